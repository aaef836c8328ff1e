"""The `.grad` that a program sees; grad_edits.py implements its operations."""

from __future__ import annotations

import weakref

from ..base.device import without_torch_function
from .grad_edits import GradEdits
from .gradient import Gradient
from .param_info import ParamInfo
from .sharded_gradient import ShardedGradient


class GradView:
    """Sets the `.grad` of every parameter of one group to a `ShardedGradient` or None.

    A `ShardedGradient` is a handle with the parameter's shape and no elements. Its operations call
    `edits`, which read and change this rank's part of the reduced gradient.
    """

    def __init__(self, gradient: Gradient) -> None:
        self.gradient = gradient
        self.group = gradient.group
        self._handles: list[ShardedGradient] = []
        self.edits = GradEdits(gradient, self._handles)

    def show(self, *, joined: bool = True) -> None:
        """Set `.grad` of every parameter that has a gradient.

        As in PyTorch, a frozen parameter has a gradient only if one arrived before it was frozen.

        Args:
            joined: Whether this rank has run the backward; False if it skipped it.
        """
        gradient = self.gradient
        members = self.group.members
        gradient.is_shown = True
        if not self._handles:
            self._handles += [_handle_of(member) for member in members]
        is_first = gradient.sum.absent is None
        absent = gradient.sum.absent or set()
        gradient.sum.absent = absent
        with without_torch_function():
            for number, (member, handle) in enumerate(zip(members, self._handles, strict=True)):
                if not member.param.requires_grad:
                    if is_first:
                        absent.add(number)
                elif joined and absent:
                    absent.discard(number)
                member.param.grad = None if number in absent else handle

    def hide(self) -> None:
        """Set every `.grad` to None before a backward, because autograd would add to it."""
        self.take_assigned()
        self.gradient.clear_shown()

    def take_assigned(self) -> None:
        """Copy values that the program assigned to `.grad` into the reduced gradient."""
        with without_torch_function():
            values = [member.param.grad for member in self.group.members]
        shown = self._handles if self.gradient.is_shown else [None] * len(values)
        for number, (value, handle) in enumerate(zip(values, shown, strict=True)):
            if value is handle:
                continue
            if value is None:
                self.edits.remove(number)
            else:
                self.edits.assign(number, value)


def _handle_of(member: ParamInfo) -> ShardedGradient:
    """Return the tensor that a program gets as `.grad` of a parameter."""
    handle = member.placeholder.as_subclass(ShardedGradient)
    handle.__dict__["param"] = weakref.ref(member.param)
    return handle
