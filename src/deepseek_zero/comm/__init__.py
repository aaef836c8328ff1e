"""Communication between ranks: collectives, transports and failure detection.

The module also serves the names that `base/plugins.py` contributes under this path, such as those
of `deepspeed.comm`.
"""

from __future__ import annotations

from functools import cache
from pkgutil import iter_modules
from typing import Any

from ..base.plugins import contributed_name


@cache
def _files() -> frozenset[str]:
    return frozenset(module.name for module in iter_modules(__path__))


def __getattr__(name: str) -> Any:
    # `from .comm import context` looks up the attribute before it imports the file
    if name.startswith("_") or name in _files():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return contributed_name(__name__, name)
