"""Moments that are stored in another memory, in fewer bits, or both.

There is one storage per group and kind of moment. This works with every PyTorch optimizer: a state
is stored this way if the first step creates it with as many elements as the shard. The optimizer
keeps counters and states of other shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..base.errors import UsageError
from ..base.nested import inner_tensors, is_subclass
from ..base.quantities import ceil_div
from ..precision.compact import BLOCK, StochasticRounding, StorageFormat, storage_format
from ..tiers.tier import Storage, Tier
from .master_shard import MasterShard
from .param_overlap import random_bits
from .tile_memory import StorageRange, TileScratch


@dataclass(eq=False)
class Moment:
    """One kind of moment (such as "exp_avg") of one parameter group.

    Attributes:
        storage: Holds the elements between updates.
        dtype: Data type in which the optimizer works.
        kept: Storage format; None if the elements are stored in `dtype`.
        powers: Scales of the blocks of 8-bit moments, by id of the shard. They stay on the device
            of the update.
        is_fresh: Whether no moments were discarded since the storage was allocated, so elements
            that were not written are zero.
    """

    storage: Storage
    dtype: torch.dtype
    kept: StorageFormat | None
    powers: dict[int, Tensor] = field(default_factory=dict)
    is_fresh: bool = True

    @property
    def is_stored(self) -> bool:
        """Whether the optimizer's state contains a placeholder between updates."""
        return self.kept is not None or self.storage.is_offloaded


class Moments:
    """Stores the moments of one optimizer in other memory or fewer bits between updates.

    Args:
        inner: The optimizer whose moments are stored.
        scratch: The buffers into which moments are decoded for an update.
    """

    def __init__(self, inner: Optimizer, scratch: TileScratch) -> None:
        self._inner = inner
        self._scratch = scratch
        self._of_group: dict[int, dict[str, Moment]] = {}  # by id of the group, then by name

    def _all(self) -> Iterator[Moment]:
        for moments in self._of_group.values():
            yield from moments.values()

    def _moments_of(self, shard: MasterShard) -> Mapping[str, Moment]:
        """Return the moments of the group of a shard, by name."""
        return self._of_group.get(id(shard.group), {})

    def offloaded(self) -> Iterable[Storage]:
        """Return the storages of moments that are not on the training device."""
        storages = (moment.storage for moment in self._all())
        return (storage for storage in storages if not storage.on_device)

    def on_device(self) -> Iterator[Tensor]:
        """Yield the tensors of moments on the training device."""
        for moment in self._all():
            yield from moment.powers.values()
            if moment.storage.on_device:
                yield moment.storage.memory

    def storage_ranges(self, shard: MasterShard) -> Iterator[StorageRange]:
        """Yield the ranges of stored moments that the update of a shard reads and writes."""
        for moment in self._moments_of(shard).values():
            yield StorageRange(moment.storage, shard.start, shard.stop)

    def storages(self, shard: MasterShard) -> Iterator[tuple[StorageRange, Tensor | None]]:
        """Yield the storage range of each moment of a shard, with its scales or None."""
        state = self._inner.state.get(shard.param, {})
        for name, moment in self._moments_of(shard).items():
            if name in state:
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
                for path, inner in inner_tensors(value).items():
                    yield f"{name}.{path}", inner
            elif self._scratch.is_placeholder(value):
                storage = self._moments_of(shard)[name].storage
                if not storage.is_offloaded:
                    yield name, storage.read(shard.start, shard.stop)
            elif isinstance(value, Tensor):
                yield name, value

    def load(self, shard: MasterShard, *, working: bool = True) -> None:
        """Load the moments of a shard into the optimizer's state.

        Args:
            shard: The shard to which the moments belong.
            working: Whether to decode into buffers that later updates overwrite. If false, decoded
                values are in new memory.
        """
        shard.group.guard.before_write()
        if shard.param not in self._inner.state:
            return
        state = self._inner.state[shard.param]
        for name, moment in self._moments_of(shard).items():
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
        """Return one moment of a shard, decoded to the data type of the optimizer.

        The result is a view of the storage or a copy. Deferred updates are not run first.

        Args:
            shard: The shard to which the moments belong.
            name: The name of the moment, for example "exp_avg".
        """
        value: Tensor = self._inner.state[shard.param][name]
        moment = self._moments_of(shard).get(name)
        if moment is None or (moment.kept is not None and not self._scratch.is_placeholder(value)):
            return value
        # Not `value`: the storage frees memory in chunks of several shards. A view of a chunk that
        # was freed with another shard has no values.
        values = moment.storage.read_now(shard.start, shard.stop)
        if moment.kept is None:
            return values
        return moment.kept.decode(values, moment.powers.get(id(shard)), None)

    def store(self, shard: MasterShard, chance: StochasticRounding, *, keep: bool) -> None:
        """Move a shard's state from the optimizer to its storage after an update.

        Values that are stored in another form are replaced by placeholders until the next `load`.

        Args:
            shard: The shard to which the moments belong.
            chance: The source of random bits for values that are stored in fewer bits.
            keep: Whether to encode the new values. False after an update that failed.
        """
        shard.group.guard.before_write()
        state = self._inner.state.get(shard.param, {})
        self._count(shard, state)
        if not shard.group.plan.moments_external:
            return
        for name, value in state.items():
            if not isinstance(value, Tensor) or value.shape != shard.param.shape:
                continue
            if is_subclass(value) or self._scratch.is_placeholder(value):
                continue
            moment = self._moment(shard, name, value.dtype)
            own = moment.storage.memory[shard.start : shard.stop]
            if moment.kept is not None:
                own = moment.storage.write(shard.start, shard.stop)
                powers = self._scales(moment, shard)
                if keep:
                    bits = random_bits(shard, chance, name)
                    moment.kept.encode(value.reshape(-1), own, powers, bits)
            elif value.data_ptr() != own.data_ptr():
                moment.storage.write(shard.start, shard.stop).copy_(value.reshape(-1))
            state[name] = self._seen(shard, moment, own, value.shape)

    def in_place(self, shard: MasterShard, names: Sequence[str]) -> tuple[Tensor, ...]:
        """Return a shard's stored moments as flat tensors for an update in place.

        Missing moments are created as zeros. Between updates the optimizer sees the same state as
        after `store`.

        Args:
            shard: The shard to which the moments belong.
            names: Names of all its moments.

        Raises:
            UsageError: A program has replaced a moment by a tensor of another dtype or size.
        """
        shard.group.guard.before_write()
        state = self._inner.state[shard.param]
        if not shard.group.plan.moments_external:
            for name in names:
                if state.get(name) is None:
                    state[name] = torch.zeros(
                        shard.param.shape, dtype=torch.float32, device=shard.master.update_device
                    )
                if state[name].dtype != torch.float32 or state[name].numel() != shard.numel:
                    raise _changed_state(shard, name, state[name])
            self._count(shard, state)
            return tuple(state[name].view(-1) for name in names)
        found = []
        for name in names:
            moment = self._moment(shard, name, torch.float32)
            own = moment.storage.write(shard.start, shard.stop)
            found.append(own)
            if state.get(name) is None:
                if not moment.is_fresh or moment.storage.is_offloaded:
                    own.zero_()
                state[name] = self._seen(shard, moment, own, shard.param.shape)
        self._count(shard, state)
        return tuple(found)

    def forget(self) -> None:
        """Discard all moments, so that states created from now on start with zeros."""
        for moment in self._all():
            moment.is_fresh = False

    def _seen(self, shard: MasterShard, moment: Moment, own: Tensor, shape: torch.Size) -> Tensor:
        """Return the tensor that the optimizer's state holds between updates."""
        if moment.is_stored:
            return self._scratch.placeholder(shape, moment.dtype, shard.master.update_device)
        return own.view(shape)

    def refuse_cut(self, shard: MasterShard) -> None:
        """Raise `UsageError` if a shard's moments cannot be cut.

        8-bit moments cannot be cut, because neighbouring elements of a block share an exponent.

        Args:
            shard: The shard that is to be divided.
        """
        if any(id(shard) in moment.powers for moment in self._all()):
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
            into: The new shards, which together cover the old one.
        """
        # A checkpoint that is being written reads the state by this shard
        shard.group.guard.before_write()
        state = self._inner.state.pop(shard.param, None)
        if state is None:
            return
        for part in into:
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
        buffer = self._scratch.take(name, dtype, shard.master.update_device)
        return buffer[shard.at : shard.at + shard.numel]

    def offload(self, shard: MasterShard, chance: StochasticRounding) -> None:
        """Store moments that a checkpoint has loaded, and move them to their offload memory.

        Args:
            shard: The shard to which the moments belong.
            chance: The random bits for stochastic rounding.
        """
        self.store(shard, chance, keep=True)
        for store in [each.release() for each in self.storage_ranges(shard)]:
            if store is not None:
                # Otherwise all moments would be in memory if this disk is slower than the source.
                store.wait()

    def _scales(self, moment: Moment, shard: MasterShard) -> Tensor | None:
        """Return the scales of a shard's 8-bit moment, created if missing; None for others."""
        if moment.kept is None or not moment.kept.has_scales:
            return None
        if id(shard) not in moment.powers:
            blocks = ceil_div(shard.numel, BLOCK)
            device = shard.master.update_device
            moment.powers[id(shard)] = torch.zeros(blocks, dtype=torch.int8, device=device)
        return moment.powers[id(shard)]

    def _moment(self, shard: MasterShard, name: str, dtype: torch.dtype) -> Moment:
        """Return a moment of a shard's group; its storage is reserved if it is missing."""
        group = shard.group
        moments = self._of_group.setdefault(id(group), {})
        if name not in moments:
            plan = group.plan
            assert plan.moments is not None
            kept = storage_format(plan.moments_format, name) if dtype == torch.float32 else None
            stored = kept.dtype if kept is not None else dtype
            what = f"{name} of {group.members[0].name}"
            numel = shard.master.buffer.memory.numel()
            if plan.moments.tier is Tier.DEVICE:
                storage = Storage(
                    torch.zeros(numel, dtype=stored, device=shard.master.update_device)
                )
                group.comm_ctx.tiers.budget.reserve_for(storage, storage.memory.nbytes, what)
            else:
                storage = group.comm_ctx.tiers.reserve(
                    plan.moments.tier, numel, stored, what, is_copied=False
                )
            moments[name] = Moment(storage, dtype, kept)
        return moments[name]

    def _count(self, shard: MasterShard, state: dict[str, Any]) -> None:
        """Count the optimizer's own allocations against the budget of the training device."""
        if shard.group.plan.moments_external:
            state = {
                name: None if getattr(value, "shape", None) == shard.param.shape else value
                for name, value in state.items()
            }
        shard.group.comm_ctx.tiers.budget.count_states(shard, shard.names, state)


def _changed_state(shard: MasterShard, name: str, value: Tensor) -> UsageError:
    """Create the error for a moment that a kernel would read beyond its end."""
    return UsageError(
        f"the optimizer's state '{name}' of {', '.join(shard.names[:3])} is now a tensor of "
        f"{value.numel()} elements of {str(value.dtype).removeprefix('torch.')}.",
        f"Updates read {shard.numel} numbers of float32.",
        "copy new values into the state (copy_) instead of replacing its tensor.",
    )
