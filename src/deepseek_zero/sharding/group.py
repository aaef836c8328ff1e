"""The parameters of one unit that share a plan, and their flat buffers: weight, gradient, master.

Owns storage and its movements; knows nothing of hooks or order (runtime.py) nor of optimizers (optim/sharded.py), which work on
the slices it shows them.  Called by unit.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..base.device import without_torch_function
from ..comm.collectives import DONE, Pending
from ..precision.policy import cast_master
from .buffer import FlatBuffer, Route, move
from .handle import put_to_rest, set_owner, show_grad, wake
from .layout import LAYOUTS, FlatLayout, Slot
from .placement import P, R, S
from .plan import ShardPlan


@dataclass(eq=False)
class Member:
    """One parameter of a group.  `kind` is the class it had before wrapping and has in use."""

    param: nn.Parameter
    slot: Slot
    kind: type[nn.Parameter]
    built_dtype: torch.dtype

    @property
    def name(self) -> str:
        return self.slot.name


@dataclass
class GradState:
    """What of the gradient has arrived since the last step."""

    collected: set[int] = field(default_factory=set)  # indices of members that are in `partial`
    reduced: bool = False  # `grad` holds a reduced sum
    partial: FlatBuffer | None = None  # this rank's summand while a backward is under way
    carry: Tensor | None = None  # an earlier reduced sum of the same step, to be added (undeclared accumulation)


class FlatGroup:
    """Flat buffers of parameters with one plan.  Building one is collective: rank 0's values win."""

    def __init__(self, members: Sequence[Member], plan: ShardPlan, route: Route) -> None:
        self.members, self.plan, self.route = list(members), plan, route
        self.layout = FlatLayout((), 0, route.comm.size)
        self.index = {id(member.param): number for number, member in enumerate(self.members)}
        self.grad_state = GradState()
        self.weight: FlatBuffer
        self.master: FlatBuffer | None = None
        self.grad: FlatBuffer | None = None
        self.full: FlatBuffer | None = None
        self.reduce_dtype: torch.dtype | None = None
        self.predivide = 1.0
        self._grads_shown = False
        self.runtime: Callable[[], Any] = lambda: None  # weak: set by the runtime that drives this group
        self.placeholder = torch.full((), float("nan"), dtype=plan.weight.dtype, device=route.pool.device)
        if not plan.weight.dtype.is_floating_point:
            self.placeholder.zero_()
        self.build("element")

    # -- building -------------------------------------------------------------------------------------------------------

    @property
    def is_sharded(self) -> bool:
        """Whether the weight must be gathered before use."""
        return self.plan.weight.placement is S

    @property
    def trainable(self) -> bool:
        return self.plan.grad is not None

    def build(self, granularity: str) -> None:
        """Lay the members out, take rank 0's values, and set every parameter to its rest state.  Collective."""
        names = [member.name for member in self.members]
        with without_torch_function():
            shapes = [tuple(member.param.shape) for member in self.members]
        self.layout = LAYOUTS[granularity](names, shapes, self.route.comm.size)
        self.members = [replace(member, slot=slot) for member, slot in zip(self.members, self.layout.slots, strict=True)]
        device, comm = self.route.pool.device, self.route.comm
        built = self.plan.master.dtype if self.plan.master is not None else self.plan.weight.dtype
        full = FlatBuffer(self.layout, replace(self.plan.weight, placement=R, dtype=built), self._packed(built))
        scatter_values(full, self.route, names)
        self.weight = FlatBuffer.empty(self.layout, self.plan.weight, device)
        whole = self.plan.weight.placement is R
        cast_master(full.storage if whole else full.slice(comm.rank), self.weight.storage)
        self._build_states(full)
        for member in self.members:
            set_owner(member.param, self)
            if self.is_sharded:
                put_to_rest(member.param, self.placeholder)
            else:
                wake(member.param, member.kind, self.weight.view(member.slot))

    def relay(self, granularity: str, what: str) -> None:
        """Cut the group anew, keeping the bits of weight and master.  Collective; gradients are dropped."""
        source = self.master if self.master is not None else self.weight
        full = FlatBuffer(self.layout, replace(source.spec, placement=R), torch.empty(0))
        full.storage = torch.empty(self.layout.padded_numel, dtype=source.spec.dtype, device=self.route.pool.device)
        if source.spec.placement is S:
            move(source, full, self.route, what).wait()
        else:
            full.storage.copy_(source.storage)
        for member in self.members:
            wake(member.param, member.kind, full.view(member.slot))
        self.grad, self.grad_state = None, GradState()
        self.build(granularity)

    def _packed(self, dtype: torch.dtype) -> Tensor:
        """This rank's own values, flat; each original is dropped as it is copied, so that two never stand side by side."""
        flat = torch.zeros(self.layout.padded_numel, dtype=dtype, device=self.route.pool.device)
        for member in self.members:
            source = member.param.data
            if not source.is_meta:
                flat[member.slot.start : member.slot.stop].copy_(source.reshape(-1))
        return flat

    def _build_states(self, full: FlatBuffer) -> None:
        plan, device, rank = self.plan, self.route.pool.device, self.route.comm.rank
        if plan.master is None or plan.grad is None:
            return
        if plan.master_is_weight:
            whole = plan.master.placement is R or plan.weight.placement is S
            self.master = FlatBuffer(self.layout, plan.master, self.weight.storage if whole else self.weight.slice(rank))
        else:
            self.master = FlatBuffer.empty(self.layout, plan.master, device)
            self.master.storage.copy_(full.storage if plan.master.placement is R else full.slice(rank))
        self.grad = None

    # -- weights --------------------------------------------------------------------------------------------------------

    def gather(self, what: str) -> Pending:
        """Start bringing the whole weight here; `show` makes it visible after the wait."""
        if not self.is_sharded or self.full is not None:
            return DONE
        spec = replace(self.plan.weight, placement=R)
        if self.route.comm.size == 1:
            self.full = FlatBuffer(self.layout, spec, self.weight.storage)
            return DONE
        storage = self.route.pool.take(self.layout.padded_numel, spec.dtype)
        self.full = FlatBuffer(self.layout, spec, storage)
        return move(self.weight, self.full, self.route, what)

    def show(self) -> None:
        """Point every parameter at the gathered buffer."""
        if self.full is not None:
            for member in self.members:
                wake(member.param, member.kind, self.full.view(member.slot))

    def release(self) -> None:
        """Put every parameter to rest and give the gathered buffer back."""
        if self.full is None:
            return
        for member in self.members:
            with without_torch_function():
                put_to_rest(member.param, self.placeholder)
        full, self.full = self.full, None
        if self.route.comm.size > 1:
            self.route.pool.give(full.storage)

    def refresh(self, what: str) -> Pending:
        """After the optimizer changed the master: cast it into the weight and bring the weight to its placement."""
        plan, rank = self.plan, self.route.comm.rank
        if self.master is None or plan.master is None:
            return DONE
        if not plan.master_is_weight:
            into = self.weight.storage if plan.master.placement is R else self.weight.slice(rank)
            cast_master(self.master.storage, into)
        if plan.weight.placement is R and plan.master.placement is S:
            own = FlatBuffer(self.layout, replace(plan.weight, placement=S), self.weight.slice(rank))
            return move(own, self.weight, self.route, what)
        return DONE

    def store(self, full: Tensor) -> None:
        """Take new whole values (flat, weight dtype): weight, and master where a value changed (unchanged ones keep their bits)."""
        rank = self.route.comm.rank
        low, high = self.layout.bounds(rank)
        old = self.weight.slice(rank)
        if self.master is not None and not self.plan.master_is_weight:
            whole = self.plan.master is not None and self.plan.master.placement is R
            before = self.weight.storage if whole else old
            after = full if whole else full[low:high]
            changed = before != after
            self.master.storage[changed] = after[changed].to(self.master.storage.dtype)
        if self.is_sharded:
            self.weight.storage.copy_(full[low:high])
        elif full.data_ptr() != self.weight.storage.data_ptr():
            self.weight.storage.copy_(full)

    # -- gradients ------------------------------------------------------------------------------------------------------

    def collect(self, param: nn.Parameter) -> bool:
        """Move a finished `.grad` into the flat partial gradient; True when it is the first of this member's backward."""
        number = self.index[id(param)]
        state = self.grad_state
        with without_torch_function():
            grad = param.grad
            param.grad = None
        if grad is None:
            return False
        partial = self._open_partial(grad)
        into = partial.view(self.members[number].slot)
        again = number in state.collected
        if grad.is_sparse:
            grad = grad.to_dense()
        into.add_(grad) if again else into.copy_(grad)
        state.collected.add(number)
        return not again

    def _open_partial(self, grad: Tensor) -> FlatBuffer:
        state, plan = self.grad_state, self.plan
        assert plan.grad is not None
        if state.partial is not None:
            return state.partial
        if plan.grad.placement is P:
            if self.grad is None:
                self.grad = FlatBuffer.empty(self.layout, plan.grad, self.route.pool.device)
            elif state.reduced:  # a second backward nobody announced: keep the first one's sum aside
                state.carry = (self.grad.storage if self._grad_is_whole else self.grad.slice(self.route.comm.rank)).clone()
                state.reduced = False
            state.partial = self.grad
        else:
            dtype = self.reduce_dtype or plan.weight.dtype
            spec = replace(plan.grad, placement=P, dtype=dtype)
            state.partial = FlatBuffer(self.layout, spec, self.route.pool.take(self.layout.padded_numel, dtype))
        return state.partial

    @property
    def _grad_is_whole(self) -> bool:
        return self.plan.master is not None and self.plan.master.placement is R

    def zero_missing(self) -> None:
        """Members without a gradient contribute zeros; so does the padding."""
        state = self.grad_state
        partial = self._open_partial(self.placeholder)
        for number, member in enumerate(self.members):
            if number not in state.collected:
                partial.storage[member.slot.start : member.slot.stop].zero_()
        for low, high in self.layout.gaps():
            partial.storage[low:high].zero_()

    def reduce(self, what: str) -> Pending:
        """Start adding the ranks' partial gradients up into `grad`.  Collective; missing members count as zeros."""
        self.zero_missing()
        state, plan = self.grad_state, self.plan
        assert state.partial is not None and plan.grad is not None
        partial, state.partial, state.collected = state.partial, None, set()
        if self.predivide != 1.0:
            partial.storage.div_(self.predivide)
        if plan.grad.placement is P:
            return self._reduce_in_place(partial, what)
        if self.grad is None:
            self.grad = FlatBuffer.empty(self.layout, plan.grad, self.route.pool.device)
        pending = move(partial, self.grad, self.route, what, add=state.reduced)
        state.reduced = True
        return pending.then(lambda: self.route.pool.give(partial.storage))

    def _reduce_in_place(self, partial: FlatBuffer, what: str) -> Pending:
        """Stages 0 and 1: the sum replaces this rank's slice (then every slice, at stage 0) of the partial gradient."""
        state, rank = self.grad_state, self.route.comm.rank
        travel, lent = partial, None
        if self.reduce_dtype is not None and self.reduce_dtype != partial.spec.dtype:
            lent = self.route.pool.take(self.layout.padded_numel, self.reduce_dtype)
            lent.copy_(partial.storage)
            travel = FlatBuffer(self.layout, replace(partial.spec, dtype=self.reduce_dtype), lent)
        placement = R if self._grad_is_whole else S
        storage = partial.storage if self._grad_is_whole else partial.slice(rank)
        target = FlatBuffer(self.layout, replace(partial.spec, placement=placement), storage)
        pending = move(travel, target, self.route, what)
        state.reduced = True

        def settle() -> None:
            if lent is not None:
                self.route.pool.give(lent)
            if state.carry is not None:
                storage.add_(state.carry)
                state.carry = None

        return pending.then(settle)

    def reduced_grad(self) -> Tensor | None:
        """The reduced gradient of what this rank's master holds, flat: a view; None before a backward."""
        if self.grad is None or not self.grad_state.reduced:
            return None
        return self.grad.storage if self._grad_is_whole else self.grad.slice(self.route.comm.rank)

    def drop_grad(self) -> None:
        """Forget the gradient (zero_grad, a finished or skipped step); its memory stays for the next."""
        state = self.grad_state
        if state.partial is not None and state.partial is not self.grad:
            self.route.pool.give(state.partial.storage)
        self.grad_state = GradState()
        self._grads_shown = False
        for member in self.members:
            with without_torch_function():
                member.param.grad = None

    def show_grads(self) -> None:
        """Let `.grad` of every member show that a reduced gradient exists."""
        self._grads_shown = True
        for member in self.members:
            show_grad(member.param, self.placeholder)

    def hide_grads(self) -> None:
        """Take the shown gradients away before a backward, or autograd would add to them."""
        if not self._grads_shown:
            return
        self._grads_shown = False
        for member in self.members:
            with without_torch_function():
                if member.param.grad is None and self.grad_state.reduced:
                    self._owned_grad(member.slot).zero_()  # somebody's zero_grad(): it must not come back
                member.param.grad = None

    def squares(self) -> list[float]:
        """Sum of squares of each rank's slice that this rank holds, in rank order; 0.0 for the others'."""
        grad = self.reduced_grad()
        sums = [0.0] * self.route.comm.size
        if grad is not None:
            parts = grad.chunk(self.route.comm.size) if self._grad_is_whole else [grad]
            for rank, part in enumerate(parts):
                sums[rank if self._grad_is_whole else self.route.comm.rank] = sum_of_squares(part)
        return sums

    # -- what handles ask (sharding/handle.py, Owner) -----------------------------------------------------------------------

    def fetch_for(self, param: nn.Parameter) -> bool:
        runtime = self.runtime()
        return runtime is not None and bool(runtime.fetch(self))

    def name_of(self, param: nn.Parameter) -> str:
        return self.members[self.index[id(param)]].name

    def write(self, param: nn.Parameter, value: Tensor) -> None:
        """This rank's part of a whole new value, into weight and master; local (every rank must do it)."""
        slot = self.members[self.index[id(param)]].slot
        flat = value.detach().expand(slot.shape).reshape(-1)
        start, stop = self.layout.owned(slot, self.route.comm.rank)
        if start < stop:
            part = flat[start - slot.start : stop - slot.start]
            if self.master is not None and not self.plan.master_is_weight:
                self.master.owned(slot, self.route.comm.rank).copy_(part)
            cast = part.to(self.route.pool.device, torch.float32 if part.is_floating_point() else part.dtype)
            cast_master(cast, self.weight.owned(slot, self.route.comm.rank))

    def grad_norm_of(self, param: nn.Parameter, order: float) -> Tensor:
        """A member's whole gradient norm.  Collective: every rank must ask."""
        slot = self.members[self.index[id(param)]].slot
        own = self._owned_grad(slot)
        if order == float("inf"):
            mine = own.abs().max().double() if own.numel() else torch.zeros((), dtype=torch.float64)
            rows = self.route.comm.rows(mine.cpu().reshape(1), f"norm of {slot.name}")
            return rows.max().float()
        mine = own.double().abs().pow(order).sum().cpu().reshape(1)
        if self._grad_is_whole:
            return mine.pow(1.0 / order).float()[0]
        return self.route.comm.rows(mine, f"norm of {slot.name}").sum().pow(1.0 / order).float()

    def scale_grad_of(self, param: nn.Parameter, factor: Tensor | float) -> None:
        self._owned_grad(self.members[self.index[id(param)]].slot).mul_(factor)

    def _owned_grad(self, slot: Slot) -> Tensor:
        assert self.grad is not None
        return self.grad.view(slot).reshape(-1) if self._grad_is_whole else self.grad.owned(slot, self.route.comm.rank)


def scatter_values(full: FlatBuffer, route: Route, names: Sequence[str]) -> None:
    """Rank 0's values of a whole buffer, to every rank.  Collective."""
    if route.comm.size == 1:
        return
    comm, nothing = route.comm, full.storage[:0]
    what = f"values of {names[0]}" if names else "values"
    slices = [full.slice(rank) for rank in range(comm.size)]
    outgoing = slices if comm.rank == 0 else [nothing] * comm.size
    incoming = [slices[comm.rank] if peer == 0 and comm.rank != 0 else nothing for peer in range(comm.size)]
    comm.exchange(outgoing, incoming, "gather", what).wait()
    comm.all_gather(full.storage, "gather", what).wait()


def sum_of_squares(values: Tensor) -> float:
    """Sum of squares, accumulated in float64 over blocks of 1,024 fp32 products; exact enough that slicing never shows."""
    if not values.numel():
        return 0.0
    blocks = torch.linalg.vector_norm(values.view(-1, 1024), dim=1, dtype=torch.float32)
    total = float(blocks.double().square().sum())
    if total == total and total != float("inf"):
        return total
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2  # fp32 squares overflow from 1e19 on


