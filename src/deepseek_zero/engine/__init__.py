"""Build the parts of a run and run its steps.

The names below are imported on first use, because most runs do not need them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.lazy import loads_on_first_use

if TYPE_CHECKING:
    from .compiling import compile_units
    from .explaining import describe, lines_about_network, lines_about_steps
    from .integrity import Integrity
    from .preemption import Preemption
    from .whole_steps import evaluate, train_batch

__all__ = [
    "Integrity",
    "Preemption",
    "compile_units",
    "describe",
    "evaluate",
    "lines_about_network",
    "lines_about_steps",
    "train_batch",
]

if not TYPE_CHECKING:  # otherwise a type checker would accept every name
    __getattr__ = loads_on_first_use(
        __name__,
        {
            "compiling": "compile_units",
            "explaining": "describe lines_about_network lines_about_steps",
            "integrity": "Integrity",
            "preemption": "Preemption",
            "whole_steps": "evaluate train_batch",
        },
    )
