"""The offsets of parameters in a group's flat buffer, and the slice of each rank.

The module computes with names, shapes and offsets. It holds no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

# Slices are cut at multiples of this many elements (docs/design/sharding.md). Every slice then
# starts on a 4 KiB fp32 boundary, which suits direct I/O and vector kernels. The price is up to
# N * 1023 elements of padding per group.
BLOCK = 1024

# If updates are fused, each parameter begins at a multiple of this many elements. A fused kernel
# computes the last n % 8 elements of a tensor by another formula. Slices begin at such multiples,
# too, so these are the last elements of a parameter, whatever the stage and the number of ranks
# (docs/design/updates.md).
GRAIN = 8

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Slot:
    """The position of one parameter in a flat buffer: elements [start, stop).

    Attributes:
        name: The full name of the parameter.
        shape: The shape of the parameter.
        start: The index of its first element in the buffer.
    """

    name: str
    shape: Shape
    start: int

    @cached_property
    def numel(self) -> int:
        """The number of elements of the parameter."""
        return prod(self.shape)

    @cached_property
    def strides(self) -> Shape:
        """The strides of a contiguous tensor of this shape."""
        return tuple(prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))

    @cached_property
    def stop(self) -> int:
        """The index after the parameter's last element in the buffer."""
        return self.start + self.numel


@dataclass(frozen=True)
class FlatLayout:
    """The layout of a flat buffer of `ranks` slices, each of `slice_numel` elements.

    Slots do not overlap.

    Attributes:
        slots: The positions of the parameters.
        slice_numel: The number of elements of one rank's slice.
        ranks: The number of slices, one for each rank of the shard group.
    """

    slots: tuple[Slot, ...]
    slice_numel: int
    ranks: int

    @cached_property
    def padded_numel(self) -> int:
        """The number of elements of the buffer, including padding."""
        return self.slice_numel * self.ranks

    @property
    def numel(self) -> int:
        """The number of elements that belong to parameters; the rest is padding."""
        return sum(slot.numel for slot in self.slots)

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return the flat range [start, stop) of a rank's slice."""
        return rank * self.slice_numel, (rank + 1) * self.slice_numel

    def owned(self, slot: Slot, rank: int) -> tuple[int, int]:
        """Return the part of a parameter in a rank's slice: [low, high), empty if low >= high."""
        low, high = self.bounds(rank)
        return max(slot.start, low), min(slot.stop, high)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The flat ranges [start, stop) of padding, which belongs to no parameter."""
        edges = sorted((slot.start, slot.stop) for slot in self.slots if slot.numel)
        found = []
        reached = 0
        for start, stop in [*edges, (self.padded_numel, self.padded_numel)]:
            if start > reached:
                found.append((reached, start))
            reached = max(reached, stop)
        return tuple(found)


def even_layout(
    names: Sequence[str], shapes: Sequence[Shape], ranks: int, grain: int = 1
) -> FlatLayout:
    """Lay out parameters one after another in a flat buffer of equal slices.

    A slice may begin inside a parameter. The buffer is padded at the end to full slices.

    Args:
        names: The full names of the parameters, in the order of the layout.
        shapes: The shape of each parameter, in the order of `names`.
        ranks: The number of slices, one for each rank of the shard group.
        grain: Each parameter begins at a multiple of this many elements; it divides `BLOCK`.
    """
    slots = []
    offset = 0
    for name, shape in zip(names, shapes, strict=True):
        slots.append(Slot(name, tuple(shape), offset))
        offset += -(-prod(shape) // grain) * grain
    per_rank = -(-offset // ranks)
    return FlatLayout(tuple(slots), -(-per_rank // BLOCK) * BLOCK, ranks)
