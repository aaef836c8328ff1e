"""Copies between the memories that hold states and the device that trains.

On a CPU there is nothing to copy across: every call has done its work on return. Beside an accelerator each direction
has a stream of its own, so that a copy runs while the device computes. Two rules keep that safe: the device waits for a
`CopyEvent` before it uses the result, and the host leaves an extent alone until its copy is over
(`Extent.wait_for_copy`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from .tier import COMPLETED, CopyEvent, Extent, Work

MAX_IN_FLIGHT = 2  # that may still be copied from when a new one is made


class CopyEngine:
    """The copy engine of a device without memory of its own: a copy is over when its call returns.

    overlaps: whether it pays to ask for a copy before its result is needed.
    """

    overlaps = False

    @contextmanager
    def h2d(self, extent: Extent) -> Iterator[CopyEvent]:
        """Open a block whose non_blocking copies read an extent, to send it to other ranks; yield their `CopyEvent`."""
        yield COMPLETED

    @contextmanager
    def d2h(self, extent: Extent, finish: Callable[[], None]) -> Iterator[None]:
        """Open a block whose non_blocking copies write an extent; call `finish` when their source is free again."""
        yield
        finish()

    def synchronize(self) -> None:
        """Free the sources of all copies to the host: no more go out for a while."""

    def staged_tile(self, there: Tensor, *, is_read: bool) -> StagedTile | None:
        """Return a `StagedTile` through which the host works on a tensor of the device; None if it can do so directly.

        is_read: the host also reads the tensor.
        """
        return None


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
        self._h2d, self._d2h = torch.Stream(device=device), torch.Stream(device=device)
        self._last_out: tuple[CopyEvent, Callable[[], None]] | None = None
        self._pinned: dict[tuple[torch.dtype, int], list[tuple[CopyEvent, Tensor]]] = defaultdict(list)

    @contextmanager
    def h2d(self, extent: Extent) -> Iterator[CopyEvent]:
        with self.on_side_stream(is_inward=True) as copy_event:
            yield copy_event
        extent.copy_event = copy_event

    @contextmanager
    def d2h(self, extent: Extent, finish: Callable[[], None]) -> Iterator[None]:
        """Copy as `CopyEngine.d2h`; the source stays taken until the next copy has begun, since waiting at once would
        stop the device.
        """
        with self.on_side_stream(is_inward=False) as copy_event:
            yield
        extent.copy_event = copy_event
        self.synchronize()
        self._last_out = copy_event, finish

    def synchronize(self) -> None:
        last, self._last_out = self._last_out, None
        if last is not None:
            copy_event, finish = last
            copy_event.wait_stream()  # the next user of the source is queued on the device behind this
            finish()

    def staged_tile(self, there: Tensor, *, is_read: bool) -> StagedTile | None:
        return StagedTile(there, self, is_read) if there.device.type == self.device.type else None

    @contextmanager
    def on_side_stream(self, *, is_inward: bool) -> Iterator[CopyEvent]:
        """Open a block whose copies wait for all that the device was asked for before, and for nothing after."""
        stream = self._h2d if is_inward else self._d2h
        stream.wait_stream(torch.accelerator.current_stream(self.device))
        copy_event = RecordedEvent(torch.Event(device=self.device), self.device)
        with stream:
            yield copy_event
            stream.record_event(copy_event.event)

    def pinned_buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return host memory for at least so many elements, page-locked where that makes copies faster."""
        size = 1 << max(0, numel - 1).bit_length()  # so that there are few sizes; torch locks no other in any case
        given = self._pinned[dtype, size]
        if not given or (len(given) <= MAX_IN_FLIGHT and not given[0][0].is_done()):
            return torch.empty(size, dtype=dtype, pin_memory=self.device.type == "cuda")
        copy_event, room = given.pop(0)
        copy_event.wait()
        return room

    def give(self, room: Tensor, copy_event: CopyEvent) -> None:
        """Return a pinned buffer for others to use when a copy is over."""
        self._pinned[room.dtype, room.numel()].append((copy_event, room))


class StagedTile:
    """A tensor of the device that the host works on through pinned buffers: tiles are copied in early and copied back
    late.
    """

    def __init__(self, there: Tensor, copy_engine: StreamCopyEngine, is_read: bool) -> None:
        self.on_device, self.copy_engine, self.is_read = there, copy_engine, is_read
        self._staged: dict[tuple[int, int], tuple[CopyEvent, Tensor]] = {}

    def fetch(self, low: int, high: int) -> Work:
        """Start to copy these elements to the host."""
        if (low, high) not in self._staged:
            room = self.copy_engine.pinned_buffer(high - low, self.on_device.dtype)
            self._staged[low, high] = COMPLETED, room
            if self.is_read:
                with self.copy_engine.on_side_stream(is_inward=False) as copy_event:
                    room[: high - low].copy_(self.on_device[low:high], non_blocking=True)
                self._staged[low, high] = copy_event, room
        return self._staged[low, high][0]

    def view(self, low: int, high: int) -> Tensor | None:
        """Return the fetched elements, to be written until `store`; None if nothing was fetched."""
        if (low, high) not in self._staged:
            return None
        copy_event, room = self._staged[low, high]
        copy_event.wait()
        return room[: high - low]

    def store(self, low: int, high: int) -> Work:
        """Copy the elements back; the device's next work sees them."""
        held = self.view(low, high)
        assert held is not None, "stored before it was fetched"
        with self.copy_engine.on_side_stream(is_inward=True) as copy_event:
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
        self.copy_engine.give(self._staged.pop((low, high))[1], copy_event)


def copy_engine_for(device: torch.device) -> CopyEngine:
    """Return the copy engine between a device and the host."""
    return CopyEngine() if device.type == "cpu" else StreamCopyEngine(device)
