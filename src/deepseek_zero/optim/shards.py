"""What an optimizer works on: ranges of masters, cut along chunks, gathered into tiles of about one size."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..planner.layout import Slot
from ..planner.spec import R
from ..precision.compact import StochasticRounding
from ..precision.split import scratch_numel
from ..sharding.master_weight import MasterWeight
from ..sharding.param_group import ParamGroup
from .prefetch import ExtentRange, StagedRange
from .scratch import Scratch


@dataclass(eq=False)
class MasterShard:
    """A stretch of one group's master that the inner optimizer treats as one parameter.

    start, stop: elements of the master (and of the reduced gradient) on this rank.  names: the parameters it covers.
    Where the master is split, `param` holds values during a step only, and NaN between steps.
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
    def master(self) -> MasterWeight:
        assert self.group.master is not None
        return self.group.master

    @property
    def rank(self) -> int:
        return self.group.comm_ctx.comm.rank

    def grad(self, *, waiting: bool = False) -> Tensor | None:
        """Of the step that is over, or the one that is `waiting` for a later update; None where it is absent."""
        gradient = self.group.gradient
        if self.is_absent(waiting=waiting):
            return None
        part = (gradient.delayed if waiting else gradient).read(self.start, self.stop)
        return None if part is None else part.view(self.param.shape)

    def extent_ranges(self, *, waiting: bool = False) -> Iterator[ExtentRange]:
        """What of master, weight and gradient rests in other memories and its update needs."""
        for extent in self.master.extents():
            yield ExtentRange(extent, self.start, self.stop)
        gradient = self.group.gradient
        buffer = gradient.delayed.buffer if waiting else gradient.buffer
        if buffer is not None and buffer.extent is not None:
            yield ExtentRange(buffer.extent, self.start, self.stop, changes=False)

    def staged_ranges(self) -> Iterator[StagedRange]:
        """What of them the training device has, where the update is the host's."""
        if self.master.staged is not None:
            yield StagedRange(self.master.staged, self.start, self.stop)

    def overlaps(self) -> Iterator[ParamOverlap]:
        """What it covers, parameter by parameter."""
        low = 0 if self.master.placement is R else self.group.layout.bounds(self.rank)[0]
        first, last = low + self.start, low + self.stop
        for number, member in enumerate(self.group.members):
            slot = member.slot
            start, stop = max(slot.start, first), min(slot.stop, last)
            if start < stop:
                yield ParamOverlap(slot, start - slot.start, stop - slot.start, self, start - first, number)

    def is_absent(self, *, waiting: bool = False) -> bool:
        """Whether none of its parameters has a gradient (frozen ones, dropped gradients): its update leaves it be."""
        gradient = self.group.gradient
        absent = (gradient.delayed.absent if waiting else gradient.state.absent) or set()
        return bool(absent) and all(cover.number in absent for cover in self.overlaps())

    def chance(self, chance: StochasticRounding, state: str) -> Tensor:
        """For each of its elements: int16, flat."""
        parts = [
            chance.of(f"{state} of {cover.slot.name}", cover.start, cover.stop - cover.start)
            for cover in self.overlaps()
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def load_values(self, scratch: Scratch) -> None:
        """Let `param` hold the values, which the optimizer changes, as it does the moments."""
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
        """Undo `show`.  keep: the values that `param` holds now become the master's."""
        if keep and self.master.in_place_view(self.start, self.stop) is None:
            random = self.chance(chance, "weight") if self.master.is_rounded else None
            self.master.write_consuming(self.start, self.stop, self.param.data.reshape(-1), random)
        if keep:
            self.master.copy_to_weight(self.start, self.stop)
        if self.master.is_copied_for_update:
            self.param.data = scratch.placeholder(self.param.shape, self.param.dtype, self.master.update_device)


@dataclass(frozen=True)
class ParamOverlap:
    """Elements [start, stop) of one parameter that a piece holds, from `offset` of the piece on.  number: of the
    parameter in its group.
    """

    slot: Slot
    start: int
    stop: int
    piece: MasterShard
    offset: int
    number: int

    @property
    def is_absent(self) -> bool:
        """Whether the parameter has no gradient in the step that is over."""
        return self.number in (self.piece.group.gradient.state.absent or ())

    def of(self, state: Tensor) -> Tensor:
        """The covered elements of a state that is as long as the piece: a view, flat."""
        return state.view(-1)[self.offset : self.offset + self.stop - self.start]


Tile = list[tuple[int, MasterShard]]  # (number of the user's parameter group, piece)
EVERY_UNIT = -1


def bundles_of(pieces: Sequence[Sequence[MasterShard]], groups: Sequence[ParamGroup], tile_numel: int) -> list[Tile]:
    """Pieces in the order of units.  What lies in one chunk of its group (parameters that the optimizer treats
    differently take turns there) stays together, so that a chunk comes and goes once.
    """
    order = {id(group): number for number, group in enumerate(groups)}
    flat = [(number, piece) for number, of_group in enumerate(pieces) for piece in of_group]
    flat.sort(key=lambda item: (order[id(item[1].group)], item[1].start))
    chunks = itertools.groupby(flat, key=lambda item: (id(item[1].group), item[1].start // tile_numel))
    return [list(chunk) for _, chunk in chunks]


def tiles_of(bundles: Sequence[Tile], tile_numel: int) -> list[Tile]:
    """Bundles, together so that one optimizer call covers about tile_numel elements."""
    tiles: list[Tile] = [[]]
    filled = 0
    for together in bundles:
        if tiles[-1] and filled + sum(piece.numel for _, piece in together) > tile_numel:
            tiles.append([])
            filled = 0
        for number, piece in together:
            piece.at = filled
            tiles[-1].append((number, piece))
            filled += piece.numel
    return [tile for tile in tiles if tile]


@dataclass(frozen=True)
class UpdatePlan:
    """The tiles of an optimizer.  now: what a step updates before it is over.  later: what may be updated at other
    times, by number of the unit (all under EVERY_UNIT where nobody asks).  runs: the bundles that tiles were made of.
    """

    runs: list[list[Tile]]
    now: list[Tile]
    later: dict[int, list[Tile]]

    @property
    def fullest(self) -> int:
        """Elements of the fullest tile."""
        tiles = [*self.now, *(tile for tiles in self.later.values() for tile in tiles)]
        return max((sum(piece.numel for _, piece in tile) for tile in tiles), default=0)


def plan_updates(
    bundles: Sequence[Tile], tile_numel: int, numbers: Mapping[int, int] | None, *, may_wait: bool
) -> UpdatePlan:
    """numbers: of each group's unit, by id of the group; None: tiles may reach from one unit into the next."""
    now, later = list[Tile](), dict[int, list[Tile]]()
    for bundle in bundles:
        if may_wait and all(piece.group.plan.can_defer_update for _, piece in bundle):
            unit = EVERY_UNIT if numbers is None else numbers[id(bundle[0][1].group)]
            later.setdefault(unit, []).append(bundle)
        else:
            now.append(bundle)
    tiles = {unit: tiles_of(mine, tile_numel) for unit, mine in later.items()}
    return UpdatePlan([now, *later.values()], tiles_of(now, tile_numel), tiles)


@dataclass(frozen=True)
class ShardRange:
    """Elements [start, stop) of a master on this rank that become one piece."""

    start: int
    stop: int
    names: tuple[str, ...]
    shape: torch.Size


def shard_ranges(group: ParamGroup, numbers: list[int], tile_numel: int, uncut: bool) -> list[ShardRange]:
    """What of a group's members this rank updates: neighbours joined and cut into tiles, or tensor by tensor."""
    assert group.master is not None
    runs: list[tuple[int, int, list[tuple[str, int, int]]]] = []
    spans: list[ShardRange] = []
    for number in numbers:
        slot = group.members[number].slot
        _, _, start = group.master.local_range(slot)
        stop = start + slot.numel if group.master.placement is R else group.master.owned_range(slot)[1]
        if start >= stop:
            continue
        if uncut:
            spans.append(ShardRange(start, stop, (slot.name,), torch.Size(slot.shape)))
        elif runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], stop, [*runs[-1][2], (slot.name, start, stop)])
        else:
            runs.append((start, stop, [(slot.name, start, stop)]))
    for start, stop, held in runs:
        for cut, end in group.layout.cuts(start, stop, tile_numel):
            names = tuple(name for name, low, high in held if low < end and cut < high)
            spans.append(ShardRange(cut, end, names, torch.Size((end - cut,))))
    return spans


def cuts_of(piece: MasterShard, apart: Callable[[ParamOverlap], Any]) -> list[ShardRange]:
    """Stretches of a piece whose parameters agree in `apart`; one where all do, or where it is a whole tensor."""
    covers = list(piece.overlaps())
    runs = [list(run) for _, run in itertools.groupby(covers, key=apart)]
    if len(runs) < 2:
        return [ShardRange(piece.start, piece.stop, piece.names, piece.param.shape)]
    edges = [piece.start, *(piece.start + run[0].offset for run in runs[1:]), piece.stop]
    return [
        ShardRange(low, high, tuple(cover.slot.name for cover in run), torch.Size((high - low,)))
        for run, low, high in zip(runs, edges, edges[1:], strict=False)
    ]
