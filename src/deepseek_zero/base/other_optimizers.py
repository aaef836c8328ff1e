"""Optimizers that DeepSpeed knows by name and this library does not have: why not, and what to use.

The one table of it: whoever reads a configuration and whoever is given a name refuse by it.
"""

from __future__ import annotations

from typing import NamedTuple


class OtherOptimizer(NamedTuple):
    """One of them.  why: a clause.  use: what to write instead."""

    why: str
    use: str


_REMOVED = "DeepSpeed has removed it (pull request 8489: it had no users)"
_WIDTHS = OtherOptimizer(
    "it scales by the width of layers that the mup package marks, which is not planned",
    "take another optimizer, for example AdamW",
)
# by name in lower case
OTHER_OPTIMIZERS = {
    "zerooneadam": OtherOptimizer(
        _REMOVED, "take OneBitAdam, or Adam with zero_quantized_gradients, which needs no warm-up"
    ),
    "onebitlamb": OtherOptimizer(_REMOVED, "take Lamb with zero_quantized_gradients"),
    "muadam": _WIDTHS,
    "muadamw": _WIDTHS,
    "musgd": _WIDTHS,
}
