"""The shards of the master weights that an optimizer updates, planned by planner/update.py, and their tiles."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..planner.layout import Slot
from ..planner.spec import R
from ..planner.update import ShardRange, UpdatePlan
from ..planner.update import Tile as PlannedTile
from ..precision.compact import StochasticRounding
from ..precision.split import scratch_numel
from ..sharding.master_weight import MasterWeight
from ..sharding.param_group import ParamGroup
from .prefetch import ExtentRange, StagedRange
from .scratch import Scratch


@dataclass(eq=False)
class MasterShard:
    """A range of one group's master that the inner optimizer treats as one parameter.

    start, stop: elements of the master (and of the reduced gradient) on this rank. names: the parameters it covers. If
    the master is split, `param` holds values during a step only, and NaN between steps.
    """

    group: ParamGroup
    start: int
    stop: int
    param: nn.Parameter
    names: tuple[str, ...]
    at: int = 0  # where its scratch begins in the tile's

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def planned(self) -> ShardRange:
        """Return the shard as data."""
        return ShardRange(self.group.planned, self.start, self.stop, self.names, tuple(self.param.shape))

    @property
    def master(self) -> MasterWeight:
        assert self.group.master is not None
        return self.group.master

    @property
    def rank(self) -> int:
        return self.group.comm_ctx.comm.rank

    def grad(self, *, waiting: bool = False) -> Tensor | None:
        """Return the last step's gradient, or with `waiting` the delayed one, in `param`'s shape; None without one."""
        gradient = self.group.gradient
        if self.is_absent(waiting=waiting):
            return None
        part = (gradient.delayed if waiting else gradient).read(self.start, self.stop)
        return None if part is None else part.view(self.param.shape)

    def extent_ranges(self, *, waiting: bool = False) -> Iterator[ExtentRange]:
        """Yield the extent ranges of master, weight and gradient that the update of this shard reads or writes."""
        for extent in self.master.extents():
            yield ExtentRange(extent, self.start, self.stop)
        gradient = self.group.gradient
        buffer = gradient.delayed.buffer if waiting else gradient.buffer
        if buffer is not None and buffer.extent is not None:
            yield ExtentRange(buffer.extent, self.start, self.stop, changes=False)

    def staged_ranges(self) -> Iterator[StagedRange]:
        """Yield the weight ranges that the training device holds and the host updates."""
        if self.master.staged is not None:
            yield StagedRange(self.master.staged, self.start, self.stop)

    def overlaps(self) -> Iterator[ParamOverlap]:
        """Return the range of each parameter that the shard covers."""
        low = 0 if self.master.placement is R else self.group.layout.bounds(self.rank)[0]
        first, last = low + self.start, low + self.stop
        for number, member in enumerate(self.group.members):
            slot = member.slot
            start, stop = max(slot.start, first), min(slot.stop, last)
            if start < stop:
                yield ParamOverlap(slot, start - slot.start, stop - slot.start, self, start - first, number)

    def is_absent(self, *, waiting: bool = False) -> bool:
        """Return whether no parameter of the shard has a gradient (all frozen or dropped): its update is skipped."""
        gradient = self.group.gradient
        absent = (gradient.delayed.absent if waiting else gradient.state.absent) or set()
        return bool(absent) and all(cover.number in absent for cover in self.overlaps())

    def chance(self, chance: StochasticRounding, state: str) -> Tensor:
        """Return random bits for each element: int16, flat."""
        parts = [
            chance.of(f"{state} of {cover.slot.name}", cover.start, cover.stop - cover.start)
            for cover in self.overlaps()
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def load_values(self, scratch: Scratch) -> None:
        """Load the master values into `param`, where the optimizer changes them."""
        self.group.guard.before_write()
        values, home = self.master.in_place_view(self.start, self.stop), self.master.update_device
        if values is None:
            into = scratch.take("masters", self.master.dtype, home)[self.at : self.at + self.numel]
            helper = None
            if self.master.is_split:
                helper = scratch.take("join", torch.int32, home, scratch_numel(home, scratch.numel))
            values = self.master.read(self.start, self.stop, into, helper)
        self.param.data = values.view(self.param.shape)

    def store_values(self, scratch: Scratch, chance: StochasticRounding, *, keep: bool) -> None:
        """Undo `load_values`. keep: first write the values of `param` into the master."""
        if keep and self.master.in_place_view(self.start, self.stop) is None:
            random = self.chance(chance, "weight") if self.master.is_rounded else None
            self.master.write_consuming(self.start, self.stop, self.param.data.reshape(-1), random)
        if keep:
            self.master.copy_to_weight(self.start, self.stop)
        if self.master.is_copied_for_update:
            self.param.data = scratch.placeholder(self.param.shape, self.param.dtype, self.master.update_device)


@dataclass(frozen=True)
class ParamOverlap:
    """Elements [start, stop) of one parameter that a shard covers, from `offset` of the shard on.

    number: of the parameter in its group.
    """

    slot: Slot
    start: int
    stop: int
    shard: MasterShard
    offset: int
    number: int

    @property
    def is_absent(self) -> bool:
        """Return whether the parameter has no gradient in the last step."""
        return self.number in (self.shard.group.gradient.state.absent or ())

    def of(self, state: Tensor) -> Tensor:
        """Return the covered elements of a state as long as the shard: a flat view."""
        return state.view(-1)[self.offset : self.offset + self.stop - self.start]


Tile = list[tuple[int, MasterShard]]  # (number of the user's parameter group, shard)


@dataclass(frozen=True)
class Tiles:
    """The tiles of an optimizer, in the order of `UpdatePlan.order`.

    now: updated at the step, before it returns. later: may be updated at other times, by number of the unit.
    """

    now: list[Tile]
    later: dict[int, list[Tile]]

    @classmethod
    def of(cls, plan: UpdatePlan, shards_by_group: Sequence[Sequence[MasterShard]]) -> Tiles:
        """Return the tiles of shards that were made of the plan's, in the same order."""
        shard_of = {
            id(planned): shard
            for ranges, shards in zip(plan.shards, shards_by_group, strict=True)
            for planned, shard in zip(ranges, shards, strict=True)
        }

        def tile_of(planned_tile: PlannedTile) -> Tile:
            tile, filled = Tile(), 0
            for number, planned in planned_tile:
                shard = shard_of[id(planned)]
                shard.at = filled
                tile.append((number, shard))
                filled += shard.numel
            return tile

        later = {unit: list(map(tile_of, tiles)) for unit, tiles in plan.order.later.items()}
        return cls(list(map(tile_of, plan.order.now)), later)


def cuts_of(shard: MasterShard, apart: Callable[[ParamOverlap], Any]) -> list[ShardRange]:
    """Return the ranges of a shard whose parameters agree in `apart`: one if all do, or if it is a whole tensor."""
    covers = list(shard.overlaps())
    runs = [list(run) for _, run in itertools.groupby(covers, key=apart)]
    if len(runs) < 2:
        return [shard.planned]
    edges = [shard.start, *(shard.start + run[0].offset for run in runs[1:]), shard.stop]
    return [
        ShardRange(shard.group.planned, low, high, tuple(cover.slot.name for cover in run), (high - low,))
        for run, low, high in zip(runs, edges, edges[1:], strict=False)
    ]
