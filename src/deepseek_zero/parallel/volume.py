"""Bytes that a rank sends along the tensor-parallel axis in one micro-batch, from the plan
alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from .layers import LayerPart
from .loss import loss_owner
from .plans import Choice, ParallelPlan, ParallelSettings, weight_of

LOSS_VECTORS = 3  # maximum, sum of exponentials and the target's logit, of each token, in fp32


def sent_bytes(
    plan: ParallelPlan,
    coordinate: int,
    tokens: int,
    itemsize: int,
    *,
    splits_loss: bool,
    recomputes: bool = False,
) -> int:
    """Return what one forward and backward send, where every parameter is trained. Pure.

    tokens: of the micro-batch. itemsize: bytes of one activation. splits_loss: whether the loss
    reads split logits.
    recomputes: whether every block is computed again in backward. The column layers of a region
    read one input here: a decoder's that reads another one in its cross attention sends more.
    Between ranks of one host nothing is sent: these bytes are read in place. Where activations are
    sharded over tokens, each rank has its own to gather or to sum: what `sent` counts in the width
    of all is sent in 1 / ranks of it, forward and backward.
    """
    inputs: dict[str, int] = {}  # by region: the width of what its column layers read
    numbers = 0
    if plan.stretch is not None:
        own_tokens, left = divmod(tokens, plan.ranks)
        assert not left, "the ranks divide the tokens"
        times = 2 if recomputes else 1
        sharded = _sharded_widths(plan, times)
        whole = replace(
            plan, stretch=None, choices=[each for each in plan.choices if not _shards(each)]
        )
        rest = sent_bytes(
            whole, coordinate, tokens, itemsize, splits_loss=splits_loss, recomputes=recomputes
        )
        return rest + (plan.ranks - 1) * sharded * own_tokens * itemsize
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


def _shards(choice: Choice) -> bool:
    return choice.part is not None and choice.part.shards_tokens


def _sharded_widths(plan: ParallelPlan, forwards: int) -> int:
    """Return the widths of all gathers and sums of the blocks, and of the two gathers at their
    ends.

    Forward a region gathers what it reads and sums what it gives; backward the other way round.
    """
    rows = [
        choice.widths[0] for choice in plan.choices if _shards(choice) and choice.style == "row"
    ]
    columns = [choice for choice in plan.choices if _shards(choice) and choice.style == "column"]
    inputs = {choice.region: choice.widths[1] for choice in columns}
    return (forwards + 1) * (sum(rows) + sum(inputs.values())) + 2 * rows[-1]


class LayerTraffic(NamedTuple):
    """What one region of layers sends.  weight: the name of its first weight.  is_head: it makes
    logits.  nbytes: for as many tokens as there are ranks, which sharded activations divide.
    """

    weight: str
    is_head: bool
    nbytes: int


def traffic_of(
    model: nn.Module,
    plan: ParallelPlan,
    settings: ParallelSettings,
    coordinate: int,
    compute: torch.dtype | None = None,
) -> list[LayerTraffic]:
    """Return what one rank sends, by region: in all what `sent_bytes` counts.  Pure; of a whole
    model, before it is cut.

    compute: the dtype of activations, where that is not the model's own.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    dtype = compute or next(param.dtype for param in model.parameters())
    recomputes = any(
        getattr(module, "gradient_checkpointing", False) is True for module in model.modules()
    )
    regions: dict[str, list[Choice]] = {}
    for choice in plan.choices:
        regions.setdefault(choice.region or choice.name, []).append(choice)
    last = next(
        (each for each in reversed(plan.choices) if _shards(each) and each.style == "row"), None
    )
    found = []
    for choices in regions.values():
        first = choices[0]
        if _shards(first):
            width = (3 if recomputes else 2) * first.widths[0 if first.style == "row" else 1]
            # The gathers at the ends of the blocks
            width += 2 * first.widths[0] if first is last else 0
            sent = (plan.ranks - 1) * width * dtype.itemsize
        else:
            splits = first.style == "head" and settings.loss != "gathered"
            splits = splits and loss_owner(model, first.module) is not None
            part = replace(plan, stretch=None, choices=choices)
            sent = sent_bytes(
                part,
                coordinate,
                plan.ranks,
                dtype.itemsize,
                splits_loss=splits,
                recomputes=recomputes,
            )
        found.append(LayerTraffic(names[id(weight_of(first.module))], first.style == "head", sent))
    return found


def _own(part: LayerPart, coordinate: int) -> int:
    return part.widths[coordinate]
