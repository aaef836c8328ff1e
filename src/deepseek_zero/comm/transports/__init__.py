"""Transports that move flat tensors between ranks, one per file.

`Tcp` loads on first use, because few jobs send over this library's sockets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...base.lazy import loads_on_first_use

if TYPE_CHECKING:
    from .tcp import Tcp

__all__ = ["Tcp"]

if not TYPE_CHECKING:  # A type checker would accept any name
    __getattr__ = loads_on_first_use(__name__, {"tcp": "Tcp"})
