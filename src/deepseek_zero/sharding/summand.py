"""This rank's gradient of one group: what backward has collected, and no sum has taken yet."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ..base.device import without_torch_function
from .buffer import FlatBuffer
from .group import Group


class Summand:
    """The gradient that this rank adds to the sum over the ranks. Local.

    Members are named by their index in the group.

    Attributes:
        buffer: The elements of all members; None while nothing is collected.
    """

    def __init__(self, group: Group, allocate: Callable[[], FlatBuffer]) -> None:
        """Args:
        group: The group.
        allocate: Returns the buffer to collect in, with arbitrary contents.
        """
        self.group = group
        self.buffer: FlatBuffer | None = None
        self._allocate = allocate
        self._arrived: set[int] = set()  # the other members' elements are arbitrary

    def open(self) -> FlatBuffer:
        """Return the buffer, allocated if there is none."""
        if self.buffer is None:
            self.buffer = self._allocate()
        return self.buffer

    def collect(self, param: nn.Parameter) -> None:
        """Move a finished `.grad` into the buffer, added to earlier ones."""
        number = self.group.index[id(param)]
        with without_torch_function():
            grad = param.grad
            param.grad = None
        if grad is None:
            return
        if grad.is_sparse:
            grad = grad.to_dense()
        into = self.open().view(self.group.members[number].slot)
        if number in self._arrived:
            into.add_(grad)
        else:
            into.copy_(grad)
            self._arrived.add(number)

    def collected(self, number: int) -> Tensor | None:
        """Return a flat view of what was collected for a member; None if that is nothing."""
        return self.values(number) if number in self._arrived else None

    def values(self, number: int) -> Tensor:
        """Return a flat view of a member's elements, to be changed; zeros if nothing came yet."""
        slot = self.group.members[number].slot
        found = self.open().memory[slot.start : slot.stop]
        if number not in self._arrived:
            found.zero_()
            self._arrived.add(number)
        return found

    def multiply(self, factor: float) -> None:
        """Multiply what was collected."""
        for number in self._arrived:
            self.values(number).mul_(factor)

    def close(self) -> FlatBuffer:
        """Return the buffer for a sum: missing members and the padding are zeros. What comes next
        belongs to the next sum.
        """
        partial = self.open()
        for number, member in enumerate(self.group.members):
            if number not in self._arrived:
                partial.memory[member.slot.start : member.slot.stop].zero_()
        for low, high in self.group.layout.gaps:
            partial.memory[low:high].zero_()
        predivide = self.group.planned.predivide
        if predivide != 1.0:
            partial.memory.div_(predivide)
        self.clear()
        return partial

    def clear(self) -> None:
        """Forget the buffer."""
        self.buffer = None
        self._arrived = set()
