"""Optimizers of DeepSpeed that this library does not have, with alternatives.

The configuration and the registry of optimizers both use this table for their errors.
"""

from __future__ import annotations

from typing import NamedTuple


class OtherOptimizer(NamedTuple):
    """An optimizer of DeepSpeed that this library does not have, and its replacement.

    Attributes:
        why: The reason, a clause.
        use: What to write instead.
    """

    why: str
    use: str


_REMOVED = "DeepSpeed has removed it (pull request 8489: it had no users)"
_WIDTHS = OtherOptimizer(
    "it scales by the width of layers that the mup package marks, which is not planned",
    "use another optimizer, for example AdamW",
)
# by name in lower case
OTHER_OPTIMIZERS = {
    "zerooneadam": OtherOptimizer(
        _REMOVED, "use OneBitAdam, or Adam with zero_quantized_gradients, which needs no warm-up"
    ),
    "onebitlamb": OtherOptimizer(_REMOVED, "use Lamb with zero_quantized_gradients"),
    "muadam": _WIDTHS,
    "muadamw": _WIDTHS,
    "musgd": _WIDTHS,
}
