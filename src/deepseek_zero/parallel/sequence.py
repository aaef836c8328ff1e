"""Ranks that share sequences: their movements, and Ulysses, which trades tokens for heads around
attention.

    (tokens / C, all heads) --exchange--> (all tokens, heads / C) --attention, exchange--> (tokens /
    C, all heads)

Attention of a head needs every token and no other head, so each rank computes whole attention of
its heads: per head the bits of one process. Exchanges move numbers and add none up; backward is the
exchange the other way around.
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

KIND = "sp"  # what the meter counts these bytes as


class SequenceRanks(Protocol):
    """The ranks that share sequences.  All of them make the same calls in the same order."""

    size: int
    index: int

    def exchange(self, pieces: Sequence[Tensor], what: str) -> list[Tensor]:
        """Send pieces[k][r] to rank r, return what the ranks sent, (size, ...) each. Collective;
        waits.

        pieces: of one dtype, (size, ...) each, the same shapes on every rank; they need not be
        contiguous.
        """
        ...


class SequenceGroup:
    """`SequenceRanks` over a communicator, whose lane "reduce" is this object's alone."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.size = comm.size
        self.index = comm.rank
        self._buffers = TensorGroup(comm)
        self._scratch = torch.empty(
            SUM_TILE_NUMEL.on(comm.device), dtype=torch.float32, device=comm.device
        )

    def exchange(self, pieces: Sequence[Tensor], what: str) -> list[Tensor]:
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
        """Return every rank's parts, (size, ...) each. Collective; waits.

        parts: of one dtype, the same shapes on every rank; they need not be contiguous.
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
        """Return the sums of every rank's pieces[k][own], in the order of the ranks, in fp32,
        rounded once. Collective; waits.

        pieces: of one dtype, (size, ...) each, the same shapes on every rank; they need not be
        contiguous.
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
            ordered_sum(received, found, self._scratch)

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
    # The shapes are in the name: ranks with other numbers of tokens find no partner, and an error
    # says so.
    name = f"{what} {[tuple(each.shape[1:]) for each in pieces]}"
    return tuple(
        each.movedim(0, join).flatten(join, join + 1) for each in ranks.exchange(pieces, name)
    )


def exchange(
    ranks: SequenceRanks, split: int, join: int, what: str, *tensors: Tensor
) -> tuple[Tensor, ...]:
    """Return each tensor with dimension `split` cut over the ranks and dimension `join` whole.
    Collective; waits.

    tensors: of one shape on every rank; their `split` is whole here, and of `join` this rank holds
    its part. Those of one dtype travel together. UsageError where the ranks do not divide `split`.
    Backward is the exchange back.
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
    """Return key or value heads so that the ranks divide them: fewer heads than ranks are repeated
    for neighbours.

    The gradient of a repeated head is the sum over its copies. UsageError where neither number
    divides the other.
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
    """Base of modules that exchange around attention by themselves: a model with one trains along
    "sp".

    local_attn: is called with (query, key, value) of all tokens and this rank's heads.
    """

    def __init__(self, local_attn: Callable[..., Any], ranks: SequenceRanks) -> None:
        super().__init__()
        self.local_attn = local_attn
        self.ranks = ranks


def _nothing(received: Sequence[Tensor]) -> None:
    """Leave the received pieces in place."""
