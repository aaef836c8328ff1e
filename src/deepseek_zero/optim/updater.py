"""Run the inner optimizer over tiles of main weight shards.

An update takes these steps. planner/update.py cuts the shards into `Tiles`, which are lists of
`MasterShard`. `TilePrefetcher` fetches the states of the next tiles during the update of a tile,
and stores the states of earlier tiles in the background. `MasterShard` copies the main weight to
`Scratch` if it is not updated in place, and `Moments` loads the optimizer's states. `Updater` calls
the inner optimizer and stores the results. The policies in update_policy.py choose which tiles are
not updated in the step itself.

Moments may be stored in another memory, in fewer bits, or both, in one storage per group and kind
of moment. This works with every PyTorch optimizer: a state is stored this way if the first step
creates it with as many elements as the shard. Counters and states of other shapes are left alone.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..base.errors import UsageError
from ..base.meter import PhaseClock
from ..base.progress import LongWork
from ..optimizers.plain_steps import raw_step
from ..planner.layout import Slot
from ..planner.spec import R
from ..planner.update import ShardRange, UpdatePlan
from ..planner.update import Tile as PlannedTile
from ..precision.compact import BLOCK, StochasticRounding, StorageFormat, storage_format
from ..precision.policy import scratch_numel
from ..sharding.grad_sum import GradSum
from ..sharding.main_weight import MasterWeight
from ..sharding.param_group import ParamGroup
from ..tiers.budget import DeviceBudget
from ..tiers.tier import COMPLETED, CopyEvent, StagedTile, Storage, Tier, Work
from .one_pass import GroupUpdate, Memory, OnePass, Piece, layout_of
from .tensor_subclasses import inner_tensors, is_subclass

T = TypeVar("T")
Hypers = list[dict[str, Any]]  # the options of each parameter group, without its parameters


GradSource = Callable[[ParamGroup], GradSum]  # the gradient that a group is updated from


def collected(group: ParamGroup) -> GradSum:
    """Return the gradient sum of the last backward."""
    return group.gradient.sum


@dataclass
class Scratch:
    """Buffers that all tiles share during updates.

    The buffer "grads" holds gradients that are cast, unscaled and clipped. The buffer "masters"
    holds main weights that are joined from their two halves (precision/policy.py).

    Attributes:
        device: The training device. Its buffers are counted in `budget`.
        numel: Elements of the largest tile, by device that runs updates.
        budget: Memory budget of the training device.
        kept: Allocated buffers by name and device.
    """

    device: torch.device
    numel: dict[torch.device, int] = field(default_factory=dict)
    budget: DeviceBudget = field(default_factory=DeviceBudget)
    kept: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict)

    def take(
        self, what: str, dtype: torch.dtype, home: torch.device, numel: int | None = None
    ) -> Tensor:
        """Return a named buffer with arbitrary contents; allocate it on first use.

        Args:
            what: Name of the buffer.
            dtype: Data type. A buffer of another type is replaced.
            home: Device that runs the update.
            numel: Number of elements; by default those of the largest tile.

        Raises:
            OutOfMemoryError: The budget of the training device does not allow the allocation.
        """
        found = self.kept.get((what, home))
        if found is None or found.dtype != dtype:
            numel = self.numel[home] if numel is None else numel
            self._count(home, numel * dtype.itemsize, "what an optimizer's step works in")
            if found is not None:
                self._count(home, -found.nbytes, "")
            self.kept[what, home] = found = torch.empty(numel, dtype=dtype, device=home)
        return found

    def grow(self, fullest: Mapping[torch.device, int]) -> None:
        """Make room for larger tiles.

        Buffers that are too small are freed, and allocated again on their next use.

        Args:
            fullest: Elements of the largest tile by device.
        """
        for home, numel in fullest.items():
            if numel <= self.numel.get(home, 0):
                continue
            self.numel[home] = numel
            for key in [
                key for key in self.kept if key[0] not in ("nothing", "undo") and key[1] == home
            ]:
                self._count(home, -self.kept.pop(key).nbytes, "")

    def drop(self, what: str) -> None:
        """Free all buffers with this name."""
        for key in [key for key in self.kept if key[0] == what]:
            self._count(key[1], -self.kept.pop(key).nbytes, "")

    def placeholder(self, shape: torch.Size, dtype: torch.dtype, home: torch.device) -> Tensor:
        """Return a tensor of this shape without values: one NaN, expanded.

        Args:
            shape: Shape of the tensor.
            dtype: Data type of the NaN if it is not allocated yet.
            home: Device of the tensor.
        """
        key = "nothing", home
        if key not in self.kept:
            self._count(home, dtype.itemsize, "what stands for values that are elsewhere")
            self.kept[key] = torch.full((), float("nan"), dtype=dtype, device=home)
        return self.kept[key].expand(shape)

    def is_placeholder(self, value: object) -> bool:
        """Return whether a value is a placeholder for values that are stored elsewhere."""
        if not isinstance(value, Tensor) or is_subclass(value):
            return False
        nothing = self.kept.get(("nothing", value.device))
        return nothing is not None and value.data_ptr() == nothing.data_ptr()

    def _count(self, home: torch.device, nbytes: int, what: str) -> None:
        if home == self.device:
            self.budget.reserve(nbytes, what)


@dataclass(eq=False)
class MasterShard:
    """A range of a group's main weight that the inner optimizer sees as one parameter.

    If the main weight is copied for updates (`MasterWeight.is_copied_for_update`), `param` has
    values only during an update, and NaN between updates.

    Attributes:
        group: The parameter group.
        start: First element in this rank's main weight and reduced gradient.
        stop: End of the range.
        param: The parameter that the inner optimizer updates.
        names: Names of the parameters that the range covers.
        at: Offset of the shard in the scratch buffers of its tile, in elements.
        has_kernel: The storage formats allow an update in one pass (one_pass.py).
    """

    group: ParamGroup
    start: int
    stop: int
    param: nn.Parameter
    names: tuple[str, ...]
    at: int = 0
    has_kernel: bool = False  # used only if the hyper-parameters have a rule (one_pass.py)

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def planned(self) -> ShardRange:
        """Return the plan's description of the shard."""
        return ShardRange(
            self.group.planned, self.start, self.stop, self.names, tuple(self.param.shape)
        )

    @property
    def master(self) -> MasterWeight:
        assert self.group.master is not None
        return self.group.master

    @property
    def rank(self) -> int:
        return self.group.comm_ctx.comm.rank

    def grad(self, source: GradSource) -> Tensor | None:
        """Return the gradient in the shape of `param`, or None if there is none."""
        if self.is_absent(source):
            return None
        part = source(self.group).read(self.start, self.stop)
        return None if part is None else part.view(self.param.shape)

    def storage_ranges(self, source: GradSource = collected) -> Iterator[StorageRange]:
        """Yield the storage ranges that the update of this shard reads or writes.

        They belong to main weights, weights and gradients outside the training device.
        """
        for storage in self.master.offloaded():
            yield StorageRange(storage, self.start, self.stop)
        buffer = source(self.group).buffer
        if buffer is not None and not buffer.storage.on_device:
            yield StorageRange(buffer.storage, self.start, self.stop, changes=False)

    def staged_ranges(
        self, source: GradSource = collected, after: CopyEvent = COMPLETED
    ) -> Iterator[StagedRange]:
        """Yield the ranges on the training device that the host updates or reads.

        Args:
            source: Returns the gradient sum of a group.
            after: Event of the device after which it does not change the ranges.
        """
        if self.master.staged is not None:
            yield StagedRange(self.master.staged, self.start, self.stop, after)
        staged = source(self.group).staged_tile()
        if staged is not None:
            yield StagedRange(staged, self.start, self.stop, after, changes=False)

    def overlaps(self) -> Iterator[ParamOverlap]:
        """Yield the range of each parameter that the shard covers."""
        low = 0 if self.master.placement is R else self.group.layout.bounds(self.rank)[0]
        first = low + self.start
        last = low + self.stop
        for number, member in enumerate(self.group.members):
            slot = member.slot
            start = max(slot.start, first)
            stop = min(slot.stop, last)
            if start < stop:
                yield ParamOverlap(
                    slot, start - slot.start, stop - slot.start, self, start - first, number
                )

    def pieces(self) -> list[Piece]:
        """Return the ranges of the parameters that the shard covers."""
        return [
            Piece(
                cover.slot.name, cover.offset, cover.offset + cover.stop - cover.start, cover.start
            )
            for cover in self.overlaps()
        ]

    def is_absent(self, source: GradSource) -> bool:
        """Return whether no parameter of the shard has a gradient, so that it is skipped.

        Parameters without a gradient are frozen, or their gradients were dropped.
        """
        absent = source(self.group).absent or set()
        return bool(absent) and all(cover.number in absent for cover in self.overlaps())

    def chance(self, chance: StochasticRounding, state: str) -> Tensor:
        """Return random bits for stochastic rounding: one int16 per element, flat.

        Args:
            chance: Random bits of this update.
            state: Name of the state that is rounded.
        """
        parts = [
            chance.of(f"{state} of {cover.slot.name}", cover.start, cover.stop - cover.start)
            for cover in self.overlaps()
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def load_values(self, scratch: Scratch) -> None:
        """Load the main weights into `param` before the optimizer changes them."""
        self.group.guard.before_write()
        values = self.master.in_place_view(self.start, self.stop)
        home = self.master.update_device
        if values is None:
            into = scratch.take("masters", self.master.dtype, home)[self.at : self.at + self.numel]
            helper = None
            if self.master.is_split:
                helper = scratch.take(
                    "join", torch.int32, home, scratch_numel(home, scratch.numel[home])
                )
            values = self.master.read(self.start, self.stop, into, helper)
        self.param.data = values.view(self.param.shape)

    def store_values(self, scratch: Scratch, chance: StochasticRounding, *, keep: bool) -> None:
        """Take the values out of `param` again after an update.

        Args:
            scratch: Provides the placeholder for main weights that are not updated in place.
            chance: Random bits for weights that are stored with stochastic rounding.
            keep: First write the values of `param` to the main weight. False after an error.
        """
        if keep and self.master.in_place_view(self.start, self.stop) is None:
            random = self.chance(chance, "weight") if self.master.is_rounded else None
            self.master.write_consuming(self.start, self.stop, self.param.data.reshape(-1), random)
        if keep:
            self.master.copy_to_weight(self.start, self.stop)
        if self.master.is_copied_for_update:
            self.param.data = scratch.placeholder(
                self.param.shape, self.param.dtype, self.master.update_device
            )


@dataclass(frozen=True)
class ParamOverlap:
    """The elements of one parameter that a shard covers.

    Attributes:
        slot: Place of the parameter in its group.
        start: First covered element of the parameter.
        stop: End of the covered elements.
        shard: The shard.
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
        """Return the covered elements of a state of the shard's size, as a flat view."""
        return state.view(-1)[self.offset : self.offset + self.stop - self.start]


Tile = list[tuple[int, MasterShard]]  # (number of the user's parameter group, shard)


@dataclass(frozen=True)
class Tiles:
    """The tiles of an optimizer in the order of `UpdatePlan.order`.

    Attributes:
        now: Tiles that are updated in the step, before it returns.
        later: Tiles that may be updated at other times, by unit number.
    """

    now: list[Tile]
    later: dict[int, list[Tile]]

    @classmethod
    def of(cls, plan: UpdatePlan, shards_by_group: Sequence[Sequence[MasterShard]]) -> Tiles:
        """Build the tiles of a plan from its shards.

        Args:
            plan: The plan of the updates.
            shards_by_group: Shards that were made from `plan.shards`, in the same order.
        """
        shard_of = {
            id(planned): shard
            for ranges, shards in zip(plan.shards, shards_by_group, strict=True)
            for planned, shard in zip(ranges, shards, strict=True)
        }

        def tile_of(planned_tile: PlannedTile) -> Tile:
            tile = Tile()
            filled = 0
            for number, planned in planned_tile:
                shard = shard_of[id(planned)]
                shard.at = filled
                shard.has_kernel = plan.has_kernel(number, planned)
                tile.append((number, shard))
                filled += shard.numel
            return tile

        later = {unit: list(map(tile_of, tiles)) for unit, tiles in plan.order.later.items()}
        return cls(list(map(tile_of, plan.order.now)), later)


def cuts_of(shard: MasterShard, apart: Callable[[ParamOverlap], Any]) -> list[ShardRange]:
    """Return the ranges of a shard within which all parameters have the same key.

    The whole shard is returned if all keys are equal or if it is a whole tensor.

    Args:
        shard: The shard.
        apart: Returns the key of a parameter's range.
    """
    covers = list(shard.overlaps())
    runs = [list(run) for _, run in itertools.groupby(covers, key=apart)]
    if len(runs) < 2:
        return [shard.planned]
    edges = [shard.start, *(shard.start + run[0].offset for run in runs[1:]), shard.stop]
    return [
        ShardRange(
            shard.group.planned, low, high, tuple(cover.slot.name for cover in run), (high - low,)
        )
        for run, low, high in zip(runs, edges, edges[1:], strict=False)
    ]


@dataclass(frozen=True)
class StorageRange:
    """Elements [low, high) of one storage.

    Attributes:
        storage: The storage.
        low: The first element.
        high: The end of the elements.
        changes: The update writes the elements.
    """

    storage: Storage
    low: int
    high: int
    changes: bool = True

    @property
    def itemsize(self) -> int:
        """Return the size of one element in bytes."""
        return self.storage.memory.itemsize

    def fetch(self) -> Work:
        return self.storage.fetch(self.low, self.high)

    def values(self) -> Tensor:
        """Return the fetched elements as a read-only view."""
        return self.storage.read(self.low, self.high)

    def restore(self, values: Tensor) -> None:
        """Overwrite the elements with earlier bytes, and store them."""
        self.storage.write(self.low, self.high).view(torch.uint8).copy_(values)
        self.release()

    def release(self) -> Work | None:
        if self.changes:
            return self.storage.store(self.low, self.high)
        self.storage.evict(self.low, self.high)
        return None


@dataclass(frozen=True)
class StagedRange:
    """Elements [low, high) of a tensor on the training device that the host works on.

    Attributes:
        mirror: Copies the elements between the device and the host.
        low: The first element.
        high: The end of the elements.
        after: Event of the device after which it does not change the elements.
        changes: The update writes the elements.
    """

    mirror: StagedTile
    low: int
    high: int
    after: CopyEvent
    changes: bool = True

    @property
    def itemsize(self) -> int:
        """Return the size of one element in bytes."""
        return self.mirror.on_device.itemsize

    def fetch(self) -> Work:
        return self.mirror.fetch(self.low, self.high, self.after)

    def values(self) -> Tensor:
        """Return the fetched elements as a read-only view."""
        found = self.mirror.view(self.low, self.high)
        assert found is not None, "read before it was fetched"
        return found

    def restore(self, values: Tensor) -> None:
        """Overwrite the elements with earlier bytes, and copy them to the device."""
        self.mirror.fetch(self.low, self.high, COMPLETED).wait()
        self.values().view(torch.uint8).copy_(values)
        self.release()

    def release(self) -> Work | None:
        if self.changes:
            return self.mirror.store(self.low, self.high)
        self.mirror.discard(self.low, self.high)
        return None


StagedState = StorageRange | StagedRange  # fetched before the update of a tile, and stored after it


@dataclass(eq=False)
class Moment:
    """One kind of moment of one group.

    Attributes:
        storage: Holds the elements between updates.
        dtype: Data type in which the optimizer works.
        kept: Storage format; None if the elements are stored in `dtype`.
        powers: Scales of 8-bit blocks, by id of the shard. They stay on the device of the update.
        is_fresh: Elements that no shard uses yet are still zero.
    """

    storage: Storage
    dtype: torch.dtype
    kept: StorageFormat | None
    powers: dict[int, Tensor] = field(default_factory=dict)
    is_fresh: bool = True

    @property
    def is_stored(self) -> bool:
        """Return whether the optimizer sees a placeholder between updates."""
        return self.kept is not None or self.storage.is_offloaded


class Moments:
    """The moments of one optimizer."""

    def __init__(self, inner: Optimizer, scratch: Scratch) -> None:
        self._inner = inner
        self._scratch = scratch
        self._found: dict[tuple[int, str], Moment] = {}  # by (id of the group, name)
        self._names: dict[int, list[str]] = {}
        self._counted: set[int] = set()  # ids of shards whose moments the optimizer keeps itself

    def offloaded(self) -> Iterable[Storage]:
        """Return the storages of moments that are not on the training device."""
        storages = (moment.storage for moment in self._found.values())
        return (storage for storage in storages if not storage.on_device)

    def on_device(self) -> Iterator[Tensor]:
        """Yield the tensors of moments on the training device."""
        for moment in self._found.values():
            yield from moment.powers.values()
            if moment.storage.on_device:
                yield moment.storage.memory

    def storage_ranges(self, shard: MasterShard) -> Iterator[StorageRange]:
        """Yield the storage ranges of moments that the update of a shard reads and writes."""
        for name in self._names.get(id(shard.group), ()):
            yield StorageRange(self._found[id(shard.group), name].storage, shard.start, shard.stop)

    def storages(self, shard: MasterShard) -> Iterator[tuple[StorageRange, Tensor | None]]:
        """Yield the storage range of each moment of a shard, and its scales if it has any."""
        state = self._inner.state.get(shard.param, {})
        for name in self._names.get(id(shard.group), ()):
            if name in state:
                moment = self._found[id(shard.group), name]
                yield (
                    StorageRange(moment.storage, shard.start, shard.stop),
                    moment.powers.get(id(shard)),
                )

    def resting(self, shard: MasterShard) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors of a shard's moments as they are stored between steps.

        Moments on a disk are left out.
        """
        for name, value in self._inner.state.get(shard.param, {}).items():
            if is_subclass(value):
                yield from ((f"{name}.{path}", each) for path, each in inner_tensors(value).items())
                continue
            if not self._scratch.is_placeholder(value):
                yield from [(name, value)] if isinstance(value, Tensor) else ()
                continue
            moment = self._found[id(shard.group), name]
            if not moment.storage.is_offloaded:
                yield name, moment.storage.read(shard.start, shard.stop)

    def load(self, shard: MasterShard, *, working: bool = True) -> None:
        """Load the moments of a shard into the optimizer's state.

        Args:
            shard: The shard.
            working: Decode into the buffers that all tiles share, for the update of one tile.
        """
        shard.group.guard.before_write()
        if shard.param not in self._inner.state:
            return
        for name in self._names.get(id(shard.group), ()):
            moment = self._found[id(shard.group), name]
            state = self._inner.state[shard.param]
            if not self._scratch.is_placeholder(state.get(name)):
                continue
            if moment.kept is None:
                values = moment.storage.write(shard.start, shard.stop)
            else:  # decoded into a copy, so there is nothing to store yet
                values = moment.storage.read(shard.start, shard.stop)
                shared = self._shared(shard, name, moment.dtype) if working else None
                values = moment.kept.decode(values, moment.powers.get(id(shard)), shared)
            state[name] = values.view(shard.param.shape)

    def read(self, shard: MasterShard, name: str) -> Tensor:
        """Return one moment as fp32, or in the data type of the optimizer.

        The result is a view or a copy. Deferred updates do not run.

        Args:
            shard: The shard.
            name: Name of the moment.
        """
        value: Tensor = self._inner.state[shard.param][name]
        moment = self._found.get((id(shard.group), name))
        if moment is None or (moment.kept is not None and not self._scratch.is_placeholder(value)):
            return value
        # The optimizer's state may be a view of memory whose pages have been freed together with
        # another shard of the same chunk.
        values = moment.storage.read_now(shard.start, shard.stop)
        if moment.kept is None:
            return values
        return moment.kept.decode(values, moment.powers.get(id(shard)), None)

    def store(self, shard: MasterShard, chance: StochasticRounding, *, keep: bool) -> None:
        """Store the optimizer's state of a shard.

        Values that are stored in another form are replaced by placeholders until the next `load`.

        Args:
            shard: The shard.
            chance: Random bits for values that are stored in fewer bits.
            keep: Encode the new values. False after an update that failed.
        """
        shard.group.guard.before_write()
        state = self._inner.state.get(shard.param, {})
        self._count(shard, state)
        if not shard.group.plan.moments_external:
            return
        for name, value in state.items():
            if (
                not isinstance(value, Tensor)
                or value.shape != shard.param.shape
                or is_subclass(value)
            ):
                continue
            if self._scratch.is_placeholder(value):
                continue
            moment = self._moment(shard, name, value.dtype)
            own = moment.storage.memory[shard.start : shard.stop]
            if moment.kept is not None:
                own = moment.storage.write(shard.start, shard.stop)
                powers = self._scales(moment, shard)
                if keep:
                    moment.kept.encode(value.reshape(-1), own, powers, shard.chance(chance, name))
            elif value.data_ptr() != own.data_ptr():
                moment.storage.write(shard.start, shard.stop).copy_(value.reshape(-1))
            state[name] = self._seen(shard, moment, own, value.shape)

    def in_place(self, shard: MasterShard, names: Sequence[str]) -> tuple[Tensor, ...]:
        """Return a shard's stored moments as flat tensors for an update in place.

        Missing moments are created as zeros. Between updates the optimizer sees the same state as
        after `store`.

        Args:
            shard: The shard.
            names: Names of all its moments.
        """
        shard.group.guard.before_write()
        state = self._inner.state[shard.param]
        missing = [name for name in names if state.get(name) is None]
        if not shard.group.plan.moments_external:
            for name in missing:
                state[name] = torch.zeros(shard.param.shape, device=shard.master.update_device)
            self._count(shard, state)
            return tuple(state[name].view(-1) for name in names)
        found = []
        for name in names:
            moment = self._moment(shard, name, torch.float32)
            own = moment.storage.write(shard.start, shard.stop)
            found.append(own)
            if name in missing:
                if not moment.is_fresh or moment.storage.is_offloaded:
                    own.zero_()
                state[name] = self._seen(shard, moment, own, shard.param.shape)
        self._count(shard, state)
        return tuple(found)

    def forget(self) -> None:
        """Zero the memory of all states that are created from now on."""
        for moment in self._found.values():
            moment.is_fresh = False

    def _seen(self, shard: MasterShard, moment: Moment, own: Tensor, shape: torch.Size) -> Tensor:
        """Return the tensor that the optimizer's state holds between updates."""
        if moment.is_stored:
            return self._scratch.placeholder(shape, moment.dtype, shard.master.update_device)
        return own.view(shape)

    def refuse_cut(self, shard: MasterShard) -> None:
        """Raise `UsageError` if a shard's moments cannot be cut.

        8-bit moments cannot be cut, because neighbouring elements of a block share an exponent.
        """
        if any(id(shard) in moment.powers for moment in self._found.values()):
            raise UsageError(
                f"the optimizer's state of {', '.join(shard.names[:3])} is kept in 8 bits, and not "
                "all of it is to be updated.",
                "Blocks of moments that reach from one parameter into the next share an exponent; "
                "updating one would change the other's.",
                "freeze whole units (blocks), or set optimizer.moments to bf16 or fp32.",
            )

    def cut(self, shard: MasterShard, into: Sequence[MasterShard]) -> None:
        """Divide the optimizer's state of a shard among the ranges into which it was cut.

        Args:
            shard: The shard that was cut.
            into: The new shards.
        """
        # A checkpoint that is being written reads the state by this shard
        shard.group.guard.before_write()
        state = self._inner.state.pop(shard.param, None)
        self._counted.discard(id(shard))
        for part in into if state is not None else ():
            low = part.start - shard.start
            high = part.stop - shard.start
            own = self._inner.state[part.param] = {}
            for name, value in state.items():
                if not isinstance(value, Tensor):
                    own[name] = value
                elif value.shape != shard.param.shape:
                    own[name] = value.clone()
                elif self._scratch.is_placeholder(value):
                    own[name] = self._scratch.placeholder(
                        part.param.shape, value.dtype, value.device
                    )
                else:
                    own[name] = value.view(-1)[low:high].view(part.param.shape)

    def _shared(self, shard: MasterShard, name: str, dtype: torch.dtype) -> Tensor:
        """Return the buffer for a moment during an update, which all tiles share."""
        return self._scratch.take(name, dtype, shard.master.update_device)[
            shard.at : shard.at + shard.numel
        ]

    def offload(self, shard: MasterShard, chance: StochasticRounding) -> None:
        """Store moments that were loaded from a checkpoint, and move them to their tier.

        Args:
            shard: The shard.
            chance: The random bits for stochastic rounding.
        """
        self.store(shard, chance, keep=True)
        for left in [stretch.release() for stretch in self.storage_ranges(shard)]:
            if left is not None:
                # Otherwise all moments would be in memory if this disk is slower than the source.
                left.wait()

    def _scales(self, moment: Moment, shard: MasterShard) -> Tensor | None:
        if moment.kept is None or not moment.kept.has_scales:
            return None
        if id(shard) not in moment.powers:
            powers = torch.zeros(
                -(-shard.numel // BLOCK), dtype=torch.int8, device=shard.master.update_device
            )
            moment.powers[id(shard)] = powers
        return moment.powers[id(shard)]

    def _moment(self, shard: MasterShard, name: str, dtype: torch.dtype) -> Moment:
        key = id(shard.group), name
        if key not in self._found:
            plan = shard.group.plan
            group = shard.group
            assert plan.moments is not None
            kept = storage_format(plan.moments_format, name) if dtype == torch.float32 else None
            stored = kept.dtype if kept is not None else dtype
            what = f"{name} of {group.members[0].name}"
            numel = shard.master.buffer.memory.numel()
            if plan.moments.tier is Tier.DEVICE:
                storage = Storage(
                    torch.zeros(numel, dtype=stored, device=shard.master.update_device)
                )
                self._scratch.budget.reserve_for(storage, storage.memory.nbytes, what)
            else:
                storage = group.comm_ctx.tiers.reserve(
                    plan.moments.tier, numel, stored, what, is_copied=False
                )
            self._found[key] = Moment(storage, dtype, kept)
            self._names.setdefault(id(group), []).append(name)
        return self._found[key]

    def _count(self, shard: MasterShard, state: dict[str, Any]) -> None:
        """Count the optimizer's own allocations against the budget of the training device."""
        if state and id(shard) not in self._counted:
            self._counted.add(id(shard))
            rest = shard.group.plan.moments_external
            tensors = [value for value in state.values() if isinstance(value, Tensor)]
            nbytes = sum(
                value.nbytes for value in tensors if not rest or value.shape != shard.param.shape
            )
            self._scratch.budget.reserve_for(
                shard, nbytes, f"the optimizer's state of {shard.names[0]}"
            )


@dataclass(frozen=True)
class PrefetchSettings:
    """Limits of a `TilePrefetcher`.

    Attributes:
        ahead: Tiles that are fetched before their turn.
        behind: Tiles that may still be stored when the next tile is updated.
    """

    ahead: int = 2
    behind: int = 2


class TilePrefetcher(Generic[T]):
    """Fetches tiles in order before their updates, and stores them afterwards.

    `next` returns a tile to update, and `release` stores it. The last stores may still be in
    progress when `next` returns None.
    """

    def __init__(
        self,
        tiles: Sequence[T],
        touched: Callable[[T], Iterable[StagedState]],
        settings: PrefetchSettings,
    ) -> None:
        self._touched = touched
        self._settings = settings
        self._upcoming = iter(tiles)
        self._coming: deque[tuple[T, list[Work]]] = deque()
        self._going: deque[list[Work | None]] = deque()

    def next(self) -> T | None:
        """Return the next tile with its states fetched, or None after the last tile."""
        for early in islice(self._upcoming, self._settings.ahead + 1 - len(self._coming)):
            self._coming.append((early, [stretch.fetch() for stretch in self._touched(early)]))
        if not self._coming:
            return None
        tile, tickets = self._coming.popleft()
        for ticket in tickets:
            ticket.wait()
        return tile

    def release(self, tile: T) -> None:
        """Start to store the changed states of a tile."""
        self._going.append([stretch.release() for stretch in self._touched(tile)])
        while len(self._going) > self._settings.behind:
            for left in self._going.popleft():
                if left is not None:
                    left.wait()


@dataclass(frozen=True)
class Decision:
    """The decision of a step about its gradients.

    Attributes:
        factor: Factor by which gradients are multiplied.
        number: Number of the update, which seeds stochastic rounding.
        hypers: Hyper-parameters of the update; None for the current ones.
        source: Returns the gradient sum of each group.
        groups: Values that the shards of a parameter group share during the update, by its index.
    """

    factor: float
    number: int
    hypers: Hypers | None = None
    source: GradSource = collected
    groups: dict[int, GroupUpdate | None] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def agrees(self, other: Decision) -> bool:
        """Return whether both decisions lead to the same bits."""
        return (self.factor, self.number) == (other.factor, other.number) and _same(
            self.hypers, other.hypers
        )


def tiles_by_group(tiles: Iterable[Tile]) -> Counter[ParamGroup]:
    """Return the number of tiles that contain a part of each group."""
    return Counter(group for tile in tiles for group in {shard.group for _, shard in tile})


def hypers_of(optimizer: Optimizer) -> Hypers:
    """Return a copy of the current hyper-parameters."""
    return [
        {key: _own(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return isinstance(left, Tensor) and isinstance(right, Tensor) and torch.equal(left, right)
    return type(left) is type(right) and bool(left == right)


class Updater:
    """Runs the inner optimizer over tiles."""

    def __init__(
        self,
        inner: Optimizer,
        scratch: Scratch,
        moments: Moments,
        settings: PrefetchSettings,
        clock: PhaseClock,
    ) -> None:
        self.inner = inner
        self.scratch = scratch
        self.moments = moments
        self.settings = settings
        self.clock = clock
        self.one_pass = OnePass(inner)
        self.is_busy = False  # whether the update of a tile is in progress
        self._ended_halfway = False
        self.updates = 0  # number of decided updates
        self.has_run = False  # whether the optimizer has created its states
        self._first_number: int | None = None  # number of the first decision
        self._first_update = LongWork("first update", 0, "parameters")

    def step_now(
        self, tiles: Sequence[Tile], decision: Decision
    ) -> Generator[set[ParamGroup], None, None]:
        """Update tiles one after another.

        Args:
            tiles: The tiles.
            decision: The decision of the step.

        Yields:
            After each tile, the groups whose tiles have all been updated.
        """
        self.expect_first(tiles, decision)
        flow = self.prefetcher(tiles, decision.source)
        done = 0
        left = tiles_by_group(tiles)  # number of tiles that are not updated yet
        try:
            while (tile := flow.next()) is not None:
                self.update(tile, decision)
                flow.release(tile)
                done += 1
                groups = {shard.group for _, shard in tile}
                for group in groups:
                    left[group] -= 1
                yield {group for group in groups if not left[group]}
        except (Exception, GeneratorExit):  # GeneratorExit: the caller failed between two tiles
            # If the first tile fails, split main weights are unchanged. Those that are updated in
            # place may have changed.
            in_place = any(
                shard.has_kernel or shard.master.is_updated_in_place
                for tile in tiles
                for _, shard in tile
            )
            self._ended_halfway = done > 0 or in_place
            for reflection in [
                each for tile in tiles for _, shard in tile for each in shard.staged_ranges()
            ]:
                reflection.mirror.clear()
            raise

    def prefetcher(
        self, tiles: Sequence[Tile], source: GradSource = collected
    ) -> TilePrefetcher[Tile]:
        """Return a prefetcher for the states that the updates of tiles use.

        Work that is given to the training device after this call must not change these states.

        Args:
            tiles: The tiles.
            source: Returns the gradient sum of each group.
        """
        after: CopyEvent = COMPLETED
        if tiles:
            after = tiles[0][0][1].group.comm_ctx.copy_engine.now()
        return TilePrefetcher(tiles, partial(self._staged_states, source, after), self.settings)

    def step_early(
        self, tiles: Sequence[Tile], decision: Decision, note: Callable[[MasterShard], None]
    ) -> None:
        """Update tiles before the decision of their step is known.

        Args:
            tiles: The tiles.
            decision: The expected decision.
            note: Called with each shard before its update.
        """
        flow = self.prefetcher(tiles, decision.source)
        with self.guard_mixture():
            while (tile := flow.next()) is not None:
                for _, shard in tile:
                    note(shard)
                self.update(tile, decision)
                flow.release(tile)

    @contextmanager
    def guard_mixture(self) -> Iterator[None]:
        """Run a block that must not fail halfway.

        If the block raises, some states have been updated and others have not. `refuse_mixture`
        then raises, because training cannot continue.
        """
        before = self.clock.enter("optimizer")
        already = self._ended_halfway
        self._ended_halfway = True
        try:
            with torch.inference_mode(False), torch.no_grad():
                yield
            self._ended_halfway = already
        finally:
            self.clock.enter(before)

    def refuse_mixture(self) -> None:
        """Raise `UsageError` if an earlier update failed after it had updated some states."""
        if self._ended_halfway and not self.is_busy:
            raise UsageError(
                "an earlier step ended with an error while states were being updated.",
                "Some have taken that step and some have not, so going on would compute with a "
                "mixture.",
                "load the last checkpoint into a new engine.",
            )

    def _staged_states(
        self, source: GradSource, after: CopyEvent, tile: Tile
    ) -> Iterator[StagedState]:
        for _, shard in tile:
            if not shard.group.plan.is_offloaded or shard.is_absent(source):
                continue
            yield from shard.storage_ranges(source)
            yield from shard.staged_ranges(source, after)
            yield from self.moments.storage_ranges(shard)

    def update(self, tile: Tile, decision: Decision) -> None:
        """Update one tile whose states have been fetched. Local.

        Args:
            tile: The tile.
            decision: The decision of the step.
        """
        rest = Tile()  # shards that the optimizer's own step updates
        shown = list[MasterShard]()
        chance = StochasticRounding(decision.number)
        self.is_busy = True
        done = False
        try:
            for number, shard in tile:
                grad = shard.grad(decision.source)
                if (
                    grad is not None
                    and shard.has_kernel
                    and self._update_in_one_pass(number, shard, grad, decision)
                ):
                    continue
                rest.append((number, shard))
                if grad is None:
                    continue
                shard.load_values(self.scratch)
                self.moments.load(shard)
                shown.append(shard)
                shard.param.grad = self._scaled(shard, grad, decision.factor)
            for part in self._alike(rest, shown) if rest else ():
                self._step_inner(part, decision.hypers)
            for number, shard in rest:
                self.one_pass.settle(shard.param, self._group(number, decision))
            done = True
        finally:
            for shard in shown:
                shard.store_values(self.scratch, chance, keep=done)
                self.moments.store(shard, chance, keep=done)
                shard.param.grad = None
            self.is_busy = False
        if decision.number == self._first_number:
            self._first_update.advance(sum(shard.numel for _, shard in tile))
            if self._first_update.done >= self._first_update.total:
                self._first_update.finish()

    def _hypers_of(self, number: int, decision: Decision) -> dict[str, Any]:
        """Return the hyper-parameters of a parameter group for a decision."""
        return (
            decision.hypers[number]
            if decision.hypers is not None
            else self.inner.param_groups[number]
        )

    def _group(self, number: int, decision: Decision) -> GroupUpdate | None:
        """Return the kernel settings of a parameter group, or None without a kernel."""
        if number not in decision.groups:
            hypers = self._hypers_of(number, decision)
            decision.groups[number] = self.one_pass.group(hypers)
        return decision.groups[number]

    def _update_in_one_pass(
        self, number: int, shard: MasterShard, grad: Tensor, decision: Decision
    ) -> bool:
        """Update a shard with a kernel.

        Returns:
            False if there is no kernel for its hyper-parameters. Nothing has changed then.
        """
        group = self._group(number, decision)
        variant = None if group is None else self.one_pass.variant(shard.param, group)
        if group is None or variant is None:
            return False
        main, other = shard.master.for_kernel(shard.start, shard.stop)
        layout = layout_of(grad, main, other, shard.group.plan.moments_format)
        if not self.one_pass.is_exact(variant, layout, main.device):
            return False
        shard.group.guard.before_write()
        counter = self.one_pass.counter(shard.param, group)
        memory = Memory(grad, main, other, self.moments.in_place(shard, variant.states))
        chance = StochasticRounding(decision.number)
        pieces = shard.pieces() if layout.is_random else ()
        self.one_pass.update(
            variant, layout, memory, group, counter, decision.factor, chance, pieces
        )
        if other is None:
            shard.master.copy_to_weight(shard.start, shard.stop)
        return True

    def expect_first(self, tiles: Sequence[Tile], decision: Decision) -> None:
        """Add these tiles to the progress report of the first update.

        The first update is slow, because it touches the memory of the states for the first time.

        Args:
            tiles: Tiles that will be updated.
            decision: The decision for these tiles.
        """
        if self._first_number is None:
            self._first_number = decision.number
            self._first_update = LongWork("first update", 0, "parameters")
        if decision.number == self._first_number:
            self._first_update.total += sum(shard.numel for tile in tiles for _, shard in tile)

    def _scaled(self, shard: MasterShard, grad: Tensor, factor: float) -> Tensor:
        dtype = shard.param.dtype
        home = shard.master.update_device
        if grad.dtype == dtype and factor == 1.0 and grad.device == home:
            return grad
        into = self.scratch.take("grads", dtype, home)[shard.at : shard.at + shard.numel].view(
            grad.shape
        )
        if factor == 1.0:
            return into.copy_(grad)
        is_alike = grad.dtype == dtype and grad.device == into.device
        return torch.mul(grad, factor, out=into) if is_alike else into.copy_(grad).mul_(factor)

    def _alike(self, tile: Tile, shown: Sequence[MasterShard]) -> list[Tile]:
        """Split a tile into shards with and without optimizer state.

        Shards that were unfrozen later have no state yet. PyTorch's fused SGD does not accept both
        in one call.
        """
        new = {id(shard) for shard in shown if not self.inner.state.get(shard.param)}
        if not new or len(new) == len(shown):
            return [tile]
        return [
            [item for item in tile if (id(item[1]) in new) is is_new] for is_new in (False, True)
        ]

    def state_of_first_step(self, shard: MasterShard, number: int) -> dict[str, Any]:
        """Return the state that the inner optimizer creates for a shard in its first step.

        The step runs on a parameter of zeros in place of the shard. It changes neither weights nor
        parameter groups. Local.

        Args:
            shard: The shard.
            number: Index of its parameter group.
        """
        twin = nn.Parameter(torch.zeros_like(shard.param, device=shard.master.update_device))
        twin.grad = torch.zeros_like(twin)
        held = [dict(group) for group in self.inner.param_groups]
        try:
            for place, group in enumerate(self.inner.param_groups):
                group["params"] = [twin] if place == number else []
            with torch.no_grad():
                raw_step(self.inner)()
            return dict(self.inner.state.pop(twin, {}))
        finally:
            for group, before in zip(self.inner.param_groups, held, strict=True):
                group.clear()
                group.update(before)

    def _step_inner(self, tile: Tile, hypers: Hypers | None) -> None:
        """Call the inner optimizer once for the shards of a tile."""
        everything = self.inner.param_groups
        held = [dict(group) for group in everything]
        try:
            for number, group in enumerate(everything):
                if hypers is not None:
                    group.update(hypers[number])
                group["params"] = [shard.param for owner, shard in tile if owner == number]
            raw_step(self.inner)()
        finally:
            for number, (group, before) in enumerate(zip(everything, held, strict=True)):
                group["params"] = before["params"]
                for key, value in hypers[number].items() if hypers is not None else ():
                    if group[key] is value:  # keep what the optimizer itself changed
                        group[key] = before[key]
