"""Bytes between ranks: the collectives of engines, their transports and what is told about them.

`deepseek_zero.comm` is also where users find DeepSpeed's `deepspeed.comm`: a name that no file of this room has is that
of compat/deepspeed/comm.py, which is loaded for it.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("_") or find_spec(f"{__name__}.{name}") is not None:  # `from .comm import links` asks, too
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("..compat.deepspeed.comm", __name__), name)
