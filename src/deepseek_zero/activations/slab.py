"""One stretch of a memory, reserved once and handed out by first fit: for what comes and goes like a stack, a stack.

Owns where things lie; what they are, and when they move, is parking.py's, which calls it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..tiers.tier import Memory, Work


class Arena:
    """So many bytes of a memory, moved in chunks.  Both sizes are multiples of what the memory moves at once."""

    def __init__(self, memory: Memory, nbytes: int, chunk_bytes: int) -> None:
        self.nbytes = nbytes
        self.extent = memory.reserve(nbytes, torch.uint8, chunk_bytes, "activations")
        self._taken: list[tuple[int, int]] = []  # [low, high) in bytes, in order

    def take(self, nbytes: int) -> ArenaBlock | None:
        """The first gap of so many bytes (whole chunks), None where there is none."""
        start = 0
        for number, (low, high) in enumerate([*self._taken, (self.nbytes, self.nbytes)]):
            if low - start >= nbytes:
                self._taken.insert(number, (start, start + nbytes))
                return ArenaBlock(self, start, start + nbytes)
            start = high
        return None

    def free(self, place: ArenaBlock) -> None:
        """Nobody will read what is there."""
        self._taken.remove((place.low, place.high))
        self.extent.discard(place.low, place.high)


@dataclass(frozen=True)
class ArenaBlock:
    """The bytes [low, high) of a slab: an extent's verbs for them alone."""

    slab: Arena
    low: int
    high: int

    def part(self) -> Tensor:
        """The bytes, to be written."""
        return self.slab.extent.write(self.low, self.high)

    def look(self) -> Tensor:
        """The bytes, to be read; waits for them."""
        return self.slab.extent.read(self.low, self.high)

    def fetch(self) -> Work:
        return self.slab.extent.fetch(self.low, self.high)

    def store(self) -> Work:
        return self.slab.extent.store(self.low, self.high)

    def drop(self) -> None:
        self.slab.extent.evict(self.low, self.high)

    def free(self) -> None:
        self.slab.free(self)
