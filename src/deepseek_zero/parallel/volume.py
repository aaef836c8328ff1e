"""Bytes that a rank sends for tensor parallelism in one micro-batch, computed from the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from .loss import loss_owner
from .plans import Choice, ParallelPlan, ParallelSettings, weight_of

LOSS_VECTORS = 3  # maximum, sum of exponentials and the target's logit, of each token, in fp32


class LayerTraffic(NamedTuple):
    """Describes the bytes that one rank sends for a group of split layers.

    An attention is an example of such a group.

    Attributes:
        weight: The name of the first weight of the group.
        is_head: Whether the group is the output layer, which computes logits.
        nbytes: Bytes that one rank sends in a forward and backward of R tokens, where R is the
            number of tensor-parallel ranks.
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
    """Compute the bytes that one rank sends for split layers.

    The split layers are grouped as in the plan. A group contains the column layers of an attention
    or a feed-forward layer, and the row layer that reads their outputs. Layers that are split by
    themselves are grouped by their parent module; embeddings, output layers and LoRA layers form a
    group each. The result assumes that every parameter is trained, and that all column layers of a
    group read the same input. A cross attention reads a second input and sends more bytes. Ranks of
    the same host that read each other's memory do not send these bytes. If activations are sharded
    over tokens, each rank sends 1 / ranks of the bytes of a whole tensor to each other rank, in
    forward and in backward.

    Args:
        model: The whole model, before it is split.
        plan: The result of `choose` for this model.
        settings: The settings with which the plan was made. They determine whether the loss reads
            split logits.
        coordinate: The index of the rank on the tensor-parallel axis. The result depends on it
            because shards may differ in size.
        compute: The dtype of activations. None means the dtype of the model's first parameter.

    Returns:
        One `LayerTraffic` for each group of layers, in the order of `ParallelPlan.choices`. Its
        bytes are those of one forward and backward of R tokens, where R is the number of ranks.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    dtype = compute or next(param.dtype for param in model.parameters())
    recomputes = recomputes_blocks(model)
    regions: dict[str, list[Choice]] = {}
    for choice in plan.choices:
        regions.setdefault(choice.region or choice.name, []).append(choice)
    found = []
    for choices in regions.values():
        first = choices[0]
        splits_loss = first.style == "head" and settings.loss != "gathered"
        splits_loss = splits_loss and loss_owner(model, first.module) is not None
        numbers = _numbers_of(choices, coordinate, recomputes=recomputes, splits_loss=splits_loss)
        nbytes = numbers * dtype.itemsize
        if splits_loss:
            nbytes += LOSS_VECTORS * 4
        tokens = 1 if first.part.shards_tokens else plan.ranks
        sent = (plan.ranks - 1) * tokens * nbytes
        found.append(LayerTraffic(names[id(weight_of(first.module))], first.style == "head", sent))
    last = next((each for each in reversed(plan.choices) if each.part.shards_tokens), None)
    if last is not None:  # the gathers at the ends of the blocks
        place = list(regions).index(last.region or last.name)
        ends = 2 * (plan.ranks - 1) * last.widths[0] * dtype.itemsize
        found[place] = found[place]._replace(nbytes=found[place].nbytes + ends)
    return found


def recomputes_blocks(model: nn.Module) -> bool:
    """Return whether a transformers model has gradient checkpointing enabled."""
    return any(getattr(each, "gradient_checkpointing", False) is True for each in model.modules())


def _numbers_of(
    choices: Sequence[Choice], coordinate: int, *, recomputes: bool, splits_loss: bool
) -> int:
    """Return how many numbers a region sends to each rank per token."""
    numbers = 0
    entered = 0  # for the input of its column layers, which they share
    for choice in choices:
        style = choice.style
        outputs, inputs = choice.widths
        own = choice.part.weight.widths[coordinate]
        forwards = 2 if recomputes and style not in ("head", "vocabulary") else 1
        if style in ("column", "column_gather", "head"):
            entered = inputs
        if style in ("row", "row_scatter"):
            numbers += forwards * outputs
        if style == "row_scatter":
            numbers += own  # backward gathers
        if style == "vocabulary":
            numbers += inputs
        if style == "column_gather" or (style == "head" and not splits_loss):
            numbers += forwards * own
        if choice.part.shards_tokens:  # forward gathers inputs, backward gradients of outputs
            numbers += outputs if style == "row" else 0
            entered = (1 + forwards) * inputs if style == "column" else entered
    return numbers + entered
