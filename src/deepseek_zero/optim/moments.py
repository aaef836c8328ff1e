"""Stores an optimizer's moments in another memory, in fewer bits, or both.

One extent per group and kind of moment. Any torch optimizer will do: every state it makes in its first step with as
many elements as a shard is taken over; counters and states of another shape stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..base.errors import UsageError
from ..precision.compact import BLOCK, StochasticRounding, StorageFormat, storage_format
from ..tiers.tier import Extent, Tier, read_now
from .prefetch import ExtentRange
from .scratch import Scratch
from .shards import MasterShard


@dataclass(eq=False)
class Moment:
    """One kind of moment of one group. kept: its storage format; None: as the optimizer has it.

    powers: the scales of 8-bit blocks, by id of the shard; they stay on the device.
    """

    extent: Extent
    tier: Tier
    dtype: torch.dtype  # that the optimizer works in
    kept: StorageFormat | None
    powers: dict[int, Tensor] = field(default_factory=dict)

    @property
    def is_stored(self) -> bool:
        """Return whether the optimizer sees no values between steps."""
        return self.kept is not None or self.extent.is_offloaded


class Moments:
    """The moments of one optimizer."""

    def __init__(self, inner: Optimizer, scratch: Scratch) -> None:
        self._inner, self._scratch = inner, scratch
        self._found: dict[tuple[int, str], Moment] = {}  # by (id of the group, name)
        self._names: dict[int, list[str]] = {}
        self._counted: set[int] = set()  # id of shards whose moments the optimizer keeps itself

    def extents(self) -> Iterable[Extent]:
        """Return the extents of offloaded moments."""
        return (moment.extent for moment in self._found.values() if moment.tier is not Tier.DEVICE)

    def on_device(self) -> Iterator[Tensor]:
        """Return the moments on the training device."""
        for moment in self._found.values():
            yield from moment.powers.values()
            if moment.tier is Tier.DEVICE:
                yield moment.extent.memory

    def extent_ranges(self, shard: MasterShard) -> Iterator[ExtentRange]:
        """Yield the extent ranges of moments that a shard's update reads and writes."""
        for name in self._names.get(id(shard.group), ()):
            yield ExtentRange(self._found[id(shard.group), name].extent, shard.start, shard.stop)

    def storages(self, shard: MasterShard) -> Iterator[tuple[ExtentRange, Tensor | None]]:
        """Yield the storage of each moment of a shard, and the scales of its blocks."""
        state = self._inner.state.get(shard.param, {})
        for name in self._names.get(id(shard.group), ()):
            if name in state:
                moment = self._found[id(shard.group), name]
                yield ExtentRange(moment.extent, shard.start, shard.stop), moment.powers.get(id(shard))

    def load(self, shard: MasterShard, *, working: bool = True) -> None:
        """Load a shard's moments into the optimizer's state. working: for one tile's update, into buffers that tiles
        share.
        """
        shard.group.guard.before_write()
        if shard.param not in self._inner.state:
            return
        for name in self._names.get(id(shard.group), ()):
            moment, state = self._found[id(shard.group), name], self._inner.state[shard.param]
            if not self._scratch.is_placeholder(state.get(name)):
                continue
            if moment.kept is None:
                values = moment.extent.write(shard.start, shard.stop)
            else:  # a copy: looking at it changes nothing that would have to be stored
                values = moment.extent.read(shard.start, shard.stop)
                shared = self._shared(shard, name, moment.dtype) if working else None
                values = moment.kept.decode(values, moment.powers.get(id(shard)), shared)
            state[name] = values.view(shard.param.shape)

    def read(self, shard: MasterShard, name: str) -> Tensor:
        """Return one moment as fp32 (or as the optimizer has it), whatever is deferred: a view or a copy."""
        value: Tensor = self._inner.state[shard.param][name]
        if not self._scratch.is_placeholder(value):
            return value
        moment = self._found[id(shard.group), name]
        values = read_now(moment.extent, shard.start, shard.stop)
        if moment.kept is None:
            return values
        return moment.kept.decode(values, moment.powers.get(id(shard)), None)

    def store(self, shard: MasterShard, chance: StochasticRounding, *, keep: bool) -> None:
        """Store the optimizer's state of a shard; values that are stored in another form are NaN until the next `load`.

        chance: random bits for values that are stored in fewer bits. keep: False after an update that failed.
        """
        shard.group.guard.before_write()
        state = self._inner.state.get(shard.param, {})
        self._count(shard, state)
        if not shard.group.plan.moments_external:
            return
        for name, value in state.items():
            if not isinstance(value, Tensor) or value.shape != shard.param.shape or self._scratch.is_placeholder(value):
                continue
            moment = self._moment(shard, name, value.dtype)
            own = moment.extent.memory[shard.start : shard.stop]
            if moment.kept is not None:
                own, powers = moment.extent.write(shard.start, shard.stop), self._scales(moment, shard)
                if keep:
                    moment.kept.encode(value.reshape(-1), own, powers, shard.chance(chance, name))
            elif value.data_ptr() != own.data_ptr():
                moment.extent.write(shard.start, shard.stop).copy_(value.reshape(-1))
            hidden = (
                self._scratch.placeholder(value.shape, value.dtype, shard.master.update_device)
                if moment.is_stored
                else own.view(value.shape)
            )
            state[name] = hidden

    def refuse_cut(self, shard: MasterShard) -> None:
        """Raise if a shard's moments cannot be cut: in 8 bits, blocks of neighbours share an exponent."""
        if any(id(shard) in moment.powers for moment in self._found.values()):
            raise UsageError(
                f"the optimizer's state of {', '.join(shard.names[:3])} is kept in 8 bits, and not all of it is to be "
                "updated.",
                "Blocks of moments that reach from one parameter into the next share an exponent; updating one would "
                "change the other's.",
                "freeze whole units (blocks), or set optimizer.moments to bf16 or fp32.",
            )

    def cut(self, shard: MasterShard, into: Sequence[MasterShard]) -> None:
        """Give the optimizer's state of a shard to the ranges it was cut into."""
        shard.group.guard.before_write()  # a checkpoint that is written meanwhile reads it by this shard
        state = self._inner.state.pop(shard.param, None)
        self._counted.discard(id(shard))
        for part in into if state is not None else ():
            low, high = part.start - shard.start, part.stop - shard.start
            own = self._inner.state[part.param] = {}
            for name, value in state.items():
                if not isinstance(value, Tensor):
                    own[name] = value
                elif value.shape != shard.param.shape:
                    own[name] = value.clone()
                elif self._scratch.is_placeholder(value):
                    own[name] = self._scratch.placeholder(part.param.shape, value.dtype, value.device)
                else:
                    own[name] = value.view(-1)[low:high].view(part.param.shape)

    def _shared(self, shard: MasterShard, name: str, dtype: torch.dtype) -> Tensor:
        """Return the buffer, shared by the shards of all tiles, in which a shard's moment is updated."""
        return self._scratch.take(name, dtype, shard.master.update_device)[shard.at : shard.at + shard.numel]

    def offload(self, shard: MasterShard, chance: StochasticRounding) -> None:
        """Store moments that a checkpoint has loaded, and evict them to their tier."""
        self.store(shard, chance, keep=True)
        for left in [stretch.release() for stretch in self.extent_ranges(shard)]:
            if left is not None:
                left.wait()  # or, on a disk that is slower than what is loaded from, all of them would be here

    def _scales(self, moment: Moment, shard: MasterShard) -> Tensor | None:
        if moment.kept is None or not moment.kept.has_scales:
            return None
        if id(shard) not in moment.powers:
            powers = torch.zeros(-(-shard.numel // BLOCK), dtype=torch.int8, device=shard.master.update_device)
            moment.powers[id(shard)] = powers
        return moment.powers[id(shard)]

    def _moment(self, shard: MasterShard, name: str, dtype: torch.dtype) -> Moment:
        key = id(shard.group), name
        if key not in self._found:
            plan, group = shard.group.plan, shard.group
            assert plan.moments is not None
            kept = storage_format(plan.moments_format, name) if dtype == torch.float32 else None
            stored, what = kept.dtype if kept is not None else dtype, f"{name} of {group.members[0].name}"
            numel = shard.master.buffer.memory.numel()
            if plan.moments.tier is Tier.DEVICE:
                extent = Extent(torch.zeros(numel, dtype=stored, device=shard.master.update_device))
                self._scratch.budget.reserve_for(extent, extent.memory.nbytes, what)
            else:
                extent = group.comm_ctx.tiers.reserve(plan.moments.tier, numel, stored, what)
            self._found[key] = Moment(extent, plan.moments.tier, dtype, kept)
            self._names.setdefault(id(group), []).append(name)
        return self._found[key]

    def _count(self, shard: MasterShard, state: dict[str, Any]) -> None:
        """Count what the optimizer allocates itself against the training device's budget."""
        if state and id(shard) not in self._counted:
            self._counted.add(id(shard))
            rest = shard.group.plan.moments_external
            tensors = [value for value in state.values() if isinstance(value, Tensor)]
            nbytes = sum(value.nbytes for value in tensors if not rest or value.shape != shard.param.shape)
            self._scratch.budget.reserve_for(shard, nbytes, f"the optimizer's state of {shard.names[0]}")
