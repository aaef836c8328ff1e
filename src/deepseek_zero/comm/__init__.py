"""Bytes between ranks: the collectives of engines, their transports and what is told about them.

`deepseek_zero.comm` is also where users find DeepSpeed's `deepspeed.comm`: a name that no file of
this room has is that of compat/deepspeed/comm.py, which is loaded for it.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any


@cache
def _files() -> frozenset[str]:
    return frozenset(module.name for module in iter_modules(__path__))


def __getattr__(name: str) -> Any:
    # `from .comm import context` asks, too, before it imports the file
    if name.startswith("_") or name in _files():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("..compat.deepspeed.comm", __name__), name)
