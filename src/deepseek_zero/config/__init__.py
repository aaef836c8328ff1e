"""Typed settings: the DeepSpeed JSON grammar, read, checked and resolved.

Only the doors and the engine import this room; lower layers get small frozen dataclasses.  The names
below load on first use, because pydantic costs as much as all the rest of our import.  `load` is imported from its
module (`from deepseek_zero.config.load import load`): a package attribute of that name is the module itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .auto import Facts, resolve
    from .batch import Batch, BatchRequest, solve
    from .fields import FieldRow, Status
    from .load import choose_source
    from .raw_config import AutoDecision, RawConfig
    from .schema import Config, off_default_config, off_default_example

__all__ = [
    "AutoDecision",
    "Batch",
    "BatchRequest",
    "Config",
    "Facts",
    "FieldRow",
    "RawConfig",
    "Status",
    "choose_source",
    "off_default_config",
    "off_default_example",
    "resolve",
    "solve",
]

_HOMES = {
    **dict.fromkeys(("Facts", "resolve"), "auto"),
    **dict.fromkeys(("Batch", "BatchRequest", "solve"), "batch"),
    **dict.fromkeys(("choose_source",), "load"),
    **dict.fromkeys(("AutoDecision", "RawConfig"), "raw_config"),
    **dict.fromkeys(("Config", "off_default_config", "off_default_example"), "schema"),
    "FieldRow": "fields",
    "Status": "fields",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
