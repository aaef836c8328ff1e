"""How the gradients of a group are summed: an extension point of the core."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from ..comm.pending import DONE, Pending
from ..planner.spec import R, S
from .buffer import FlatBuffer
from .move import move

if TYPE_CHECKING:
    from .param_group import ParamGroup


class GradReduction:
    """Reduces the gradients of one parameter group over the ranks.

    By default it uses a reduce-scatter that adds in rank order.

    Extensions derive from this class. All ranks use the same class for a group.
    """

    def __init__(self, group: ParamGroup) -> None:
        self.group = group

    @property
    def sums_all(self) -> bool:
        """Whether `reduce` sums over all ranks. If not, `complete` then sums over replicas."""
        return True

    @property
    def is_local(self) -> bool:
        """Whether the sum has only one summand, so that nothing is sent."""
        return self.group.comm_ctx.comm.size == 1

    def reduce(self, partial: FlatBuffer, target: FlatBuffer, what: str, *, add: bool) -> Pending:
        """Start to sum the ranks' partial gradients.

        Args:
            partial: This rank's gradient of all elements of the group.
            target: The output, this rank's slice of the sum.
            what: The name of the unit, used in error messages.
            add: Whether to add the sum to the values of `target`.

        Returns:
            A handle. The result may be read after its `wait()` has returned.

        Note:
            Collective: every rank of the shard group must call it in the same order.
        """
        return move(partial, target, self.group.comm_ctx, what, add=add)

    def reduce_in_place(self, partial: FlatBuffer, what: str, *, has_earlier_sum: bool) -> Pending:
        """Start to sum the ranks' partial gradients in the memory of `partial`.

        All slices are summed if every rank needs the whole sum (stage 0), otherwise only this
        rank's slice (stage 1).

        Args:
            partial: This rank's gradient of all elements of the group.
            what: The name of the unit, used in error messages.
            has_earlier_sum: Whether an earlier backward of the step was reduced already. The caller
                adds both.

        Returns:
            A handle. The result may be read after its `wait()` has returned.

        Note:
            Collective: every rank of the shard group must call it in the same order.
        """
        group = self.group
        if group.plan.sums_to_all:
            target = FlatBuffer(group.layout, replace(partial.spec, placement=R), partial.memory)
        else:
            target = own_slice(partial, group.comm_ctx.comm.rank)
        return move(partial, target, group.comm_ctx, what)

    def complete(self, buffer: FlatBuffer, what: str) -> Pending:
        """Start to add the sums of all replicas, after `reduce` has summed within each replica.

        Args:
            buffer: The sum within this replica, completed in place.
            what: The name of the unit, used in error messages.

        Returns:
            A handle. The result may be read after its `wait()` has returned.

        Note:
            Collective: every rank that holds the same slices must call it.
        """
        return DONE

    def copy_from_first(self, values: Tensor, what: str) -> None:
        """Copy `values` from the first rank that holds these elements to the others.

        Args:
            values: The elements, written on all but the first rank.
            what: The name of the values, used in error messages.

        Note:
            Collective: every rank that holds the same slices must call it.
        """

    def own_states(self) -> dict[str, Tensor]:
        """Return the states that this rank keeps across steps, by name, for checkpoints."""
        return {}

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Restore the states of this rank from a checkpoint.

        Args:
            saved: The result of `own_states`.
        """

    def tensors(self) -> list[Tensor]:
        """Return the tensors that this object keeps between steps, to count their memory."""
        return list(self.own_states().values())

    @property
    def is_scaled(self) -> bool:
        """Whether the reduced values are still multiplied by the loss scale."""
        return True

    def end_step(self, *, keep: bool) -> None:
        """Record the end of a step.

        Every rank must call it; it does not communicate.

        Args:
            keep: Whether the step used the sum; False if the step was skipped.
        """

    def scale(self, factor: float) -> None:
        """Multiply the states that are kept across steps, such as error feedback, by a factor.

        Args:
            factor: The new loss scale divided by the old one.

        Note:
            Every rank must call it when the loss scale changes; it does not communicate.
        """

    def forget(self) -> None:
        """Discard the states that are kept across steps.

        Every rank must call it; it does not communicate.
        """


def own_slice(whole: FlatBuffer, rank: int) -> FlatBuffer:
    """Return a view of a rank's slice of a buffer that has all elements.

    Args:
        whole: The buffer with all elements.
        rank: The rank among those that share slices.
    """
    return FlatBuffer(whole.layout, replace(whole.spec, placement=S), whole.shard(rank))
