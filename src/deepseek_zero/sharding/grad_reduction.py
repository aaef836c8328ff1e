"""How the gradients of one group are summed over the ranks: an extension point of the core."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from ..comm.pending import DONE, Pending
from ..planner.spec import R, S
from .buffer import FlatBuffer, move
from .group import Group


class GradReduction:
    """Sums gradients by one ordered reduce-scatter: the default.

    Extensions derive from this class. All ranks use the same class for a group.
    """

    def __init__(self, group: Group) -> None:
        self.group = group

    @property
    def sums_all(self) -> bool:
        """Whether `reduce` sums the gradients of all ranks.

        If not, `complete` is called once per step.
        """
        return True

    @property
    def is_local(self) -> bool:
        """Whether no other rank has a part in the sum."""
        return self.group.comm_ctx.comm.size == 1

    def reduce(self, partial: FlatBuffer, target: FlatBuffer, what: str, *, add: bool) -> Pending:
        """Start to sum the ranks' partial gradients. Collective within the reduce lane.

        Args:
            partial: This rank's gradient of all elements of the group.
            target: The buffer of this rank's slice of the sum.
            what: The name of the unit, for messages.
            add: Add the sum to the values of `target`.
        """
        return move(partial, target, self.group.comm_ctx, what, add=add)

    def reduce_in_place(self, partial: FlatBuffer, what: str, *, has_earlier_sum: bool) -> Pending:
        """Start to sum the ranks' partial gradients in the memory of `partial`.

        The sum has all slices if every rank needs the whole sum (stage 0), and otherwise this
        rank's slice (stage 1).

        Args:
            partial: This rank's gradient of all elements of the group.
            what: The name of the unit, for messages.
            has_earlier_sum: The step has an earlier sum, to which the caller adds this one.

        Note:
            Collective within the reduce lane.
        """
        group = self.group
        if group.plan.sums_to_all:
            target = FlatBuffer(group.layout, replace(partial.spec, placement=R), partial.memory)
        else:
            target = own_slice(partial, group.comm_ctx.comm.rank)
        return move(partial, target, group.comm_ctx, what)

    def complete(self, buffer: FlatBuffer, what: str) -> Pending:
        """Start to add up the sums that `reduce` left apart, in place. Collective."""
        return DONE

    def copy_from_first(self, values: Tensor, what: str) -> None:
        """Give all ranks that hold these elements the values of the first of them. Collective."""

    def own_states(self) -> dict[str, Tensor]:
        """Return what this rank has kept from earlier steps, by name; a checkpoint stores it."""
        return {}

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Take over the `own_states` of this rank from a checkpoint. Local."""

    def tensors(self) -> list[Tensor]:
        """Return all memory that this object holds."""
        return list(self.own_states().values())

    @property
    def is_scaled(self) -> bool:
        """Whether sums are multiplied by the loss scale, as the summands are."""
        return True

    def end_step(self, *, keep: bool) -> None:
        """Note that a step is over. Local; every rank does so.

        Args:
            keep: The step has used the sum; False if it was skipped.
        """

    def scale(self, factor: float) -> None:
        """Adapt to a changed loss scale.

        Local, but every rank must call it.

        Args:
            factor: The factor by which gradients grow from now on.
        """

    def forget(self) -> None:
        """Forget what this rank has kept from earlier steps. Local; every rank does so."""


def own_slice(whole: FlatBuffer, rank: int) -> FlatBuffer:
    """Return a rank's slice of a buffer with all elements, as a view."""
    return FlatBuffer(whole.layout, replace(whole.spec, placement=S), whole.shard(rank))
