"""`deepspeed.comm`, under DeepSpeed's path: deepseek_zero.comm answers for every name."""

from __future__ import annotations

from deepseek_zero.compat.deepspeed import comm

__all__ = sorted(name for name in dir(comm) if not name.startswith("_"))


def __getattr__(name: str) -> object:
    return getattr(comm, name)


def __dir__() -> list[str]:
    return __all__
