"""Communication between sequence-parallel ranks, and the exchange of Ulysses attention.

Ulysses exchanges tokens for heads around attention:

    (tokens / C, all heads) -> exchange -> (all tokens, heads / C) -> attention -> exchange
    -> (tokens / C, all heads)

Attention of a head needs every token and no other head. Each rank therefore computes complete
attention of its heads, with the same bits per head as one process. Exchanges move numbers without
adding them; backward is the reverse exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..base.errors import UsageError
from ..comm.collectives import Comm, ordered_sum
from ..comm.transports.base import Inbox, Use, leave_in_place
from .autograd import Tensors, with_backward
from .group import TensorGroup

KIND = "sp"  # kind of these bytes in the meter


class SequenceRanks(Protocol):
    """Interface of a group of ranks among which sequences are split (sequence parallelism).

    All of them must make the same calls in the same order.

    Attributes:
        size: The number of ranks.
        index: This rank's index among them.
    """

    size: int
    index: int

    def exchange(self, pieces: Sequence[Tensor], what: str) -> list[Tensor]:
        """Send a slice of each tensor to each rank (all-to-all).

        Args:
            pieces: Tensors of one dtype and shape (size, ...), with the same shapes on every rank;
                rank r receives `piece[r]`. They need not be contiguous.
            what: The name of the collective, for messages.

        Returns:
            For each piece, a tensor of shape (size, ...) with the slices that the ranks sent, in
            rank order.

        Note:
            Collective and blocking: every rank must call it.
        """
        ...


class SequenceGroup:
    """Collectives of the sequence-parallel ranks over a communicator.

    Args:
        comm: The communicator of these ranks. No other object may use its queue of
            messages (lane) "reduce".

    Attributes:
        size: The number of ranks.
        index: This rank's index among them.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.size = comm.size
        self.index = comm.rank
        self._group = TensorGroup(comm)

    def exchange(self, pieces: Sequence[Tensor], what: str) -> list[Tensor]:
        """Send a slice of each tensor to each rank (all-to-all).

        Args:
            pieces: Tensors of one dtype and shape (size, ...), with the same shapes on every rank;
                rank r receives `piece[r]`. They need not be contiguous.
            what: The name of the collective, for messages.

        Returns:
            For each piece, a tensor of shape (size, ...) with the slices that the ranks sent, in
            rank order.

        Note:
            Collective and blocking: every rank must call it.
        """
        outgoing = self._packed(pieces)
        found = torch.empty_like(outgoing)
        found[self.index] = outgoing[self.index]
        self._send(outgoing, list(outgoing), list(found), what, leave_in_place)
        return _unpacked(found, pieces)

    def all_gather(self, parts: Sequence[Tensor], what: str) -> list[Tensor]:
        """All-gather tensors of every rank.

        Args:
            parts: Tensors of one dtype, with the same shapes on every rank. They need not be
                contiguous.
            what: The name of the collective, for messages.

        Returns:
            For each part, a tensor of shape (size, ...) with that of each rank, in rank order.

        Note:
            Collective and blocking: every rank must call it.
        """
        pieces = [part[None] for part in parts]
        outgoing = self._packed(pieces)
        found = outgoing.new_empty(self.size, outgoing.shape[1])
        found[self.index] = outgoing[0]
        self._send(outgoing, [outgoing[0]] * self.size, list(found), what, leave_in_place)
        return _unpacked(found, pieces)

    def sum_scatter(self, pieces: Sequence[Tensor], what: str) -> list[Tensor]:
        """Reduce-scatter tensors in rank order, in fp32, rounded once.

        Args:
            pieces: Tensors of one dtype and shape (size, ...), with the same shapes on every rank;
                rank r receives the sum of all ranks' `piece[r]`. They need not be contiguous.
            what: The name of the collective, for messages.

        Returns:
            For each piece, this rank's sum, of shape (...).

        Note:
            Collective and blocking: every rank must call it.
        """
        outgoing = self._packed(pieces)
        found = outgoing.new_empty(outgoing.shape[1])
        inbox: list[Tensor | None] = [None] * self.size
        if not self.comm.reads_in_place:
            inbox = list(torch.empty_like(outgoing))

        def add_up(received: Sequence[Tensor]) -> None:
            ordered_sum(received, found, self._group.scratch, threads=self.comm.threads)

        self._send(outgoing, list(outgoing), inbox, what, add_up)
        return [each[0] for each in _unpacked(found[None], pieces)]

    def _send(
        self,
        outgoing: Tensor,
        pieces: Sequence[Tensor],
        inbox: Inbox,
        what: str,
        use: Use,
    ) -> None:
        self.comm.exchange(pieces, inbox, "reduce", what, use, KIND).wait()
        self._group.give_back(outgoing)

    def _packed(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return a buffer of the group with the rows of all pieces next to each other."""
        rows = pieces[0].shape[0]
        numel = sum(piece.numel() for piece in pieces)
        outgoing = self._group.take((rows, numel // rows), pieces[0].dtype)
        for box, piece in zip(_unpacked(outgoing, pieces), pieces, strict=True):
            box.copy_(piece)
        return outgoing


def _unpacked(rows: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of packed rows, each with the shape of one of `like` but for the rows."""
    widths = [piece.shape[1:].numel() for piece in like]
    return [
        box.unflatten(1, piece.shape[1:])
        for box, piece in zip(rows.split(widths, 1), like, strict=True)
    ]


def _moved(
    ranks: SequenceRanks, split: int, join: int, what: str, tensors: Sequence[Tensor]
) -> Tensors:
    pieces = [each.unflatten(split, (ranks.size, -1)).movedim(split, 0) for each in tensors]
    # The name contains the shapes: ranks with other numbers of tokens then get an error instead of
    # a partner.
    name = f"{what} {[tuple(each.shape[1:]) for each in pieces]}"
    return tuple(
        each.movedim(0, join).flatten(join, join + 1) for each in ranks.exchange(pieces, name)
    )


def exchange(ranks: SequenceRanks, split: int, join: int, what: str, *tensors: Tensor) -> Tensors:
    """Split one dimension of tensors over the ranks, and gather another one (all-to-all).

    Tensors of one dtype are sent together. Backward is the reverse exchange.

    Args:
        ranks: The sequence-parallel ranks among which the tensors are exchanged.
        split: The dimension that is whole here and split in the result.
        join: The dimension that is split here and whole in the result.
        what: The name of the collective, for messages.
        *tensors: Tensors with the same shapes on every rank.

    Returns:
        For each tensor, one whose dimension `split` is divided by the number of ranks and whose
        dimension `join` is multiplied by it; the tensors themselves if there is only one rank.

    Raises:
        UsageError: The number of ranks does not divide dimension `split`.

    Note:
        Collective and blocking: every rank must call it.
    """
    if ranks.size == 1:
        return tensors
    for each in tensors:
        if each.shape[split] % ranks.size:
            raise UsageError(
                f"{what}: {each.shape[split]} cannot be cut over {ranks.size} ranks (dimension "
                f"{split} of {list(each.shape)}).",
                "Each rank takes as many heads, and as many tokens, as every other.",
                "choose a number of sequence-parallel ranks that divides both.",
            )
    if len({each.dtype for each in tensors}) > 1:
        return tuple(
            exchange(ranks, split, join, f"{what}, {place}", each)[0]
            for place, each in enumerate(tensors)
        )
    return with_backward(
        lambda *tensors: _moved(ranks, split, join, what, tensors),
        lambda *grads: _moved(ranks, join, split, f"the gradient of {what}", grads),
        *tensors,
    )


def spread(heads: Tensor, ranks: int, dim: int) -> Tensor:
    """Repeat key or value heads if there are fewer heads than ranks.

    Neighboring ranks receive the copies of one head. The gradient of a repeated head is the sum
    over its copies.

    Args:
        heads: Keys or values.
        ranks: The number of sequence-parallel ranks that will split the heads.
        dim: The dimension of `heads` that counts heads.

    Returns:
        A tensor with as many heads as ranks, or `heads` itself if the ranks divide its heads.

    Raises:
        UsageError: Neither number divides the other.
    """
    held = heads.shape[dim]
    if held % ranks == 0:
        return heads
    if ranks % held:
        raise UsageError(
            f"{held} key and value heads cannot be cut over {ranks} sequence-parallel ranks.",
            "A rank holds whole heads, or a copy of one that ranks beside it hold, too.",
            "choose a number of ranks that divides the heads, or is a multiple of their number.",
        )
    return heads.repeat_interleave(ranks // held, dim)


class SequenceAttention(nn.Module):
    """Base class of attention modules that communicate over sequence-parallel ranks.

    A model that contains such a module can be trained with sequence parallelism.

    Args:
        local_attn: Computes attention from (query, key, value) of all tokens and this rank's heads.
        ranks: The ranks among which sequences are split.
    """

    def __init__(self, local_attn: Callable[..., Any], ranks: SequenceRanks) -> None:
        super().__init__()
        self.local_attn = local_attn
        self.ranks = ranks
