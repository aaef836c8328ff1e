"""Offload of checkpoint inputs to an arena of a memory tier, until backward.

Forward offloads in one order and backward restores in the reverse order, so the arena is used like
a stack; first-fit allocation supports any other order too. The size of the arena is given or
learned. To learn it, the first forward reserves blocks one by one, and they are joined into one
arena as soon as nothing is offloaded. On a disk, the newest checkpoint stays in memory because
backward begins with it. Earlier ones are written while later ones compute, and backward reads the
next ones while it recomputes one. An `OffloadHandle` can restore any number of times; its block is
freed when the handle is garbage-collected.

`ActivationCopy` copies inputs out and in. If the arena is not in the device's memory, the copies
overlap with computation. `TensorMeta` holds the dtype, shape, strides and device of a tensor.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..base.device import backward_id, queue_backward_callback, version_of
from ..base.memory import HEAP, PAGE
from ..base.quantities import ceil_div, format_bytes, rounded_up
from ..base.work import Work
from ..comm.context import ranks_of_this_host
from ..tiers.tier import CopyEngine, CopyEvent, Storage, TierMemory, copy_engine_for

# Number of chunks in which the largest checkpoint's inputs are moved: enough work for all threads
# of a disk, and little rounding
CHUNKS = 16
AHEAD = 2  # Checkpoints that are read before backward needs them
BEHIND = 2  # Checkpoints that may be in flight to the disk
ALIGNMENT = 64  # Alignment of tensors in bytes
SMALLEST_BYTES = 4096  # Minimum size of a tensor that is offloaded

Block = tuple[int, int]  # The bytes [low, high) of an arena


class ActivationOffload:
    """Offloads the inputs of activation checkpoints to host memory or a disk until backward.

    Args:
        open_memory: Opens the memory. It is called again whenever the size of the arena changes, so
            that nothing of the old one is kept.
        checkpoints: Number of checkpoints to reserve memory for; None determines it in the first
            step.
    """

    def __init__(
        self, open_memory: Callable[[], TierMemory], checkpoints: int | None = None
    ) -> None:
        self._open = open_memory
        self.checkpoints = checkpoints
        self.memory = open_memory()
        self.slabs: list[Arena] = []
        self.used_bytes = self.peak_bytes = 0
        self._offloaded: dict[int, OffloadedInputs] = {}  # In order of arrival
        # Filled by finalizers, which may run anywhere and therefore do nothing else
        self._dropped: deque[int] = deque()
        self._leaving: deque[Work] = deque()
        self._arrived = 0
        self._chunk_bytes = self._largest_bytes = 0
        self._backward = -1  # The last backward that ends with a sweep
        self._known: dict[int, KnownTensor] = {}  # By id, while the tensor exists
        self._copies = ActivationCopy()

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes of memory that are reserved in all arenas."""
        return sum(arena.nbytes for arena in self.slabs)

    @property
    def unused_bytes(self) -> int:
        """Return the reserved bytes that exceed the peak of the offloaded bytes."""
        return self.reserved_bytes - self.peak_bytes

    def park(
        self, tensors: Sequence[Tensor], cut: Callable[[Tensor], Tensor] = lambda whole: whole
    ) -> ParkedTensors:
        """Copy the inputs of one checkpoint to the arena.

        A tensor that an earlier checkpoint has offloaded is not copied again, unless it was changed
        in place.

        Args:
            tensors: The input tensors of the checkpoint.
            cut: A function that returns the part of a tensor that is copied; by default the whole
                tensor.

        Returns:
            An object whose `restore()` returns copies of the tensors.
        """
        places = [self._place_of(tensor) for tensor in tensors]
        new = list(
            {
                id(tensor): tensor
                for tensor, place in zip(tensors, places, strict=True)
                if place is None
            }.values()
        )
        if new:
            handle = self.offload([cut(tensor) for tensor in new])
            for number, tensor in enumerate(new):
                self._remember(tensor, handle, number)
            places = [self._place_of(tensor) for tensor in tensors]
        return ParkedTensors([place for place in places if place is not None])

    def _remember(self, tensor: Tensor, handle: OffloadHandle, number: int) -> None:
        table = self._known
        key = id(tensor)
        alive = weakref.ref(tensor, lambda _: table.pop(key, None))
        table[key] = KnownTensor(alive, version_of(tensor), weakref.ref(handle), number)

    def _place_of(self, tensor: Tensor) -> tuple[OffloadHandle, int] | None:
        """Return the handle and the index that restore this version, or None."""
        known = self._known.get(id(tensor))
        if known is None or known.version != version_of(tensor):
            return None
        handle = known.handle()
        return None if handle is None else (handle, known.number)

    def offload(self, tensors: Sequence[Tensor]) -> OffloadHandle:
        """Copy tensors to the arena.

        Returns:
            A handle that restores them. Their memory in the arena is freed when it is
            garbage-collected.
        """
        self.sweep()
        self._store_newest()
        forms = [TensorMeta.of(tensor) for tensor in tensors]
        nbytes = sum(rounded_up(form.nbytes, ALIGNMENT) for form in forms)
        inputs = OffloadedInputs(*self._block_for(nbytes), forms)
        self._copies.copy_out(tensors, inputs)
        self._arrived += 1
        self._offloaded[self._arrived] = inputs
        HEAP.trim()  # freed storages and restored copies leave holes in it
        self.used_bytes += inputs.nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return OffloadHandle(self, self._arrived)

    def restore(self, number: int, wanted: Sequence[int] | None = None) -> list[Tensor]:
        """Return new tensors with the values of offloaded ones.

        The arena keeps its copy, for another backward through this graph.

        Args:
            number: The number of the offloaded inputs, which an `OffloadHandle` has.
            wanted: Indices of the tensors to restore; None for all.

        Returns:
            The tensors, in the order in which they were offloaded.
        """
        self.sweep()
        self._copies.synchronize()
        inputs = self._offloaded[number]
        inputs.storage.fetch(*inputs.block)
        # Earlier checkpoints, latest first, as backward needs them
        earlier_numbers = (other for other in reversed(self._offloaded) if other < number)
        soon = list(islice(earlier_numbers, AHEAD))
        tickets = []
        for other in soon:
            earlier = self._offloaded[other]
            tickets.append(earlier.storage.fetch(*earlier.block))
        numbers = range(len(inputs.forms)) if wanted is None else wanted
        found = self._copies.copy_in(number, inputs, numbers)
        if inputs.is_stored:
            inputs.storage.evict(*inputs.block)
        if soon and tickets[0].is_done():
            self._copies.prefetch(soon[0], self._offloaded[soon[0]])
        HEAP.trim()  # freed storages and restored copies leave holes in it
        self._sweep_after_backward()
        return found

    def _store_newest(self) -> None:
        """Write the newest checkpoint to the tier, because another one follows.

        Wait if the disk is too slow.
        """
        newest = next(reversed(self._offloaded.values()), None)
        if newest is not None and not newest.is_stored:
            self._leaving.append(newest.storage.store(*newest.block))
            newest.is_stored = True
        while len(self._leaving) > BEHIND:
            self._leaving.popleft().wait()

    # -- memory

    def _block_for(self, nbytes: int) -> tuple[Arena, Block]:
        """Allocate a block, and return its arena and its range."""
        self._largest_bytes = max(self._largest_bytes, nbytes)
        if not self._offloaded and len(self.slabs) > 1:
            self._join()
        self._chunk_bytes = self._chunk_bytes or self._best_chunk()
        whole = rounded_up(nbytes, self._chunk_bytes)
        for arena in self.slabs:
            if (block := arena.take(whole)) is not None:
                return arena, block
        count = 1 if self.slabs or self.checkpoints is None else self.checkpoints
        arena = self._reserve(whole * count)
        block = arena.take(whole)
        assert block is not None
        return arena, block

    def _join(self) -> None:
        """Replace several arenas by one, while nothing is offloaded."""
        self._chunk_bytes = self._best_chunk()
        nbytes = sum(rounded_up(arena.nbytes, self._chunk_bytes) for arena in self.slabs)
        self._release_memory()
        self.memory = self._open()
        self._reserve(nbytes)

    def _best_chunk(self) -> int:
        return rounded_up(ceil_div(self._largest_bytes, CHUNKS), PAGE)

    def _reserve(self, nbytes: int) -> Arena:
        self.memory.check_space(nbytes, ranks_of_this_host())
        self.slabs.append(Arena(self.memory, nbytes, self._chunk_bytes))
        return self.slabs[-1]

    def _release_memory(self) -> None:
        self.slabs.clear()
        self._leaving.clear()
        self.memory.close()

    # -- release

    def sweep(self) -> None:
        """Free the memory of handles that have been garbage-collected."""
        while self._dropped:
            self._copies.discard(number := self._dropped.popleft())
            inputs = self._offloaded.pop(number)
            self.used_bytes -= inputs.nbytes
            inputs.arena.free(inputs.block)

    def _sweep_after_backward(self) -> None:
        """Free blocks at the end of backward, because handles are dropped after `restore`."""
        if self._backward != (now := backward_id()) and now != -1:
            self._backward = now
            queue_backward_callback(self.sweep)

    def close(self) -> None:
        """Free the arenas, unless a graph still needs offloaded tensors.

        In that case they are freed with the graph.
        """
        if len(self._dropped) == len(self._offloaded):
            for number in self._dropped:
                self._copies.discard(number)
            self._dropped.clear()
            self._offloaded.clear()
            self._copies.synchronize()
            self._copies = ActivationCopy()
            self._release_memory()

    def explain(self) -> str:
        """Return one line for a report, with the reserved bytes and the unused ones."""
        slabs = "one arena" if len(self.slabs) == 1 else f"{len(self.slabs)} slabs"
        return (
            f"activations: {format_bytes(self.reserved_bytes)} in {slabs}, "
            f"{format_bytes(self.peak_bytes)} used at most, gap {format_bytes(self.unused_bytes)}"
        )


@dataclass(eq=False)
class OffloadHandle:
    """Handle of offloaded tensors. Their memory is freed when it is garbage-collected.

    Attributes:
        parking: The offload that holds the tensors.
        number: The number of the offloaded inputs there.
    """

    parking: ActivationOffload
    number: int

    def restore(self, wanted: Sequence[int] | None = None) -> list[Tensor]:
        """Return new tensors with the offloaded values.

        Args:
            wanted: Indices of the tensors to restore; None for all.
        """
        return self.parking.restore(self.number, wanted)

    def __del__(self) -> None:
        self.parking._dropped.append(self.number)


@dataclass(frozen=True)
class KnownTensor:
    """The record of an offloaded tensor that still exists, to avoid a second copy.

    Attributes:
        tensor: A weak reference to the tensor.
        version: The version counter of the tensor when it was copied.
        handle: A weak reference to the handle that restores it.
        number: The index of the tensor in that handle.
    """

    tensor: weakref.ref[Tensor]
    version: int
    handle: weakref.ref[OffloadHandle]
    number: int


@dataclass(frozen=True)
class ParkedTensors:
    """The offloaded input tensors of one checkpoint.

    A tensor may have been offloaded by an earlier checkpoint.

    Attributes:
        places: For each tensor, the handle that restores it and its index there.
    """

    places: list[tuple[OffloadHandle, int]]

    def restore(self) -> list[Tensor]:
        """Return new tensors with the offloaded values.

        A tensor that was passed twice is one new tensor.
        """
        wanted: dict[OffloadHandle, list[int]] = {}
        for handle, number in self.places:
            numbers = wanted.setdefault(handle, [])
            if number not in numbers:
                numbers.append(number)
        found = {
            (handle, number): tensor
            for handle, numbers in wanted.items()
            for number, tensor in zip(numbers, handle.restore(numbers), strict=True)
        }
        return [found[place] for place in self.places]


@dataclass
class OffloadedInputs:
    """The location of one checkpoint's inputs in an arena.

    Attributes:
        arena: The arena from which the block was allocated.
        block: The range of bytes of the arena that holds the inputs.
        forms: The dtype, shape, strides and device of each tensor.
        is_stored: Whether the block was written to the memory tier.
    """

    arena: Arena
    block: Block
    forms: list[TensorMeta]
    is_stored: bool = False

    @property
    def storage(self) -> Storage:
        """Return the storage of the arena in which the inputs are stored."""
        return self.arena.storage

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors, without padding."""
        return sum(form.nbytes for form in self.forms)

    def parts(self, bytes_: Tensor) -> list[tuple[TensorMeta, Tensor]]:
        """Split the bytes of the block into those of each tensor, with its metadata."""
        found: list[tuple[TensorMeta, Tensor]] = []
        start = 0
        for form in self.forms:
            found.append((form, bytes_[start : start + form.nbytes]))
            start += rounded_up(form.nbytes, ALIGNMENT)
        return found


class ActivationCopy:
    """Copies tensors between an arena and their device, if possible asynchronously."""

    def __init__(self) -> None:
        self._engines: dict[torch.device, CopyEngine] = {}
        self._prefetched: dict[int, tuple[CopyEvent, dict[int, Tensor]]] = {}

    def copy_out(self, tensors: Sequence[Tensor], inputs: OffloadedInputs) -> None:
        """Copy tensors to an arena, and keep references to them until the copy has ended.

        Args:
            tensors: The tensors to copy, in the order of `inputs.forms`.
            inputs: The block of the arena that receives them.
        """
        bytes_ = inputs.storage.write(*inputs.block)
        sources = list(tensors)
        with self._copy_engine(inputs).d2h(inputs.storage, sources.clear):
            for tensor, (form, part) in zip(tensors, inputs.parts(bytes_), strict=True):
                form.write(tensor, part)

    def copy_in(self, number: int, inputs: OffloadedInputs, wanted: Sequence[int]) -> list[Tensor]:
        """Copy tensors from an arena to new tensors, or return those of an earlier `prefetch`.

        Args:
            number: The number of the offloaded inputs, which identifies a prefetched copy.
            inputs: The block of the arena that holds them.
            wanted: Indices of the tensors to copy.

        Returns:
            The new tensors, which the current stream of their device may use.
        """
        copy_event, found = (
            self._prefetched.pop(number)
            if number in self._prefetched
            else self._start(inputs, wanted)
        )
        copy_event.wait_stream()
        return [found[place] for place in wanted]

    def prefetch(self, number: int, inputs: OffloadedInputs) -> None:
        """Start to copy tensors from an arena, if such copies overlap with computation.

        Args:
            number: The number of the offloaded inputs, with which `copy_in` finds the copy.
            inputs: The block of the arena that holds them.
        """
        if number not in self._prefetched and self._copy_engine(inputs).overlaps:
            self._prefetched[number] = self._start(inputs, range(len(inputs.forms)))

    def discard(self, number: int) -> None:
        """Drop a prefetched copy, if there is one of this number.

        Later work of the device waits for the copy, because it may get the memory.
        """
        if number in self._prefetched:
            copy_event, _ = self._prefetched.pop(number)
            copy_event.wait_stream()

    def synchronize(self) -> None:
        """Make the current stream wait for all copies to arenas, and release their sources."""
        for copy_engine in self._engines.values():
            copy_engine.synchronize()

    def _start(
        self, inputs: OffloadedInputs, wanted: Sequence[int]
    ) -> tuple[CopyEvent, dict[int, Tensor]]:
        parts = inputs.parts(inputs.storage.read(*inputs.block))
        found = {number: inputs.forms[number].empty() for number in wanted}
        with self._copy_engine(inputs).h2d(inputs.storage) as copy_event:
            for number, tensor in found.items():
                form, part = parts[number]
                form.read(tensor, part)
        return copy_event, found

    def _copy_engine(self, inputs: OffloadedInputs) -> CopyEngine:
        """Return the copy engine of the tensors' device."""
        home = inputs.storage.memory.device
        device = next((form.device for form in inputs.forms if form.device != home), home)
        if device not in self._engines:
            self._engines[device] = CopyEngine() if device == home else copy_engine_for(device)
        return self._engines[device]


class Arena:
    """A contiguous range of a memory tier from which blocks are allocated.

    Args:
        memory: The memory in which the range is reserved.
        nbytes: The size, a multiple of the memory's unit.
        chunk_bytes: The size of the chunks in which blocks are moved, a multiple of the memory's
            unit.
    """

    def __init__(self, memory: TierMemory, nbytes: int, chunk_bytes: int) -> None:
        self.nbytes = nbytes
        self.storage = memory.reserve(nbytes, torch.uint8, chunk_bytes, "activations")
        self._taken: list[Block] = []  # Ascending

    def take(self, nbytes: int) -> Block | None:
        """Allocate `nbytes` bytes (whole chunks) from the first gap that is large enough.

        Returns:
            The range of bytes [low, high), or None if no gap is large enough.
        """
        start = 0
        for number, (low, high) in enumerate([*self._taken, (self.nbytes, self.nbytes)]):
            if low - start >= nbytes:
                self._taken.insert(number, (start, start + nbytes))
                return start, start + nbytes
            start = high
        return None

    def free(self, block: Block) -> None:
        """Free a block that `take` returned and that nothing reads any more."""
        self._taken.remove(block)
        self.storage.discard(*block)


@dataclass(frozen=True)
class TensorMeta:
    """Dtype, shape, strides and device of a tensor, from which an equal one can be allocated.

    If the elements have no gaps, in any order (a transposed or expanded tensor), their memory is
    copied as it is. A slice with gaps is copied element by element. Strides are restored, because
    a kernel may round differently for other strides.

    Attributes:
        dtype: The dtype of the elements.
        size: The shape of the tensor.
        stride: The stride of each dimension, in elements.
        device: The device on which the tensor is allocated.
    """

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMeta:
        """Return the dtype, shape, strides and device of a tensor."""
        return cls(tensor.dtype, tensor.size(), tensor.stride(), tensor.device)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes that `write` stores."""
        return min(self._span, prod(self.size)) * self.dtype.itemsize

    @property
    def _span(self) -> int:
        """Return the number of elements from the first to the last."""
        if 0 in self.size:
            return 0
        return 1 + sum(
            (length - 1) * step for length, step in zip(self.size, self.stride, strict=True)
        )

    def _gapless(self, tensor: Tensor, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Return both tensors as views with equal elements in equal order, without gaps."""
        if self._span <= prod(self.size):
            return tensor.as_strided((self._span,), (1,)), flat
        return tensor, flat.view(self.size)

    def write(self, tensor: Tensor, bytes_: Tensor) -> None:
        """Copy a tensor with this metadata to a byte buffer, in the current stream.

        Args:
            tensor: The tensor to copy.
            bytes_: The uint8 tensor of `nbytes` elements that receives it.
        """
        source, target = self._gapless(tensor.detach(), bytes_.view(self.dtype))
        target.copy_(source, non_blocking=True)

    def empty(self) -> Tensor:
        """Allocate an uninitialized tensor with this metadata."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)

    def read(self, tensor: Tensor, bytes_: Tensor) -> None:
        """Copy a byte buffer to a tensor with this metadata, as the inverse of `write`.

        Args:
            tensor: The tensor that receives the values.
            bytes_: The uint8 tensor of `nbytes` elements to copy.
        """
        target, source = self._gapless(tensor, bytes_.view(self.dtype))
        target.copy_(source, non_blocking=True)


@dataclass(frozen=True)
class Placeholder:
    """The placeholder of a tensor that `extract_tensors` has removed.

    Attributes:
        number: The index of the tensor among the removed ones.
    """

    number: int


def mark_held(tensor: Tensor) -> None:
    """Exclude a tensor from offload, because other code keeps its memory until backward."""
    tensor.is_held = True  # type: ignore[attr-defined]


def is_activation(value: Any) -> bool:
    """Return whether offloading a value frees memory.

    This is true for a plain tensor with a gradient that an operation computed. Parameters, leaves,
    tensors without gradient (batches, masks) and tensors passed to `mark_held` are kept by other
    code in any case, and are often shared by several checkpoints.
    """
    return (
        type(value) is Tensor
        and value.requires_grad
        and not value.is_leaf
        and not getattr(value, "is_held", False)
        and value.layout is torch.strided
        and value.nbytes >= SMALLEST_BYTES
        and not value.is_conj()
        and not value.is_neg()
    )


def extract_tensors(value: Any) -> tuple[Any, list[Tensor]]:
    """Replace the activations in nested containers by placeholders.

    Returns:
        `value` with a `Placeholder` for each activation, and the list of the activations.
    """
    found: list[Tensor] = []

    def change(leaf: Any) -> Any:
        if not is_activation(leaf):
            return leaf
        found.append(leaf)
        return Placeholder(len(found) - 1)

    return replaced(value, change), found


def insert_tensors(value: Any, tensors: Sequence[Tensor]) -> Any:
    """Return a value with its placeholders replaced by tensors.

    This is the inverse of `extract_tensors`.

    Args:
        value: A value returned by `extract_tensors`.
        tensors: The tensors to insert, in the order in which they were extracted.

    Returns:
        The nested containers that `extract_tensors` was called with, with tensors as leaves.
    """
    return replaced(
        value, lambda leaf: tensors[leaf.number] if isinstance(leaf, Placeholder) else leaf
    )


def replaced(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return `value` with ``change(leaf)`` for each leaf of its tuples, lists and dicts.

    A container without changes stays the same object, because a function may fill a list that it is
    passed.

    Args:
        value: Nested containers, or a single leaf.
        change: A function that returns the replacement of a leaf, or the leaf itself.
    """
    if type(value) is dict:
        items = {key: replaced(item, change) for key, item in value.items()}
        return items if any(items[key] is not item for key, item in value.items()) else value
    if type(value) in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        parts = [replaced(item, change) for item in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return change(value)
