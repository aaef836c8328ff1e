"""Communication between ranks that share sequences, and Ulysses attention.

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
from torch.autograd.function import once_differentiable

from ..base.errors import UsageError
from ..comm.collectives import Comm, ordered_sum
from ..planner.messages import SUM_TILE_NUMEL
from .group import TensorGroup

KIND = "sp"  # kind of these bytes in the meter


class SequenceRanks(Protocol):
    """The ranks that share sequences.

    All of them must make the same calls in the same order.
    """

    size: int
    index: int

    def exchange(self, pieces: Sequence[Tensor], what: str) -> list[Tensor]:
        """Send pieces[k][r] to rank r and return what each rank sent.

        Args:
            pieces: Tensors of one dtype and shape (size, ...), with the same shapes on every rank.
                They need not be contiguous.
            what: The name of the collective, for messages.

        Returns:
            For each piece, a tensor of shape (size, ...).

        Note:
            Collective and blocking: every rank must call it.
        """
        ...


class SequenceGroup:
    """`SequenceRanks` over a communicator.

    Args:
        comm: The communicator. Only this object uses its lane "reduce".
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.size = comm.size
        self.index = comm.rank
        self._buffers = TensorGroup(comm)
        self._scratch = torch.empty(
            SUM_TILE_NUMEL.on(comm.device), dtype=torch.float32, device=comm.device
        )

    def exchange(self, pieces: Sequence[Tensor], what: str) -> list[Tensor]:
        """Exchange pieces as `SequenceRanks.exchange`.

        Args:
            pieces: Tensors of one dtype and shape (size, ...).
            what: The name of the collective, for messages.

        Note:
            Collective and blocking: every rank must call it.
        """
        widths = [piece.numel() // self.size for piece in pieces]
        dtype = pieces[0].dtype
        outgoing = self._buffers.take((self.size, sum(widths)), dtype)
        found = torch.empty(self.size, sum(widths), dtype=dtype, device=pieces[0].device)
        for part, piece in zip(outgoing.split(widths, 1), pieces, strict=True):
            part.unflatten(1, piece.shape[1:]).copy_(piece)
        found[self.index] = outgoing[self.index]
        self.comm.exchange(list(outgoing), list(found), "reduce", what, _nothing, KIND).wait()
        self._buffers.give_back(outgoing)
        parts = found.split(widths, 1)
        return [
            part.unflatten(1, piece.shape[1:]) for part, piece in zip(parts, pieces, strict=True)
        ]

    def all_gather(self, parts: Sequence[Tensor], what: str) -> list[Tensor]:
        """Return every rank's parts, each of shape (size, ...).

        Args:
            parts: Tensors of one dtype, with the same shapes on every rank. They need not be
                contiguous.
            what: The name of the collective, for messages.

        Note:
            Collective and blocking: every rank must call it.
        """
        widths = [part.numel() for part in parts]
        outgoing = self._buffers.take((sum(widths),), parts[0].dtype)
        found = outgoing.new_empty(self.size, sum(widths))
        for box, part in zip(outgoing.split(widths), parts, strict=True):
            box.view(part.shape).copy_(part)
        found[self.index] = outgoing
        self.comm.exchange(
            [outgoing] * self.size, list(found), "reduce", what, _nothing, KIND
        ).wait()
        self._buffers.give_back(outgoing)
        return [
            box.unflatten(1, part.shape)
            for box, part in zip(found.split(widths, 1), parts, strict=True)
        ]

    def sum_scatter(self, pieces: Sequence[Tensor], what: str) -> list[Tensor]:
        """Return the sums of every rank's pieces[k][own].

        They are formed in rank order, in fp32, and rounded once.

        Args:
            pieces: Tensors of one dtype and shape (size, ...), with the same shapes on every rank.
                They need not be contiguous.
            what: The name of the collective, for messages.

        Note:
            Collective and blocking: every rank must call it.
        """
        widths = [piece.numel() // self.size for piece in pieces]
        outgoing = self._buffers.take((self.size, sum(widths)), pieces[0].dtype)
        for box, piece in zip(outgoing.split(widths, 1), pieces, strict=True):
            box.unflatten(1, piece.shape[1:]).copy_(piece)
        found = outgoing.new_empty(sum(widths))
        inbox: list[Tensor | None] = [None] * self.size
        if not self.comm.reads_in_place:
            inbox = list(torch.empty_like(outgoing))

        def add_up(received: Sequence[Tensor]) -> None:
            ordered_sum(received, found, self._scratch, threads=self.comm.threads)

        self.comm.exchange(list(outgoing), inbox, "reduce", what, add_up, KIND).wait()
        self._buffers.give_back(outgoing)
        return [
            box.view(piece.shape[1:])
            for box, piece in zip(found.split(widths), pieces, strict=True)
        ]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ranks: SequenceRanks, split: int, join: int, what: str, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.ranks = ranks
        ctx.split = split
        ctx.join = join
        ctx.what = what
        return _moved(ranks, split, join, what, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return (
            None,
            None,
            None,
            None,
            *_moved(ctx.ranks, ctx.join, ctx.split, f"the gradient of {ctx.what}", grads),
        )


def _moved(
    ranks: SequenceRanks, split: int, join: int, what: str, tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    pieces = [each.unflatten(split, (ranks.size, -1)).movedim(split, 0) for each in tensors]
    # The name contains the shapes: ranks with other numbers of tokens then get an error instead of
    # a partner.
    name = f"{what} {[tuple(each.shape[1:]) for each in pieces]}"
    return tuple(
        each.movedim(0, join).flatten(join, join + 1) for each in ranks.exchange(pieces, name)
    )


def exchange(
    ranks: SequenceRanks, split: int, join: int, what: str, *tensors: Tensor
) -> tuple[Tensor, ...]:
    """Split dimension `split` of tensors over the ranks, and gather dimension `join`.

    Tensors of one dtype are sent together. Backward is the reverse exchange.

    Args:
        ranks: The ranks.
        split: The dimension that is whole here and split in the result.
        join: The dimension that is split here and whole in the result.
        what: The name of the collective, for messages.
        *tensors: Tensors with the same shapes on every rank.

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
    found: tuple[Tensor, ...] = _Exchange.apply(ranks, split, join, what, *tensors)  # type: ignore[no-untyped-call]
    return found


def spread(heads: Tensor, ranks: int, dim: int) -> Tensor:
    """Repeat key/value heads if there are fewer than ranks.

    The copies are for neighboring ranks. The gradient of a repeated head is the sum over its
    copies.

    Args:
        heads: Keys or values.
        ranks: The number of ranks.
        dim: The dimension of heads.

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
    """Base class of attention modules that do their own exchanges.

    A model with one can be trained along "sp".

    Args:
        local_attn: Called with (query, key, value) of all tokens and this rank's heads.
        ranks: The ranks that share sequences.
    """

    def __init__(self, local_attn: Callable[..., Any], ranks: SequenceRanks) -> None:
        super().__init__()
        self.local_attn = local_attn
        self.ranks = ranks


def _nothing(received: Sequence[Tensor]) -> None:
    """Leave the received pieces in place."""
