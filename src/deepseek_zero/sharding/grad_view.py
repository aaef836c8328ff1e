"""What a program sees as `.grad`, and what it sets there."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..base.device import without_torch_function
from ..base.errors import AtRestError, UsageError
from .grad_norm import norm_summand
from .grad_sum import GradState
from .gradient import Gradient
from .group import complete
from .sharded_gradient import Part, ShardedGradient, own_part_of, sharded_gradient


class GradView:
    """The `.grad` of every parameter of one group: a `ShardedGradient`, or None.

    Indices are those of the group's members.
    """

    def __init__(self, gradient: Gradient) -> None:
        self.gradient = gradient
        self.group = gradient.group
        self._handles: list[ShardedGradient] = []

    def show(self, *, joined: bool = True) -> None:
        """Set `.grad` of every member that has a gradient.

        A frozen member has none unless one came before it was frozen, as in PyTorch.

        Args:
            joined: This rank has run the backward; False if it skipped it.
        """
        self.gradient.is_shown = True
        if not self._handles:
            self._handles = [
                sharded_gradient(member.param, member.placeholder) for member in self.group.members
            ]
        gradient = self.gradient
        is_first = gradient.sum.absent is None
        absent = gradient.sum.absent = set() if gradient.sum.absent is None else gradient.sum.absent
        with without_torch_function():
            for number, (member, handle) in enumerate(
                zip(self.group.members, self._handles, strict=True)
            ):
                if not member.param.requires_grad:
                    if is_first:
                        absent.add(number)
                elif joined and absent:
                    absent.discard(number)
                member.param.grad = None if absent and number in absent else handle

    def hide(self) -> None:
        """Set every `.grad` to None before a backward, because autograd would add to it."""
        self.take_assigned()
        self.gradient.clear_shown()

    def take_assigned(self) -> None:
        """Take over the values that the program has assigned to `.grad`. Local."""
        gradient = self.gradient
        members = self.group.members
        shown = self._handles if self.gradient.is_shown else [None] * len(members)
        assigned: list[tuple[int, Tensor | None]] = []
        with without_torch_function():
            for number, (member, handle) in enumerate(zip(members, shown, strict=True)):
                found = member.param.grad
                if found is not handle:
                    assigned.append((number, found))
        for number, value in assigned:
            if value is not None:
                self.assign(number, value)
            elif gradient.sum.absent is not None and number not in gradient.sum.absent:
                gradient.part_of(number).values.zero_()
                gradient.sum.changed(number)
                gradient.sum.absent.add(number)

    def assign(self, number: int, value: Tensor) -> None:
        """Set a member's gradient.

        Args:
            number: The index of the member.
            value: A whole tensor, of which each rank takes its part, or the member's own handle.

        Raises:
            UsageError: The value is another parameter's handle, or has another size.
        """
        part = self.gradient.part_of(number)
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
        """Set this rank's part of a member's gradient, flat."""
        gradient = self.gradient
        part = gradient.part_of(number)
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
        gradient.sum.changed(number)
        gradient.is_edited = True
        if gradient.sum.absent is not None:
            gradient.sum.absent.discard(number)
        if self.gradient.is_shown:
            with without_torch_function():
                self.group.members[number].param.grad = self._handles[number]

    # -- what handles ask (sharded_gradient.py, ShownGradients)

    def shown_part(self, param: nn.Parameter) -> Part:
        """Return this rank's part of the gradient that a handle shows.

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
        return self.gradient.part_of(number)

    def weight_part(self, param: nn.Parameter, part: Part) -> Tensor:
        """Return the elements of the weight at the places of a part."""
        slot = self.group.members[self.group.index[id(param)]].slot
        start, _, place = self.group.weight.local_range(slot, self.group.comm_ctx.comm.rank)
        low = place + part.start - start
        return self.group.weight.write(low, low + part.values.numel())

    def edited(self, param: nn.Parameter, *, alike: bool) -> None:
        """Note that a handle's part was changed in place.

        Args:
            param: The parameter.
            alike: The change is the same on all ranks.
        """
        number = self.group.index[id(param)]
        self._refuse_partial_sum(self.group.members[number].name)
        self.gradient.sum.changed(number)
        if not alike:
            self.gradient.is_edited = True

    def norm(self, param: nn.Parameter, part: Part, order: float) -> Tensor:
        """Return the norm of a member's gradient. Collective unless the part is whole."""
        own = part.values.double().abs()
        mine, together = norm_summand(own, order)
        if not part.is_whole:
            name = self.group.members[self.group.index[id(param)]].name
            comm = self.group.comm_ctx.comm
            rows = comm.all_gather_rows(mine.cpu().reshape(1), f"norm of {name}")
            mine = together(rows)
        if order not in (0.0, float("inf"), -float("inf")):
            mine = mine.pow(1.0 / order)
        return mine.to(own.device, torch.float32)

    def whole(self, param: nn.Parameter, part: Part) -> Tensor:
        """Return all elements of a part, in the parameter's shape. Collective unless the part is
        whole.
        """
        slot = self.group.members[self.group.index[id(param)]].slot
        device = self.group.comm_ctx.pool.device
        full = torch.empty(slot.numel, dtype=part.values.dtype, device=device)
        full[part.start : part.start + part.values.numel()].copy_(part.values)
        if not part.is_whole:
            complete(full, self.group, slot, f"gradient of {slot.name}")
        return full.view(slot.shape)

    def _refuse_partial_sum(self, name: str) -> None:
        """Raise `UsageError` while only some ranks' gradients are summed: a change would be added
        once for each of these sums.
        """
        if self.gradient.sum.state is GradState.PARTIAL:
            raise UsageError(
                f"the gradient of '{name}' was changed between the micro-batches of a step, on a "
                "mesh with replicas.",
                "Until the last backward of a step each replica has its own sum, to which a change "
                "would be added.",
                "change `.grad` after the last backward of the step.",
            )
