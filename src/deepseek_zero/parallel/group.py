"""Ordered sums over the ranks of a tensor-parallel axis, and their buffers.

Sums are direct: every rank reads the part of every other rank in place, and forms the whole sum in
rank order (`ordered_sum`). If activations are sharded over tokens, a rank forms the sum of its own
tokens only. Buffers are reused; a buffer that other ranks still read is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..comm.collectives import Comm, ordered_sum
from ..comm.pending import Pending
from ..comm.transports.base import Inbox, Use, leave_in_place
from ..planner.messages import SUM_TILE_NUMEL

KIND = "tp"  # kind of these bytes in the meter
LEAST_BUFFERS = 3  # created before a buffer that is still read is waited for


class TensorGroup:
    """The collectives of one tensor-parallel group, with reusable buffers.

    All ranks of the group must make the same calls in the same order.

    Args:
        comm: The communicator of the tensor-parallel ranks. No other object may use its queue
            of messages (lane) "reduce".
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.size = comm.size
        self.index = comm.rank
        self._free: list[Tensor] = []  # least recently used first
        self._lent: dict[int, Tensor] = {}  # by address
        self._made = 0
        self.scratch = torch.empty(
            SUM_TILE_NUMEL.on(comm.device), dtype=torch.float32, device=comm.device
        )

    # -- buffers

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized buffer for a tensor that will be summed over the ranks.

        `sum` returns the buffer to the pool. The call blocks if other ranks still read every
        buffer.

        Args:
            shape: The shape of the returned tensor.
            dtype: The dtype of the returned tensor.

        Returns:
            A view of a buffer that other ranks can read directly.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        large = [buffer for buffer in self._free if buffer.numel() >= nbytes]
        buffer = next((each for each in large if not self.comm.is_read(each)), None)
        if buffer is None and large and self._made >= LEAST_BUFFERS:
            buffer = large[0]
        if buffer is not None:
            self._free = [each for each in self._free if each is not buffer]
            self.comm.wait_until_read(buffer)
        else:
            # All are too small: free the largest
            if self._free and self._made >= LEAST_BUFFERS:
                self._free.pop()
                self._made -= 1
            buffer = self.comm.empty(max(nbytes, 1), torch.uint8)
            self._made += 1
        self._lent[buffer.data_ptr()] = buffer
        return buffer[:nbytes].view(dtype).view(tuple(shape))

    def buffers(self) -> list[Tensor]:
        """Return the pooled buffers and the scratch memory that sums use."""
        return [self.scratch, *self._free]

    def sum(self, part: Tensor, what: str) -> Sum:
        """Start an all-reduce in rank order, in fp32, rounded once.

        Args:
            part: A buffer of `take` with the same shape and dtype on every rank. The group owns it
                from now on.
            what: The name of the sum, for messages.

        Returns:
            A handle whose `wait()` returns a new tensor with the shape and dtype of `part`.

        Note:
            Collective: every rank must call it.
        """
        return self._sum(part, [part.view(-1)] * self.size, torch.empty_like(part), what)

    def sum_own_tokens(self, part: Tensor, what: str) -> Sum:
        """Start a reduce-scatter over tokens in rank order, in fp32, rounded once.

        Args:
            part: A buffer of `take`, shape (batch, tokens, n), with the same shape and dtype on
                every rank; the number of ranks divides `tokens`. The group owns it from now on.
            what: The name of the sum, for messages.

        Returns:
            A handle whose `wait()` returns the sum for this rank's tokens, shape
            (batch, tokens / size, n).

        Note:
            Collective: every rank must call it.
        """
        batch, tokens, width = part.shape
        own = tokens // self.size
        if batch > 1:  # the part that one rank reads must be contiguous
            page = self.take((self.size, batch, own, width), part.dtype)
            page.copy_(part.view(batch, self.size, own, width).transpose(0, 1))
            self.give_back(part)
            part = page
        found = torch.empty((batch, own, width), dtype=part.dtype, device=part.device)
        return self._sum(part, part.view(-1).chunk(self.size), found, what)

    def _sum(self, part: Tensor, pieces: Sequence[Tensor], found: Tensor, what: str) -> Sum:
        """Start to sum the ranks' pieces for this rank into `found`."""

        def use(received: Sequence[Tensor]) -> None:
            ordered_sum(received, found.view(-1), self.scratch, threads=self.comm.threads)

        boxes = _boxes(self, pieces[self.index])
        pending = self.comm.exchange(pieces, boxes, "reduce", what, use, KIND)
        return Sum(found, pending.then(partial(self.give_back, part)))

    def give_back(self, part: Tensor) -> None:
        """Return a buffer of `take` to the pool. Other ranks may still read it."""
        self._free.append(self._lent.pop(part.data_ptr()))

    # -- movements

    def all_gather(self, part: Tensor, widths: Sequence[int], what: str) -> list[Tensor]:
        """Return every rank's part, in rank order, each of shape (rows, widths[rank]).

        Args:
            part: This rank's part, contiguous. The returned list contains this tensor itself.
            widths: The width of each rank's part.
            what: The name of the collective, for messages.

        Note:
            Collective and blocking: every rank must call it.
        """
        rows = part.shape[0]
        found = [
            part if rank == self.index else part.new_empty(rows, width)
            for rank, width in enumerate(widths)
        ]
        outgoing = self.take(part.shape, part.dtype).copy_(part)
        self._send_to_all(outgoing.view(-1), [box.view(-1) for box in found], what, leave_in_place)
        return found

    def gather_tokens(self, own: Tensor, what: str) -> Tensor:
        """All-gather a tensor that is sharded over tokens.

        Args:
            own: This rank's tokens, shape (batch, tokens / size, n).
            what: The name of the collective, for messages.

        Returns:
            A new tensor of shape (batch, tokens, n).

        Note:
            Collective and blocking: every rank must call it.
        """
        batch, tokens, width = own.shape
        outgoing = self.take(own.shape, own.dtype).copy_(own).view(-1)
        found = torch.empty((batch, self.size, tokens, width), dtype=own.dtype, device=own.device)

        def use(received: Sequence[Tensor]) -> None:
            for rank, each in enumerate(received):
                found[:, rank].copy_((own if rank == self.index else each).view(own.shape))

        self._send_to_all(outgoing, _boxes(self, outgoing), what, use)
        return found.view(batch, -1, width)

    def _send_to_all(self, outgoing: Tensor, boxes: Inbox, what: str, use: Use) -> None:
        """Send a buffer of `take` to every rank, receive theirs, and take it back."""
        self.comm.exchange([outgoing] * self.size, boxes, "reduce", what, use, KIND).wait()
        self.give_back(outgoing)


def _boxes(group: TensorGroup, own: Tensor) -> list[Tensor | None]:
    """Return the receive buffer for each rank's piece, or None if it is read in place."""
    if group.comm.reads_in_place:
        return [None] * group.size
    return [own if rank == group.index else torch.empty_like(own) for rank in range(group.size)]


@dataclass(frozen=True)
class Sum:
    """Handle of an all-reduce or reduce-scatter that a `TensorGroup` has started.

    Attributes:
        found: The tensor that receives the sum of this rank's piece over all ranks.
        pending: The collective.
    """

    found: Tensor
    pending: Pending

    def wait(self) -> Tensor:
        """Block until the sum is complete, and return it.

        Raises:
            PeerError: Another rank failed or issued a different collective.
        """
        self.pending.wait()
        return self.found
