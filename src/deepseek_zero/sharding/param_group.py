"""The parameters of one unit that share a row of the plan, as one flat weight."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..base.device import without_torch_function
from ..base.memory import HEAP
from ..comm.pending import DONE, Pending
from ..planner.spec import R, S
from ..planner.units import GroupPlan
from ..tiers.tier import Storage
from .accessible_group import AccessibleGroup
from .buffer import FlatBuffer, PendingUpdate
from .comm_context import CommContext
from .grad_reduction import GradReduction
from .grad_sum import GradSum
from .grad_view import GradView
from .gradient import Gradient
from .group import Group
from .param_info import ParamInfo
from .weight_gather import WeightGather


@dataclass(frozen=True)
class GroupParts:
    """Functions that create the objects with which parameter groups communicate, and a check.

    Attributes:
        comm_ctx: The communicator of the shard group, with buffer pool, settings and route.
        context_of: A function that returns the context of a group from its plan.
        weight_gather: A function that returns the `WeightGather` of a group, from the group and the
            name of its weight. Collective: every rank must call it.
        reduction: A function that returns the `GradReduction` of a group.
        kept_gradients: A function that returns the gradients that are kept in addition to a group's
            gradient, by name.
        lost_at_reshard: A function that returns an error if a reshard would lose values that the
            program has written to parameters or their gathered buffer, else None.
    """

    comm_ctx: CommContext
    context_of: Callable[[GroupPlan], CommContext]
    weight_gather: Callable[[Group, str], WeightGather]
    reduction: Callable[[ParamGroup], GradReduction]
    kept_gradients: Callable[[Gradient], Mapping[str, GradSum]]
    lost_at_reshard: Callable[[Sequence[ParamInfo], FlatBuffer], Exception | None]


class ParamGroup(AccessibleGroup):
    """A group of parameters, whose weight is gathered and released, with its gradient.

    Attributes:
        parts: Functions that create the objects that gather the weight and reduce the gradient.
        gradient: The gradient of the group.
        grad_view: Sets the `.grad` of the parameters.
        weight_gather: How the weight is gathered.
        unsharded: The gathered weight; None while the weight is sharded.
        placeholder: One element, expanded to the shape of a parameter as its data while sharded.
        is_idle: Whether every parameter was frozen after wrapping, so that nothing is reduced.
        is_in_block: Whether the weight stays unsharded until a `GatheredParameters` block ends.
        runtime: A weak reference to the runtime that drives the group.
        optimizer: A weak reference to the optimizer that updates the group.
    """

    def __init__(
        self,
        members: Sequence[ParamInfo],
        planned: GroupPlan,
        comm_ctx: CommContext,
        parts: GroupParts,
    ) -> None:
        super().__init__(members, planned, comm_ctx)
        self.parts = parts
        self.new_gradient()
        self.weight_gather: WeightGather
        self.unsharded: FlatBuffer | None = None
        self.is_idle = False
        self.is_in_block = False
        self.runtime: Callable[[], Any] = lambda: None
        self.optimizer: Callable[[], Any] = lambda: None
        dtype = planned.plan.weight.dtype
        nothing = float("nan") if dtype.is_floating_point else 0
        self.placeholder = torch.full((), nothing, dtype=dtype, device=comm_ctx.pool.device)

    def new_gradient(self) -> None:
        """Replace the gradient by an empty one that follows the current plan."""
        self.gradient = Gradient(self, self.parts.reduction(self))
        self.gradient.kept = self.parts.kept_gradients(self.gradient)
        self.grad_view = GradView(self.gradient)

    def restrict_norm(self, updated: Collection[int]) -> None:
        """Restrict the gradient norm to parameters with these ids. Every rank must call it."""
        numbers = frozenset(
            number for number, member in enumerate(self.members) if id(member.param) not in updated
        )
        if numbers != self.not_updated:
            self.not_updated = numbers
            self.gradient.sum.known_squares = None

    def offloaded(self) -> list[Storage]:
        """Return the storages of the group's states that are not on the training device."""
        buffers = [self.weight, *self.gradient.buffers()]
        found = [buffer.storage for buffer in buffers if not buffer.storage.on_device]
        return found + (self.master.offloaded() if self.master is not None else [])

    def set_pending(self, update: PendingUpdate | None) -> None:
        """Set the update that must run before any read of the group's states, or None."""
        self.guard.pending = update
        self.gradient.sum.guard.pending = update

    # -- weights

    def gather(self, what: str) -> Pending:
        """Start to all-gather the weight into `unsharded`, in the weight's dtype.

        A pending update runs first.

        Args:
            what: The name of the unit, used in error messages.

        Returns:
            A handle; call `point_to_unsharded` after ``wait()``, which raises `PeerError` if
            another rank failed and `StorageError` if a disk failed.

        Note:
            Collective: every rank of the shard group must call it in the same order.
        """
        if not self.is_sharded or self.unsharded is not None or self.is_in_block:
            return DONE
        if self.guard.pending is not None:
            # Keep the updated weight in memory until it has been gathered.
            self.weight.storage.keep_until_evict()
            self.guard.pending.flush_group(self)
        self.unsharded = self.weight_gather.lend()
        return self.weight_gather.gather(self.unsharded, what)

    def point_to_unsharded(self) -> None:
        """Make every parameter a view of the gathered buffer."""
        if self.unsharded is None:
            return
        gather = self.weight_gather
        views = gather.views or [self.unsharded.view(member.slot) for member in self.members]
        if not gather.makes_copies:
            gather.views = views
        for member, view in zip(self.members, views, strict=True):
            member.unshard(view)

    def show_own(self) -> None:
        """Make every parameter sharded, or a view of the weight if it is replicated."""
        for member in self.members:
            if self.is_sharded:
                member.reshard()
            else:
                member.unshard(self.weight.view(member.slot))

    def reshard(self) -> None:
        """Shard every parameter and return the gathered buffer to the pool.

        Raises:
            UsageError: The program replaced the memory of a parameter while it was gathered, and
                changed its values.
        """
        full = self.unsharded
        if full is None:
            return
        with without_torch_function():
            error = None
            if not self.is_in_block:
                error = self.parts.lost_at_reshard(self.members, full)
            for member in self.members:
                member.reshard()
        self.unsharded = None
        self.weight_gather.give_back(full)
        if self.weight.storage.is_offloaded:
            HEAP.trim()  # return the holes that the unit's gradients left
        if error is not None:
            raise error

    def refresh(self, what: str, *, is_update: bool = False) -> Pending:
        """Start to update the replicated weight from the sharded main weight.

        At ZeRO stages 1 and 2 it starts an all-gather, at other stages it does nothing.

        Args:
            what: The name of the unit, used in error messages.
            is_update: Whether an optimizer step has changed the main weight; False if a program
                wrote it.

        Note:
            Collective: every rank of the shard group must call it.
        """
        if (
            self.master is None
            or self.plan.weight.placement is not R
            or self.master.placement is not S
        ):
            return DONE
        return self.weight_gather.refresh(what, is_update=is_update)
