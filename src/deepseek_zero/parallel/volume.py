"""Bytes that a rank sends along the tensor-parallel axis in one micro-batch, from the plan alone."""

from __future__ import annotations

from .layers import Part
from .plans import ParallelPlan

LOSS_VECTORS = 3  # maximum, sum of exponentials and the target's logit, of each token, in fp32


def sent_bytes(
    plan: ParallelPlan, coordinate: int, tokens: int, itemsize: int, *, splits_loss: bool, recomputes: bool = False
) -> int:
    """Return what one forward and backward send, where every parameter is trained. Pure.

    tokens: of the micro-batch. itemsize: bytes of one activation. splits_loss: whether the loss reads split logits.
    recomputes: whether every block is computed again in backward. The column layers of a region read one input here: a
    decoder's that reads another one in its cross attention sends more. Between ranks of one host nothing is sent: these
    bytes are read in place.
    """
    inputs: dict[str, int] = {}  # by region: the width of what its column layers read
    numbers = 0
    for choice in plan.choices:
        if choice.part is None:
            continue
        outputs, width = choice.widths
        own = _own(choice.part, coordinate)
        forwards = 2 if recomputes and choice.style not in ("head", "vocabulary") else 1
        if choice.style in ("row", "row_scatter"):
            numbers += forwards * outputs
        if choice.style == "row_scatter":
            numbers += own  # backward gathers
        if choice.style == "vocabulary":
            numbers += width
        if choice.style == "column_gather" or (choice.style == "head" and not splits_loss):
            numbers += forwards * own
        if choice.style in ("column", "column_gather", "head"):
            inputs[choice.region or choice.name] = width
    total = (numbers + sum(inputs.values())) * tokens * itemsize
    if splits_loss and any(choice.style == "head" for choice in plan.choices):
        total += LOSS_VECTORS * tokens * 4
    return (plan.ranks - 1) * total


def _own(part: Part, coordinate: int) -> int:
    return part.widths[coordinate]
