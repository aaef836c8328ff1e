"""The parameters of one unit that share a plan, and their flat buffers: weight and master (gradient.py has the
gradient).

Owns storage and its movements; knows nothing of hooks or order (runtime.py) nor of optimizers (optim/sharded.py),
which work on the slices it shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..base.device import CPU, without_torch_function
from ..base.memory import trim_heap
from ..comm.collectives import DONE, Comm, Pending, scatter
from ..planner.layout import FlatLayout, Slot
from ..planner.spec import R, S, ShardPlan, Spec
from ..planner.units import GroupPlan
from ..precision.policy import cast_master
from ..tiers.tier import Extent, Tier
from .buffer import CommContext, FlatBuffer, PendingUpdate, StateGuard, move
from .gradient import Gradient
from .init import take_values
from .master_weight import MasterWeight
from .sharded_gradient import Part
from .sharded_parameter import clear_owner, owner_of, reshard, set_owner, unshard


@dataclass(eq=False)
class ParamInfo:
    """One parameter of a group. param_class: the class it had before wrapping and has while unsharded."""

    param: nn.Parameter
    slot: Slot
    param_class: type[nn.Parameter]
    placeholder: Tensor = field(init=False)  # its data at rest
    is_frozen: bool = field(init=False)  # `requires_grad` was off when all ranks looked last (regroup.py)

    def __post_init__(self) -> None:
        with without_torch_function():
            self.is_frozen = not self.param.requires_grad

    @property
    def name(self) -> str:
        return self.slot.name


class ParamGroup:
    """Flat buffers of parameters with one plan.  Building one is collective: rank 0's values win."""

    def __init__(
        self,
        members: Sequence[ParamInfo],
        planned: GroupPlan,
        comm_ctx: CommContext,
    ) -> None:
        self.members, self.planned, self.comm_ctx = list(members), planned, comm_ctx
        plan = planned.plan
        self.index = {id(member.param): number for number, member in enumerate(self.members)}
        self.gradient = Gradient(self)
        self.weight: FlatBuffer
        self.master: MasterWeight | None = None
        self.unsharded: FlatBuffer | None = None
        self.is_idle = False  # every member was frozen after it was wrapped: nothing to reduce
        self.is_pinned = False  # by a GatheredParameters block: whole until it ends, whatever runs inside it
        self.runtime: Callable[[], Any] = lambda: None  # weak: set by the runtime that drives this group
        self.optimizer: Callable[[], Any] = lambda: None  # weak: set by the optimizer that updates this group
        self.guard = StateGuard()  # of weight, master, moments and the gradient that waits
        nothing = float("nan") if plan.weight.dtype.is_floating_point else 0
        self.placeholder = torch.full((), nothing, dtype=plan.weight.dtype, device=comm_ctx.pool.device)
        self._views: list[Tensor] = []  # of members in common pages, which stay where they are
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

    @property
    def has_frozen(self) -> bool:
        """Return whether a member is frozen now (`requires_grad_(False)`)."""
        with without_torch_function():
            return not all(member.param.requires_grad for member in self.members)

    def build(self) -> None:
        """Lay the members out as planned, take rank 0's values, and shard every parameter. Collective."""
        names = self.planned.names
        self.members = [
            replace(member, slot=slot) for member, slot in zip(self.members, self.layout.slots, strict=True)
        ]
        set_placeholders(self.members, self.placeholder)
        comm = self.comm_ctx.comm
        built = (self.plan.moments or self.plan.weight).dtype
        full = FlatBuffer(self.layout, replace(self.plan.weight, placement=R, dtype=built), self._packed(built))
        broadcast_from_first(full, comm, f"values of {names[0]}" if names else "values", only_own=self.is_sharded)
        self._take_from_first_replica(full)
        self.weight = FlatBuffer.allocate_weight(
            self.layout, self.plan.weight, self.comm_ctx, f"the weights of {names[0]}"
        )
        self.weight.guard = self.guard
        self._views = []
        whole = self.plan.weight.placement is R
        cast_master(full.storage if whole else full.shard(comm.rank), self.weight.storage)
        self.master = build_master(self.weight, self.plan, self.comm_ctx)
        if self.master is not None and not self.plan.master_is_weight:
            values = full.storage if self.master.placement is R else full.shard(comm.rank)
            self.master.write_consuming(0, values.numel(), values)
            del values  # the pool lends nothing again that somebody still sees
        self.comm_ctx.pool.give(full.storage)
        for extent in (extents := offloaded_extents(self)):
            extent.store(0, extent.memory.numel()).wait()
        if extents:
            trim_heap()  # of the values it was built from
        for member in self.members:
            set_owner(member.param, self)
            if self.is_sharded:
                reshard(member.param, member.placeholder)
            else:
                unshard(member.param, member.param_class, self.weight.view(member.slot))

    def _take_from_first_replica(self, full: FlatBuffer) -> None:
        """Let every replica have the values of the first: its slice where the weight is cut, else all.  Collective."""
        replicas = self.comm_ctx.replicas
        if replicas is not None and self.layout.padded_numel:
            values = full.shard(self.comm_ctx.comm.rank) if self.is_sharded else full.storage
            scatter(replicas.comm, [values] * replicas.comm.size, values, f"replicas of {self.members[0].name}")

    def relayout(self, granularity: str) -> None:
        """Cut the group anew, keeping the bits of weight and master. Collective; gradients are dropped."""
        source = self.master.values() if self.master is not None else self.weight
        full = FlatBuffer(self.layout, replace(source.spec, placement=R), self._whole(source))
        for member in self.members:
            unshard(member.param, member.param_class, full.view(member.slot))
        self.planned = self.planned.relayout(granularity)
        self.gradient = Gradient(self)
        self.build()

    def restore_params(self) -> None:
        """Make every member whole and plain again, with the master's values (when an engine is destroyed).
        Collective.
        """
        source = self.master.values() if self.master is not None else self.weight
        full = FlatBuffer(self.layout, replace(source.spec, placement=R), self._whole(source))
        for member in self.members:
            unshard(member.param, member.param_class, full.view(member.slot).clone())
            clear_owner(member.param)

    def _whole(self, source: FlatBuffer) -> Tensor:
        storage = torch.empty(self.layout.padded_numel, dtype=source.spec.dtype, device=self.comm_ctx.pool.device)
        full = FlatBuffer(self.layout, replace(source.spec, placement=R), storage)
        move(source, full, self.comm_ctx, self.members[0].name).wait()
        return storage

    def promote_to_fp32(self, what: str) -> None:
        """Store weight and gradient in fp32 from now on, cut from the master. Collective; gradients are dropped."""
        if self.master is None or self.plan.weight.dtype == torch.float32:
            return
        values, rank = self.master.values(), self.master.rank
        self.planned = self.planned.promoted()
        self.weight = FlatBuffer.allocate_weight(self.layout, self.plan.weight, self.comm_ctx, f"the weights of {what}")
        self.weight.guard = values.guard = self.guard
        self.master = replace(
            self.master, buffer=values, weight=weight_shard(self.weight, self.plan, rank), is_split=False
        )
        self.master.copy_to_weight(0, values.memory.numel())
        self.placeholder, self._views = self.placeholder.float(), []
        set_placeholders(self.members, self.placeholder)
        self.gradient = Gradient(self)
        for member in self.members:
            with without_torch_function():
                if self.is_sharded:
                    reshard(member.param, member.placeholder)
                else:
                    unshard(member.param, member.param_class, self.weight.view(member.slot))
        self.refresh(what).wait()

    def _packed(self, dtype: torch.dtype) -> Tensor:
        """Return this rank's own values, flat; each original is dropped as it is copied, so that two never exist
        side by side.
        """
        flat = self.comm_ctx.pool.take(self.layout.padded_numel, dtype)
        for low, high in self.layout.gaps():
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

    def set_pending(self, update: PendingUpdate | None) -> None:
        """Flush this update before any read of the group's states; None: nothing is pending."""
        self.guard.pending = self.gradient.guard.pending = update

    # -- weights

    def gather(self, what: str) -> Pending:
        """Start to all-gather the weight: (numel,) in the weight's dtype; `point_to_unsharded` shows it after the wait.

        Collective within the gather lane. The wait raises `PeerError` if another rank failed, `StorageError` if a disk
        did.
        """
        if not self.is_sharded or self.unsharded is not None or self.is_pinned:
            return DONE
        spec = Spec(R, self.plan.weight.dtype)
        if self.weight.extent is not None:
            return self._gather_offloaded(self.weight.extent, spec, what)
        if self.comm_ctx.comm.size == 1:
            self.unsharded = FlatBuffer(self.layout, spec, self.weight.storage)
            return DONE
        if self.weight.common is not None:
            self.unsharded = FlatBuffer(self.layout, spec, self.weight.common.whole)
            return self.comm_ctx.comm.gather_shared(self.weight.common, what)
        storage = self.comm_ctx.pool.take(self.layout.padded_numel, spec.dtype)
        self.unsharded = FlatBuffer(self.layout, spec, storage)
        return move(self.weight, self.unsharded, self.comm_ctx, what)

    def _gather_offloaded(self, extent: Extent, spec: Spec, what: str) -> Pending:
        """Gather out of another memory: this rank's slice is fetched first, and evicted when it has been copied.

        A pending update runs first, and its weight stays in memory; the executor comes here for others only in their
        turn, so that states travel meanwhile.
        """
        if self.guard.pending is not None:
            extent.pin()
            self.guard.pending.flush_group(self)
        numel = self.weight.memory.numel()
        full = self.unsharded = FlatBuffer(
            self.layout, spec, self.comm_ctx.pool.take(self.layout.padded_numel, spec.dtype)
        )

        def start() -> Pending:
            here, own = extent.read(0, numel), full.shard(self.comm_ctx.comm.rank)
            with self.comm_ctx.copy_engine.h2d(extent) as crossing:
                own.copy_(here, non_blocking=True)
                pending = move(FlatBuffer(self.layout, self.weight.spec, own), full, self.comm_ctx, what)

            def leave() -> None:
                crossing.wait_stream()
                extent.evict(0, numel)

            if not crossing.is_done():
                return pending.then(leave)
            leave()
            return pending

        return self.comm_ctx.issue_queue.add(extent.fetch(0, numel), start)

    def point_to_unsharded(self) -> None:
        """Point every parameter at the gathered buffer."""
        if self.unsharded is not None:
            views = self._views or [self.unsharded.view(member.slot) for member in self.members]
            if self.weight.common is not None:
                self._views = views
            for member, view in zip(self.members, views, strict=True):
                unshard(member.param, member.param_class, view)

    def reshard(self) -> None:
        """Shard every parameter and return the gathered buffer to the pool. Local."""
        if self.unsharded is None:
            return
        with without_torch_function():
            for member in self.members:
                reshard(member.param, member.placeholder)
        full, self.unsharded = self.unsharded, None
        if self.weight.common is not None:
            self.weight.common.release()
        elif gathers_a_copy(self):
            self.comm_ctx.pool.give(full.storage)
        if self.weight.is_offloaded:
            trim_heap()  # of its gradients

    def refresh(self, what: str) -> Pending:
        """Start to bring the weight to its placement after the master changed: an all-gather at stages 1 and 2.
        Collective.
        """
        plan, rank = self.plan, self.comm_ctx.comm.rank
        if plan.master is None:
            return DONE
        if plan.weight.placement is R and plan.master.placement is S:
            own = FlatBuffer(self.layout, replace(plan.weight, placement=S), self.weight.shard(rank))
            return move(own, self.weight, self.comm_ctx, what)
        return DONE

    def set_full_values(self, full: Tensor) -> None:
        """Write new whole values (flat, weight's dtype) into this rank's part of weight and master; unchanged
        elements of the master keep their bits.
        """
        self.guard.before_write()
        rank = self.comm_ctx.comm.rank
        low, high = self.layout.bounds(rank)
        old = self.weight.shard(rank)
        mine = full[low:high].to(old.device)
        if self.master is not None and not self.plan.master_is_weight:
            whole = self.master.placement is R
            before = self.weight.storage if whole else old
            after = full if whole else mine
            self.master.take_changed(before != after, after)
        if self.is_sharded:
            self.weight.write(0, mine.numel()).copy_(mine)
        elif full.data_ptr() != self.weight.storage.data_ptr():
            self.weight.write(0, full.numel()).copy_(full)

    # -- what handles ask (sharding/sharded_parameter.py, Owner)

    def fetch_for(self, param: nn.Parameter) -> bool:
        runtime = self.runtime()
        return runtime is not None and bool(runtime.fetch(self))

    def name_of(self, param: nn.Parameter) -> str:
        return self.members[self.index[id(param)]].name

    def write_param(self, param: nn.Parameter, value: Tensor) -> None:
        """Write this rank's part of a whole new value into weight and master. Every rank must do it."""
        if self.weight.common is not None:  # others may still be reading the old one
            self.comm_ctx.comm.barrier(f"writing {self.name_of(param)}")
        slot, rank = self.members[self.index[id(param)]].slot, self.comm_ctx.comm.rank
        flat = value.detach().to(self.comm_ctx.pool.device).expand(slot.shape).reshape(-1)
        start, stop, weight = self.weight.local_part(slot, rank)
        cast_master(flat[start:stop].float() if flat.is_floating_point() else flat[start:stop], weight)
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


def complete(full: Tensor, group: ParamGroup, slot: Slot, what: str) -> None:
    """Complete a parameter-sized flat tensor whose owned part each rank has filled in.  Collective."""
    comm = group.comm_ctx.comm
    if comm.size == 1:
        return
    parts: list[Any] = []
    for rank in range(comm.size):
        start, stop = group.layout.owned(slot, rank)
        parts.append(full[start - slot.start : max(start, stop) - slot.start])
    comm.exchange([parts[comm.rank]] * comm.size, parts, "gather", what).wait()


def build_group(planned: GroupPlan, params: Mapping[str, nn.Parameter], comm_ctx: CommContext) -> ParamGroup:
    """Build a group as planned, from whole parameters by full name.  Collective."""
    members = [ParamInfo(params[slot.name], slot, type(params[slot.name])) for slot in planned.layout.slots]
    return ParamGroup(members, planned, comm_ctx)


def gathers_a_copy(group: ParamGroup) -> bool:
    """Return whether a gather brings the weight into a lent buffer; else it is used in the memory it lies in."""
    return group.weight.common is None and (group.comm_ctx.comm.size > 1 or group.weight.extent is not None)


def weight_shard(weight: FlatBuffer, plan: ShardPlan, rank: int) -> FlatBuffer:
    """Return the part of a weight whose values this rank's master has."""
    if plan.master is None or plan.master.placement is plan.weight.placement:
        return weight
    return FlatBuffer(weight.layout, replace(plan.weight, placement=S), weight.shard(rank), guard=weight.guard)


def build_master(weight: FlatBuffer, plan: ShardPlan, comm_ctx: CommContext) -> MasterWeight | None:
    """Return an empty master beside a weight, or on it; None if nothing is trained."""
    if plan.master is None or plan.moments is None:
        return None
    layout, rank = weight.layout, comm_ctx.comm.rank
    home = comm_ctx.pool.device if plan.moments.tier is Tier.DEVICE else CPU
    beneath = weight_shard(weight, plan, rank)
    if plan.master_is_weight:
        buffer = FlatBuffer(layout, plan.master, beneath.memory, extent=beneath.extent, guard=weight.guard)
        return MasterWeight(buffer, rank, plan.moments.dtype, update_device=home, copy_engine=comm_ctx.copy_engine)
    buffer = FlatBuffer.allocate(layout, plan.master, comm_ctx, f"the master of {layout.slots[0].name}")
    buffer.guard = weight.guard
    exposed = plan.weight.placement is not S or comm_ctx.comm.size == 1
    return MasterWeight(
        buffer, rank, plan.moments.dtype, beneath, plan.master_is_split, exposed, home, comm_ctx.copy_engine
    )


def offloaded_extents(group: ParamGroup) -> list[Extent]:
    """Return the extents of weight, master and gradients that are offloaded."""
    buffers = [buffer for buffer in (group.weight, group.gradient.buffer) if buffer is not None]
    found = [buffer.extent for buffer in buffers if buffer.extent is not None]
    found += group.gradient.delayed.extents
    return found + (group.master.extents() if group.master is not None else [])


def set_placeholders(members: Sequence[ParamInfo], placeholder: Tensor) -> None:
    """Expand the placeholder to each member's shape: the data of a sharded parameter."""
    for member in members:
        member.placeholder = placeholder.expand(member.slot.shape)


def broadcast_from_first(full: FlatBuffer, comm: Comm, what: str, *, only_own: bool) -> None:
    """Write rank 0's values of a whole buffer to every rank; `only_own`: each rank's slice alone. Collective."""
    slices = [full.shard(rank) for rank in range(comm.size)]
    scatter(comm, slices, slices[comm.rank], what)
    if not only_own:
        comm.all_gather(full.storage, "gather", what).wait()
