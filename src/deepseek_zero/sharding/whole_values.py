"""All values of a weight, for checkpoints and for groups that are built anew."""

from __future__ import annotations

from dataclasses import replace

import torch

from .buffer import FlatBuffer
from .main_weight import MasterWeight
from .move import move
from .param_group import ParamGroup
from .sharded_parameter import clear_owner


def main_values(master: MasterWeight) -> FlatBuffer:
    """Return all values of this rank's main weight, flat: its own buffer, or a copy.

    Args:
        master: The main weight.
    """
    buffer = master.buffer
    if buffer.spec.dtype == master.dtype:
        return buffer
    spec = replace(buffer.spec, dtype=master.dtype)
    return FlatBuffer(buffer.layout, spec, master.read(0, buffer.memory.numel()))


def whole_values(group: ParamGroup) -> FlatBuffer:
    """Gather all values of a group's main weight, or of its weight if it has no main weight.

    Args:
        group: The parameter group.

    Returns:
        A replicated buffer with all values.

    Note:
        Collective: every rank of the shard group must call it.
    """
    source = main_values(group.master) if group.master is not None else group.weight
    device = group.comm_ctx.pool.device
    memory = torch.empty(group.layout.padded_numel, dtype=source.spec.dtype, device=device)
    full = FlatBuffer(group.layout, source.spec.gathered(), memory)
    move(source, full, group.comm_ctx, group.members[0].name).wait()
    return full


def restore_params(group: ParamGroup) -> None:
    """Make every parameter a plain parameter with the main weight's values.

    Note:
        Collective: every rank of the shard group must call it.
    """
    full = whole_values(group)
    for member in group.members:
        member.unshard(full.view(member.slot).clone())
        clear_owner(member.param)
