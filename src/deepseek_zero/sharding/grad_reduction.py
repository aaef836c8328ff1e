"""How the gradients of a group are summed: an extension point of the core."""

from __future__ import annotations

from torch import Tensor

from ..comm.pending import DONE, Pending
from .buffer import FlatBuffer
from .group import Group
from .move import move


class GradReduction:
    """Reduces the gradients of one parameter group over the ranks, by an ordered reduce-scatter.

    Extensions derive from this class. All ranks use the same class for a group.

    Attributes:
        sums_all: Whether `reduce` sums over all ranks. If not, `complete` then sums over replicas.
        is_scaled: Whether the reduced values are still multiplied by the loss scale.
    """

    sums_all = True
    is_scaled = True

    def __init__(self, group: Group) -> None:
        self.group = group

    def reduce(self, partial: FlatBuffer, target: FlatBuffer, what: str, *, add: bool) -> Pending:
        """Start to sum the ranks' partial gradients.

        Args:
            partial: This rank's gradient of all elements of the group.
            target: The output. At stages 2 and 3 it is this rank's slice of the sum. At stages 0
                and 1 it is a view of `partial`: of all slices, or of this rank's slice.
            what: The name of the unit, used in error messages.
            add: Whether to add the sum to the values of `target`.

        Returns:
            A handle; `target` may be read after `wait()`.

        Note:
            Collective: every rank of the shard group must call it in the same order.
        """
        return move(partial, target, self.group.comm_ctx, what, add=add)

    def complete(self, what: str) -> Pending:
        """Start to complete the sum over all ranks, unless `reduce` has done so.

        Args:
            what: The name of the unit, used in error messages.

        Returns:
            A handle, as from `reduce`.

        Note:
            Collective: every rank that holds the same slices must call it.
        """
        return DONE

    def copy_from_first(self, values: Tensor, what: str) -> None:
        """Copy `values` from the first rank that holds these elements to the others.

        Note:
            Collective: every rank that holds the same slices must call it.
        """

    def own_states(self) -> dict[str, Tensor]:
        """Return the states that this rank keeps across steps, by name, for checkpoints."""
        return {}

    def tensors(self) -> list[Tensor]:
        """Return the tensors that this object keeps between steps, to count their memory."""
        return list(self.own_states().values())

    def forget(self) -> None:
        """Discard the states that are kept across steps. Every rank must call it."""
