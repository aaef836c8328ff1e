"""Where each parameter lies in a unit's flat buffer, and which slice each rank owns.

Pure arithmetic on names, shapes and offsets; holds no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import NamedTuple

import torch

from ..base.device import PerDevice
from ..precision.codecs import Blocks, Cast, Codec

# Slices are cut at multiples of this many elements (decision 0001): every slice starts on a 4 KiB
# fp32 boundary, as direct I/O and vector kernels like it, at the price of up to N * 1023 elements
# of padding per group.
BLOCK = 1024

# Where updates are fused, each parameter begins at a multiple of this many elements. A fused kernel
# computes the last n % 8 elements of a tensor by another formula. Since slices begin at multiples
# of it too, these are the last elements of a parameter, whatever the stage and the number of ranks
# (decision 0126).
GRAIN = 8

# Elements of a sum over ranks that are added at a time: 1 MiB of fp32 stays in a core's cache; a
# GPU wants few, large kernels.
SUM_TILE_NUMEL = PerDevice(cpu=1 << 18, accelerator=1 << 24)
MAX_IN_FLIGHT = 2  # messages of one reduction, or units whose differences are under way

Shape = tuple[int, ...]
Box = tuple[Shape, Shape, int]  # offset, size, flat start


@dataclass(frozen=True)
class Slot:
    """One parameter's place: elements [start, stop) of the flat buffer."""

    name: str
    shape: Shape
    start: int

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def strides(self) -> Shape:
        """Of a contiguous tensor of that shape."""
        return tuple(prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))

    @cached_property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class FlatLayout:
    """A flat buffer of `ranks` equal slices of `slice_numel` elements; slots do not overlap."""

    slots: tuple[Slot, ...]
    slice_numel: int
    ranks: int

    @cached_property
    def padded_numel(self) -> int:
        return self.slice_numel * self.ranks

    @property
    def numel(self) -> int:
        """Elements that belong to parameters; the rest is padding."""
        return sum(slot.numel for slot in self.slots)

    def bounds(self, rank: int) -> tuple[int, int]:
        """Flat [start, stop) of a rank's slice."""
        return rank * self.slice_numel, (rank + 1) * self.slice_numel

    def owned(self, slot: Slot, rank: int) -> tuple[int, int]:
        """The part of a slot that a rank owns, as flat [start, stop); empty if start >= stop."""
        low, high = self.bounds(rank)
        return max(slot.start, low), min(slot.stop, high)

    def cuts(self, start: int, stop: int, tile_numel: int) -> list[tuple[int, int]]:
        """Flat [start, stop) cut where ranks' slices end, and at every `tile_numel` elements of a
        slice.

        A fused kernel treats the last few elements of a tensor by other instructions, which may
        round otherwise.  So the cuts are where the layout has them, whatever the stage (a
        replicated master is cut where a sharded one would be), the tier and the parameters that an
        optimizer treats alike.
        """
        found = []
        while start < stop:
            low = start // self.slice_numel * self.slice_numel
            end = min(
                stop, low + self.slice_numel, low + ((start - low) // tile_numel + 1) * tile_numel
            )
            found.append((start, end))
            start = end
        return found

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The padding: flat [start, stop) ranges that belong to no parameter."""
        edges = sorted((slot.start, slot.stop) for slot in self.slots if slot.numel)
        found = []
        reached = 0
        for start, stop in [*edges, (self.padded_numel, self.padded_numel)]:
            if start > reached:
                found.append((reached, start))
            reached = max(reached, stop)
        return tuple(found)


def even_layout(
    names: Sequence[str], shapes: Sequence[Shape], ranks: int, block: int = BLOCK, grain: int = 1
) -> FlatLayout:
    """Granularity "element": parameters in their order, cut into equal slices, also inside a
    parameter.

    grain: each parameter begins at a multiple of so many elements; it divides `block`.
    """
    slots = []
    offset = 0
    for name, shape in zip(names, shapes, strict=True):
        slots.append(Slot(name, tuple(shape), offset))
        offset += -(-prod(shape) // grain) * grain
    per_rank = -(-offset // ranks)
    return FlatLayout(tuple(slots), -(-per_rank // block) * block, ranks)


def whole_layout(
    names: Sequence[str], shapes: Sequence[Shape], ranks: int, block: int = BLOCK
) -> FlatLayout:
    """Granularity "tensor": no parameter is cut, for optimizers that need whole matrices or
    per-tensor norms.

    Largest first onto the least loaded rank; slices are padded to the fullest rank.
    """
    loads = [0] * ranks
    place: dict[int, tuple[int, int]] = {}
    order = sorted(range(len(names)), key=lambda index: (-prod(shapes[index]), index))
    for index in order:
        rank = min(range(ranks), key=lambda candidate: (loads[candidate], candidate))
        place[index] = (rank, loads[rank])
        loads[rank] += prod(shapes[index])
    slice_numel = -(-max(loads, default=0) // block) * block
    slots = [
        Slot(name, tuple(shape), place[index][0] * slice_numel + place[index][1])
        for index, (name, shape) in enumerate(zip(names, shapes, strict=True))
    ]
    return FlatLayout(tuple(slots), slice_numel, ranks)


LAYOUTS = {"element": even_layout, "tensor": whole_layout}


class Messages(NamedTuple):
    """How one reduction is cut.  numel: elements of a message for each rank.  in_flight: messages
    under way at once.
    """

    numel: int
    in_flight: int


@cache
def messages_of(slice_numel: int, ranks: int, bucket_numel: int, most: int = 1 << 62) -> Messages:
    """A message is a slice, or as much of it as a bucket over all ranks allows, and `most`; the
    next one travels while one is waited for and added up.
    """
    numel = min(max(BLOCK, bucket_numel // ranks // BLOCK * BLOCK), slice_numel, most)
    count = -(-slice_numel // max(1, numel))
    most_in_flight = 1 if ranks == 1 else MAX_IN_FLIGHT
    return Messages(numel, min(count, most_in_flight))


@cache
def hop_wires(
    wire: Codec, summand: torch.dtype, near: int, inside: Codec | None
) -> tuple[Codec, Codec]:
    """Return how gradients are sent among the ranks of a host, and how the hosts' sums are; of one
    hop the first holds.

    Codes are for links between hosts: inside one, summands travel as they are collected, unless
    `inside` says how.
    near: as `GroupPlan` has it.
    """
    if near == 1:
        return wire, wire
    return (
        (inside or Cast(summand), wire) if isinstance(wire, Blocks) else (wire, Cast(torch.float32))
    )


@cache
def message_rooms(
    numel: int,
    wires: tuple[Codec, Codec],
    ranks: int,
    near: int,
    *,
    in_place: bool,
    near_in_place: bool,
    far_in_place: bool,
) -> tuple[tuple[torch.dtype, int], ...]:
    """Return the buffers, by dtype and elements, in which the sum of one message is received: one
    inbox, or by host the hosts' sums, their codes if they are coded, then the inboxes of both hops.

    numel, wires: elements that each rank sends to each, and how (`hop_wires`).  near: as
    `GroupPlan` has it.
    in_place: the ranks read each other's pieces; near_in_place, far_in_place: those of a host, and
    those with one place on their hosts.
    """
    (dtype, length), (far_dtype, far_length) = ((wire.dtype, wire.length(numel)) for wire in wires)
    if near == 1:
        return () if in_place else ((dtype, length * (ranks - 1)),)
    hosts = ranks // near
    found = [(torch.float32, numel * hosts)]
    found += [(far_dtype, far_length * hosts)] if isinstance(wires[1], Blocks) else []
    found += [] if near_in_place else [(dtype, length * hosts * (near - 1))]
    found += [] if far_in_place else [(far_dtype, far_length * (hosts - 1))]
    return tuple(found)


def boxes(shape: Shape, start: int, stop: int) -> list[Box]:
    """Flat [start, stop) of a C-order tensor as axis-aligned boxes (offset, size, flat start), each
    element once.
    """
    if start >= stop:
        return []
    if not shape:
        return [((), (), start)]
    row = prod(shape[1:])
    first = start // row
    last = (stop - 1) // row
    if start % row == 0 and stop % row == 0:
        offset = (first, *[0] * (len(shape) - 1))
        size = ((stop - start) // row, *shape[1:])
        return [(offset, size, start)]
    if first == last:  # inside one row: describe it one dimension down
        inner = boxes(shape[1:], start - first * row, stop - first * row)
        return [((first, *offset), (1, *size), first * row + flat) for offset, size, flat in inner]
    head = min(stop, -(-start // row) * row)
    tail = max(head, stop // row * row)
    return boxes(shape, start, head) + boxes(shape, head, tail) + boxes(shape, tail, stop)
