"""Display plans and measurements, and record the steps of a run.

The names below are loaded on first use, because most runs draw nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.lazy import loads_on_first_use

if TYPE_CHECKING:
    from .explain import Advice, Timeline, what_moved, where_steps_went
    from .links import links_of
    from .memory_trace import MemoryTrace
    from .network import network_links
    from .picture import draw

__all__ = [
    "Advice",
    "MemoryTrace",
    "Timeline",
    "draw",
    "links_of",
    "network_links",
    "what_moved",
    "where_steps_went",
]

if not TYPE_CHECKING:  # otherwise a type checker accepts any name
    __getattr__ = loads_on_first_use(
        __name__,
        {
            "explain": "Advice Timeline what_moved where_steps_went",
            "links": "links_of",
            "memory_trace": "MemoryTrace",
            "network": "network_links",
            "picture": "draw",
        },
    )
