"""Optimizers and learning-rate schedules that PyTorch does not have.

The classes below load on first use, because a run uses at most one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.lazy import loads_on_first_use

if TYPE_CHECKING:
    from .lamb import Lamb
    from .lion import Lion
    from .muon import Muon
    from .one_bit_adam import OneBitAdam

__all__ = ["Lamb", "Lion", "Muon", "OneBitAdam"]

if not TYPE_CHECKING:  # A type checker would accept any name
    __getattr__ = loads_on_first_use(
        __name__,
        {"lamb": "Lamb", "lion": "Lion", "muon": "Muon", "one_bit_adam": "OneBitAdam"},
    )
