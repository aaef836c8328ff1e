"""Memories that hold states outside the training device's own, and the copies between them and the
device.

`Storage` is an extension point of the core: a flat tensor at one address for as long as it lives,
and where its bytes are between uses. `TierMemory` reserves storages, `Tiers` opens memories. A user
calls `fetch` before a use, `store` after a change and `evict` after a read; a view that was not
fetched is waited for. `TransferMeter` counts transfers, and records each of them on demand.

On a CPU `CopyEngine` has nothing to copy across: every call has done its work on return.  Beside an
accelerator each direction has a stream of its own, so that a copy runs while the device computes.
Two rules keep that safe: the device waits for a `CopyEvent` before it uses the result, and the host
leaves a storage alone until its copy is over (`Storage.wait_for_copy`).
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
from .budget import DeviceBudget
from .staging import StagingRing

STRIDE_BYTES = 2 << 20  # of a tensor that is copied to the host step by step
# Many times what is under way at once, so that a burst is not taken for the link's speed
STRETCH_BYTES = 256 << 20


class Tier(Enum):
    """The memory that holds a state between uses."""

    DEVICE = "device"  # where forward and backward compute
    HOST = "host"
    NVME = "nvme"


class Work(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Wait until the transfer is over; raise `StorageError` if it failed."""

    def is_done(self) -> bool:
        """Return whether `wait` would return at once."""


class CopyEvent(Work, Protocol):
    """A copy to or from the training device."""

    def wait_stream(self) -> None:
        """Order what the device is asked for from now on behind this copy; the host does not
        wait.
        """


class CompletedWork:
    """A transfer that had nothing to move."""

    def wait(self) -> None:
        """Return at once: there is nothing to wait for."""

    def is_done(self) -> bool:
        return True

    def wait_stream(self) -> None:
        """Return at once: there is nothing to order."""


COMPLETED = CompletedWork()


@dataclass(eq=False, slots=True)
class TransferEvent:
    """One transfer on this rank, in seconds of time.perf_counter; 0.0: not yet, or never.

    issued: when it was asked for.  began, ended: when its bytes moved.  waited: from when to when
    this rank did nothing else than wait for it.
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
        """Return the seconds during which the bytes moved."""
        return self.began, self.ended


class TransferMeter:
    """Counts since `reset`, and a list of transfers while one is recorded.

    seconds: time with a transfer under way. waited_seconds: time in which the rank stood and waited
    for one. best_rate: bytes a second over the fastest stretch; 0 before there was one. clock: is
    told of waits.
    """

    def __init__(self) -> None:
        self.clock = PhaseClock()
        self.events: list[TransferEvent] | None = None
        self._lock = threading.Lock()
        self._active = 0
        self._since = 0.0
        self.reset()

    def reset(self) -> None:
        """Count from zero."""
        with self._lock:
            self.read_bytes = self.written_bytes = 0
            self.seconds = self.waited_seconds = self.best_rate = 0.0
            self._stretch = (0, 0.0)  # bytes and seconds counted when it began
            self._since = time.perf_counter()

    def request(self, what: str, nbytes: int, *, is_read: bool) -> TransferEvent:
        """Note that a transfer is asked for."""
        event = TransferEvent(what, nbytes, is_read, time.perf_counter())
        if self.events is not None:
            self.events.append(event)
        return event

    @contextmanager
    def transfer(self, event: TransferEvent) -> Iterator[None]:
        """Count a transfer whose bytes move in this block, in any thread."""
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
        """Count a block in which this rank does nothing but wait for the transfer."""
        before = self.clock.enter(AWAY)
        began = time.perf_counter()
        try:
            yield
        finally:
            event.waited = began, time.perf_counter()
            self.waited_seconds += event.waited[1] - began
            self.clock.enter(before)

    def _pass(self) -> float:
        """Advance to now: the time since the last call counts if a transfer was under way."""
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
    """Where the elements of a flat state are between uses; in this class, always in `memory`, on
    the device that computes with them.

    Other memories derive from this class, and a `TierMemory` reserves them. All methods act on this
    rank alone and change no values. Ranges are elements: [low, high). `fetch`, `read` and `write`
    raise `StorageError` if bytes do not come back as they were written.

    Attributes:
        memory: The elements, at one address for as long as the storage lives.
        on_device: The device that computes has them, so that nothing has to be fetched or copied.
        has_elements: `memory` has the elements themselves; if not, `read` and `write` return
            copies, and `writing` changes the elements.
        is_offloaded: `memory` shows nothing between `store` and `fetch`.
        copy_event: The copy that is under way between `memory` and the training device.
    """

    on_device = True
    has_elements = True
    is_offloaded = False
    copy_event: CopyEvent = COMPLETED

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory

    @property
    def numel(self) -> int:
        """Return how many elements there are."""
        return self.memory.numel()

    def wait_for_copy(self) -> None:
        """Wait until every copy to or from the training device is over."""
        copy_event = self.copy_event
        self.copy_event = COMPLETED
        copy_event.wait()

    def fetch(self, low: int, high: int) -> Work:
        """Start to bring elements [low, high) to their address; return a completed `Work` if they
        are there.
        """
        return COMPLETED

    def pin(self) -> None:
        """Keep elements at their address after `store`, until `evict`: a fetch of the whole storage
        follows soon.
        """

    def read(self, low: int, high: int) -> Tensor:
        """Return a read-only view of elements [low, high), valid until `store` or `evict`; it waits
        for their fetch.
        """
        return self.memory[low:high]

    def read_now(self, low: int, high: int) -> Tensor:
        """Return a view as `read` does; safe from another thread if the elements never leave
        `memory`.
        """
        self.copy_event.wait()
        if self.is_offloaded:
            self.fetch(low, high).wait()
        return self.memory[low:high]

    def write(self, low: int, high: int) -> Tensor:
        """Return a view as `read` does, and mark the elements as changed."""
        return self.read(low, high)

    @contextmanager
    def writing(self, low: int, high: int) -> Iterator[Tensor]:
        """Open a block that writes elements [low, high) in the tensor that it is given."""
        yield self.write(low, high)

    def store(self, low: int, high: int) -> Work:
        """Send changed elements to the tier; they are not needed for a while."""
        return COMPLETED

    def evict(self, low: int, high: int) -> None:
        """Free the pages of elements that are not needed for a while; changed ones are stored
        first.
        """

    def discard(self, low: int, high: int) -> None:
        """Drop the values: the next ones are written before they are read."""

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
        """Return where the training device forms a sum of elements [low, high).

        Args:
            low: The first element.
            high: The end of the elements.
            numel: The most elements of any sum, so that all can use one lent buffer.
            pool: Lends memory of the training device.
            copy_engine: Copies between it and this memory.
            add: The sum is added to the values that are here.
        """
        return Landing(self.memory[low:high])


class HostStorage(Storage):
    """Elements in host memory, which the training device copies."""

    on_device = False

    def __del__(self) -> None:
        with suppress(Exception):  # Python or the device is ending
            self.copy_event.wait()  # its memory may be freed now

    def read(self, low: int, high: int) -> Tensor:
        self.wait_for_copy()
        return self.memory[low:high]

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
        kept = self.memory[low:high]
        if kept.device == pool.device:
            return Landing(kept)
        return StagedLanding(self, kept, numel, pool, copy_engine, add=add)


class Lender(Protocol):
    """Lends flat tensors of the training device."""

    device: torch.device

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor with arbitrary contents."""

    def give(self, tensor: Tensor) -> None:
        """Take a tensor back."""


class Landing:
    """The elements of a sum that is formed where they are kept."""

    def __init__(self, kept: Tensor) -> None:
        self.kept = kept

    def values(self) -> Tensor:
        """Return the elements to write, or to add to."""
        return self.kept

    def send(self) -> None:
        """Start to bring the written sum to its place."""


class StagedLanding(Landing):
    """A lent buffer of the training device for a sum that is kept on the host."""

    def __init__(
        self,
        storage: HostStorage,
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


class TierMemory(Protocol):
    """One tier of one rank."""

    traffic: TransferMeter
    reserved_bytes: int

    def capabilities(self) -> list[Capability]:
        """Describe how bytes come and go here, and what a faster way would need."""

    def check_room(self, nbytes: int, sharers: int) -> None:
        """Raise if each of `sharers` ranks of this host cannot have so many bytes; reserve
        nothing.
        """

    def reserve(
        self, numel: int, dtype: torch.dtype, chunk_numel: int, what: str, *, is_copied: bool = True
    ) -> Storage:
        """Return a zeroed storage, moved in chunks of so many elements.

        is_copied: the training device copies it, from it or to it.
        """

    def commit(self, sharers: int) -> None:
        """Give planned memory its pages; `sharers` ranks of this host do so."""

    def close(self) -> None:
        """Release everything; storages must not be used any more."""


@dataclass(frozen=True)
class Tiers:
    """The memories beside the training device's that one rank's states may be kept in.

    chunk_numel: elements that are moved, and updated, together. budget: counts what is taken of the
    training device.
    """

    memories: Mapping[Tier, TierMemory] = field(default_factory=dict)
    chunk_numel: int = 1 << 20
    budget: DeviceBudget = field(default_factory=DeviceBudget)

    def start_counting(self) -> None:
        """Count from zero: bytes moved so far are left out."""
        for memory in self.memories.values():
            memory.traffic.reset()

    def capabilities(self) -> list[Capability]:
        """Describe how bytes come and go in each memory."""
        return [each for memory in self.memories.values() for each in memory.capabilities()]

    def record(self, events: list[TransferEvent] | None) -> None:
        """Add an entry to this list for every transfer from now on; None stops that."""
        for memory in self.memories.values():
            memory.traffic.events = events

    def reserve(
        self, tier: Tier, numel: int, dtype: torch.dtype, what: str, *, is_copied: bool = True
    ) -> Storage:
        """Return a zeroed storage on a tier. is_copied: as `TierMemory.reserve` takes it."""
        return self.memories[tier].reserve(
            numel, dtype, self.chunk_numel, what, is_copied=is_copied
        )


class CopyEngine:
    """The copy engine of a device without memory of its own: a copy is over when its call returns.

    overlaps: whether it pays to ask for a copy before its result is needed.
    """

    overlaps = False

    @contextmanager
    def h2d(self, storage: Storage) -> Iterator[CopyEvent]:
        """Open a block whose non_blocking copies read a storage, to send it to other ranks; yield
        their `CopyEvent`.
        """
        yield COMPLETED

    @contextmanager
    def d2h(self, storage: Storage, finish: Callable[[], None]) -> Iterator[None]:
        """Open a block whose non_blocking copies write a storage; call `finish` when their source
        is free again.
        """
        yield
        finish()

    def synchronize(self) -> None:
        """Free the sources of all copies to the host: no more go out for a while."""

    def now(self) -> CopyEvent:
        """Return the event after all that the device has been asked for so far."""
        return COMPLETED

    def staged_tile(self, there: Tensor, *, is_read: bool) -> StagedTile | None:
        """Return a `StagedTile` through which the host works on a tensor of the device; None if it
        can do so directly.

        is_read: the host also reads the tensor.
        """
        return None

    def reserve_staging(self, nbytes: int) -> None:
        """Reserve the memory through which staged tiles pass."""

    def to_host(self, values: Tensor) -> Tensor:
        """Return a copy of a flat tensor of the device in host memory."""
        return values.cpu()


@dataclass(frozen=True)
class RecordedEvent:
    """The work that a stream had been given when `event` was recorded."""

    event: torch.Event
    device: torch.device

    def wait(self) -> None:
        self.event.synchronize()

    def is_done(self) -> bool:
        return bool(self.event.query())

    def wait_stream(self) -> None:
        torch.accelerator.current_stream(self.device).wait_event(self.event)


class StreamCopyEngine(CopyEngine):
    """The copy engine of an accelerator: one stream for each direction."""

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
        """Copy as `CopyEngine.d2h`; the source stays taken until the next copy has begun, since
        waiting at once would stop the device.
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
            # The next user of the source is queued on the device behind this
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
        """Open a block whose copies run on the stream of their direction.

        Args:
            is_inward: The copies go to the device.
            after: They wait for this event of the device; by default for all that the device has
                been asked for so far.
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
            self.ring.reserve(max(nbytes, 3 * STRIDE_BYTES))  # `to_host` has two rooms in use

    def to_host(self, values: Tensor) -> Tensor:
        """Copy through the ring, so that no copy goes through pageable memory."""
        found = torch.empty(values.shape, dtype=values.dtype)
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
    """A range of a tensor of the device in page-locked memory.

    Attributes:
        room: The memory on the host.
        copied: The copy to `room`.
        after: The event of the device after which it does not change the range.
    """

    room: Tensor
    copied: CopyEvent
    after: CopyEvent


class StagedTile:
    """A tensor of the device that the host works on through page-locked memory: tiles are copied in
    early and copied back late.
    """

    def __init__(self, there: Tensor, copy_engine: StreamCopyEngine, is_read: bool) -> None:
        self.on_device = there
        self.copy_engine = copy_engine
        self.is_read = is_read
        self._staged: dict[tuple[int, int], _Staged] = {}

    def fetch(self, low: int, high: int, after: CopyEvent) -> Work:
        """Start to copy elements [low, high) to the host.

        Args:
            low: The first element.
            high: The end of the elements.
            after: The event of the device after which it does not change the elements. Neither
                this copy nor that of `store` waits for what the device was asked for later.
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
        """Return the fetched elements, to be written until `store`; None if nothing was fetched."""
        staged = self._staged.get((low, high))
        if staged is None:
            return None
        staged.copied.wait()
        return staged.room

    def store(self, low: int, high: int) -> Work:
        """Copy the elements back; the device's next work sees them."""
        held = self.view(low, high)
        assert held is not None, "stored before it was fetched"
        after = self._staged[low, high].after
        with self.copy_engine.on_side_stream(is_inward=True, after=after) as copy_event:
            self.on_device[low:high].copy_(held, non_blocking=True)
        copy_event.wait_stream()
        self._release(low, high, copy_event)
        return copy_event

    def discard(self, low: int, high: int) -> None:
        """Release the elements without copying them back: they have not changed."""
        if self.view(low, high) is not None:
            self._release(low, high, COMPLETED)

    def clear(self) -> None:
        """Drop all that was fetched: an update ended with an error."""
        for low, high in list(self._staged):
            self.discard(low, high)

    def _release(self, low: int, high: int, copy_event: CopyEvent) -> None:
        self.copy_engine.ring.give(self._staged.pop((low, high)).room, copy_event)


def locks_pages(device: torch.device) -> bool:
    """Return whether copies of a device are faster from and to page-locked memory."""
    return device.type == "cuda"


def copy_engine_for(device: torch.device) -> CopyEngine:
    """Return the copy engine between a device and the host."""
    return CopyEngine() if device.type == "cpu" else StreamCopyEngine(device)
