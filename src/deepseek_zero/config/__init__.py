"""Typed settings: DeepSpeed's JSON configuration, read, checked and resolved.

Only the APIs and the engine import this package; lower packages receive small frozen dataclasses.
The names below are imported on first use, because importing pydantic takes as long as the rest of
the library. Import `load` from its module (`from deepseek_zero.config.load import load`): a package
attribute of that name is the module itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.lazy import loads_on_first_use

if TYPE_CHECKING:
    from .auto import Facts, resolve
    from .batch import Batch, BatchRequest
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
]

if not TYPE_CHECKING:  # otherwise a type checker accepts any name
    __getattr__ = loads_on_first_use(
        __name__,
        {
            "auto": "Facts resolve",
            "batch": "Batch BatchRequest",
            "fields": "FieldRow Status",
            "load": "choose_source",
            "problems": "AutoDecision",
            "raw_config": "RawConfig",
            "schema": "Config",
        },
    )
