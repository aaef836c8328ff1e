"""The elements of single parameters that a shard of a main weight covers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..planner.layout import Slot
from ..planner.spec import R
from ..precision.compact import StochasticRounding
from .master_shard import MasterShard


@dataclass(frozen=True)
class ParamOverlap:
    """The elements of one parameter that a shard covers.

    Attributes:
        slot: Place of the parameter in its group.
        start: First covered element of the parameter.
        stop: End of the covered elements.
        shard: The shard that covers the elements.
        offset: First covered element in the shard.
        number: Index of the parameter in its group.
    """

    slot: Slot
    start: int
    stop: int
    shard: MasterShard
    offset: int
    number: int

    @property
    def is_absent(self) -> bool:
        """Return whether the parameter got no gradient in the last step."""
        return self.number in (self.shard.group.gradient.sum.absent or ())

    def of(self, state: Tensor) -> Tensor:
        """Return a flat view of the covered elements of a state.

        Args:
            state: A tensor with one value for each element of the shard, for example a moment.
        """
        return state.view(-1)[self.offset : self.offset + self.stop - self.start]


def overlaps_of(shard: MasterShard) -> Iterator[ParamOverlap]:
    """Yield the range of each parameter that a shard covers.

    Args:
        shard: The shard, whose parameters are visited in the order of the layout.
    """
    low = 0 if shard.master.placement is R else shard.group.layout.bounds(rank_of(shard))[0]
    first = low + shard.start
    last = low + shard.stop
    for number, member in enumerate(shard.group.members):
        slot = member.slot
        start = max(slot.start, first)
        stop = min(slot.stop, last)
        if start < stop:
            yield ParamOverlap(
                slot, start - slot.start, stop - slot.start, shard, start - first, number
            )


def rank_of(shard: MasterShard) -> int:
    """Return this rank's index in the shard group of a shard."""
    return shard.group.comm_ctx.comm.rank


def random_bits(shard: MasterShard, chance: StochasticRounding, state: str) -> Tensor:
    """Return random bits for stochastic rounding: an int16 tensor with one value per element.

    Args:
        shard: The shard whose elements are rounded.
        chance: The source of the random bits of this update.
        state: Name of the state that is rounded.
    """
    parts = [
        chance.of(f"{state} of {cover.slot.name}", cover.start, cover.stop - cover.start)
        for cover in overlaps_of(shard)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
