"""Bytes that a rank sends along the tensor-parallel axis per micro-batch.

Computed from the plan.
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
    """Return the bytes that one forward and backward send. Pure.

    It is assumed that every parameter is trained, and that the column layers of a region read one
    input; cross attention, which reads another one, sends more. Ranks of one host send nothing,
    because they read in place. If activations are sharded over tokens, each rank gathers or sums
    its own tokens: 1 / ranks of the bytes of a whole tensor, in forward and in backward.

    Args:
        plan: The plan.
        coordinate: The rank's index on the axis.
        tokens: The number of tokens of the micro-batch.
        itemsize: The bytes of one activation.
        splits_loss: Whether the loss reads split logits.
        recomputes: Whether every block is recomputed in backward.
    """
    inputs: dict[str, int] = {}  # the input width of the column layers of each region
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
    """Return the total width of the gathers and sums of blocks and at their ends.

    In forward a region gathers its input and sums its output; backward does the reverse.
    """
    rows = [
        choice.widths[0] for choice in plan.choices if _shards(choice) and choice.style == "row"
    ]
    columns = [choice for choice in plan.choices if _shards(choice) and choice.style == "column"]
    inputs = {choice.region: choice.widths[1] for choice in columns}
    return (forwards + 1) * (sum(rows) + sum(inputs.values())) + 2 * rows[-1]


class LayerTraffic(NamedTuple):
    """Bytes that one region of layers sends.

    Attributes:
        weight: The name of its first weight.
        is_head: Whether it computes logits.
        nbytes: Bytes for as many tokens as there are ranks.
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
    """Return the bytes that one rank sends, by region. Pure.

    The total is the result of `sent_bytes`.

    Args:
        model: The whole model, before it is split.
        plan: Its plan.
        settings: The settings.
        coordinate: The rank's index on the axis.
        compute: The dtype of activations, if it differs from the model's.
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
