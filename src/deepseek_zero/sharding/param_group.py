"""The parameters of one unit that share a plan, and their flat buffers: weight, master and
gradient.

`ParamGroup` owns the weight's storage and its movements; `MasterWeight` the values that the
optimizer updates, wherever
they lie: a buffer of their own, the weight's storage (fp32 training), or the live bf16 weight and a
buffer of remainders (precision/policy.py).  `Gradient` collects from autograd, reduces over the
ranks, and exposes `.grad`; `DelayedGradient` is the reduced gradient of an earlier step, for
delayed updates: two buffers are swapped, so that one is updated from while the other collects.
None of them knows hooks or order (runtime.py, executor.py), nor optimizers (optim/sharded.py),
which work on the slices they show.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from ..base.device import CPU, double_norms, without_torch_function
from ..base.errors import AtRestError, UsageError
from ..base.memory import private_pages, return_pages, trim_heap
from ..comm.collectives import DONE, Comm, Pending, scatter
from ..kernels.sums import sum_of_squares as squares_on_cpu
from ..planner.layout import FlatLayout, Slot
from ..planner.spec import P, Placement, PlanSettings, R, S, ShardPlan, Spec
from ..planner.units import GroupPlan
from ..precision.compact import round_to_bf16
from ..precision.feedback import Errors
from ..precision.policy import LOW_PRECISION, cast_master, join, split
from ..tiers.tier import CopyEngine, Extent, StagedTile, Tier
from .buffer import (
    CommContext,
    FlatBuffer,
    OffloadedGuard,
    PendingUpdate,
    StateGuard,
    all_gather,
    all_reduce,
    has_pages_to_return,
    move,
    move_differences,
)
from .init import take_values
from .model_changes import error_of_lost_values
from .momentum import SIGNS, Momentum
from .secondary import SecondaryWeight
from .sharded_gradient import Part, ShardedGradient, own_part_of, sharded_gradient
from .sharded_parameter import ShardedParameter, clear_owner, owner_of, set_owner

_NORM_TILE_NUMEL = 1 << 24  # on an accelerator
_TILE_NUMEL = 1 << 20  # elements that change places at once where buffers cannot
_WRITE_NUMEL = 1 << 20  # values that are copied at once before they are split


@dataclass(eq=False)
class ParamInfo:
    """One parameter of a group. param_class: the class it had before wrapping and has while
    unsharded.
    """

    param: nn.Parameter
    slot: Slot
    param_class: type[nn.Parameter]
    placeholder: Tensor = field(init=False)  # its data while sharded
    # `requires_grad` was off when all ranks looked last (regroup.py)
    is_frozen: bool = field(init=False)

    def __post_init__(self) -> None:
        with without_torch_function():
            self.is_frozen = not self.param.requires_grad

    @property
    def name(self) -> str:
        return self.slot.name

    def unshard(self, data: Tensor) -> None:
        """Let the parameter view `data`, in the class it had before wrapping."""
        self.param.__class__ = self.param_class  # written out: every unit of every step comes here
        self.param.data = data

    def reshard(self) -> None:
        """Let the parameter be a sharded one, which holds a placeholder of its shape."""
        self.param.data = self.placeholder
        self.param.__class__ = ShardedParameter


class ParamGroup:
    """Flat buffers of parameters with one plan.  Building one is collective: rank 0's values
    win.
    """

    def __init__(
        self,
        members: Sequence[ParamInfo],
        planned: GroupPlan,
        comm_ctx: CommContext,
    ) -> None:
        self.members = list(members)
        self.planned = planned
        self.comm_ctx = comm_ctx
        plan = planned.plan
        self.index = {id(member.param): number for number, member in enumerate(self.members)}
        self.gradient = Gradient(self)
        self.weight: FlatBuffer
        self.master: MasterWeight | None = None
        self.secondary: SecondaryWeight | None = None
        self.momentum: Momentum | None = None  # that ranks exchange instead of reducing gradients
        self._reduced_plan = (
            plan  # while they do, the row of the plan by which gradients are reduced
        )
        self.unsharded: FlatBuffer | None = None
        self.is_idle = False  # every member was frozen after it was wrapped: nothing to reduce
        self.weight_is_written = False  # by a load, where it is a state beside its master
        # Members that no optimizer updates: the norm leaves them out
        self.not_updated: frozenset[int] = frozenset()
        self.is_pinned = (
            False  # by a GatheredParameters block: whole until it ends, whatever runs inside it
        )
        # weak: set by the runtime that drives this group
        self.runtime: Callable[[], Any] = lambda: None
        # weak: set by the optimizer that updates this group
        self.optimizer: Callable[[], Any] = lambda: None
        self.guard = StateGuard()  # of weight, master, moments and the gradient that waits
        nothing = float("nan") if plan.weight.dtype.is_floating_point else 0
        self.placeholder = torch.full(
            (), nothing, dtype=plan.weight.dtype, device=comm_ctx.pool.device
        )
        self._views: list[Tensor] = []  # of members in symmetric memory, which stay where they are
        self.build()

    # -- building

    @property
    def plan(self) -> ShardPlan:
        """Return the specs of the group's states."""
        return self.planned.plan

    @property
    def layout(self) -> FlatLayout:
        """Return the layout of the group's parameters."""
        return self.planned.layout

    @property
    def is_sharded(self) -> bool:
        """Return whether the weight must be gathered before use."""
        return self.plan.weight.placement is S

    @property
    def trainable(self) -> bool:
        return self.plan.grad is not None

    def follow_optimizer(self, updated: Collection[int]) -> None:
        """Restrict the gradient norm to members with these parameter ids. Local; every rank must
        call it.
        """
        numbers = frozenset(
            number for number, member in enumerate(self.members) if id(member.param) not in updated
        )
        if numbers != self.not_updated:
            self.not_updated = numbers
            self.gradient.known_squares = None

    def updated_ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the elements [start, stop) of the layout that the optimizer updates, neighbours
        joined.
        """
        slots = [
            member.slot
            for number, member in enumerate(self.members)
            if number not in self.not_updated
        ]
        for number, slot in enumerate(slots):
            if number == 0 or slots[number - 1].stop != slot.start:
                start = slot.start
            if number + 1 == len(slots) or slots[number + 1].start != slot.stop:
                yield start, slot.stop

    @property
    def has_frozen(self) -> bool:
        """Return whether a member is frozen now (`requires_grad_(False)`)."""
        with without_torch_function():
            return not all(member.param.requires_grad for member in self.members)

    def build(self) -> None:
        """Lay the members out as planned, take rank 0's values, and shard every parameter.
        Collective.
        """
        names = self.planned.names
        self.members = [
            replace(member, slot=slot)
            for member, slot in zip(self.members, self.layout.slots, strict=True)
        ]
        set_placeholders(self.members, self.placeholder)
        comm = self.comm_ctx.comm
        built = (self.plan.moments or self.plan.weight).dtype
        full = FlatBuffer(
            self.layout, replace(self.plan.weight.gathered(), dtype=built), self._packed(built)
        )
        broadcast_from_first(
            full, comm, f"values of {names[0]}" if names else "values", only_own=self.is_sharded
        )
        self._take_from_first_replica(full)
        self._allocate_weight(names[0])
        self._views = []
        whole = self.plan.weight.placement is R
        with self.weight.writing(0, self.weight.numel) as own:
            cast_master(full.memory if whole else full.shard(comm.rank), own)
        self.master = build_master(self.weight, self.plan, self.comm_ctx)
        if self.master is not None and not self.plan.master_is_weight:
            values = full.memory if self.master.placement is R else full.shard(comm.rank)
            self.master.write_consuming(0, values.numel(), values)
            del values  # the pool never lends a buffer that is still viewed
        self.comm_ctx.pool.give(full.memory)
        for extent in (extents := self.offloaded_extents()):
            extent.store(0, extent.memory.numel()).wait()
        if extents:
            trim_heap()  # of the values it was built from
        for member in self.members:
            set_owner(member.param, self)
            if self.is_sharded:
                member.reshard()
            else:
                member.unshard(self.weight.view(member.slot))

    def _allocate_weight(self, what: str) -> None:
        """Allocate the weight, and its second copy if it has one.  Collective."""
        what = f"the weights of {what}"
        has_secondary = self.plan.secondary is not None
        is_copied = has_secondary or self.plan.weight.wire is not None
        self.weight = FlatBuffer.allocate_weight(
            self.layout, self.plan.weight, self.comm_ctx, what, is_copied=is_copied
        )
        self.weight.guard = self.guard
        self.secondary = (
            SecondaryWeight(
                self.planned, self.comm_ctx, f"the second copy (zero_hpz_partition_size) of {what}"
            )
            if has_secondary
            else None
        )

    def _take_from_first_replica(self, full: FlatBuffer) -> None:
        """Let every replica have the values of the first: its slice where the weight is cut, else
        all.  Collective.
        """
        replicas = self.comm_ctx.replicas
        if replicas is not None and self.layout.padded_numel:
            values = full.shard(self.comm_ctx.comm.rank) if self.is_sharded else full.memory
            scatter(
                replicas.comm,
                [values] * replicas.comm.size,
                values,
                f"replicas of {self.members[0].name}",
            )

    def relayout(self, granularity: str) -> None:
        """Cut the group anew, keeping the bits of weight and master. Collective; gradients are
        dropped.
        """
        source = self.master.values() if self.master is not None else self.weight
        full = FlatBuffer(self.layout, source.spec.gathered(), self._whole(source))
        for member in self.members:
            member.unshard(full.view(member.slot))
        self.planned = self.planned.relayout(granularity)
        self.gradient = Gradient(self)
        self.build()

    def restore_params(self) -> None:
        """Make every member whole and plain again, with the master's values (when an engine is
        destroyed). Collective.
        """
        source = self.master.values() if self.master is not None else self.weight
        full = FlatBuffer(self.layout, source.spec.gathered(), self._whole(source))
        for member in self.members:
            member.unshard(full.view(member.slot).clone())
            clear_owner(member.param)

    def _whole(self, source: FlatBuffer) -> Tensor:
        storage = torch.empty(
            self.layout.padded_numel, dtype=source.spec.dtype, device=self.comm_ctx.pool.device
        )
        full = FlatBuffer(self.layout, source.spec.gathered(), storage)
        move(source, full, self.comm_ctx, self.members[0].name).wait()
        return storage

    def promote_to_fp32(self, what: str) -> None:
        """Store weight and gradient in fp32 from now on, cut from the master. Collective; gradients
        are dropped.
        """
        if self.master is None or self.plan.weight.dtype == torch.float32:
            return
        values = self.master.values()
        self.planned = self.planned.promoted()
        self._store_anew(values, what)

    def demote(self, what: str) -> None:
        """Store weight and gradient again as before `promote_to_fp32`, cut from the master.
        Collective; gradients are dropped.
        """
        if self.master is None or self.planned.low is None:
            return
        values = self.master.values()
        self.planned = self.planned.demoted()
        self._store_anew(values, what)

    def _store_anew(self, values: FlatBuffer, what: str) -> None:
        """Store a weight of these master's values as it is planned now. Collective."""
        assert self.master is not None
        self._allocate_weight(what)
        if self.plan.master_is_split:
            self.master = build_master(self.weight, self.plan, self.comm_ctx)
            assert self.master is not None
            self.master.write_consuming(0, values.memory.numel(), values.memory)
        else:
            values.guard = self.guard
            beneath = (
                None
                if self.plan.sends_differences
                else weight_shard(self.weight, self.plan, self.master.rank)
            )
            self.master = replace(self.master, buffer=values, weight=beneath, is_split=False)
            self.master.copy_to_weight(0, values.memory.numel())
        self.placeholder = self.placeholder.to(self.plan.weight.dtype)
        self._views = []
        set_placeholders(self.members, self.placeholder)
        self.gradient = Gradient(self)
        for member in self.members:
            with without_torch_function():
                if self.is_sharded:
                    member.reshard()
                else:
                    member.unshard(self.weight.view(member.slot))
        self.refresh(what).wait()

    def _packed(self, dtype: torch.dtype) -> Tensor:
        """Return this rank's own values, flat; each original is dropped as it is copied, so that
        two never exist side by side.
        """
        flat = self.comm_ctx.pool.take(self.layout.padded_numel, dtype)
        for low, high in self.layout.gaps:
            flat[low:high].zero_()
        for member in self.members:
            held_by = owner_of(member.param)
            if isinstance(held_by, ParamGroup) and held_by is not self:
                held_by.restore_params()
            values, member.param_class = take_values(member.param)
            flat[member.slot.start : member.slot.stop].copy_(values)
            del values
            # The original goes as soon as it is copied, so that a unit never stands here twice.
            member.param.__class__ = member.param_class
            member.param.data = member.placeholder
        return flat

    def offloaded_extents(self) -> list[Extent]:
        """Return the extents of weight, master and gradients that are offloaded."""
        buffers = [buffer for buffer in (self.weight, self.gradient.buffer) if buffer is not None]
        found = [buffer.extent for buffer in buffers if buffer.extent is not None]
        found += self.gradient.delayed.extents
        return found + (self.master.extents() if self.master is not None else [])

    def follow_frozen(self) -> None:
        """Note whether there is still a member to train, after some were frozen or unfrozen on all
        ranks. Local.

        What codes left out is forgotten: of what is frozen now nothing more may come.
        """
        self.gradient.forget_errors()
        self.is_idle = self.trainable and all(member.is_frozen for member in self.members)

    def set_grad_dtype(self, dtype: torch.dtype) -> None:
        """Keep gradients in another dtype from now on, between two steps; every rank does so.
        Local.
        """
        assert self.plan.grad is not None
        if dtype != self.plan.grad.dtype:
            self.planned = self.planned.with_grad_dtype(dtype)
            self.gradient.drop_buffers()

    def send_as(self, settings: PlanSettings) -> None:
        """Send weights and gradients as other settings have it from now on, between two steps;
        every rank does so. Local.
        """
        planned = self.planned.sent_as(settings)
        if planned != self.planned:
            assert self.weight.symmetric is None, (
                "what lies in pages that others read in place does not travel"
            )
            self.planned = planned
            self.weight.spec = planned.plan.weight
            self.gradient.follow_wires()

    def exchange_momenta(self, beta1: float, own: Tensor, saved: Mapping[str, Tensor]) -> None:
        """Exchange momenta from now on instead of reducing gradients, between two steps.
        Collective within "reduce".

        own, saved: as `Momentum` takes them.
        """
        if self.momentum is None:
            self._reduced_plan = self.plan
            self.gradient.drop_buffers()
        self.planned = replace(self.planned, plan=self._reduced_plan.exchanging(SIGNS))
        self.momentum = Momentum(
            self.planned, self.comm_ctx, beta1, own, saved, self.members[0].name
        )

    def reduce_gradients(self) -> None:
        """Reduce gradients again, between two steps; every rank does so.  Local."""
        if self.momentum is not None:
            self.momentum = None
            self.planned = replace(self.planned, plan=self._reduced_plan)
            self.gradient.drop_buffers()

    def own_states(self) -> dict[str, Tensor]:
        """Return the states that are each rank's own, and belong to no element of the model, by
        name.
        """
        errors = self.gradient.errors
        kept = {} if errors is None else {"gradients": errors.memory}
        return kept if self.momentum is None else {**kept, **self.momentum.states()}

    def set_pending(self, update: PendingUpdate | None) -> None:
        """Flush this update before any read of the group's states; None: nothing is pending."""
        self.guard.pending = self.gradient.guard.pending = update

    # -- weights

    def gather(self, what: str) -> Pending:
        """Start to all-gather the weight: (numel,) in the weight's dtype; `point_to_unsharded`
        shows it after the wait.

        A pending update runs first; the executor comes here for others only in their turn, so that
        states travel meanwhile.

        Collective within the gather lane. The wait raises `PeerError` if another rank failed,
        `StorageError` if a disk did.
        """
        if not self.is_sharded or self.unsharded is not None or self.is_pinned:
            return DONE
        if self.guard.pending is not None:
            if self.weight.extent is not None:
                # What the update writes stays in memory until it has been gathered
                self.weight.extent.pin()
            self.guard.pending.flush_group(self)
        self.unsharded = self.weight.lend_whole(self.comm_ctx.pool, self.plan.weight.wire)
        if self.secondary is not None:
            return self.secondary.gather(self.weight, self.unsharded, self.comm_ctx, what)
        return move(self.weight, self.unsharded, self.comm_ctx, what)

    def weights_changed(self) -> None:
        """Let the next gather be of the weights as they are now, and not of a copy.  Local; every
        rank does so, between the same two gathers.
        """
        if self.secondary is not None:
            self.secondary.is_current = False

    def point_to_unsharded(self) -> None:
        """Point every parameter at the gathered buffer."""
        if self.unsharded is not None:
            views = self._views or [self.unsharded.view(member.slot) for member in self.members]
            if self.weight.symmetric is not None:
                self._views = views
            for member, view in zip(self.members, views, strict=True):
                member.unshard(view)

    def reshard(self) -> None:
        """Shard every parameter and return the gathered buffer to the pool. Local.

        Raises: UsageError: The program replaced the memory of a parameter while it was gathered,
            and changed its values.
        """
        full = self.unsharded
        if full is None:
            return
        with without_torch_function():
            error = None
            if not self.is_pinned:
                error = error_of_lost_values(self.members, full)
            for member in self.members:
                member.reshard()
        self.unsharded = None
        self.weight.return_whole(full, self.comm_ctx.pool)
        if self.weight.is_offloaded:
            trim_heap()  # of its gradients
        if error is not None:
            raise error

    def refresh(self, what: str, *, is_update: bool = False) -> Pending:
        """Start to bring the weight to its placement after the master changed: an all-gather at
        stages 1 and 2. Collective.

        is_update: by a step, after which differences alone are sent where the plan says so;
        otherwise weights become what is written of them, or their masters' casts.
        """
        plan = self.plan
        if self.master is None or plan.weight.placement is not R or self.master.placement is not S:
            return DONE
        if plan.sends_differences:
            self.guard.before_write()
            if is_update:
                return move_differences(self.master.buffer, self.weight, self.comm_ctx, what)
            if not self.weight_is_written:
                cast_master(
                    self.master.read(0, self.layout.slice_numel).to(self.weight.memory.device),
                    self._own_weight,
                )
            self.weight_is_written = False
        own = FlatBuffer(self.layout, replace(plan.weight, placement=S), self._own_weight)
        return move(own, self.weight, self.comm_ctx, what)

    @property
    def _own_weight(self) -> Tensor:
        """Return this rank's slice of the weight, flat."""
        return self.weight.shard(self.comm_ctx.comm.rank)

    def write_own_weight(self, slot: Slot, values: Tensor | None, low: int = 0) -> None:
        """Write values of this rank's part of a parameter, from its element `low` on, into a weight
        that follows its master by differences; None: the master's casts.  The next `refresh`
        spreads them.  Local.
        """
        assert self.master is not None
        view = self.weight.owned_view(slot, self.comm_ctx.comm.rank)
        (place, end) = self.master.owned_range(slot)
        self.weight_is_written = True
        if values is None:
            cast_master(self.master.read(place, end).to(view.device), view)
        else:
            view[low : low + values.numel()].copy_(values)

    def set_full_values(self, full: Tensor) -> None:
        """Write new whole values (flat, weight's dtype) into this rank's part of weight and master;
        unchanged elements of the master keep their bits.
        """
        self.guard.before_write()
        self.weights_changed()
        rank = self.comm_ctx.comm.rank
        low, high = self.layout.bounds(rank)
        old = self.weight.shard(rank)
        mine = full[low:high].to(old.device)
        if self.master is not None and not self.plan.master_is_weight:
            whole = self.master.placement is R
            before = self.weight.memory if whole else old
            after = full if whole else mine
            self.master.take_changed(before != after, after)
        if self.is_sharded:
            with self.weight.writing(0, mine.numel()) as weight:
                weight.copy_(mine)
        elif full.data_ptr() != self.weight.memory.data_ptr():
            self.weight.write(0, full.numel()).copy_(full)

    def refuse_offloaded_weight(self) -> None:
        """Raise `UsageError` if `engine.offload_states` has moved the weight away."""
        if isinstance(self.weight.guard, OffloadedGuard):
            self.weight.guard.before_read()

    # -- what handles ask (sharding/sharded_parameter.py, Owner)

    def fetch_for(self, param: nn.Parameter) -> bool:
        self.refuse_offloaded_weight()
        runtime = self.runtime()
        return runtime is not None and bool(runtime.fetch(self))

    def name_of(self, param: nn.Parameter) -> str:
        return self.members[self.index[id(param)]].name

    def is_in_engine(self) -> bool:
        runtime = self.runtime()
        return runtime is not None and not runtime.is_destroyed

    def write_param(self, param: nn.Parameter, value: Tensor) -> None:
        """Write this rank's part of a whole new value into weight and master. Every rank must do
        it.
        """
        if self.weight.symmetric is not None:  # others may still be reading the old one
            self.comm_ctx.comm.barrier(f"writing {self.name_of(param)}")
        self.weights_changed()
        slot = self.members[self.index[id(param)]].slot
        rank = self.comm_ctx.comm.rank
        flat = value.detach().to(self.comm_ctx.pool.device).expand(slot.shape).reshape(-1)
        start, stop, low = self.weight.local_range(slot, rank)
        with self.weight.writing(low, low + stop - start) as weight:
            cast_master(
                flat[start:stop].float() if flat.is_floating_point() else flat[start:stop], weight
            )
        if self.master is not None and not self.plan.master_is_weight:
            start, stop, place = self.master.local_range(slot)
            self.master.write(place, place + stop - start, flat[start:stop])

    # -- what handles of gradients ask (sharding/sharded_gradient.py, GradOwner)

    def grad_part(self, param: nn.Parameter) -> Part:
        return self.gradient.exposed_shard(self.index[id(param)])

    def weight_part(self, param: nn.Parameter, part: Part) -> Tensor:
        slot = self.members[self.index[id(param)]].slot
        start, _, view = self.weight.local_part(slot, self.comm_ctx.comm.rank)
        return view[part.start - start : part.start - start + part.values.numel()]

    def grad_changed(self, param: nn.Parameter, *, alike: bool) -> None:
        self.gradient.edited(self.index[id(param)], alike=alike)

    def norm_over_ranks(self, param: nn.Parameter, part: Part, order: float) -> Tensor:
        return self.gradient.norm_of(self.index[id(param)], part, order)

    def whole_of(self, param: nn.Parameter, part: Part) -> Tensor:
        slot = self.members[self.index[id(param)]].slot
        full = torch.empty(slot.numel, dtype=part.values.dtype, device=self.comm_ctx.pool.device)
        full[part.start : part.start + part.values.numel()].copy_(part.values)
        if not part.is_whole:
            complete(full, self, slot, f"gradient of {slot.name}")
        return full.view(slot.shape)


@dataclass(eq=False)
class MasterWeight:
    """The master of one group. buffer: fp32 values, or int16 remainders if the master `is_split`
    and `weight` holds the upper halves.

    weight: this rank's part of the live weight, None if the master is that weight, or if that
    follows it by
    differences. is_exposed: programs see it between steps and may change it.
    """

    buffer: FlatBuffer
    rank: int
    dtype: torch.dtype  # of the values
    weight: FlatBuffer | None = None
    is_split: bool = False
    is_exposed: bool = True
    update_device: torch.device = CPU  # where it is updated
    copy_engine: CopyEngine = field(default_factory=CopyEngine)
    # Of what the host updates and the device has
    staged: StagedTile | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.update_device == CPU:
            self.staged = self.copy_engine.staged_tile(
                self._on_device.memory, is_read=self.weight is None or self.is_split
            )

    @property
    def _on_device(self) -> FlatBuffer:
        """Return the buffer that computing needs: the weight."""
        return self.buffer if self.weight is None else self.weight

    @property
    def is_rounded(self) -> bool:
        """Return whether the weight is the only copy, in fewer bits than the values have."""
        return not self.is_split and self.buffer.spec.dtype != self.dtype

    @property
    def is_copied_for_update(self) -> bool:
        """Return whether the values do not lie in one place on the update's device between
        steps.
        """
        return not self.is_updated_in_place or self.buffer.is_offloaded

    @property
    def is_updated_in_place(self) -> bool:
        """Return whether an optimizer works on the values themselves, not on a copy."""
        return (
            not self.is_split
            and not self.is_rounded
            and self.buffer.memory.device == self.update_device
        )

    @property
    def placement(self) -> Placement:
        return self.buffer.spec.placement

    # -- where a parameter lies

    def local_range(self, slot: Slot) -> tuple[int, int, int]:
        """Return (start, stop, place): the range of a parameter that is held here, and the place of
        its first element.
        """
        if self.placement is R:
            return 0, slot.numel, slot.start
        place, end = self.owned_range(slot)
        start = place + self.buffer.layout.bounds(self.rank)[0] - slot.start
        return start, start + end - place, place

    def owned_range(self, slot: Slot) -> tuple[int, int]:
        """Return the range [place, end) of a parameter's elements that this rank owns; every
        element has one owner.
        """
        layout = self.buffer.layout
        start, stop = layout.owned(slot, self.rank)
        low = 0 if self.placement is R else layout.bounds(self.rank)[0]
        return start - low, max(start, stop) - low

    # -- values

    def in_place_view(self, place: int, end: int) -> Tensor | None:
        """Return a flat view of the values, to be written; None if they lie in two halves, or are
        updated elsewhere.
        """
        return self.buffer.write(place, end) if self.is_updated_in_place else None

    def read(
        self, place: int, end: int, out: Tensor | None = None, scratch: Tensor | None = None
    ) -> Tensor:
        """Return elements [place, end), flat, in the master's dtype: a view if they lie together, a
        copy (in `out`) if they are joined.
        """
        lower = self._at_update_device(self.buffer, place, end)
        if not self.is_split or self.weight is None:
            return lower.to(self.dtype) if out is None else out.copy_(lower)
        if out is None:
            out = torch.empty(end - place, dtype=self.dtype, device=lower.device)
        upper = self._at_update_device(self.weight, place, end).to(lower.device)
        join(upper, lower, out, scratch, is_exposed=self.is_exposed)
        return out

    def read_now(self, place: int, end: int) -> Tensor:
        """Return the values as `read` does, whatever update is pending: a view or a copy, to be
        read only.
        """
        lower = self.buffer.read_now(place, end)
        if not self.is_split or self.weight is None:
            return lower.to(self.dtype)
        out = torch.empty(end - place, dtype=self.dtype, device=lower.device)
        join(
            self.weight.read_now(place, end).to(lower.device),
            lower,
            out,
            is_exposed=self.is_exposed,
        )
        return out

    def write(self, place: int, end: int, values: Tensor) -> None:
        """Write new values, flat, into master and this rank's part of the weight. Local."""
        if not self.is_split:
            cast_master(values, self.buffer.write(place, end))
            self.copy_to_weight(place, end)
            return
        for start in range(place, end, _WRITE_NUMEL):
            part = values[start - place : start - place + _WRITE_NUMEL]
            self.write_consuming(start, start + part.numel(), part.to(self.dtype, copy=True))

    def write_consuming(
        self, place: int, end: int, values: Tensor, chance: Tensor | None = None
    ) -> None:
        """Write as `write`; `values` (in the master's dtype) are scratch afterwards. chance: random
        bits, if it `is_rounded`.
        """
        self.buffer.guard.before_write()
        lower = self._at_update_device(self.buffer, place, end)
        if chance is not None:
            round_to_bf16(values, lower, chance)
            return
        if not self.is_split or self.weight is None:
            cast_master(values, lower)
            return
        upper = self._at_update_device(self.weight, place, end)
        near = staging_like(upper, values), staging_like(lower, values)
        split(values, *near)
        for half, own in zip(near, (upper, lower), strict=True):
            if half is not own:
                own.copy_(half)

    def for_kernel(self, place: int, end: int) -> tuple[Tensor, Tensor | None]:
        """Return the main weight, and the other tensor of it that an update writes, flat, on the
        update's device.

        A split main weight is its bf16 weight; the other tensor has the remainders. Else the main
        weight is fp32, and the other tensor is the weight in its own dtype, or None if
        `copy_to_weight` has to write it: to another device, or in fp32.
        """
        self.buffer.guard.before_write()
        own = self._at_update_device(self.buffer, place, end)
        if self.weight is None:
            return own, None
        other = self._at_update_device(self.weight, place, end)
        if self.is_split:
            return other, own
        is_published = other.device == own.device and other.dtype in LOW_PRECISION
        return own, other if is_published else None

    def copy_to_weight(self, place: int, end: int) -> None:
        """Cast the values into this rank's part of the weight, unless the weight is the master, or
        half of it.
        """
        if self.weight is not None and not self.is_split:
            self.buffer.guard.before_write()
            values = self.buffer.elements(place, end)
            upper = self._at_update_device(self.weight, place, end)
            near = staging_like(upper, values)
            cast_master(values, near)
            if near is not upper:
                upper.copy_(near)

    def _at_update_device(self, buffer: FlatBuffer, place: int, end: int) -> Tensor:
        """Return these elements on the update's device: the staged copy of an update under way,
        else the buffer's.
        """
        came = (
            self.staged.view(place, end)
            if self.staged is not None and buffer is self._on_device
            else None
        )
        return buffer.elements(place, end) if came is None else came

    def extents(self) -> list[Extent]:
        """Return the extents that hold offloaded values."""
        found = [self.buffer.extent, self.weight.extent if self.weight is not None else None]
        return [extent for extent in found if extent is not None]

    def take_changed(self, changed: Tensor, weight: Tensor) -> None:
        """Take a new weight's values where a mask is true; the caller changes the weight itself."""
        storage = self.buffer.write(0, self.buffer.memory.numel())
        places = changed.to(storage.device)
        storage[places] = 0 if self.is_split else weight[changed].to(storage)

    def values(self) -> FlatBuffer:
        """Return all values of this rank, flat: the buffer itself, or a copy."""
        if not self.is_split and not self.is_rounded:
            return self.buffer
        spec = replace(self.buffer.spec, dtype=self.dtype)
        return FlatBuffer(self.buffer.layout, spec, self.read(0, self.buffer.memory.numel()))


class GradState(Enum):
    """The states of a group's gradient within one step.

    Where the plan shards gradients, a summand that comes beside a sum (of the next micro-batch, or
    a late one) leaves
    the state as it is: the sum stays, and the summand is added when it is reduced.  Where it
    replicates them, the summand takes the sum's memory, and an earlier sum is set aside.
    """

    EMPTY = "empty"  # no gradient has come since the last step
    COLLECTING = "collecting"  # this rank's summand is under way, and there is no sum
    REDUCING = "reducing"  # the sum is under way; the buffer belongs to the transport
    PARTIAL = (
        "partially reduced"  # the sum of one replica's ranks, of which every replica has its own
    )
    REDUCED = "reduced"  # the sum of all ranks
    DEFERRED = "deferred"  # a step is over, and its update, still to come, needs the sum


GRAD_MOVES = {
    (GradState.EMPTY, GradState.COLLECTING),
    (
        GradState.EMPTY,
        GradState.REDUCED,
    ),  # zeros that a program changes, or the delayed gradient of a step before
    (GradState.EMPTY, GradState.DEFERRED),  # the update of parameters that are all absent
    (GradState.COLLECTING, GradState.REDUCING),
    (GradState.COLLECTING, GradState.REDUCED),  # such zeros, made beside the summand
    (GradState.COLLECTING, GradState.EMPTY),
    (GradState.REDUCING, GradState.PARTIAL),
    (GradState.REDUCING, GradState.REDUCED),
    (GradState.REDUCING, GradState.EMPTY),  # the sum failed
    (GradState.PARTIAL, GradState.COLLECTING),
    (GradState.PARTIAL, GradState.REDUCING),  # over the replicas, or to add a summand
    (GradState.PARTIAL, GradState.EMPTY),
    (GradState.REDUCED, GradState.COLLECTING),
    (GradState.REDUCED, GradState.REDUCING),
    (GradState.REDUCED, GradState.DEFERRED),
    (GradState.REDUCED, GradState.EMPTY),
    (GradState.DEFERRED, GradState.EMPTY),
}
# Of the step under way
_SUMMED = frozenset((GradState.REDUCING, GradState.PARTIAL, GradState.REDUCED))


class Gradient:
    """Collects, reduces and exposes the gradient of one trainable group: (numel,) while partial, a
    slice when reduced.

    buffer: of the sum, None before the first. absent: indices of members whose `.grad` is None,
    which are not updated;
    None: no backward has ended. is_edited: the program has set values that may differ between
    ranks. known_squares: of this rank's slice; None where it may have changed. delayed: the
    gradient of an earlier step. errors: what codes have left out of this rank's summands, None
    before the first.
    """

    def __init__(self, group: ParamGroup) -> None:
        self.group = group
        self.predivide = group.planned.predivide
        self.buffer: FlatBuffer | None = None
        # A checkpoint takes no gradient but the one that waits: no reader
        self.guard = StateGuard()
        self._state = GradState.EMPTY
        self._clear()
        self.delayed = DelayedGradient(self)
        self.errors: Errors | None = None
        self._staged: StagedTile | None = None
        self._sharded_grads: list[ShardedGradient] = []
        self._is_exposed = False

    def _clear(self) -> None:
        """Forget what has come since the last step."""
        self.absent: set[int] | None = None
        self.is_edited = False
        self.known_squares: float | None = None
        self._partial: FlatBuffer | None = None  # this rank's summand while one is under way
        self._arrived: set[int] = set()  # indices of members that are in it
        self._reduction: Pending = DONE  # into `buffer`, maybe still under way
        self._carried_sum: Tensor | None = (
            None  # an earlier sum of the same step, to be added to the next
        )
        self._carried_state = GradState.EMPTY  # that it had

    @property
    def state(self) -> GradState:
        return self._state

    def _enter(self, state: GradState) -> None:
        if (self._state, state) not in GRAD_MOVES:
            name = self.group.members[0].name
            raise AssertionError(
                f"the gradient of '{name}' cannot go from {self._state.value} to {state.value}"
            )
        self._state = state

    @property
    def is_whole(self) -> bool:
        """Return whether every rank holds the whole reduced gradient (stage 0)."""
        master = self.group.plan.master
        return master is not None and master.placement is R

    def collect(self, param: nn.Parameter) -> None:
        """Move a finished `.grad` into the flat partial gradient, added to earlier ones. Local."""
        number = self.group.index[id(param)]
        with without_torch_function():
            grad = param.grad
            param.grad = None
        if grad is None:
            return
        if grad.is_sparse:
            grad = grad.to_dense()
        into = self._open().view(self.group.members[number].slot)
        if number in self._arrived:
            into.add_(grad)
        else:
            into.copy_(grad)
            self._arrived.add(number)

    def _open(self) -> FlatBuffer:
        """Return the partial gradient under way; make one if there is none."""
        if self._partial is not None:
            return self._partial
        self._flush_deferred()
        group = self.group
        assert group.plan.grad is not None
        if group.plan.grad.placement is P:
            buffer = self.ensure_buffer()
            # A late gradient: the sum under way lands where this one is to be collected
            self._reduction.wait()
            group.comm_ctx.world.wait_until_read(buffer.memory)
            # A second backward nobody announced: keep the first one's sum aside
            if self._state in _SUMMED:
                self._carry(self._own(buffer))
            self._partial = buffer
        else:
            spec = group.planned.summands
            storage = group.comm_ctx.pool.take(group.layout.padded_numel, spec.dtype)
            self._partial = FlatBuffer(group.layout, spec, storage)
        if self._state is GradState.EMPTY:
            self._enter(GradState.COLLECTING)
        return self._partial

    def _flush_deferred(self) -> None:
        """Run the deferred update that needs the sum, whose memory is about to be taken."""
        if self._state is GradState.DEFERRED and self.guard.pending is not None:
            self.guard.pending.flush_group(self.group)

    def _own(self, buffer: FlatBuffer) -> Tensor:
        return buffer.memory if self.is_whole else buffer.shard(self.group.comm_ctx.comm.rank)

    def reduce(self, what: str) -> Pending:
        """Start to sum the ranks' partial gradients, in fp32 in rank order; missing members and the
        padding count as zeros.

        Collective within the reduce lane: a rank that skipped the unit calls it too.
        """
        group = self.group
        assert group.plan.grad is not None
        self.known_squares = None
        partial = self._open()
        for number, member in enumerate(group.members):
            if number not in self._arrived:
                partial.memory[member.slot.start : member.slot.stop].zero_()
        for low, high in group.layout.gaps:
            partial.memory[low:high].zero_()
        if self.predivide != 1.0:
            partial.memory.div_(self.predivide)
        if group.plan.feedback is not None:
            group.guard.before_write()
            partial.errors = self.ensure_errors()
        if group.momentum is not None and self._carried_sum is not None:
            raise UsageError(
                f"the gradient of '{group.members[0].name}' comes in two parts behind OneBitAdam's "
                "freeze_step.",
                "Momenta are exchanged once a step, when all of its gradient is here.",
                "say with gradient_accumulation_steps how many backwards a step has.",
            )
        self._partial = None
        self._arrived = set()
        if group.plan.grad.placement is P:
            return self._reduce_in_place(partial, what)
        if group.comm_ctx.replicas is not None and self._state is GradState.REDUCED:
            # A backward that comes after the replicas have met
            self._carry(self.ensure_buffer().load())
        pending = move(
            partial, self.ensure_buffer(), group.comm_ctx, what, add=self._state in _SUMMED
        )
        self._enter(GradState.REDUCING)
        return pending.then(lambda: self._finish_shard(partial))

    def _carry(self, own: Tensor) -> None:
        """Set an earlier sum of the same step aside, to be added to the next one."""
        self._carried_sum, self._carried_state = own.clone(), self._state
        self._enter(GradState.COLLECTING)

    def _summed(self) -> None:
        """Note that the sum over the ranks of one replica is there."""
        self._enter(
            GradState.REDUCED if self.group.comm_ctx.replicas is None else GradState.PARTIAL
        )

    def _finish_shard(self, partial: FlatBuffer) -> None:
        """Release the summands of a finished sum; if it is offloaded, take its norm on the way."""
        self._summed()
        self.group.comm_ctx.pool.give(partial.memory)
        if self.buffer is not None:
            self._store_offloaded(self.buffer)

    def _store_offloaded(self, buffer: FlatBuffer) -> None:
        if buffer.extent is not None and buffer.is_offloaded:
            values = buffer.load()
            first = (
                0 if self.is_whole else self.group.layout.bounds(self.group.comm_ctx.comm.rank)[0]
            )
            found = self._squares_of(values, first)
            if not isinstance(found, float):
                (found,) = _squares_on_accelerator([found])
            self.known_squares = found
            buffer.extent.store(0, buffer.memory.numel())

    def ensure_buffer(self) -> FlatBuffer:
        """Return `buffer`, allocated on its first use."""
        if self.buffer is None:
            spec = self.group.plan.grad
            assert spec is not None
            group = self.group
            if spec.placement is S:
                self.buffer = self.new_slice(spec)
            else:
                self.buffer = FlatBuffer.allocate_for_comm(
                    group.layout, spec, group.comm_ctx, self._what, is_zeroed=False
                )
        return self.buffer

    def release(self) -> None:
        """Free the memory of the sum until the next backward, if nothing is in it and this rank
        alone uses it. Local.

        On a CPU it is kept: its pages would have to come again.
        """
        comm_ctx = self.group.comm_ctx
        buffer = self.buffer
        if buffer is None or buffer.spec.placement is not P or comm_ctx.pool.device.type == "cpu":
            return
        is_empty = self._state is GradState.EMPTY and self._partial is None
        if is_empty and comm_ctx.comm.size == 1 and comm_ctx.replicas is None:
            self.buffer = None
            self._staged = None

    def ensure_errors(self) -> Errors | None:
        """Return `errors`, zeros on its first use; None where nothing is kept of what codes leave
        out.
        """
        feedback = self.group.plan.feedback
        comm_ctx = self.group.comm_ctx
        if self.errors is None and feedback is not None:
            self.errors = feedback.zeros(self.group.planned.errors_numel, comm_ctx.pool.device)
            budget = comm_ctx.tiers.budget
            nbytes = self.errors.memory.nbytes
            budget.reserve_for(self.errors, nbytes, f"what codes leave out of {self._what}")
        return self.errors

    def forget_errors(self) -> None:
        """Forget what codes have left out.  Local; every rank does so."""
        if self.errors is not None:
            self.group.guard.before_write()
            self.errors.forget()

    def scale_errors(self, factor: float) -> None:
        """Let what codes have left out be that of gradients multiplied by so much more.  Local;
        every rank does so.
        """
        if self.errors is not None:
            self.group.guard.before_write()
            self.errors.scale(factor)

    def new_slice(self, spec: Spec) -> FlatBuffer:
        """Return a buffer for this rank's slice of the sum."""
        layout = self.group.layout
        comm_ctx = self.group.comm_ctx
        if (
            spec.tier is not Tier.DEVICE
            or comm_ctx.pool.device.type != "cpu"
            or not layout.padded_numel
        ):
            found = FlatBuffer.allocate(layout, spec, comm_ctx, self._what)
            found.guard = self.guard
            return found
        memory = private_pages(spec.numel(layout.padded_numel, layout.ranks), spec.dtype)
        return FlatBuffer(layout, spec, memory, guard=self.guard).counted(comm_ctx, self._what)

    @property
    def _what(self) -> str:
        return f"gradients of {self.group.members[0].name}"

    def _reduce_in_place(self, partial: FlatBuffer, what: str) -> Pending:
        """Replace this rank's slice of the partial gradient by the sum (stage 1), then every slice
        (stage 0).
        """
        group = self.group
        own = self._own(partial)
        waits = group.comm_ctx.replicas is not None
        if group.momentum is not None:
            group.guard.before_write()
            pending = group.momentum.exchange(partial, own, what, group.optimizer().loss_scale)
            self._enter(GradState.REDUCING)
            self._reduction = pending.then(self._summed)
            return self._reduction
        if waits:  # slices first are summed over the replicas, then, at stage 0, gathered
            cut = partial.shard(group.comm_ctx.comm.rank)
            target = FlatBuffer(group.layout, replace(partial.spec, placement=S), cut)
        else:
            target = FlatBuffer(
                group.layout, replace(partial.spec, placement=R if self.is_whole else S), own
            )
        pending = move(partial, target, group.comm_ctx, what)
        self._enter(GradState.REDUCING)

        def finish() -> None:
            self._summed()
            # Else it is added to the total
            if self._carried_sum is not None and self._carried_state is self._state:
                own.add_(self._carried_sum)
                self._carried_sum = None

        self._reduction = pending.then(finish)
        return self._reduction

    def sum_over_replicas(self, what: str) -> Pending:
        """Start to sum the replicas' sums of one step, once for all its backwards.

        Collective among the ranks that hold this slice; does nothing if they have met for this sum,
        or if there is one replica.
        """
        comm_ctx = self.group.comm_ctx
        buffer = self.buffer
        if comm_ctx.replicas is None or buffer is None or self._state is not GradState.PARTIAL:
            return DONE
        self._enter(GradState.REDUCING)
        self.known_squares = None
        replicas = replace(comm_ctx.replicas, bucket_numel=comm_ctx.bucket_numel)
        pending = all_reduce(buffer.shard(comm_ctx.comm.rank), replicas, what)

        def finish() -> None:
            if self.is_whole and comm_ctx.comm.size > 1:
                all_gather(buffer.memory, "reduce", comm_ctx, what).wait()
            self._enter(GradState.REDUCED)
            if self._carried_sum is not None:
                self._own(buffer).add_(self._carried_sum)
                self._carried_sum = None
            self._store_offloaded(buffer)

        self._reduction = pending.then(finish)
        return self._reduction

    def has(self, number: int) -> bool:
        """Return whether a member has a reduced gradient."""
        return self.is_reduced and not (self.absent and number in self.absent)

    @property
    def is_reduced(self) -> bool:
        """Return whether there is a reduced gradient of the step under way."""
        return self._state in _SUMMED

    @property
    def is_deferred(self) -> bool:
        """Return whether a deferred update of the last step still needs the sum."""
        return self._state is GradState.DEFERRED

    @property
    def _has_sum(self) -> bool:
        return self._state in _SUMMED or self._state is GradState.DEFERRED

    def reduced(self) -> Tensor | None:
        """Return a flat view of the reduced gradient of this rank's master; None before a
        backward.
        """
        return self._own(self.buffer) if self.buffer is not None and self._has_sum else None

    def own_summand(self, number: int) -> Tensor | None:
        """Return a view of what this rank has collected for a member, flat; None where that is
        nothing yet.
        """
        if self._partial is None or number not in self._arrived:
            return None
        slot = self.group.members[number].slot
        return self._partial.memory[slot.start : slot.stop]

    def read(self, low: int, high: int) -> Tensor | None:
        """Return elements [low, high) of `reduced`, to be read only: offloaded ones are not written
        a second time.
        """
        if self.buffer is None or not self._has_sum:
            return None
        came = self._staged.view(low, high) if self._staged is not None else None
        if came is not None:
            return came
        if self.buffer.spec.placement is S:
            return self.buffer.read(low, high)
        return self._own(self.buffer)[low:high]

    def staged_tile(self) -> StagedTile | None:
        """Return what brings the sum from the training device to the host that updates; None if
        nothing must.
        """
        self._staged = staged_gradient(self.group, self.buffer, self._staged)
        return self._staged

    def defer(self) -> None:
        """Keep the sum for an update that is still to come; `finish_deferred` drops it. Local."""
        if self._state is GradState.EMPTY:
            # Nobody has a gradient, so that nobody is updated
            self.absent = set(range(len(self.group.members)))
        self._enter(GradState.DEFERRED)

    def finish_deferred(self) -> None:
        """Drop the sum, which the deferred update has used. Local."""
        self._enter(GradState.EMPTY)
        self.discard()

    def discard(self) -> None:
        """Drop the gradient (zero_grad, a finished or skipped step) unless a deferred update needs
        it; its memory stays for the next. Local.

        On the CPU the pages of a shard are the system's until then.
        """
        self._unset_grads()
        if self._state is GradState.DEFERRED:
            return
        if self._state is not GradState.EMPTY:
            self._enter(GradState.EMPTY)
        if self._partial is not None and self._partial is not self.buffer:
            self.group.comm_ctx.pool.give(self._partial.memory)
        self._clear()
        shard = self.buffer if self.buffer is not None and self.buffer.spec.placement is S else None
        if shard is not None and shard.extent is not None:
            self.guard.before_read()  # an update made ahead of its step goes with the gradient
            shard.extent.wait_for_copy()
            shard.extent.discard(0, shard.memory.numel())
        elif (
            shard is not None
            and not self.group.comm_ctx.pool.keeps_pages
            and has_pages_to_return(shard.memory)
        ):
            return_pages(shard.memory)

    def drop_buffers(self) -> None:
        """Free the memory of the sum and of the delayed gradient, for others of another dtype; both
        must be empty.
        """
        assert self._state is GradState.EMPTY and not self.delayed.is_full, (
            "a gradient's memory was dropped with it"
        )
        self.buffer = None
        self.delayed.buffer = None

    def follow_wires(self) -> None:
        """Send what is collected in the sum's memory as the plan has it now.  Local."""
        planned = self.group.plan.grad
        if self.buffer is not None and planned is not None:
            self.buffer.spec = replace(
                self.buffer.spec, wire=planned.wire, wire_inside=planned.wire_inside
            )

    def swap_delayed(
        self, buffer: FlatBuffer | None, absent: set[int] | None, *, is_full: bool
    ) -> None:
        """Take a delayed gradient's place: buffer (None: its values are here already), absent
        members, whether there is one.
        """
        if buffer is not None:
            self.buffer = buffer
        self.absent = absent
        self.known_squares = None
        state = GradState.REDUCED if is_full else GradState.EMPTY
        if self._state is not state:
            self._enter(state)

    # -- what `.grad` shows, and what the program makes of it

    def expose(self, *, joined: bool = True) -> None:
        """Set `.grad` of every member that has a gradient. joined: False if this rank skipped a
        backward.

        A frozen member has none unless one came before it was frozen, as in torch.
        """
        self._is_exposed = True
        if not self._sharded_grads:
            self._sharded_grads = [
                sharded_gradient(member.param, member.placeholder) for member in self.group.members
            ]
        is_first = self.absent is None
        absent = self.absent = set() if self.absent is None else self.absent
        with without_torch_function():
            for number, (member, grad) in enumerate(
                zip(self.group.members, self._sharded_grads, strict=True)
            ):
                if not member.param.requires_grad:
                    if is_first:
                        absent.add(number)
                elif joined and absent:
                    absent.discard(number)
                member.param.grad = None if absent and number in absent else grad

    def take_assigned(self) -> None:
        """Take over the values that the program has assigned to `.grad`. Local."""
        members = self.group.members
        shown = self._sharded_grads if self._is_exposed else [None] * len(self.group.members)
        assigned: list[tuple[int, Tensor | None]] = []
        with without_torch_function():
            for number, (member, grad) in enumerate(zip(members, shown, strict=True)):
                found = member.param.grad
                if found is not grad:
                    assigned.append((number, found))
        for number, value in assigned:
            if value is not None:
                self.assign(number, value)
            elif self.absent is not None and number not in self.absent:
                self._part_of(number).values.zero_()
                self._changed(number)
                self.absent.add(number)

    def hide(self) -> None:
        """Clear the exposed `.grad` before a backward: autograd would add to it."""
        self.take_assigned()
        self._unset_grads()

    def _unset_grads(self) -> None:
        self._is_exposed = False
        with without_torch_function():
            for member in self.group.members:
                member.param.grad = None

    def assign(self, number: int, value: Tensor) -> None:
        """Set a member's gradient: a whole tensor, of which each rank takes its part, or another
        handle's.
        """
        part = self._part_of(number)
        name = self.group.members[number].name
        if isinstance(value, ShardedGradient):
            theirs, own = own_part_of(value)
            if theirs is not self.group.members[number].param:
                raise UsageError(
                    f"the gradient of '{name}' was set to the sharded gradient of another "
                    "parameter.",
                    "Ranks hold different elements of the two.",
                    "assign a whole tensor: `other.grad.full_tensor()`, taken on all ranks.",
                )
            mine = self.exposed_shard(number).values if own is None else own.values
        else:
            flat = (value.to_dense() if value.is_sparse else value).detach().reshape(-1)
            mine = flat[part.start : part.start + part.values.numel()]
        self.assign_shard(number, mine)

    def assign_shard(self, number: int, mine: Tensor) -> None:
        """Set this rank's part of a member's gradient, flat."""
        part = self._part_of(number)
        name = self.group.members[number].name
        if mine.numel() != part.values.numel():
            raise UsageError(
                f"the gradient of '{name}' was set to one of {mine.numel()} elements where "
                f"{part.values.numel()} are held.",
                "It was calculated before the ranks' gradients were added up.",
                "assign to `.grad` what is calculated from it after the same backward.",
            )
        self._refuse_partial_sum(name)
        part.values.copy_(mine)
        self._changed(number)
        self.is_edited = True
        if self.absent is not None:
            self.absent.discard(number)
        if self._is_exposed:
            with without_torch_function():
                self.group.members[number].param.grad = self._sharded_grads[number]

    def exposed_shard(self, number: int) -> Part:
        """Return the part of the gradient that a handle exposes."""
        if not self._is_exposed:
            raise AtRestError(
                f"the gradient of '{self.group.members[number].name}' is over.",
                "It was seen before, and a step has used it or the next backward has begun.",
                "take `param.grad` anew after each backward; keep a copy with `grad.clone()`.",
            )
        return self._part_of(number)

    def multiply(self, factor: float) -> None:
        """Multiply this rank's own sums that are still to be reduced.  Local."""
        if self._partial is not None:
            self.known_squares = None
            for number in self._arrived:
                self._partial.view(self.group.members[number].slot).mul_(factor)

    def summand(self, number: int) -> Tensor:
        """Return this rank's own sum of a member's gradient, flat, which is still to be reduced;
        zeros if none came.

        Of a group whose gradients are reduced once a step, between its backwards.  Local.
        """
        self._open()
        return self._part_of(number).values

    def _part_of(self, number: int) -> Part:
        """Return a member's gradient on this rank, to be changed; zeros if there is none yet.

        Between the micro-batches of a step it is this rank's own sum if that is still to be
        reduced.
        """
        slot = self.group.members[number].slot
        if self._partial is not None and self._partial is self.buffer:
            values = self._partial.memory[slot.start : slot.stop]
            if number not in self._arrived:
                values.zero_()
                self._arrived.add(number)
            return Part(values, 0, is_whole=True)
        self._seed()
        values = self.of(slot)
        low = (
            0
            if self.is_whole
            else self.group.layout.owned(slot, self.group.comm_ctx.comm.rank)[0] - slot.start
        )
        return Part(values, low, self.is_whole)

    def _seed(self) -> None:
        """Make a reduced gradient, of zeros, if no backward has made one."""
        self._flush_deferred()
        if not self._has_sum:
            self._own(self.ensure_buffer()).zero_()
            self._enter(GradState.REDUCED)
            self.known_squares = None

    def _changed(self, number: int) -> None:
        """Note that a member's part was written."""
        self.known_squares = None
        if (
            self.buffer is not None
            and self.buffer.extent is not None
            and self.buffer.spec.placement is S
        ):
            place, end = self.buffer.owned_range(
                self.group.members[number].slot, self.group.comm_ctx.comm.rank
            )
            self.buffer.extent.evict(place, end)

    def edited(self, number: int, *, alike: bool) -> None:
        """Note that a handle's part was changed in place. alike: by the same on every rank."""
        self._refuse_partial_sum(self.group.members[number].name)
        self._changed(number)
        if not alike:
            self.is_edited = True

    def _refuse_partial_sum(self, name: str) -> None:
        """Raise UsageError while each replica has a sum of its own: what is set now would count
        once for each.
        """
        if self._state is GradState.PARTIAL:
            raise UsageError(
                f"the gradient of '{name}' was changed between the micro-batches of a step, on a "
                "mesh with replicas.",
                "Until the last backward of a step each replica has its own sum, to which a change "
                "would be added.",
                "change `.grad` after the last backward of the step.",
            )

    def spread(self, what: str) -> Pending:
        """Make copies of a changed gradient equal: among replicas, and of each slice if ranks hold
        all. Collective.
        """
        comm_ctx = self.group.comm_ctx
        if comm_ctx.replicas is not None:
            self._seed()
            own = self._own(self.ensure_buffer())
            comm = comm_ctx.replicas.comm
            scatter(comm, [own] * comm.size, own, f"changed gradients of {what}")
            self.known_squares = None
        if not self.is_whole:
            return DONE
        self._seed()
        return all_gather(self.ensure_buffer().memory, "reduce", comm_ctx, what)

    def of(self, slot: Slot) -> Tensor:
        """Return this rank's part of one member's reduced gradient: a flat view."""
        assert self.buffer is not None
        self.known_squares = None  # whoever asks may change it
        if self.is_whole:
            return self.buffer.memory[slot.start : slot.stop]
        return self.buffer.owned_view(slot, self.group.comm_ctx.comm.rank)

    def norm_of(self, number: int, part: Part, order: float) -> Tensor:
        """Return the norm of a member's gradient. Collective, every rank must ask, unless the part
        is whole.
        """
        own = part.values.double().abs()
        comm = self.group.comm_ctx.comm
        mine, together = _powers(own, order)
        if not part.is_whole:
            rows = comm.all_gather_rows(
                mine.cpu().reshape(1), f"norm of {self.group.members[number].name}"
            )
            mine = together(rows)
        is_root = order not in (0.0, float("inf"), -float("inf"))
        return (mine.pow(1.0 / order) if is_root else mine).to(own.device, torch.float32)

    def squares(self) -> list[float | list[Tensor]]:
        """Return the sum of squares of each rank's slice, in rank order; 0.0 for slices that this
        rank does not hold.

        For a slice on an accelerator it returns the tensors: `squares_of` adds them up, for all
        groups at once.
        """
        comm = self.group.comm_ctx.comm
        sums: list[float | list[Tensor]] = [0.0] * comm.size
        if self.known_squares is not None:
            sums[comm.rank] = self.known_squares
            return sums
        grad = self.reduced()
        if grad is not None and self.is_whole:
            first = 0
            for rank, part in enumerate(grad.chunk(comm.size)):
                sums[rank] = self._squares_of(part, first)
                first += part.numel()
        elif grad is not None:
            first = self.group.layout.bounds(comm.rank)[0]
            sums[comm.rank] = found = self._squares_of(grad, first)
            self.known_squares = found if isinstance(found, float) else None
        return sums

    def _squares_of(self, values: Tensor, first: int) -> float | list[Tensor]:
        """Return the sum of squares of elements [first, ...) of the layout, of those that the
        optimizer updates; on an accelerator these elements.

        The device of the update computes it, so that every stage finds the same bits.
        """
        home = home_of(self)
        if values.device != home and home == CPU:
            values = self.group.comm_ctx.copy_engine.to_host(values)
        parts = [(values, first)]
        if self.group.not_updated:
            parts = []
            last = first + values.numel()
            for start, stop in self.group.updated_ranges():
                low = max(start, first)
                high = min(stop, last)
                if low < high:
                    parts.append((values[low - first : high - first], low))
        if home.type == "cpu":
            threads = self.group.comm_ctx.comm.threads
            return sum((squares_on_cpu(part, place, threads) for part, place in parts), 0.0)
        return [part for part, _ in parts]


class DelayedGradient:
    """The gradient of an earlier step, for a delayed update. buffer: this rank's slice of it,
    allocated on first
    use. absent: as of the gradient under way.
    """

    def __init__(self, gradient: Gradient) -> None:
        self.gradient = gradient
        self.buffer: FlatBuffer | None = None
        self.absent: set[int] | None = None
        self._is_full = False
        self._staged: StagedTile | None = None

    @property
    def is_full(self) -> bool:
        """Return whether `buffer` has a gradient."""
        return self._is_full

    @property
    def extents(self) -> list[Extent]:
        """Return the extent that holds it, if it is offloaded."""
        return (
            [self.buffer.extent]
            if self.buffer is not None and self.buffer.extent is not None
            else []
        )

    def swap(self, *, keep: bool) -> None:
        """Exchange the delayed and the reduced gradient; `keep`: False drops the reduced one."""
        gradient = self.gradient
        comes = self._is_full
        if not (keep or comes):
            return
        gradient.group.guard.before_write()
        theirs = gradient.ensure_buffer()
        mine = self._ensure_buffer()
        is_cut = theirs.spec.placement is S
        if is_cut:
            self.buffer = theirs
        else:
            _change_places(theirs.shard(gradient.group.comm_ctx.comm.rank), mine.load())
        absent = self.absent
        self.absent = gradient.absent
        gradient.swap_delayed(mine if is_cut else None, absent, is_full=comes)
        self._is_full = keep
        if not keep:
            self.discard()

    def read(self, low: int, high: int) -> Tensor | None:
        """Return elements [low, high) of it, to be read only; None if there is none."""
        if not self._is_full or self.buffer is None:
            return None
        came = self._staged.view(low, high) if self._staged is not None else None
        return self.buffer.read(low, high) if came is None else came

    def staged_tile(self) -> StagedTile | None:
        """Return what brings it from the training device to the host that updates; None if nothing
        must.
        """
        self._staged = staged_gradient(self.gradient.group, self.buffer, self._staged)
        return self._staged

    def owned(self, slot: Slot) -> Tensor:
        """Return this rank's part of one member's: a flat view, which a checkpoint fills."""
        self.gradient.group.guard.before_write()
        return self._ensure_buffer().owned_view(slot, self.gradient.group.comm_ctx.comm.rank)

    def restore_absent(self, absent: set[int] | None) -> None:
        """Take the members that had no gradient from a checkpoint, which fills `owned` for the
        others.
        """
        self.absent = absent

    def restore(self, *, is_full: bool) -> None:
        """Take from a checkpoint whether there is one, after its values."""
        self._is_full = is_full

    def discard(self) -> None:
        """Drop it: no update will use it."""
        self.gradient.group.guard.before_write()
        self._is_full = False
        self.absent = None
        for extent in self.extents:
            extent.discard(0, extent.memory.numel())

    def _ensure_buffer(self) -> FlatBuffer:
        if self.buffer is None:
            spec = self.gradient.group.plan.delayed_grad
            assert spec is not None
            self.buffer = self.gradient.new_slice(spec)
        return self.buffer


def complete(full: Tensor, group: ParamGroup, slot: Slot, what: str) -> None:
    """Complete a parameter-sized flat tensor whose owned part each rank has filled in.
    Collective.
    """
    comm = group.comm_ctx.comm
    if comm.size == 1:
        return
    parts: list[Any] = []
    for rank in range(comm.size):
        start, stop = group.layout.owned(slot, rank)
        parts.append(full[start - slot.start : max(start, stop) - slot.start])
    comm.exchange([parts[comm.rank]] * comm.size, parts, "gather", what).wait()


def build_group(
    planned: GroupPlan, params: Mapping[str, nn.Parameter], comm_ctx: CommContext
) -> ParamGroup:
    """Build a group as planned, from whole parameters by full name.  Collective."""
    members = [
        ParamInfo(params[slot.name], slot, type(params[slot.name])) for slot in planned.layout.slots
    ]
    return ParamGroup(members, planned, comm_ctx)


def gathers_a_copy(group: ParamGroup) -> bool:
    """Return whether a gather brings the weight into a lent buffer; else it is used in the memory
    it lies in.
    """
    return group.weight.symmetric is None


def weight_shard(weight: FlatBuffer, plan: ShardPlan, rank: int) -> FlatBuffer:
    """Return the part of a weight whose values this rank's master has."""
    if plan.master is None or plan.master.placement is plan.weight.placement:
        return weight
    return FlatBuffer(
        weight.layout, replace(plan.weight, placement=S), weight.shard(rank), guard=weight.guard
    )


def build_master(weight: FlatBuffer, plan: ShardPlan, comm_ctx: CommContext) -> MasterWeight | None:
    """Return an empty master beside a weight, or on it; None if nothing is trained."""
    if plan.master is None or plan.moments is None:
        return None
    layout = weight.layout
    rank = comm_ctx.comm.rank
    home = comm_ctx.pool.device if plan.moments.tier is Tier.DEVICE else CPU
    beneath = weight_shard(weight, plan, rank)
    if plan.master_is_weight:
        buffer = FlatBuffer(
            layout, plan.master, beneath.memory, extent=beneath.extent, guard=weight.guard
        )
        return MasterWeight(
            buffer, rank, plan.moments.dtype, update_device=home, copy_engine=comm_ctx.copy_engine
        )
    what = f"the master of {layout.slots[0].name}"
    buffer = FlatBuffer.allocate(
        layout, plan.master, comm_ctx, what, is_copied=plan.sends_differences
    )
    buffer.guard = weight.guard
    if plan.sends_differences:
        return MasterWeight(
            buffer, rank, plan.moments.dtype, update_device=home, copy_engine=comm_ctx.copy_engine
        )
    exposed = is_exposed(plan, comm_ctx)
    return MasterWeight(
        buffer,
        rank,
        plan.moments.dtype,
        beneath,
        plan.master_is_split,
        exposed,
        home,
        comm_ctx.copy_engine,
    )


def is_exposed(plan: ShardPlan, comm_ctx: CommContext) -> bool:
    """Return whether programs see a group's weight between steps, and may change it past its
    guard.
    """
    return plan.weight.placement is not S or comm_ctx.comm.size == 1


def set_placeholders(members: Sequence[ParamInfo], placeholder: Tensor) -> None:
    """Expand the placeholder to each member's shape: the data of a sharded parameter."""
    for member in members:
        member.placeholder = placeholder.expand(member.slot.shape)


def broadcast_from_first(full: FlatBuffer, comm: Comm, what: str, *, only_own: bool) -> None:
    """Write rank 0's values of a whole buffer to every rank; `only_own`: each rank's slice alone.
    Collective.
    """
    slices = [full.shard(rank) for rank in range(comm.size)]
    scatter(comm, slices, slices[comm.rank], what)
    if not only_own:
        comm.all_gather(full.memory, "gather", what).wait()


def _powers(own: Tensor, order: float) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return one rank's summand of a norm, and the function that combines the ranks'."""
    if order == float("inf"):
        return own.max() if own.numel() else own.new_zeros(()), torch.max
    if order == -float("inf"):
        return own.min() if own.numel() else own.new_full((), float("inf")), torch.min
    return (own != 0).double().sum() if order == 0.0 else own.pow(order).sum(), torch.sum


def staged_gradient(
    group: ParamGroup, buffer: FlatBuffer | None, known: StagedTile | None
) -> StagedTile | None:
    """Return the staged tile of this rank's slice of a gradient, if the training device has it and
    the host updates.

    known: of the last call; it is kept while the memory is the same.
    """
    if buffer is None or buffer.extent is not None or not group.plan.is_updated_on_host:
        return None
    memory = buffer.memory
    if buffer.spec.placement is not S and memory.numel() != group.layout.slice_numel:
        first, last = group.layout.bounds(group.comm_ctx.comm.rank)
        memory = memory[first:last]
    if known is not None and known.on_device.data_ptr() == memory.data_ptr():
        return known
    return group.comm_ctx.copy_engine.staged_tile(memory, is_read=True)


def home_of(gradient: Gradient) -> torch.device:
    """Return the device on which an optimizer works on the gradient."""
    master = gradient.group.master
    assert master is not None
    return master.update_device


def squares_of(groups: Sequence[ParamGroup]) -> list[list[float]]:
    """Return `Gradient.squares` of each group, all read; the host waits for an accelerator once at
    most.
    """
    found = [group.gradient.squares() for group in groups]
    unread = [each for of_group in found for each in of_group if isinstance(each, list)]
    numbers = iter(_squares_on_accelerator(unread))
    read = [
        [next(numbers) if isinstance(each, list) else each for each in of_group]
        for of_group in found
    ]
    for group, before, own in zip(groups, found, read, strict=True):
        rank = group.comm_ctx.comm.rank
        if isinstance(before[rank], list) and not group.gradient.is_whole:
            group.gradient.known_squares = own[rank]
    return read


def _squares_on_accelerator(slices: Sequence[Sequence[Tensor]]) -> list[float]:
    """Return the sum of squares of each of these slices, given as parts. The host waits once.

    Sums in float64 differ so little by their order that a factor of fp32, made of the norm, is that
    of a CPU. The norms of tiles are one pass over memory on a GPU.
    """
    tiles = [
        [tile for part in parts if part.numel() for tile in part.split(_NORM_TILE_NUMEL)]
        for parts in slices
    ]
    together = [tile for own in tiles for tile in own]
    norms = iter(torch.stack(double_norms(together)).tolist() if together else ())
    return [sum(norm * norm for norm in itertools.islice(norms, len(own))) for own in tiles]


def _change_places(left: Tensor, right: Tensor) -> None:
    for mine, yours in zip(left.split(_TILE_NUMEL), right.split(_TILE_NUMEL), strict=True):
        held = mine.clone()
        mine.copy_(yours)
        yours.copy_(held)


def staging_like(target: Tensor, values: Tensor) -> Tensor:
    """Return the buffer through which a tensor is written: itself, or one on the device of the
    values, so that it is copied across once.
    """
    if target.device == values.device:
        return target
    return torch.empty_like(target, device=values.device)
