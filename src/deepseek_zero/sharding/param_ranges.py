"""The elements of single parameters in the flat buffers of a group, for programs and checkpoints.

A training step does not use this module, because it works on whole buffers.
"""

from __future__ import annotations

from torch import Tensor

from ..planner.layout import Slot
from ..planner.spec import R, S
from ..precision.policy import cast_master
from .buffer import FlatBuffer
from .group import Group
from .main_weight import MasterWeight

_WRITE_NUMEL = 1 << 20  # elements of one copy before they are split


def owned_range(buffer: FlatBuffer, slot: Slot, rank: int) -> tuple[int, int]:
    """Return the range [place, end) in a buffer of the part of a parameter that a rank owns.

    Args:
        buffer: The buffer of one state of the parameter's group.
        slot: The position of the parameter in the layout.
        rank: The index in the shard group of the rank that owns the part.
    """
    start, stop = buffer.layout.owned(slot, rank)
    low = buffer.layout.bounds(rank)[0] if buffer.spec.placement is S else 0
    return start - low, max(start, stop) - low


def owned_view(buffer: FlatBuffer, slot: Slot, rank: int) -> Tensor:
    """Return a flat view of the part of a parameter that a rank owns.

    Args:
        buffer: The buffer of one state of the parameter's group.
        slot: The position of the parameter in the layout.
        rank: The index in the shard group of the rank that owns the part.
    """
    return buffer.elements(*owned_range(buffer, slot, rank))


def local_range(buffer: FlatBuffer, slot: Slot, rank: int) -> tuple[int, int, int]:
    """Return which elements of a parameter this rank's buffer holds, and where.

    Args:
        buffer: The buffer of one state of the parameter's group.
        slot: The position of the parameter in the layout.
        rank: This rank's index in the shard group.

    Returns:
        ``(start, stop, place)``: elements [start, stop) of the parameter, and the index of the
        first one in the buffer.
    """
    if buffer.spec.placement is R:
        return 0, slot.numel, slot.start
    place, end = owned_range(buffer, slot, rank)
    start = buffer.layout.owned(slot, rank)[0] - slot.start
    return start, start + end - place, place


def updated_parts(group: Group, values: Tensor, first: int) -> list[tuple[Tensor, int]]:
    """Return the parts of a gradient that the optimizer updates, with their positions.

    Args:
        group: The parameter group.
        values: Elements of the gradient, flat.
        first: The index of their first element in the layout.
    """
    last = first + values.numel()
    ranges = [(max(start, first), min(stop, last)) for start, stop in _updated_ranges(group)]
    return [(values[low - first : high - first], low) for low, high in ranges if low < high]


def _updated_ranges(group: Group) -> list[tuple[int, int]]:
    """Return the ranges [start, stop) of the layout that the optimizer updates.

    Adjacent parameters are merged into one range.
    """
    found = list[tuple[int, int]]()
    for number, member in enumerate(group.members):
        if number in group.not_updated:
            continue
        start = member.slot.start
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, member.slot.stop))
    return found


def write_param(group: Group, slot: Slot, value: Tensor) -> None:
    """Write this rank's part of a new value into the weight and the main weight.

    Args:
        group: The parameter group.
        slot: The position of the parameter in the layout.
        value: The whole new value, in the parameter's shape.
    """
    rank = group.comm_ctx.comm.rank
    flat = value.detach().to(group.comm_ctx.pool.device).expand(slot.shape).reshape(-1)
    start, stop, place = local_range(group.weight, slot, rank)
    with group.weight.writing(place, place + stop - start) as weight:
        values = flat[start:stop]
        if flat.is_floating_point():
            values = values.float()
        cast_master(values, weight)
    if group.master is not None and not group.plan.master_is_weight:
        start, stop, place = local_range(group.master.buffer, slot, rank)
        write_main(group.master, place, flat[start:stop])


def write_main(master: MasterWeight, place: int, values: Tensor) -> None:
    """Write new values into the main weight and this rank's part of the weight.

    Args:
        master: The main weight of a group.
        place: The index of the first element to write.
        values: The new values, flat.
    """
    if not master.is_split:
        master.write_consuming(place, place + values.numel(), values)  # keeps the values
        master.copy_to_weight(place, place + values.numel())
        return
    for start in range(0, values.numel(), _WRITE_NUMEL):
        part = values[start : start + _WRITE_NUMEL].to(master.dtype, copy=True)
        master.write_consuming(place + start, place + start + part.numel(), part)
