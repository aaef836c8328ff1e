"""Brings the values of a parameter group to every rank, as whole tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from ..planner.layout import Slot
from .buffer import FlatBuffer, move
from .group import Group
from .sharded_parameter import clear_owner


def restore_params(group: Group) -> None:
    """Make every member whole and plain again, with the main weight's values (when an engine is
    destroyed). Collective.
    """
    full = whole_values(group)
    for member in group.members:
        member.unshard(full.view(member.slot).clone())
        clear_owner(member.param)


def whole_values(group: Group) -> FlatBuffer:
    """Return all values of the main weight, or of the weight if there is none. Collective."""
    source = group.master.values() if group.master is not None else group.weight
    device = group.comm_ctx.pool.device
    memory = torch.empty(group.layout.padded_numel, dtype=source.spec.dtype, device=device)
    full = FlatBuffer(group.layout, source.spec.gathered(), memory)
    move(source, full, group.comm_ctx, group.members[0].name).wait()
    return full


def complete(full: Tensor, group: Group, slot: Slot, what: str) -> None:
    """Complete a parameter-sized flat tensor whose owned part each rank has filled in.
    Collective.
    """
    comm = group.comm_ctx.comm
    if comm.size == 1:
        return
    parts = []
    for rank in range(comm.size):
        start, stop = group.layout.owned(slot, rank)
        parts.append(full[start - slot.start : max(start, stop) - slot.start])
    boxes: list[Tensor | None] = [*parts]
    comm.exchange([parts[comm.rank]] * comm.size, boxes, "gather", what).wait()
