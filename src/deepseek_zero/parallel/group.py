"""The ranks of one tensor-parallel axis: ordered sums over them, and the buffers that these read in
place.

A sum is direct: every rank reads every other rank's part where it lies and forms the whole sum, in
the order of the ranks (`ordered_sum`). Where activations are sharded over tokens, it forms that of
its own tokens. Buffers are kept and lent again; one that others still read is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..comm.collectives import Comm, ordered_sum
from ..planner.messages import SUM_TILE_NUMEL

KIND = "tp"  # what the meter counts these bytes as
LEAST_BUFFERS = 3  # made before one that others still read is waited for


class Sum(Protocol):
    """A sum under way."""

    def wait(self) -> Tensor:
        """Return the sum over the ranks; raises `PeerError` if another rank failed or strayed."""
        ...


class TensorGroup:
    """The ranks that hold parts of the same layers.  All of them make the same calls in the same
    order.

    comm: of these ranks.  Its lane "reduce" is this object's alone.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.size = comm.size
        self.index = comm.rank
        self._free: list[Tensor] = []  # the one lent longest ago first
        self._lent: dict[int, Tensor] = {}  # by address
        self._made = 0
        self._scratch = torch.empty(
            SUM_TILE_NUMEL.on(comm.device), dtype=torch.float32, device=comm.device
        )

    # -- buffers

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Lend a buffer for this rank's part of a sum; arbitrary contents. `sum` takes it back.
        Local.

        Waits where every buffer is still read by others.
        """
        numel = math.prod(shape)
        nbytes = numel * dtype.itemsize
        large = [buffer for buffer in self._free if buffer.numel() >= nbytes]
        buffer = next((each for each in large if not self.comm.is_read(each)), None)
        if buffer is None and large and self._made >= LEAST_BUFFERS:
            buffer = large[0]
        if buffer is not None:
            self._free = [each for each in self._free if each is not buffer]
            self.comm.wait_until_read(buffer)
        else:
            # Too small, all of them: the largest makes room
            if self._free and self._made >= LEAST_BUFFERS:
                self._free.pop()
                self._made -= 1
            buffer = self.comm.empty(max(nbytes, 1), torch.uint8)
            self._made += 1
        self._lent[buffer.data_ptr()] = buffer
        return buffer[:nbytes].view(dtype).view(tuple(shape))

    def buffers(self) -> list[Tensor]:
        """Return the memory that is kept for sums. Local."""
        return [self._scratch, *self._free]

    def sum(self, part: Tensor, what: str) -> Sum:
        """Start the sum of every rank's part, in the order of the ranks, in fp32, rounded once.
        Collective.

        part: from `take`, of one shape and dtype on every rank; it belongs to the group from now
        on.
        """
        flat = part.view(-1)
        return _Sum(self, part, [flat] * self.size, torch.empty_like(part), what)

    def sum_own_tokens(self, part: Tensor, what: str) -> Sum:
        """Start the sum of every rank's part, of this rank's tokens alone: (batch, tokens, n) to
        (batch, tokens / size, n). Collective.

        part: as for `sum`; its ranks divide the tokens.
        """
        batch, tokens, width = part.shape
        own = tokens // self.size
        if batch > 1:  # what one rank reads lies in one piece
            page = self.take((self.size, batch, own, width), part.dtype)
            page.copy_(part.view(batch, self.size, own, width).transpose(0, 1))
            self.give_back(part)
            part = page
        found = torch.empty((batch, own, width), dtype=part.dtype, device=part.device)
        return _Sum(self, part, part.view(-1).chunk(self.size), found, what)

    def give_back(self, part: Tensor) -> None:
        """Take back a lent buffer; others may still read it. Local."""
        self._free.append(self._lent.pop(part.data_ptr()))

    # -- movements

    def all_gather(self, part: Tensor, widths: Sequence[int], what: str) -> list[Tensor]:
        """Return every rank's part, by rank: (rows, widths[rank]) each. Collective; waits.

        part: (rows, widths[own]), contiguous; it is the own one.
        """
        rows = part.shape[0]
        found = [
            part if rank == self.index else part.new_empty(rows, width)
            for rank, width in enumerate(widths)
        ]
        outgoing = self.take(part.shape, part.dtype).copy_(part)
        boxes = [box.view(-1) for box in found]
        self.comm.exchange(
            [outgoing.view(-1)] * self.size, boxes, "reduce", what, _nothing, KIND
        ).wait()
        self.give_back(outgoing)
        return found

    def gather_tokens(self, own: Tensor, what: str) -> Tensor:
        """Return all tokens of a tensor that is sharded over them: (batch, tokens / size, n) to
        (batch, tokens, n).

        Collective; waits.
        """
        batch, tokens, width = own.shape
        outgoing = self.take(own.shape, own.dtype).copy_(own).view(-1)
        found = torch.empty((batch, self.size, tokens, width), dtype=own.dtype, device=own.device)

        def use(received: Sequence[Tensor]) -> None:
            for rank, each in enumerate(received):
                found[:, rank].copy_((own if rank == self.index else each).view(own.shape))

        boxes = _boxes(self, outgoing)
        self.comm.exchange([outgoing] * self.size, boxes, "reduce", what, use, KIND).wait()
        self.give_back(outgoing)
        return found.view(batch, -1, width)


def _boxes(group: TensorGroup, own: Tensor) -> list[Tensor | None]:
    """Return where every rank's piece comes to, each as large as the own one; None where it is read
    in its place.
    """
    if group.comm.reads_in_place:
        return [None] * group.size
    return [own if rank == group.index else torch.empty_like(own) for rank in range(group.size)]


class _Sum:
    """A sum that a group started.  pieces: by rank, what it is to have of the part; found: for the
    sum of the own.
    """

    def __init__(
        self, group: TensorGroup, part: Tensor, pieces: Sequence[Tensor], found: Tensor, what: str
    ) -> None:
        self._group = group
        self._part = part
        self._found = found
        into = found.view(-1)
        scratch = group._scratch

        def use(received: Sequence[Tensor]) -> None:
            ordered_sum(received, into, scratch)

        boxes = _boxes(group, pieces[group.index])
        self._pending = group.comm.exchange(pieces, boxes, "reduce", what, use, KIND)

    def wait(self) -> Tensor:
        self._pending.wait()
        self._group.give_back(self._part)
        return self._found


def _nothing(received: Sequence[Tensor]) -> None:
    """Leave the received pieces in place."""
