"""Block-sparse attention: layouts of blocks, and kernels that compute only these blocks.

The names below load on first use, because most runs have no sparse attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.lazy import loads_on_first_use

if TYPE_CHECKING:
    from .hugging_face import attend_sparsely, is_of_transformers
    from .layer import SparseAttention
    from .layouts import MODES, BlockLayout, fields_of, layout_of
    from .plan import Pattern
    from .select import attend_selected, select_blocks

__all__ = [
    "MODES",
    "BlockLayout",
    "Pattern",
    "SparseAttention",
    "attend_selected",
    "attend_sparsely",
    "fields_of",
    "is_of_transformers",
    "layout_of",
    "select_blocks",
]

if not TYPE_CHECKING:  # A type checker would accept any name
    __getattr__ = loads_on_first_use(
        __name__,
        {
            "hugging_face": "attend_sparsely is_of_transformers",
            "layer": "SparseAttention",
            "layouts": "MODES BlockLayout fields_of layout_of",
            "plan": "Pattern",
            "select": "attend_selected select_blocks",
        },
    )
