"""The bytes that ranks exchange of a flat buffer: by default its elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..comm.collectives import ordered_sum
from ..precision.codecs import Codec
from .pool import Pool


@dataclass(frozen=True)
class Message:
    """The elements of a flat buffer, which are sent from where they are.

    Attributes:
        wire: How the elements are encoded.
        memory: The encoded elements, flat.
        pool: Lends scratch memory.
        is_lent: The memory belongs to the pool, and the elements have to be written to it first.
    """

    wire: Codec
    memory: Tensor
    pool: Pool
    is_lent: bool = False

    def piece(self, low: int, high: int) -> Tensor:
        """Return the encoded elements [low, high)."""
        return self.memory[self.wire.length(low) : self.wire.length(high)]

    def write(self, values: Tensor, piece: Tensor, place: int) -> None:
        """Write elements to a piece of lent memory. Local.

        Args:
            values: The elements.
            piece: Where to write them.
            place: The index of the first element in the buffer.
        """

    def sum(self, received: Sequence[Tensor], into: Tensor, *, divisor: float, add: bool) -> None:
        """Sum the pieces of all ranks in fp32, in rank order, and round once. Local.

        Args:
            received: The piece of each rank.
            into: The sum.
            divisor: Divide the sum by this number.
            add: Add the sum to the values of `into`.
        """
        scratch = self.pool.take_scratch()
        ordered_sum(received, into, scratch, divisor=divisor, add=add)
        self.pool.give(scratch)

    def arrived(self) -> None:
        """Return lent memory, after this rank no longer needs the message."""
        if self.is_lent:
            self.pool.give(self.memory)
