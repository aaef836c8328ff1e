"""Messages in which ranks exchange flat buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..comm.collectives import ordered_sum
from ..precision.codecs import Codec
from .pool import Pool


@dataclass(frozen=True)
class Message:
    """A message with the elements of a flat buffer, which is sent in place if it is not encoded.

    Attributes:
        wire: The encoding of the elements.
        memory: The encoded elements, flat.
        pool: The pool of scratch buffers.
        is_lent: Whether the memory is taken from the pool, so `write` must copy the elements to it
            before they are sent.
    """

    wire: Codec
    memory: Tensor
    pool: Pool
    is_lent: bool = False

    def piece(self, low: int, high: int) -> Tensor:
        """Return a view of the encoded elements [low, high)."""
        return self.memory[self.wire.length(low) : self.wire.length(high)]

    def write(self, values: Tensor, piece: Tensor, place: int) -> None:
        """Encode elements into lent memory (`CodedMessage`); this class sends them in place.

        Args:
            values: The elements to send, flat.
            piece: The destination, a view of `memory`.
            place: The index of the first element in the buffer.
        """

    def sum(self, received: Sequence[Tensor], into: Tensor, *, divisor: float, add: bool) -> None:
        """Sum the messages of all ranks in fp32, in rank order, and round once.

        Args:
            received: The message of each rank, in rank order.
            into: The output, this rank's slice of the sum.
            divisor: The number that the sum is divided by.
            add: Whether to add the sum to the values of `into`.
        """
        scratch = self.pool.take_scratch()
        threads = self.pool.comm.threads
        ordered_sum(received, into, scratch, divisor=divisor, add=add, threads=threads)
        self.pool.give(scratch)

    def arrived(self) -> None:
        """Return the memory of the message to the pool, after this rank has read it."""
        if self.is_lent:
            self.pool.give(self.memory)
