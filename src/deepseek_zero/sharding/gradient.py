"""The gradient of one group: collected from autograd, then summed over the ranks.

A rank's own gradient is a `Summand`, the sum over the ranks is a `GradSum`, and `Gradient` reduces
one into the other. `GradReduction` implements the reduction, and `GradView` shows the sum as
`.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..base.device import CPU, without_torch_function
from ..comm.pending import DONE, Pending
from ..planner.spec import P
from .buffer import FlatBuffer
from .grad_reduction import GradReduction
from .grad_sum import GradState, GradSum, QueuedSquares, squares_now

if TYPE_CHECKING:
    from .param_group import ParamGroup


class Summand:
    """This rank's own gradient of a parameter group, before it is reduced over the ranks.

    Parameters are identified by their index in the group.

    Attributes:
        group: The parameter group to which the gradient belongs.
        buffer: The flat buffer in which gradients are accumulated; None while none has arrived.
    """

    def __init__(self, group: ParamGroup, allocate: Callable[[], FlatBuffer]) -> None:
        """Start without a gradient and without a buffer.

        Args:
            group: The parameter group to which the gradient belongs.
            allocate: A function that returns the uninitialized buffer in which gradients are
                collected.
        """
        self.group = group
        self.buffer: FlatBuffer | None = None
        self._allocate = allocate
        self._arrived: set[int] = set()  # elements of other members are arbitrary

    def open(self) -> FlatBuffer:
        """Return the buffer; allocate it if there is none."""
        if self.buffer is None:
            self.buffer = self._allocate()
        return self.buffer

    def collect(self, param: nn.Parameter) -> None:
        """Move the `.grad` that autograd has written into the buffer, or add it to earlier values.

        Args:
            param: The parameter, whose `.grad` is None afterwards.
        """
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
        """Return a flat view of a parameter's accumulated gradient; None if it has none.

        Args:
            number: The index of the parameter in the group.
        """
        return self.values(number) if number in self._arrived else None

    def values(self, number: int) -> Tensor:
        """Return a flat, writable view of a parameter's accumulated gradient.

        Args:
            number: The index of the parameter in the group. If it has no gradient, zeros are added.
        """
        slot = self.group.members[number].slot
        found = self.open().memory[slot.start : slot.stop]
        if number not in self._arrived:
            found.zero_()
            self._arrived.add(number)
        return found

    def multiply(self, factor: float) -> None:
        """Multiply the collected gradients by `factor`."""
        for number in self._arrived:
            self.values(number).mul_(factor)

    def close(self) -> FlatBuffer:
        """Return the buffer for the reduction, and drop the reference to it.

        Elements of parameters without a gradient, and padding, are set to zeros.
        """
        partial = self.open()
        for number, member in enumerate(self.group.members):
            if number not in self._arrived:
                partial.memory[member.slot.start : member.slot.stop].zero_()
        for low, high in self.group.layout.gaps:
            partial.memory[low:high].zero_()
        # A division before the sum, so that 16-bit messages do not overflow.
        predivide = self.group.planned.predivide
        if predivide != 1.0:
            partial.memory.div_(predivide)
        self.clear()
        return partial

    def clear(self) -> None:
        """Discard the collected gradients."""
        self.buffer = None
        self._arrived = set()


class Gradient:
    """The gradient of one parameter group: accumulated on this rank, then reduced over the ranks.

    Args:
        group: The parameter group to which the gradient belongs.
        reduction: Sums the gradients of the ranks.

    Attributes:
        group: The parameter group to which the gradient belongs.
        reduction: How the ranks sum the gradient.
        summand: The gradient that this rank has computed and not yet reduced.
        sum: The reduced gradient.
        kept: Reduced gradients that extensions keep after their step, by name.
        is_edited: Whether the program has set values that may differ between ranks.
        is_shown: Whether the `.grad` of the parameters is set to the reduced gradient (`GradView`).
    """

    def __init__(self, group: ParamGroup, reduction: GradReduction) -> None:
        self.group = group
        self.reduction = reduction
        self.summand = Summand(group, self._summand_buffer)
        self.sum = GradSum(group)
        self.kept: Mapping[str, GradSum] = {}
        self.is_shown = False
        self._clear()

    def _clear(self) -> None:
        """Forget everything since the last step."""
        self.summand.clear()
        self.sum.absent = None
        self.sum.known_squares = None
        self.is_edited = False
        # The reduction in the memory of the sum; it may still be in flight.
        self._reduction: Pending = DONE
        # An earlier sum of the same step and its state. It is added to the next sum.
        self._carried_sum: Tensor | None = None
        self._carried_state = GradState.EMPTY

    @property
    def is_empty(self) -> bool:
        """Return whether this rank has no gradient of the group: own, reduced or kept."""
        is_kept = any(kept.is_full for kept in self.kept.values())
        return self.sum.state is GradState.EMPTY and not is_kept

    def buffers(self) -> list[FlatBuffer]:
        """Return the allocated buffers of the sum and of the kept gradients."""
        buffers = [each.buffer for each in (self.sum, *self.kept.values())]
        return [buffer for buffer in buffers if buffer is not None]

    def clear_shown(self) -> None:
        """Set the `.grad` of every parameter to None, even if the program has assigned it."""
        self.is_shown = False
        with without_torch_function():
            for member in self.group.members:
                member.param.grad = None

    # -- from the summand to the sum

    def _summand_buffer(self) -> FlatBuffer:
        """Return the buffer of a new summand: that of the sum unless it is sharded."""
        self.flush_held()
        group = self.group
        if self.sum.spec.placement is P:
            buffer = self.sum.ensure()
            # A late gradient needs the memory that the reduction in flight writes.
            self._reduction.wait()
            group.comm_ctx.world.wait_until_read(buffer.memory)
            # An unannounced second backward: keep the sum of the first one aside.
            if self.sum.is_reduced:
                self._carry(self.sum.own())
        else:
            spec = group.planned.summands  # partial, in the dtype in which a rank collects
            memory = group.comm_ctx.pool.take(group.layout.padded_numel, spec.dtype)
            buffer = FlatBuffer(group.layout, spec, memory)
        if self.sum.state is GradState.EMPTY:
            self.sum.enter(GradState.COLLECTING)
        return buffer

    def flush_held(self) -> None:
        """Run the deferred update that reads the gradient, before its buffer is reused."""
        pending = self.sum.guard.pending
        if self.sum.state is GradState.HELD and pending is not None:
            pending.flush_group(self.group)

    def reduce(self, what: str, *, is_last: bool = False) -> Pending:
        """Start to sum the ranks' partial gradients, in fp32 in rank order.

        Missing parameters and the padding count as zeros.

        Args:
            what: The name of the unit, used in error messages.
            is_last: Whether no other sum is expected before the step, so that an accelerator can
                compute the norm while backward goes on.

        Returns:
            A handle. The result may be read after its `wait()` has returned.

        Note:
            Collective: every rank of the shard group must call it in the same order, even if it
            skipped the unit.
        """
        self.sum.known_squares = None
        partial = self.summand.close()
        squares = None
        if is_last and self._can_queue_squares:
            squares = QueuedSquares()
        if self.sum.spec.placement is P:
            return self._reduce_in_place(partial, what, squares)
        if not self.reduction.sums_all and self.sum.state is GradState.REDUCED:
            # A further backward after the sum of the step was completed.
            self._carry(self.sum.ensure().load())
        target = self.sum.ensure()
        target.on_sum = None
        if squares is not None:
            target.on_sum = squares.add
        pending = self.reduction.reduce(partial, target, what, add=self.sum.is_reduced)
        self.sum.enter(GradState.REDUCING)

        def finish() -> None:
            self._end_reduction()
            self.sum.known_squares = squares
            self.group.comm_ctx.pool.give(partial.memory)
            self._store_offloaded()

        return pending.then(finish)

    @property
    def _can_queue_squares(self) -> bool:
        """Return whether an accelerator sums this rank's whole part of the norm."""
        group = self.group
        is_own = not group.plan.sums_to_all or group.comm_ctx.comm.size == 1
        is_counted = group.master is not None and not group.not_updated
        on_accelerator = group.comm_ctx.pool.device != CPU
        return on_accelerator and is_own and is_counted and self.reduction.sums_all

    def _carry(self, own: Tensor) -> None:
        """Set an earlier sum of the same step aside, to be added to the next one."""
        self._carried_sum = own.clone()
        self._carried_state = self.sum.state
        self.sum.enter(GradState.COLLECTING)

    def _end_reduction(self) -> None:
        self.sum.enter(GradState.REDUCED if self.reduction.sums_all else GradState.PARTIAL)

    def _store_offloaded(self) -> None:
        """Store an offloaded sum, and compute its norm while it is on the device."""
        buffer = self.sum.buffer
        if buffer is not None and buffer.storage.is_offloaded:
            first = 0
            if not self.group.plan.sums_to_all:
                first = self.group.layout.bounds(self.group.comm_ctx.comm.rank)[0]
            if self.sum.known_squares is None:
                self.sum.known_squares = squares_now(self.group, buffer.load(), first)
            buffer.storage.store(0, buffer.memory.numel())

    def _reduce_in_place(
        self, partial: FlatBuffer, what: str, squares: QueuedSquares | None
    ) -> Pending:
        """Reduce in the memory of the partial gradient (stages 0 and 1).

        Args:
            partial: The partial gradient.
            what: The name of the unit, used in error messages.
            squares: Gets the squares of this rank's part of the sum.
        """
        own = self.sum.own()
        pending = self.reduction.reduce_in_place(
            partial, what, has_earlier_sum=self._carried_sum is not None
        )
        self.sum.enter(GradState.REDUCING)

        def finish() -> None:
            self._end_reduction()
            # Otherwise it is added after the sum is complete.
            if self._carried_sum is not None and self._carried_state is self.sum.state:
                own.add_(self._carried_sum)
                self._carried_sum = None
            if squares is not None:
                squares.add(own)
                self.sum.known_squares = squares

        self._reduction = pending.then(finish)
        return self._reduction

    def complete_sum(self, what: str) -> Pending:
        """Start to sum the reduced gradient over replicas, once per step.

        Nothing is done if the sum is already complete.

        Args:
            what: The name of the unit, used in error messages.

        Returns:
            A handle. The result may be read after its `wait()` has returned.

        Note:
            Collective: every rank that holds the same slices must call it.
        """
        buffer = self.sum.buffer
        if buffer is None or self.sum.state is not GradState.PARTIAL:
            return DONE
        self.sum.enter(GradState.REDUCING)
        self.sum.known_squares = None
        pending = self.reduction.complete(buffer, what)

        def finish() -> None:
            self.sum.enter(GradState.REDUCED)
            if self._carried_sum is not None:
                self.sum.own().add_(self._carried_sum)
                self._carried_sum = None
            self._store_offloaded()

        self._reduction = pending.then(finish)
        return self._reduction

    # -- the end of a step

    def hold(self) -> None:
        """Keep the reduced gradient for a deferred update, until `end_hold`."""
        if self.sum.state is GradState.EMPTY:
            # No member has a gradient, so none is updated.
            self.sum.absent = set(range(len(self.group.members)))
        self.sum.enter(GradState.HELD)

    def end_hold(self) -> None:
        """Discard the reduced gradient after the update has used it."""
        self.sum.enter(GradState.EMPTY)
        self.discard()

    def discard(self) -> None:
        """Discard the gradient after a step or `zero_grad`.

        A gradient that a deferred update still needs is kept. The buffer is kept for the next
        gradient.
        """
        self.clear_shown()
        if self.sum.state is GradState.HELD:
            return
        self.sum.become(GradState.EMPTY)
        partial = self.summand.buffer
        if partial is not None and partial is not self.sum.buffer:
            self.group.comm_ctx.pool.give(partial.memory)
        self._clear()
        self.sum.discard_values()

    def release(self) -> None:
        """Free the buffer of an empty, replicated gradient until the next backward.

        On a CPU, and if other ranks use the memory, the buffer is kept, because it would be slow to
        allocate again.
        """
        comm_ctx = self.group.comm_ctx
        buffer = self.sum.buffer
        if buffer is None or buffer.spec.placement is not P or comm_ctx.pool.device.type == "cpu":
            return
        is_empty = self.sum.state is GradState.EMPTY and self.summand.buffer is None
        if is_empty and self.reduction.is_local:
            self.sum.drop()

    def drop_buffers(self) -> None:
        """Free the memory of the sum and of the kept gradients; all must be empty.

        The next gradients are allocated with the current plan, for example in another dtype.
        """
        assert self.is_empty, "a gradient's memory was dropped with it"
        self.sum.drop()
        for kept in self.kept.values():
            kept.drop()
