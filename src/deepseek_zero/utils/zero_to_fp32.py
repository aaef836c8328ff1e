"""`deepspeed.utils.zero_to_fp32`: whole fp32 weights from a checkpoint folder.

All names are contributed by a package above the core (`base/plugins.py`).
"""

from __future__ import annotations

from typing import Any

from ..base.plugins import contributed_name, contributed_names

_NAME = f"{__package__}.zero_to_fp32"  # also if it runs as a program

__all__: list[str] = []
__all__ += contributed_names(_NAME)


def __getattr__(name: str) -> Any:
    return contributed_name(_NAME, name)


if __name__ == "__main__":
    __getattr__("main")()
