"""Typed settings: the DeepSpeed JSON grammar, read, checked and resolved.

Only the doors and the engine import this room; lower layers get small frozen dataclasses.  The
names below load on first use, because pydantic costs as much as all the rest of our import.  `load`
is imported from its module (`from deepseek_zero.config.load import load`): a package attribute of
that name is the module itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.lazy import loads_on_first_use

if TYPE_CHECKING:
    from .auto import Facts, resolve
    from .batch import Batch, BatchRequest, solve
    from .fields import FieldRow, Status
    from .load import choose_source
    from .problems import AutoDecision
    from .raw_config import RawConfig
    from .schema import Config

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
    "resolve",
    "solve",
]

if not TYPE_CHECKING:  # a type checker would take any name for one of these
    __getattr__ = loads_on_first_use(
        __name__,
        {
            "auto": "Facts resolve",
            "batch": "Batch BatchRequest solve",
            "fields": "FieldRow Status",
            "load": "choose_source",
            "problems": "AutoDecision",
            "raw_config": "RawConfig",
            "schema": "Config",
        },
    )
