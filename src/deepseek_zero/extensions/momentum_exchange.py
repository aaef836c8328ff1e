"""Exchange of one group's momentum as signs, instead of reducing its gradients.

In each step, every rank sends each owner of a slice the signs of its own new momentum. Every owner
then sends all ranks the signs of the mean. For P elements and N ranks these are 2 (N - 1) messages
of P/N bits and a scale. The compression errors stay on the rank that made them and are added to its
next message. `optimizers/one_bit_adam.py` has the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..base.errors import UsageError
from ..comm.collectives import ordered_sum
from ..comm.pending import Pending
from ..planner.extras import with_momenta_exchanged
from ..planner.spec import ShardPlan
from ..precision.codecs import Signs
from ..sharding.buffer import FlatBuffer
from ..sharding.comm_context import boxes_in
from ..sharding.grad_reduction import GradReduction
from ..sharding.param_group import ParamGroup
from ..sharding.regroup import drop_gradient_buffers, reduce_by

SIGNS = Signs()


class MomentumExchange(GradReduction):
    """Replaces the gradient reduction of one parameter group by 1-bit Adam's exchange of momenta.

    Each rank sends the signs of its own momentum to the ranks that own the slices. Each owner sends
    the signs of the mean to all ranks.

    Attributes:
        worker: The error feedback of the signs of this rank's own momentum, shape
            ``(padded_numel,)``, fp32.
        server: The error feedback of the signs of the mean of this rank's slice, shape
            ``(slice_numel,)``, fp32.
        signs: The current momentum: the signs and scales of all slices, in rank order.
        before: The gradient reduction that is used again when the exchange ends.
        plan_before: The dtypes and placements of the group's states while `before` is used.
    """

    is_scaled = False

    group: ParamGroup

    def __init__(
        self,
        group: ParamGroup,
        beta1: float,
        own: Tensor,
        saved: Mapping[str, Tensor],
        loss_scale: Callable[[], float],
        before: GradReduction,
        plan_before: ShardPlan,
    ) -> None:
        """Start from this rank's slice of the momentum, or from saved states.

        Args:
            group: The parameter group whose momenta are exchanged.
            beta1: The decay rate of the momentum.
            own: This rank's slice of the momentum so far.
            saved: The error-feedback buffers of this rank from a checkpoint; may be empty.
            loss_scale: A function that returns the current loss scale.
            before: The gradient reduction that is used again when the exchange ends.
            plan_before: The dtypes and placements of the group's states while `before` is used.

        Note:
            Collective: every rank of the shard group must call it in the same order.
        """
        super().__init__(group)
        self.before = before
        self.plan_before = plan_before
        self._beta1 = beta1
        self._loss_scale = loss_scale
        self._layout = group.layout
        comm_ctx = group.comm_ctx
        comm = comm_ctx.comm
        device = comm_ctx.pool.device
        self._length = SIGNS.length(self._layout.slice_numel)
        self.signs, self._coming = (
            comm_ctx.world.empty(comm.size * self._length, SIGNS.dtype) for _ in range(2)
        )
        self.worker = torch.zeros(self._layout.padded_numel, dtype=torch.float32, device=device)
        self.server = torch.zeros(self._layout.slice_numel, dtype=torch.float32, device=device)
        self._has_come = False
        what = group.members[0].name
        nbytes = sum(each.nbytes for each in self.tensors())
        comm_ctx.tiers.budget.reserve_for(self, nbytes, f"what signs leave out of {what}")
        if saved:
            for name, values in self.own_states().items():
                values.copy_(saved[name])
            return
        # The first signs are of the momentum itself. Their error is added to the next means.
        self.server.copy_(own)
        self._send_mean(self.signs, what)
        self.server.mul_(beta1)

    def own_states(self) -> dict[str, Tensor]:
        return {"worker": self.worker, "server": self.server, "signs": self.signs}

    def tensors(self) -> list[Tensor]:
        return [*self.own_states().values(), self._coming]

    def reduce(self, partial: FlatBuffer, target: FlatBuffer, what: str, *, add: bool) -> Pending:
        """Start to exchange momenta, computed from this rank's own gradient.

        The momentum over all ranks replaces the gradient. Momenta and errors are not multiplied by
        the loss scale.

        Args:
            partial: This rank's gradient of all elements of the group.
            target: The output, a view of `partial`: of all slices or of this rank's slice.
            what: The name of the unit, used in error messages.
            add: False, because the momenta replace the gradient.

        Returns:
            A handle. The result may be read after its `wait()` has returned.

        Raises:
            UsageError: An earlier backward of the step was reduced already.

        Note:
            Collective: every rank of the shard group must call it in the same order.
        """
        group = self.group
        if group.gradient.earlier is not None:
            raise UsageError(
                f"the gradient of '{group.members[0].name}' comes in two parts behind OneBitAdam's "
                "freeze_step.",
                "Momenta are exchanged once a step, when all of its gradient is here.",
                "say with gradient_accumulation_steps how many backwards a step has.",
            )
        group.guard.before_write()
        comm = group.comm_ctx.comm
        pool = group.comm_ctx.pool
        into = target.memory
        length = self._length
        sent = pool.take(comm.size * length, SIGNS.dtype)
        inbox = None if comm.reads_in_place else pool.take((comm.size - 1) * length, SIGNS.dtype)
        boxes = boxes_in(inbox, comm, length)
        pieces = sent.split(length)
        scratch = pool.take_scratch()
        # The weight of this rank's gradient in its new momentum; the mean divides by `comm.size`
        weight = (1 - self._beta1) * comm.size / group.comm_ctx.divisor / self._loss_scale()
        for rank in range(comm.size):
            low, high = self._layout.bounds(rank)
            old = self._piece(self.signs, rank)
            self._add_own(self.worker[low:high], old, partial.memory[low:high], weight, scratch)
        self._clear_padding(self.worker, 0)
        for rank, piece in enumerate(pieces):
            low, high = self._layout.bounds(rank)
            self._sign(self.worker[low:high], piece, rank, scratch)
        pool.give(scratch)

        def add_mean(received: Sequence[Tensor]) -> None:
            working = pool.take_scratch()
            ordered_sum(
                received,
                self.server,
                working,
                divisor=float(comm.size),
                add=True,
                decode=SIGNS.decode,
            )
            pool.give(working)

        def finish() -> None:
            for lent in (sent, inbox):
                if lent is not None:
                    pool.give(lent)
            self._send_mean(self._coming, what)
            self._has_come = True
            numel = self._layout.slice_numel
            ranks = range(comm.size) if into.numel() > numel else (comm.rank,)
            for rank, values in zip(ranks, into.split(numel), strict=True):
                SIGNS.decode(self._piece(self._coming, rank), 0, values.numel(), values)
            self._clear_padding(into, ranks[0])

        return comm.exchange(pieces, boxes, "reduce", what, add_mean).then(finish)

    def end_step(self, *, keep: bool) -> None:
        """Replace the old momentum by the new one at the end of a step.

        Args:
            keep: Whether to keep the new momentum. False if the step was skipped: the new momentum
                is discarded, and the error feedback is set to zero.

        Note:
            Every rank must call it with the same value of `keep`.
        """
        if not keep:
            self.worker.zero_()
            self.server.zero_()
        elif self._has_come:
            self.signs, self._coming = self._coming, self.signs
        self._has_come = False

    def _piece(self, message: Tensor, rank: int) -> Tensor:
        return message[rank * self._length : (rank + 1) * self._length]

    def _add_own(
        self, total: Tensor, old: Tensor, grad: Tensor, weight: float, scratch: Tensor
    ) -> None:
        """Add beta1 m + weight g to `total`, each product rounded before it is added."""
        tile = scratch.numel() // 2
        for low in range(0, total.numel(), tile):
            high = min(low + tile, total.numel())
            kept = scratch[: high - low]
            new = scratch[tile : tile + high - low]
            SIGNS.decode(old, low, high, kept)
            new.copy_(grad[low:high]).mul_(weight)
            total[low:high].add_(kept.mul_(self._beta1)).add_(new)

    def _sign(self, values: Tensor, piece: Tensor, owner: int, scratch: Tensor) -> None:
        """Write the signs of values into a message, and replace the values by the errors."""
        low, high = self._layout.bounds(owner)
        padding = sum(
            max(0, min(high, stop) - max(low, start)) for start, stop in self._layout.gaps
        )
        SIGNS.encode(values, piece, values.numel() - padding)
        for start in range(0, values.numel(), scratch.numel()):
            stop = min(start + scratch.numel(), values.numel())
            SIGNS.decode(piece, start, stop, scratch[: stop - start])
            values[start:stop].sub_(scratch[: stop - start])

    def _send_mean(self, message: Tensor, what: str) -> None:
        """Send the signs of this rank's means to all ranks, and wait for theirs."""
        comm = self.group.comm_ctx.comm
        scratch = self.group.comm_ctx.pool.take_scratch()
        self._clear_padding(self.server, comm.rank)
        self._sign(self.server, self._piece(message, comm.rank), comm.rank, scratch)
        self.group.comm_ctx.pool.give(scratch)
        comm.all_gather(message, "reduce", what).wait()

    def _clear_padding(self, values: Tensor, first: int) -> None:
        """Set padding to zero in values that begin with the slice of rank `first`."""
        origin = first * self._layout.slice_numel
        for low, high in self._layout.gaps:
            values[max(0, low - origin) : max(0, high - origin)].zero_()


def exchange_momenta(
    group: ParamGroup,
    beta1: float,
    own: Tensor,
    saved: Mapping[str, Tensor],
    loss_scale: Callable[[], float],
) -> None:
    """Replace the gradient reduction of a parameter group by 1-bit Adam's exchange of momenta.

    From then on, each rank computes a momentum from its own gradient, and ranks exchange the signs.

    Args:
        group: The parameter group whose momenta are exchanged.
        beta1: The decay rate of the momentum.
        own: This rank's slice of the momentum so far.
        saved: The error-feedback buffers of this rank from a checkpoint; may be empty.
        loss_scale: A function that returns the current loss scale.

    Note:
        Collective: every rank of the shard group must call it, between two steps.
    """
    before = group.gradient.reduction
    plan = group.plan
    if isinstance(before, MomentumExchange):
        plan = before.plan_before
        before = before.before
    else:
        drop_gradient_buffers(group.gradient)
    exchange = MomentumExchange(group, beta1, own, saved, loss_scale, before, plan)
    reduce_by(group, exchange, with_momenta_exchanged(plan, SIGNS))


def reduce_gradients(group: ParamGroup) -> None:
    """End a parameter group's exchange of momenta, so that its gradients are reduced again.

    Args:
        group: The parameter group whose momenta are exchanged.

    Note:
        Every rank must call it, between two steps.
    """
    exchange = group.gradient.reduction
    if isinstance(exchange, MomentumExchange):
        drop_gradient_buffers(group.gradient)
        reduce_by(group, exchange.before, exchange.plan_before)
