"""Attention in which a query sees some blocks of keys: layouts, plans of tiles, and the kernels
that compute them.
"""

from __future__ import annotations

from .attend import attend
from .hugging_face import attend_sparsely, is_of_transformers
from .layer import SparseAttention
from .layouts import MODES, BlockLayout, layout_of
from .plan import Pattern
from .select import attend_selected, select_blocks

__all__ = [
    "MODES",
    "BlockLayout",
    "Pattern",
    "SparseAttention",
    "attend",
    "attend_selected",
    "attend_sparsely",
    "is_of_transformers",
    "layout_of",
    "select_blocks",
]
