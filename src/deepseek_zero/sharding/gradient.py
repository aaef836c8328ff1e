"""The gradient of one group: collected from autograd, then summed over the ranks.

`Gradient` reduces a rank's own gradient, a `Summand`, into the sum over the ranks, a `GradSum`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor, nn

from ..base.device import CPU, without_torch_function
from ..comm.pending import DONE, Pending
from ..kernels.squares import norms_of, read_squares
from ..planner.spec import P, R, S
from .buffer import FlatBuffer
from .grad_reduction import GradReduction
from .grad_sum import GradState, GradSum, own_squares
from .group import Group


class Summand:
    """This rank's own gradient of a parameter group, before it is reduced over the ranks.

    Parameters are identified by their index in the group.

    Attributes:
        group: The parameter group to which the gradient belongs.
        buffer: The flat buffer in which gradients are accumulated; None while none has arrived.
        arrived: The parameters that have a gradient; other elements of the buffer are arbitrary.
    """

    def __init__(self, group: Group, allocate: Callable[[], FlatBuffer]) -> None:
        self.group = group
        self.buffer: FlatBuffer | None = None
        self._allocate = allocate
        self.arrived = set[int]()

    def open(self) -> FlatBuffer:
        """Return the buffer; allocate it if there is none."""
        if self.buffer is None:
            self.buffer = self._allocate()
        return self.buffer

    def collect(self, param: nn.Parameter) -> None:
        """Move the `.grad` of a parameter into the buffer, or add it to earlier values."""
        number = self.group.index[id(param)]
        with without_torch_function():
            grad = param.grad
            param.grad = None
        if grad is None:
            return
        if grad.is_sparse:
            grad = grad.to_dense()
        into = self.open().view(self.group.members[number].slot)
        if number in self.arrived:
            into.add_(grad)
        else:
            into.copy_(grad)
            self.arrived.add(number)

    def values(self, number: int) -> Tensor:
        """Return a flat, writable view of a parameter's gradient; zeros if none has arrived."""
        slot = self.group.members[number].slot
        found = self.open().memory[slot.start : slot.stop]
        if number not in self.arrived:
            found.zero_()
            self.arrived.add(number)
        return found

    def close(self) -> FlatBuffer:
        """Return the buffer for the reduction, and drop the reference to it.

        Elements of parameters without a gradient, and padding, are set to zeros.
        """
        partial = self.open()
        for number in set(range(len(self.group.members))) - self.arrived:
            self.values(number)  # zeros
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
        self.arrived = set()


class Gradient:
    """The gradient of one parameter group: accumulated on this rank, then reduced over the ranks.

    Attributes:
        group: The parameter group to which the gradient belongs.
        reduction: Sums the gradients of the ranks.
        summand: The gradient that this rank has computed and not yet reduced.
        sum: The reduced gradient.
        kept: Reduced gradients that extensions keep after their step, by name.
        is_edited: Whether the program has set values that may differ between ranks.
        is_shown: Whether the `.grad` of the parameters is set to the reduced gradient (`GradView`).
        earlier: An earlier sum of the same step that `track` adds to the next one, or None.
    """

    def __init__(self, group: Group, reduction: GradReduction) -> None:
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
        # The last reduction, which may still be in flight.
        self._reduction: Pending = DONE
        self.earlier: Tensor | None = None
        self._earlier_state = GradState.EMPTY

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
                self._set_sum_aside()
        else:
            spec = group.plan.summands  # partial, in the dtype in which a rank collects
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
            is_last: Whether no other sum is expected before the step, so the norm can be queued.

        Note:
            Collective: every rank of the shard group must call it in the same order, even if it
            skipped the unit.
        """
        total = self.sum
        partial = self.summand.close()
        norms: list[Tensor] = []
        squares = norms if is_last and self._can_queue_squares else None
        is_in_place = total.spec.placement is P
        if is_in_place:
            target = self._summed_part(partial)
        else:
            if not self.reduction.sums_all and total.state is GradState.REDUCED:
                # A further backward after the sum of the step was completed.
                self._set_sum_aside()
            target = total.ensure()
            target.on_sum = None
            if squares is not None:
                target.on_sum = lambda values: norms.extend(norms_of(values))
        add = not is_in_place and total.is_reduced
        total.known_squares = None
        pending = self.reduction.reduce(partial, target, what, add=add)
        if not is_in_place:
            pending = pending.then(lambda: self.group.comm_ctx.pool.give(partial.memory))
        state = GradState.REDUCED if self.reduction.sums_all else GradState.INCOMPLETE
        return self.track(pending, state, squares)

    def track(
        self, pending: Pending, state: GradState, squares: list[Tensor] | None = None
    ) -> Pending:
        """Track a reduction in flight.

        Args:
            pending: The reduction, which writes the buffer of the sum.
            state: The state after the reduction. An earlier sum over the same ranks is then added.
            squares: Receives the norms of the sum; None if they are not computed yet.

        Returns:
            A handle. The sum may be read after its `wait()` has returned.
        """
        total = self.sum
        total.enter(GradState.REDUCING)

        def finish() -> None:
            total.enter(state)
            if self.earlier is not None and self._earlier_state is state:
                total.own().add_(self.earlier)
                self.earlier = None
            if squares is not None and total.spec.placement is P:
                squares.extend(norms_of(total.own()))
            total.known_squares = squares
            self._store_offloaded()

        self._reduction = pending.then(finish)
        return self._reduction

    @property
    def _can_queue_squares(self) -> bool:
        """Return whether an accelerator sums this rank's whole part of the norm."""
        group = self.group
        is_own = not group.plan.sums_to_all or group.comm_ctx.comm.size == 1
        is_counted = group.master is not None and not group.not_updated
        on_accelerator = group.comm_ctx.pool.device != CPU
        return on_accelerator and is_own and is_counted and self.reduction.sums_all

    def _summed_part(self, partial: FlatBuffer) -> FlatBuffer:
        """Return the part of a partial gradient that its sum overwrites (stages 0 and 1)."""
        is_whole = self.group.plan.sums_to_all and self.reduction.sums_all
        memory = partial.memory if is_whole else partial.slice_of(self.group.comm_ctx.comm.rank)
        spec = replace(partial.spec, placement=R if is_whole else S)
        return FlatBuffer(partial.layout, spec, memory)

    def _set_sum_aside(self) -> None:
        """Copy an earlier sum of the same step, to add it to the next one."""
        self.earlier = self.sum.own().clone()
        self._earlier_state = self.sum.state
        self.sum.enter(GradState.COLLECTING)

    def _store_offloaded(self) -> None:
        """Store an offloaded sum, and compute its norm while it is on the device."""
        buffer = self.sum.buffer
        if buffer is not None and buffer.storage.is_offloaded:
            if self.sum.known_squares is None:
                ((self.sum.known_squares,),) = read_squares([[own_squares(self.sum)]])
            buffer.storage.store(0, buffer.memory.numel())

    # -- the end of a step

    def discard(self) -> None:
        """Discard the gradient after a step or `zero_grad`, unless a later update needs it."""
        self.clear_shown()
        if self.sum.state is GradState.HELD:
            return
        self.sum.become(GradState.EMPTY)
        partial = self.summand.buffer
        if partial is not None and partial is not self.sum.buffer:
            self.group.comm_ctx.pool.give(partial.memory)
        self._clear()
        self.sum.discard_values()
