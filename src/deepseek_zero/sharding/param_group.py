"""The parameters of one unit that have one row of the plan: a weight in a flat buffer.

`ParamGroup` owns the weight's storage and its movements. Beside it are the main weight that the
optimizer updates (main_weight.py) and the gradient (gradient.py). None of them knows hooks or the
order of units (runtime.py, executor.py), nor optimizers (optim/), which work on the slices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..base.device import without_torch_function
from ..base.memory import trim_heap
from ..comm.collectives import DONE, Comm, Pending, scatter
from ..planner.layout import FlatLayout, Slot
from ..planner.plan_settings import PlanSettings
from ..planner.spec import R, S, ShardPlan
from ..planner.units import GroupPlan
from ..precision.policy import cast_master
from ..tiers.tier import Storage
from .buffer import (
    CommContext,
    FlatBuffer,
    OffloadedGuard,
    PendingUpdate,
    StateGuard,
    move,
)
from .grad_reduction import GradReduction
from .grad_sum import GradSum
from .grad_view import GradView
from .gradient import Gradient
from .group import Group, ParamInfo
from .init import take_values
from .main_weight import MasterWeight, build_master, weight_shard
from .model_changes import error_of_lost_values
from .sharded_gradient import Part
from .sharded_parameter import clear_owner, owner_of, set_owner
from .weight_gather import WeightGather


@dataclass(frozen=True)
class GroupParts:
    """The parts of a group that extensions may replace: a function for each extension point.

    Attributes:
        weight_gather: Returns how a group's weight is gathered. Collective. Its second argument is
            the name of the weight, for messages.
        reduction: Returns how a group's gradients are summed. Local.
        kept_gradients: Returns what is kept beside a group's gradient, by name. Local.
    """

    weight_gather: Callable[[Group, str], WeightGather]
    reduction: Callable[[Group], GradReduction]
    kept_gradients: Callable[[Gradient], Mapping[str, GradSum]] = lambda gradient: {}


class ParamGroup:
    """Flat buffers of parameters with one plan. Building one is collective: rank 0's values
    win.
    """

    def __init__(
        self,
        members: Sequence[ParamInfo],
        planned: GroupPlan,
        comm_ctx: CommContext,
        parts: GroupParts,
    ) -> None:
        self.members = list(members)
        self.planned = planned
        self.comm_ctx = comm_ctx
        self.parts = parts
        plan = planned.plan
        self.index = {id(member.param): number for number, member in enumerate(self.members)}
        self._new_gradient()
        self.weight: FlatBuffer
        self.weight_gather: WeightGather
        self.master: MasterWeight | None = None
        self.unsharded: FlatBuffer | None = None
        self.is_idle = False  # every member was frozen after it was wrapped: nothing to reduce
        # Members that no optimizer updates: the norm leaves them out
        self.not_updated: frozenset[int] = frozenset()
        # By a GatheredParameters block: whole until it ends, whatever runs inside it
        self.is_pinned = False
        # weak: set by the runtime that drives this group
        self.runtime: Callable[[], Any] = lambda: None
        # weak: set by the optimizer that updates this group
        self.optimizer: Callable[[], Any] = lambda: None
        self.guard = StateGuard()  # of weight, master, moments and the gradient that waits
        nothing = float("nan") if plan.weight.dtype.is_floating_point else 0
        self.placeholder = torch.full(
            (), nothing, dtype=plan.weight.dtype, device=comm_ctx.pool.device
        )
        # Views of the members, if the gathered weight is always in the same memory
        self._views: list[Tensor] = []
        self.build()

    # -- building

    def _new_gradient(self) -> None:
        self.gradient = Gradient(self, self.parts.reduction(self))
        self.gradient.kept = self.parts.kept_gradients(self.gradient)
        self.grad_view = GradView(self.gradient)

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
            self.gradient.sum.known_squares = None

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
        if self.layout.padded_numel:
            own = full.shard(comm.rank) if self.is_sharded else full.memory
            what = f"replicas of {self.members[0].name}"
            self.gradient.reduction.copy_from_first(own, what)
            del own  # the pool never lends a buffer that is still viewed
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
        storages = self.offloaded()
        for storage in storages:
            storage.store(0, storage.memory.numel()).wait()
        if storages:
            trim_heap()  # of the values it was built from
        for member in self.members:
            set_owner(member.param, self)
            if self.is_sharded:
                member.reshard()
            else:
                member.unshard(self.weight.view(member.slot))

    def _allocate_weight(self, what: str) -> None:
        """Allocate the weight. Collective."""
        what = f"the weights of {what}"
        self.weight_gather = self.parts.weight_gather(self, what)
        self.weight = self.weight_gather.allocate(what)
        self.weight.guard = self.guard

    def relayout(self, granularity: str) -> None:
        """Cut the group anew, keeping the bits of weight and master. Collective; gradients are
        dropped.
        """
        source = self.master.values() if self.master is not None else self.weight
        full = FlatBuffer(self.layout, source.spec.gathered(), self._whole(source))
        for member in self.members:
            member.unshard(full.view(member.slot))
        self.planned = self.planned.relayout(granularity)
        self._new_gradient()
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
                if self.plan.weight_is_independent
                else weight_shard(self.weight, self.plan, self.master.rank)
            )
            self.master = replace(self.master, buffer=values, weight=beneath, is_split=False)
            self.master.copy_to_weight(0, values.memory.numel())
        self.placeholder = self.placeholder.to(self.plan.weight.dtype)
        self._views = []
        set_placeholders(self.members, self.placeholder)
        self._new_gradient()
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

    def offloaded(self) -> list[Storage]:
        """Return the storages of weight, main weight and gradients outside the training device."""
        buffers = [self.weight, *self.gradient.buffers()]
        found = [buffer.storage for buffer in buffers if not buffer.storage.on_device]
        return found + (self.master.offloaded() if self.master is not None else [])

    def follow_frozen(self) -> None:
        """Note whether there is still a member to train, after some were frozen or unfrozen on all
        ranks. Local.

        What the reduction has kept is forgotten: nothing of frozen members may come any more.
        """
        self.gradient.reduction.forget()
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
            assert self.weight_gather.makes_copies, (
                "what lies in pages that others read in place does not travel"
            )
            self.planned = planned
            self.weight.spec = planned.plan.weight
            self.gradient.sum.follow_wires()

    def reduce_by(self, reduction: GradReduction, plan: ShardPlan) -> None:
        """Sum gradients in another way from now on, between two steps. Local; every rank does so.

        Args:
            reduction: How they are summed.
            plan: The row of the plan that says in which dtype.
        """
        self.planned = replace(self.planned, plan=plan)
        self.gradient.reduction = reduction

    def set_pending(self, update: PendingUpdate | None) -> None:
        """Flush this update before any read of the group's states; None: nothing is pending."""
        self.guard.pending = update
        self.gradient.sum.guard.pending = update

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
            # What the update writes stays in memory until it has been gathered
            self.weight.storage.pin()
            self.guard.pending.flush_group(self)
        self.unsharded = self.weight_gather.lend()
        return self.weight_gather.gather(self.unsharded, what)

    def weights_changed(self) -> None:
        """Let the next gather bring the weights as they are now. Local; every rank does so, between
        the same two gathers.
        """
        self.weight_gather.changed()

    def point_to_unsharded(self) -> None:
        """Point every parameter at the gathered buffer."""
        if self.unsharded is not None:
            views = self._views or [self.unsharded.view(member.slot) for member in self.members]
            if not self.weight_gather.makes_copies:
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
        self.weight_gather.give_back(full)
        if self.weight.is_offloaded:
            trim_heap()  # of its gradients
        if error is not None:
            raise error

    def refresh(self, what: str, *, is_update: bool = False) -> Pending:
        """Start to bring the weight to its placement after the master changed: an all-gather at
        stages 1 and 2. Collective.

        is_update: A step has changed it; otherwise it was written.
        """
        if (
            self.master is None
            or self.plan.weight.placement is not R
            or self.master.placement is not S
        ):
            return DONE
        return self.weight_gather.refresh(what, is_update=is_update)

    @property
    def own_weight(self) -> Tensor:
        """Return this rank's slice of the weight, flat."""
        return self.weight.shard(self.comm_ctx.comm.rank)

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
        self.weight_gather.before_write(self.name_of(param))
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
        return self.grad_view.shown_part(self.index[id(param)])

    def weight_part(self, param: nn.Parameter, part: Part) -> Tensor:
        slot = self.members[self.index[id(param)]].slot
        start, _, view = self.weight.local_part(slot, self.comm_ctx.comm.rank)
        return view[part.start - start : part.start - start + part.values.numel()]

    def grad_changed(self, param: nn.Parameter, *, alike: bool) -> None:
        self.grad_view.edited(self.index[id(param)], alike=alike)

    def norm_over_ranks(self, param: nn.Parameter, part: Part, order: float) -> Tensor:
        return self.grad_view.norm(self.index[id(param)], part, order)

    def whole_of(self, param: nn.Parameter, part: Part) -> Tensor:
        slot = self.members[self.index[id(param)]].slot
        full = torch.empty(slot.numel, dtype=part.values.dtype, device=self.comm_ctx.pool.device)
        full[part.start : part.start + part.values.numel()].copy_(part.values)
        if not part.is_whole:
            complete(full, self, slot, f"gradient of {slot.name}")
        return full.view(slot.shape)


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
    planned: GroupPlan,
    params: Mapping[str, nn.Parameter],
    comm_ctx: CommContext,
    parts: GroupParts,
) -> ParamGroup:
    """Build a group as planned, from whole parameters by full name. Collective."""
    members = [
        ParamInfo(params[slot.name], slot, type(params[slot.name])) for slot in planned.layout.slots
    ]
    return ParamGroup(members, planned, comm_ctx, parts)


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
