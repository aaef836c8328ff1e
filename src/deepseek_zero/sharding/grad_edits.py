"""Operations with which a program reads and changes the gradients of one group."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from ..base.device import without_torch_function
from ..base.errors import AtRestError, UsageError
from ..base.log import log_once
from ..comm.pending import DONE, Pending
from ..planner.layout import Slot
from .grad_sum import GradState, GradSum
from .gradient import Gradient
from .group import Group
from .param_ranges import local_range, owned_range, owned_view
from .sharded_gradient import Part, ShardedGradient, own_part_of


class GradEdits:
    """Implements the operations of a program on the `.grad` of one parameter group.

    `ShardedGradient`, the class of `.grad`, calls these methods. Parameters are identified by their
    index in the group.

    Args:
        gradient: The gradient of the group, which these methods read and change.
        handles: The tensors that are set as `.grad`, one for each parameter.

    Attributes:
        gradient: The gradient of the group, which these methods read and change.
        group: The parameter group to which the gradient belongs.
        handles: The tensors that are set as `.grad`, one for each parameter; empty before the first
            backward.
    """

    def __init__(self, gradient: Gradient, handles: Sequence[ShardedGradient]) -> None:
        self.gradient = gradient
        self.group = gradient.group
        self.handles = handles

    def part_of(self, number: int) -> Part:
        """Return this rank's writable part of a parameter's gradient.

        A gradient of zeros is created if the parameter has none. Between the micro-batches of a
        step, the result is the gradient that this rank has computed, if that is not reduced yet.
        """
        summand = self.gradient.summand
        if summand.buffer is not None and summand.buffer is self.gradient.sum.buffer:
            return Part(summand.values(number), 0, is_whole=True)
        self._ensure_sum()
        slot = self.group.members[number].slot
        values = own_part(self.gradient.sum, slot)
        if self.group.plan.sums_to_all:
            return Part(values, 0, is_whole=True)
        low = self.group.layout.owned(slot, self.group.comm_ctx.comm.rank)[0] - slot.start
        return Part(values, low, is_whole=False)

    def remove(self, number: int) -> None:
        """Set a parameter's gradient to None, so that the step does not update the parameter."""
        total = self.gradient.sum
        if total.absent is not None and number not in total.absent:
            self.part_of(number).values.zero_()
            self._changed(number)
            total.absent.add(number)

    def assign(self, number: int, value: Tensor) -> None:
        """Replace a parameter's gradient by a value that the program assigned to `.grad`.

        Args:
            number: The index of the parameter in the group.
            value: A whole tensor, of which each rank copies its part, or a sharded gradient of the
                same parameter.

        Raises:
            UsageError: The value is the gradient of another parameter, or has another size.
        """
        part = self.part_of(number)
        member = self.group.members[number]
        if isinstance(value, ShardedGradient):
            theirs, own = own_part_of(value)
            if theirs is not member.param:
                raise UsageError(
                    f"the gradient of '{member.name}' was set to the sharded gradient of another "
                    "parameter.",
                    "Ranks hold different elements of the two.",
                    "assign a whole tensor: `other.grad.full_tensor()`, taken on all ranks.",
                )
            mine = self.shown_part(member.param).values if own is None else own.values
        else:
            flat = (value.to_dense() if value.is_sparse else value).detach().reshape(-1)
            mine = flat[part.start : part.start + part.values.numel()]
        self.assign_shard(number, mine)

    def assign_shard(self, number: int, mine: Tensor) -> None:
        """Replace this rank's part of a parameter's gradient.

        Args:
            number: The index of the parameter in the group.
            mine: The new values, flat.

        Raises:
            UsageError: The number of elements is wrong, or only some ranks' gradients are summed.
        """
        gradient = self.gradient
        part = self.part_of(number)
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
        gradient.is_edited = True
        if gradient.sum.absent is not None:
            gradient.sum.absent.discard(number)
        if self.gradient.is_shown:
            with without_torch_function():
                self.group.members[number].param.grad = self.handles[number]

    def shown_part(self, param: nn.Parameter) -> Part:
        """Return this rank's part of the gradient to which a `ShardedGradient` refers.

        Raises:
            AtRestError: A step has used the gradient, or the next backward has begun.
        """
        number = self.group.index[id(param)]
        if not self.gradient.is_shown:
            raise AtRestError(
                f"the gradient of '{self.group.members[number].name}' is over.",
                "It was seen before, and a step has used it or the next backward has begun.",
                "take `param.grad` anew after each backward; keep a copy with `grad.clone()`.",
            )
        return self.part_of(number)

    def weight_part(self, param: nn.Parameter, part: Part) -> Tensor:
        """Return a flat view of the weight at the elements of this rank's part of the gradient.

        Args:
            param: A parameter of the group.
            part: This rank's part of the gradient.
        """
        slot = self.group.members[self.group.index[id(param)]].slot
        start, _, place = local_range(self.group.weight, slot, self.group.comm_ctx.comm.rank)
        low = place + part.start - start
        return self.group.weight.write(low, low + part.values.numel())

    def edited(self, param: nn.Parameter, *, alike: bool) -> None:
        """Record that this rank's part of a gradient was changed in place.

        Args:
            param: The parameter whose gradient has changed.
            alike: Whether the change is the same on all ranks.
        """
        number = self.group.index[id(param)]
        self._refuse_partial_sum(self.group.members[number].name)
        self._changed(number)
        if not alike:
            self.gradient.is_edited = True

    def norm(self, param: nn.Parameter, part: Part, order: float) -> Tensor:
        """Return the norm of a parameter's gradient, an fp32 scalar.

        Args:
            param: A parameter of the group.
            part: This rank's part of the gradient.
            order: The order of the norm, as for `torch.linalg.vector_norm`.

        Note:
            Collective unless every rank has all elements (`Part.is_whole`). It is also collective
            for a parameter that is split along "tp".
        """
        own = part.values.double().abs()
        mine, together = norm_summand(own, order)
        comms = [] if part.is_whole else [self.group.comm_ctx.comm]
        along = self.group.comm_ctx.world.along
        if "pp" in along:
            _warn_of_stages()
        key = self.group.planned.key
        if key is not None and key.split == "split":
            comms.append(along["tp"])
            if not key.is_counted and together is torch.sum:
                mine = torch.zeros_like(mine)  # another rank adds the same elements
        name = self.group.members[self.group.index[id(param)]].name
        for comm in comms:
            rows = comm.all_gather_rows(mine.cpu().reshape(1), f"norm of {name}")
            mine = together(rows)
        if order not in (0.0, float("inf"), -float("inf")):
            mine = mine.pow(1.0 / order)
        return mine.to(own.device, torch.float32)

    def whole(self, param: nn.Parameter, part: Part) -> Tensor:
        """Return all elements of a gradient, in the parameter's shape.

        Args:
            param: A parameter of the group.
            part: This rank's part of the gradient.

        Note:
            Collective unless every rank has all elements (`Part.is_whole`).
        """
        slot = self.group.members[self.group.index[id(param)]].slot
        device = self.group.comm_ctx.pool.device
        full = torch.empty(slot.numel, dtype=part.values.dtype, device=device)
        full[part.start : part.start + part.values.numel()].copy_(part.values)
        if not part.is_whole:
            complete(full, self.group, slot, f"gradient of {slot.name}")
        return full.view(slot.shape)

    def equalise(self, what: str) -> Pending:
        """Copy an edited gradient from one rank to all ranks that hold the same elements.

        Args:
            what: The name of the gradient, used in error messages.

        Returns:
            A handle. The gradient may be read after its `wait()` has returned.

        Note:
            Collective: every rank must call it.
        """
        is_whole = self.group.plan.sums_to_all
        if self.gradient.reduction.sums_all and not is_whole:
            return DONE
        self._ensure_sum()
        self.gradient.reduction.copy_from_first(
            self.gradient.sum.own(), f"changed gradients of {what}"
        )
        self.gradient.sum.known_squares = None
        if not is_whole:
            return DONE
        comm_ctx = self.group.comm_ctx
        memory = self.gradient.sum.ensure().memory
        return comm_ctx.route.all_gather(memory, "reduce", comm_ctx, what)

    def _ensure_sum(self) -> None:
        """Create a reduced gradient of zeros if no backward has produced one."""
        self.gradient.flush_held()
        if not self.gradient.sum.is_full:
            self.gradient.sum.own().zero_()
            self.gradient.sum.enter(GradState.REDUCED)
            self.gradient.sum.known_squares = None

    def _changed(self, number: int) -> None:
        """Record that a parameter's gradient was written, and store it again if it is offloaded."""
        total = self.gradient.sum
        total.known_squares = None
        if total.buffer is not None and total.buffer.storage.is_offloaded:
            slot = self.group.members[number].slot
            place, end = owned_range(total.buffer, slot, self.group.comm_ctx.comm.rank)
            total.buffer.storage.evict(place, end)

    def _refuse_partial_sum(self, name: str) -> None:
        """Raise `UsageError` while only some ranks' gradients are summed.

        A change would be added once for each of these sums.
        """
        if self.gradient.sum.state is GradState.INCOMPLETE:
            raise UsageError(
                f"the gradient of '{name}' was changed between the micro-batches of a step, on a "
                "mesh with replicas.",
                "Until the last backward of a step each replica has its own sum, to which a change "
                "would be added.",
                "change `.grad` after the last backward of the step.",
            )


def is_reduced(total: GradSum, number: int) -> bool:
    """Return whether a parameter has a reduced gradient of the current step.

    Args:
        total: The reduced gradient of the parameter's group.
        number: The index of the parameter in the group.
    """
    return total.is_reduced and number not in (total.absent or ())


def own_part(total: GradSum, slot: Slot) -> Tensor:
    """Return a flat, writable view of this rank's part of one parameter's reduced gradient.

    Args:
        total: The reduced gradient of the parameter's group.
        slot: The position of the parameter in the flat buffer.
    """
    assert total.buffer is not None
    total.known_squares = None  # the caller may change it
    if total.group.plan.sums_to_all:
        return total.buffer.memory[slot.start : slot.stop]
    return owned_view(total.buffer, slot, total.group.comm_ctx.comm.rank)


@cache
def _warn_of_stages() -> None:
    """Warn once per process that each stage of a pipeline computes norms of its own."""
    log_once(
        "the program computes norms of gradients, but each rank has only the parameters of its "
        "pipeline stages: clip_grad_norm_ clips each stage by its own norm.\n"
        "  What to do: set gradient_clipping, which uses the norm of all stages.",
        logging.WARNING,
    )


def norm_summand(own: Tensor, order: float) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return this rank's contribution to a norm over all ranks.

    Args:
        own: The absolute values of this rank's elements, in float64.
        order: The order of the norm.

    Returns:
        The contribution, and a function that computes the norm from the contributions of all ranks.
    """
    if order == float("inf"):
        return own.max() if own.numel() else own.new_zeros(()), torch.max
    if order == -float("inf"):
        return own.min() if own.numel() else own.new_full((), float("inf")), torch.min
    return (own != 0).double().sum() if order == 0.0 else own.pow(order).sum(), torch.sum


def complete(full: Tensor, group: Group, slot: Slot, what: str) -> None:
    """All-gather a flat tensor of which each rank has only its own part.

    Args:
        full: All elements of one parameter; the other ranks' parts are written.
        group: The parameter group to which the parameter belongs.
        slot: The position of the parameter in the layout.
        what: The name of the tensor, used in error messages.

    Note:
        Collective: every rank of the shard group must call it.
    """
    comm = group.comm_ctx.comm
    if comm.size == 1:
        return
    parts = []
    for rank in range(comm.size):
        start, stop = group.layout.owned(slot, rank)
        parts.append(full[start - slot.start : max(start, stop) - slot.start])
    boxes: list[Tensor | None] = [*parts]
    comm.exchange([parts[comm.rank]] * comm.size, boxes, "gather", what).wait()
