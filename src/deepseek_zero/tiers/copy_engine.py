"""Copies between the memories that states rest in and the device that trains.

On a CPU there is nothing to cross: what is asked for has been done on return.  Beside an accelerator each direction has
a stream of its own, as it has wires of its own, so that a copy passes while the device computes.  What that leaves to
get wrong is kept in two rules: a `CopyEvent` is ordered before the device goes on with its result, and an extent is not
touched on the host before its copy is over (`Extent.wait_for_copy`).
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
    """The one of a device without memory of its own: a copy is over when the call that asked for it returns.

    overlaps: whether it is worth asking for a copy before its result is needed.
    """

    overlaps = False

    @contextmanager
    def h2d(self, extent: Extent) -> Iterator[CopyEvent]:
        """What is copied in this block (non_blocking) out of an extent and sent on to other ranks."""
        yield COMPLETED

    @contextmanager
    def d2h(self, extent: Extent, finish: Callable[[], None]) -> Iterator[None]:
        """What is copied in this block (non_blocking) into an extent.  finish: called when its source is free again."""
        yield
        finish()

    def synchronize(self) -> None:
        """Nothing more goes out for a while: the sources of what went are free."""

    def staged_tile(self, there: Tensor, *, is_read: bool) -> StagedTile | None:
        """What lets the host work on a tensor of the device; None where nothing need.  is_read: not only written."""
        return None


@dataclass(frozen=True)
class RecordedEvent:
    """What had been asked of a stream when `event` was recorded."""

    event: torch.Event
    device: torch.device

    def wait(self) -> None:
        self.event.synchronize()

    def is_done(self) -> bool:
        return bool(self.event.query())

    def wait_stream(self) -> None:
        torch.accelerator.current_stream(self.device).wait_event(self.event)


class StreamCopyEngine(CopyEngine):
    """The one of an accelerator."""

    overlaps = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._h2d, self._d2h = torch.Stream(device=device), torch.Stream(device=device)
        self._last_out: tuple[CopyEvent, Callable[[], None]] | None = None
        self._pinned: dict[tuple[torch.dtype, int], list[tuple[CopyEvent, Tensor]]] = defaultdict(list)

    @contextmanager
    def h2d(self, extent: Extent) -> Iterator[CopyEvent]:
        with self.on_side_stream(is_inward=True) as crossing:
            yield crossing
        extent.copy_event = crossing

    @contextmanager
    def d2h(self, extent: Extent, finish: Callable[[], None]) -> Iterator[None]:
        """The source stays taken until the next one is on its way: to wait for it at once would be to copy instead of
        computing.
        """
        with self.on_side_stream(is_inward=False) as crossing:
            yield
        extent.copy_event = crossing
        self.synchronize()
        self._last_out = crossing, finish

    def synchronize(self) -> None:
        last, self._last_out = self._last_out, None
        if last is not None:
            crossing, finish = last
            crossing.wait_stream()  # whoever takes the source next asks the device for it after this
            finish()

    def staged_tile(self, there: Tensor, *, is_read: bool) -> StagedTile | None:
        return StagedTile(there, self, is_read) if there.device.type == self.device.type else None

    @contextmanager
    def on_side_stream(self, *, is_inward: bool) -> Iterator[CopyEvent]:
        """A block whose copies wait for all that the device was asked for before, and for nothing after."""
        stream = self._h2d if is_inward else self._d2h
        stream.wait_stream(torch.accelerator.current_stream(self.device))
        crossing = RecordedEvent(torch.Event(device=self.device), self.device)
        with stream:
            yield crossing
            stream.record_event(crossing.event)

    def pinned_buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Host memory for so many elements and some more, page-locked where that makes copies faster."""
        size = 1 << max(0, numel - 1).bit_length()  # so that there are few sizes; torch locks no other in any case
        given = self._pinned[dtype, size]
        if not given or (len(given) <= MAX_IN_FLIGHT and not given[0][0].is_done()):
            return torch.empty(size, dtype=dtype, pin_memory=self.device.type == "cuda")
        crossing, room = given.pop(0)
        crossing.wait()
        return room

    def give(self, room: Tensor, crossing: CopyEvent) -> None:
        """It is free for others when a crossing is over."""
        self._pinned[room.dtype, room.numel()].append((crossing, room))


class StagedTile:
    """A tensor of the device that the host works on: each tile comes ahead of its turn and goes back behind it."""

    def __init__(self, there: Tensor, ferry: StreamCopyEngine, is_read: bool) -> None:
        self.on_device, self.copy_engine, self.is_read = there, ferry, is_read
        self._staged: dict[tuple[int, int], tuple[CopyEvent, Tensor]] = {}

    def fetch(self, low: int, high: int) -> Work:
        """Let these elements come to the host."""
        if (low, high) not in self._staged:
            room = self.copy_engine.pinned_buffer(high - low, self.on_device.dtype)
            self._staged[low, high] = COMPLETED, room
            if self.is_read:
                with self.copy_engine.on_side_stream(is_inward=False) as crossing:
                    room[: high - low].copy_(self.on_device[low:high], non_blocking=True)
                self._staged[low, high] = crossing, room
        return self._staged[low, high][0]

    def view(self, low: int, high: int) -> Tensor | None:
        """What came, to be written until `store`: a view; None where nothing was fetched."""
        if (low, high) not in self._staged:
            return None
        crossing, room = self._staged[low, high]
        crossing.wait()
        return room[: high - low]

    def store(self, low: int, high: int) -> Work:
        """Let them go back; what the device is asked for next sees them."""
        held = self.view(low, high)
        assert held is not None, "stored before it was fetched"
        with self.copy_engine.on_side_stream(is_inward=True) as crossing:
            self.on_device[low:high].copy_(held, non_blocking=True)
        crossing.wait_stream()
        self._release(low, high, crossing)
        return crossing

    def discard(self, low: int, high: int) -> None:
        """They have not changed."""
        if self.view(low, high) is not None:
            self._release(low, high, COMPLETED)

    def clear(self) -> None:
        """Nothing that came counts: an update ended with an error."""
        for low, high in list(self._staged):
            self.discard(low, high)

    def _release(self, low: int, high: int, crossing: CopyEvent) -> None:
        self.copy_engine.give(self._staged.pop((low, high))[1], crossing)


def copy_engine_for(device: torch.device) -> CopyEngine:
    """The one between a device and the host."""
    return CopyEngine() if device.type == "cpu" else StreamCopyEngine(device)
