"""Save, load, export and convert checkpoints.

The names below are loaded on first use, so a run that neither saves nor loads does not import them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.lazy import loads_on_first_use

if TYPE_CHECKING:
    from .convert import state_dict_of
    from .export import (
        FILE_SUFFIXES,
        ExportSettings,
        consolidated,
        export_file,
        export_safetensors,
    )
    from .load import load_slices
    from .save import PendingSave
    from .weights import load_weights, load_weights_into

__all__ = [
    "FILE_SUFFIXES",
    "ExportSettings",
    "PendingSave",
    "consolidated",
    "export_file",
    "export_safetensors",
    "load_slices",
    "load_weights",
    "load_weights_into",
    "state_dict_of",
]

if not TYPE_CHECKING:  # otherwise a type checker accepts any name
    __getattr__ = loads_on_first_use(
        __name__,
        {
            "convert": "state_dict_of",
            "export": "FILE_SUFFIXES ExportSettings consolidated export_file export_safetensors",
            "load": "load_slices",
            "save": "PendingSave",
            "weights": "load_weights load_weights_into",
        },
    )
