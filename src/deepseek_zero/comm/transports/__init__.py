"""One transport per file: what carries flat tensors between ranks.

`Tcp` loads on first use: few jobs send over our own sockets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...base.lazy import loads_on_first_use

if TYPE_CHECKING:
    from .tcp import Tcp

__all__ = ["Tcp"]

if not TYPE_CHECKING:  # a type checker would take any name for one of these
    __getattr__ = loads_on_first_use(__name__, {"tcp": "Tcp"})
