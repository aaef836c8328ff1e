"""Memories that hold states outside the training device, and copies between them.

`Storage` is an extension point of the core. It is a flat tensor at a fixed address, and its bytes
may be in another memory between uses. `TierMemory` reserves storages, and `Tiers` groups the
memories of a rank. Callers use `fetch` before a use, `store` after a change, and `evict` after a
read. Access to a range that was not fetched waits for the transfer. `TransferMeter` counts
transfers, and can record each of them.

On a CPU, `CopyEngine` has nothing to copy, and every call is complete when it returns. With an
accelerator, each direction has its own stream, so that copies run while the device computes. Two
rules keep this safe. The device waits for a `CopyEvent` before it uses the result. The host does
not touch a storage until its copy is complete (`Storage.wait_for_copy`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from ..base.capabilities import Capability
from ..base.memory import parts_in_lock_ranges
from ..base.meter import AWAY, PhaseClock
from ..base.work import Work
from .budget import DeviceBudget
from .staging import StagingRing

STRIDE_BYTES = 2 << 20  # bytes that `to_host` copies at a time
# Bytes of one measurement of the rate. This is many times the number of bytes in flight, so that a
# burst does not count as the speed of the link.
STRETCH_BYTES = 256 << 20


class Tier(Enum):
    """The memory that holds a state between uses."""

    DEVICE = "device"  # memory of the device that computes forward and backward
    HOST = "host"
    NVME = "nvme"


class CopyEvent(Work, Protocol):
    """A copy to or from the training device."""

    def wait_stream(self) -> None:
        """Make later work of the device wait for this copy; the host does not wait."""


class CompletedWork:
    """A transfer of zero bytes, which is always complete."""

    def wait(self) -> None:
        """Return immediately."""

    def is_done(self) -> bool:
        """Return True."""
        return True

    def wait_stream(self) -> None:
        """Return immediately."""


COMPLETED = CompletedWork()


@dataclass(eq=False, slots=True)
class TransferEvent:
    """One transfer of this rank. Times are in seconds of time.perf_counter.

    A time of 0.0 means "not yet" or "never".

    Attributes:
        what: Name of the state.
        nbytes: Number of bytes.
        is_read: Whether the transfer reads from the tier; otherwise it writes to it.
        issued: Time of the request.
        began: Time when the bytes began to move.
        ended: Time when all bytes had moved.
        waited: Start and end of the time in which this rank only waited for the transfer.
    """

    what: str
    nbytes: int
    is_read: bool
    issued: float
    began: float = 0.0
    ended: float = 0.0
    waited: tuple[float, float] = (0.0, 0.0)

    @property
    def under_way(self) -> tuple[float, float]:
        """Return the times when the bytes began and stopped to move."""
        return self.began, self.ended


class TransferMeter:
    """Counts transfers since `reset`, and lists them while they are recorded.

    Attributes:
        clock: The phase clock that counts the waits.
        events: The list of transfers; None if they are not recorded.
        read_bytes: Bytes that were read.
        written_bytes: Bytes that were written.
        seconds: Time during which at least one transfer was in progress.
        waited_seconds: Time during which this rank only waited for transfers.
        best_rate: Highest measured rate in bytes per second; 0 before the first measurement.
    """

    def __init__(self) -> None:
        self.clock = PhaseClock()
        self.events: list[TransferEvent] | None = None
        self._lock = threading.Lock()
        self._active = 0
        self._since = 0.0
        self.reset()

    def reset(self) -> None:
        """Reset all counts to zero."""
        with self._lock:
            self.read_bytes = self.written_bytes = 0
            self.seconds = self.waited_seconds = self.best_rate = 0.0
            self._stretch = (0, 0.0)  # bytes and seconds at the start of the measurement
            self._since = time.perf_counter()

    def request(self, what: str, nbytes: int, *, is_read: bool) -> TransferEvent:
        """Record the request of a transfer.

        Args:
            what: Name of the state.
            nbytes: Number of bytes.
            is_read: Whether the transfer reads from the tier; otherwise it writes to it.

        Returns:
            The event, whose other times are filled in when the bytes move.
        """
        event = TransferEvent(what, nbytes, is_read, time.perf_counter())
        if self.events is not None:
            self.events.append(event)
        return event

    @contextmanager
    def transfer(self, event: TransferEvent) -> Iterator[None]:
        """Context manager that counts a transfer whose bytes are moved in its block."""
        with self._lock:
            event.began = self._pass()
            self._active += 1
        try:
            yield
        finally:
            with self._lock:
                event.ended = self._pass()
                self._active -= 1
                self.read_bytes += event.nbytes * event.is_read
                self.written_bytes += event.nbytes * (not event.is_read)
                self._compare()

    @contextmanager
    def waiting(self, event: TransferEvent) -> Iterator[None]:
        """Context manager that counts the time in which this rank only waits for the transfer."""
        before = self.clock.enter(AWAY)
        began = time.perf_counter()
        try:
            yield
        finally:
            event.waited = began, time.perf_counter()
            self.waited_seconds += event.waited[1] - began
            self.clock.enter(before)

    def _pass(self) -> float:
        """Add the time since the last call if a transfer ran, and return the time now."""
        now = time.perf_counter()
        if self._active:
            self.seconds += now - self._since
        self._since = now
        return now

    def _compare(self) -> None:
        total = self.read_bytes + self.written_bytes
        (moved, seconds) = self._stretch
        if total - moved >= STRETCH_BYTES and self.seconds > seconds:
            self.best_rate = max(self.best_rate, (total - moved) / (self.seconds - seconds))
            self._stretch = total, self.seconds


class Storage:
    """The memory of a flat state, at one address for the whole life of the state.

    This class keeps the elements on the device that computes with them, so `memory` is always
    valid. Subclasses keep them in host memory or on a disk between uses, and `TierMemory.reserve`
    creates their instances. No method communicates or changes values. Ranges are elements
    [low, high). `fetch`, `read` and `write` raise `StorageError` if the bytes differ from those
    that were written.

    Attributes:
        memory: The elements, flat. The address never changes.
        on_device: Whether the elements are on the device that computes, so no fetch or copy is
            needed.
        has_elements: Whether `memory` has the elements themselves. Otherwise `read` and `write`
            return copies, and only `writing` changes the elements.
        is_offloaded: Whether `memory` has no values between `store` and `fetch`.
        copy_event: The copy in progress between `memory` and the training device.
    """

    on_device = True
    has_elements = True
    is_offloaded = False
    copy_event: CopyEvent = COMPLETED

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return self.memory.numel()

    @property
    def itemsize(self) -> int:
        """Return the size of one element in bytes."""
        return self.memory.itemsize

    def wait_for_copy(self) -> None:
        """Wait until every copy to or from the training device is complete."""
        copy_event = self.copy_event
        self.copy_event = COMPLETED
        copy_event.wait()

    def fetch(self, low: int, high: int) -> Work:
        """Start to read elements [low, high) into `memory`.

        Args:
            low: Index of the first element.
            high: Index after the last element.

        Returns:
            The transfer, which is complete if the elements are in `memory` already.
        """
        return COMPLETED

    def keep_until_evict(self) -> None:
        """Keep the elements in memory after `store` until `evict`.

        This saves a transfer if the whole storage is fetched again soon.
        """

    def read(self, low: int, high: int) -> Tensor:
        """Return a read-only view of fetched elements, valid until `store` or `evict`.

        Args:
            low: Index of the first element.
            high: Index after the last element.
        """
        return self.memory[low:high]

    def read_now(self, low: int, high: int) -> Tensor:
        """Return a read-only view of elements, which need not have been fetched.

        Other threads may call this if the elements never leave `memory`.

        Args:
            low: Index of the first element.
            high: Index after the last element.
        """
        self.copy_event.wait()
        if self.is_offloaded:
            self.fetch(low, high).wait()
        return self.memory[low:high]

    def write(self, low: int, high: int) -> Tensor:
        """Return a writable view of elements, which `store` then writes to the tier.

        Args:
            low: Index of the first element.
            high: Index after the last element.
        """
        return self.read(low, high)

    @contextmanager
    def writing(self, low: int, high: int) -> Iterator[Tensor]:
        """Context manager that yields a tensor through which elements are written.

        Args:
            low: Index of the first element.
            high: Index after the last element.
        """
        yield self.write(low, high)

    def store(self, low: int, high: int) -> Work:
        """Start to write changed elements to the tier, after their last use.

        Args:
            low: Index of the first element.
            high: Index after the last element.

        Returns:
            The transfer, which is complete if no element was changed.
        """
        return COMPLETED

    def evict(self, low: int, high: int) -> None:
        """Free the pages of elements that are not needed soon, after storing changed ones.

        Args:
            low: Index of the first element.
            high: Index after the last element.
        """

    def discard(self, low: int, high: int) -> None:
        """Drop the values of elements, which must be written before they are read again.

        Args:
            low: Index of the first element.
            high: Index after the last element.
        """

    def landing(
        self,
        low: int,
        high: int,
        numel: int,
        pool: Lender,
        copy_engine: CopyEngine,
        *,
        add: bool,
    ) -> Landing:
        """Return the memory in which the training device sums elements [low, high).

        Args:
            low: Index of the first element.
            high: Index after the last element.
            numel: Elements of the largest sum, so that all sums can use one buffer.
            pool: The pool of buffers on the training device.
            copy_engine: Copies between the device and this memory.
            add: Whether to add the sum to the current values.
        """
        kept = self.memory[low:high]
        if self.on_device or kept.device == pool.device:
            return Landing(kept)
        return StagedLanding(self, kept, numel, pool, copy_engine, add=add)


class HostStorage(Storage):
    """Elements in host memory that the training device copies."""

    on_device = False

    def __del__(self) -> None:
        with suppress(Exception):  # Python or the device is shutting down
            self.copy_event.wait()  # the memory may be freed after this

    def read(self, low: int, high: int) -> Tensor:
        self.wait_for_copy()
        return self.memory[low:high]


class Lender(Protocol):
    """A pool of flat tensors on the training device."""

    device: torch.device

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor of shape ``(numel,)``.

        Args:
            numel: Number of elements.
            dtype: Dtype of the elements.
        """

    def give(self, tensor: Tensor) -> None:
        """Return a tensor of `take` to the pool."""


class Landing:
    """Memory for a sum, which is formed directly in its storage."""

    def __init__(self, kept: Tensor) -> None:
        self.kept = kept

    def values(self) -> Tensor:
        """Return the elements that are written or added to."""
        return self.kept

    def send(self) -> None:
        """Start to copy the written sum to its storage."""


class StagedLanding(Landing):
    """A buffer on the training device for a sum that is stored on the host."""

    def __init__(
        self,
        storage: Storage,
        kept: Tensor,
        numel: int,
        pool: Lender,
        copy_engine: CopyEngine,
        *,
        add: bool,
    ) -> None:
        super().__init__(kept)
        self.storage = storage
        self._pool = pool
        self._copy_engine = copy_engine
        self._lent = pool.take(numel, kept.dtype)
        self._copied: CopyEvent = COMPLETED
        if add:
            with copy_engine.h2d(storage) as self._copied:
                for part in parts_in_lock_ranges(kept):
                    self._sum[part].copy_(kept[part], non_blocking=True)

    @property
    def _sum(self) -> Tensor:
        return self._lent[: self.kept.numel()]

    def values(self) -> Tensor:
        self._copied.wait_stream()
        return self._sum

    def send(self) -> None:
        with self._copy_engine.d2h(self.storage, lambda: self._pool.give(self._lent)):
            for part in parts_in_lock_ranges(self.kept):
                self.kept[part].copy_(self._sum[part], non_blocking=True)


class TierMemory:
    """The memory of one tier for one rank.

    Attributes:
        traffic: Counts the transfers of this memory.
        reserved_bytes: Bytes of all storages.
    """

    def __init__(self) -> None:
        self.traffic = TransferMeter()
        self.reserved_bytes = 0

    def capabilities(self) -> list[Capability]:
        """Return how bytes are transferred, and what a faster transfer would need."""
        raise NotImplementedError

    def check_space(self, nbytes: int, sharers: int) -> None:
        """Raise an error if the memory cannot hold the states of all ranks of this host.

        Args:
            nbytes: Bytes for each rank.
            sharers: Number of ranks on this host.
        """
        raise NotImplementedError

    def reserve(
        self, numel: int, dtype: torch.dtype, chunk_numel: int, what: str, *, is_copied: bool = True
    ) -> Storage:
        """Return a zeroed storage.

        Args:
            numel: Number of elements.
            dtype: Data type.
            chunk_numel: Elements that are transferred together.
            what: Name of the state for error messages.
            is_copied: Whether the training device copies the storage, in either direction.
        """
        raise NotImplementedError

    def commit(self, sharers: int) -> None:
        """Allocate the pages of planned memory.

        Args:
            sharers: Number of ranks on this host that call this at the same time.
        """

    def close(self) -> None:
        """Release all memory. Its storages must not be used afterwards."""


@dataclass(frozen=True)
class Tiers:
    """The memories of one rank for states outside the training device.

    Attributes:
        memories: The memories by tier.
        chunk_numel: Elements that are transferred and updated together.
        budget: Memory budget of the training device.
    """

    memories: Mapping[Tier, TierMemory] = field(default_factory=dict)
    chunk_numel: int = 1 << 20
    budget: DeviceBudget = field(default_factory=DeviceBudget)

    def start_counting(self) -> None:
        """Reset the transfer counts of all memories."""
        for memory in self.memories.values():
            memory.traffic.reset()

    def capabilities(self) -> list[Capability]:
        """Return how bytes are transferred in each memory."""
        return [each for memory in self.memories.values() for each in memory.capabilities()]

    def record(self, events: list[TransferEvent] | None) -> None:
        """Append every later transfer to this list; None stops the recording."""
        for memory in self.memories.values():
            memory.traffic.events = events

    def reserve(
        self, tier: Tier, numel: int, dtype: torch.dtype, what: str, *, is_copied: bool = True
    ) -> Storage:
        """Return a zeroed storage on a tier.

        Args:
            tier: Memory that holds the elements between uses.
            numel: Number of elements.
            dtype: Data type.
            what: Name of the state for error messages.
            is_copied: Whether the training device copies the storage, in either direction.
        """
        return self.memories[tier].reserve(
            numel, dtype, self.chunk_numel, what, is_copied=is_copied
        )


class CopyEngine:
    """Copy engine of a device without separate memory: calls return after the copy.

    Attributes:
        overlaps: Copies should start before their result is needed.
    """

    overlaps = False

    @contextmanager
    def h2d(self, storage: Storage) -> Iterator[CopyEvent]:
        """Context manager for non_blocking copies that read a storage.

        Args:
            storage: Storage that the copies read.

        Yields:
            The event of the copies.
        """
        yield COMPLETED

    @contextmanager
    def d2h(self, storage: Storage, finish: Callable[[], None]) -> Iterator[None]:
        """Context manager for non_blocking copies that write a storage.

        Args:
            storage: Storage that the copies write.
            finish: Called when the source of the copies can be reused.
        """
        yield
        finish()

    def synchronize(self) -> None:
        """Release the sources of all copies to the host, because no more follow soon."""

    def now(self) -> CopyEvent:
        """Return an event that is complete after all work queued on the device so far."""
        return COMPLETED

    def staged_tile(self, there: Tensor, *, is_read: bool) -> StagedTile | None:
        """Return a `StagedTile` through which the host works on a tensor of the device.

        Args:
            there: Tensor on the device.
            is_read: Whether the host also reads the tensor.

        Returns:
            The staged tile; None if the host can access the tensor directly.
        """
        return None

    def reserve_staging(self, nbytes: int) -> None:
        """Reserve the page-locked memory for staged tiles."""

    def to_host(self, values: Tensor) -> Tensor:
        """Return a copy of a flat device tensor in host memory."""
        return values.cpu()


@dataclass(frozen=True)
class RecordedEvent:
    """All work that a stream had been given when `event` was recorded."""

    event: torch.Event
    device: torch.device

    def wait(self) -> None:
        """Wait until the work is complete."""
        self.event.synchronize()

    def is_done(self) -> bool:
        """Return whether the work is complete."""
        return bool(self.event.query())

    def wait_stream(self) -> None:
        """Make later work of the device wait for this work; the host does not wait."""
        torch.accelerator.current_stream(self.device).wait_event(self.event)


class StreamCopyEngine(CopyEngine):
    """Copy engine of an accelerator, with one stream for each direction."""

    overlaps = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._h2d = torch.Stream(device=device)
        self._d2h = torch.Stream(device=device)
        self._last_out: tuple[CopyEvent, Callable[[], None]] | None = None
        self.ring = StagingRing(is_locked=locks_pages(device))

    @contextmanager
    def h2d(self, storage: Storage) -> Iterator[CopyEvent]:
        with self.on_side_stream(is_inward=True) as copy_event:
            yield copy_event
        storage.copy_event = copy_event

    @contextmanager
    def d2h(self, storage: Storage, finish: Callable[[], None]) -> Iterator[None]:
        """Context manager for non_blocking copies that write a storage, on their own stream.

        The source is released when the next copy begins. An immediate wait for this copy would
        block the device.
        """
        with self.on_side_stream(is_inward=False) as copy_event:
            yield
        storage.copy_event = copy_event
        self.synchronize()
        self._last_out = copy_event, finish

    def synchronize(self) -> None:
        last = self._last_out
        self._last_out = None
        if last is not None:
            copy_event, finish = last
            # The host need not wait: later work on the source is queued after this wait
            copy_event.wait_stream()
            finish()

    def now(self) -> RecordedEvent:
        event = torch.Event(device=self.device)
        torch.accelerator.current_stream(self.device).record_event(event)
        return RecordedEvent(event, self.device)

    def staged_tile(self, there: Tensor, *, is_read: bool) -> StagedTile | None:
        return StagedTile(there, self, is_read) if there.device.type == self.device.type else None

    @contextmanager
    def on_side_stream(
        self, *, is_inward: bool, after: CopyEvent | None = None
    ) -> Iterator[CopyEvent]:
        """Context manager for copies on the stream of their direction.

        Args:
            is_inward: Whether the copies go to the device.
            after: Event of the device for which the copies wait; by default all work that the
                device has been given so far.

        Yields:
            The event of the copies.
        """
        stream = self._h2d if is_inward else self._d2h
        if isinstance(after, RecordedEvent):
            stream.wait_event(after.event)
        else:
            stream.wait_stream(torch.accelerator.current_stream(self.device))
        copy_event = RecordedEvent(torch.Event(device=self.device), self.device)
        with stream:
            yield copy_event
            stream.record_event(copy_event.event)

    def reserve_staging(self, nbytes: int) -> None:
        if nbytes:
            self.ring.reserve(max(nbytes, 3 * STRIDE_BYTES))  # `to_host` uses two ranges at a time

    def to_host(self, values: Tensor) -> Tensor:
        """Return a copy of a flat device tensor in host memory, made through page-locked memory."""
        found = torch.empty(values.shape, dtype=values.dtype, device="cpu")
        under_way: deque[tuple[Tensor, Tensor, CopyEvent]] = deque()

        def finish_oldest() -> None:
            target, room, copy_event = under_way.popleft()
            copy_event.wait()
            target.copy_(room)
            self.ring.give(room, COMPLETED)

        step = STRIDE_BYTES // values.itemsize
        for target, source in zip(found.split(step), values.split(step), strict=True):
            if len(under_way) == 2:
                finish_oldest()
            room = self.ring.take(source.numel(), source.dtype)
            with self.on_side_stream(is_inward=False) as copy_event:
                room.copy_(source, non_blocking=True)
            under_way.append((target, room, copy_event))
        while under_way:
            finish_oldest()
        return found


@dataclass(frozen=True)
class _Staged:
    """A range of a device tensor in page-locked memory.

    Attributes:
        room: The memory on the host.
        copied: The copy to the host.
        after: Event of the device after which it does not change the range.
    """

    room: Tensor
    copied: CopyEvent
    after: CopyEvent


class StagedTile:
    """A device tensor that the host works on through page-locked memory.

    Tiles are copied to the host early, and copied back late.
    """

    is_offloaded = False

    def __init__(self, there: Tensor, copy_engine: StreamCopyEngine, is_read: bool) -> None:
        self.on_device = there
        self.copy_engine = copy_engine
        self.is_read = is_read
        self._staged: dict[tuple[int, int], _Staged] = {}

    @property
    def itemsize(self) -> int:
        """Return the size of one element in bytes."""
        return self.on_device.itemsize

    def fetch(self, low: int, high: int, after: CopyEvent) -> Work:
        """Start to copy elements [low, high) to the host.

        Args:
            low: Index of the first element.
            high: Index after the last element.
            after: Event of the device after which it does not change the elements. Neither this
                copy nor that of `store` waits for later work of the device.

        Returns:
            The copy to the host.
        """
        staged = self._staged.get((low, high))
        if staged is None:
            room = self.copy_engine.ring.take(high - low, self.on_device.dtype)
            copied: CopyEvent = COMPLETED
            if self.is_read:
                with self.copy_engine.on_side_stream(is_inward=False, after=after) as copied:
                    room.copy_(self.on_device[low:high], non_blocking=True)
            staged = self._staged[low, high] = _Staged(room, copied, after)
        return staged.copied

    def view(self, low: int, high: int) -> Tensor | None:
        """Return the fetched elements, writable until `store`; None if there are none.

        Args:
            low: Index of the first element.
            high: Index after the last element.
        """
        staged = self._staged.get((low, high))
        if staged is None:
            return None
        staged.copied.wait()
        return staged.room

    def read(self, low: int, high: int) -> Tensor:
        """Return the fetched elements.

        Args:
            low: Index of the first element.
            high: Index after the last element.
        """
        found = self.view(low, high)
        assert found is not None, "read before it was fetched"
        return found

    def write(self, low: int, high: int) -> Tensor:
        """Return elements to write; fetch them first if necessary.

        Args:
            low: Index of the first element.
            high: Index after the last element.
        """
        self.fetch(low, high, COMPLETED).wait()
        return self.read(low, high)

    def store(self, low: int, high: int) -> Work:
        """Start to copy elements back to the device, whose later work uses the new values.

        Args:
            low: Index of the first element.
            high: Index after the last element.

        Returns:
            The copy to the device.
        """
        held = self.read(low, high)
        after = self._staged[low, high].after
        with self.copy_engine.on_side_stream(is_inward=True, after=after) as copy_event:
            self.on_device[low:high].copy_(held, non_blocking=True)
        copy_event.wait_stream()
        self._release(low, high, copy_event)
        return copy_event

    def evict(self, low: int, high: int) -> None:
        """Release elements that have not changed, without copying them back.

        Args:
            low: Index of the first element.
            high: Index after the last element.
        """
        if self.view(low, high) is not None:
            self._release(low, high, COMPLETED)

    def _release(self, low: int, high: int, copy_event: CopyEvent) -> None:
        self.copy_engine.ring.give(self._staged.pop((low, high)).room, copy_event)


def locks_pages(device: torch.device) -> bool:
    """Return whether copies of a device are faster with page-locked memory."""
    return device.type == "cuda"


def copy_engine_for(device: torch.device) -> CopyEngine:
    """Return the copy engine between a device and the host."""
    return CopyEngine() if device.type == "cpu" else StreamCopyEngine(device)
