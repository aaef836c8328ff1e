"""Copies between the memories that states rest in and the device that trains.

On a CPU there is nothing to cross: what is asked for has been done on return.  Beside an accelerator each direction has
a stream of its own, as it has wires of its own, so that a copy passes while the device computes.  What that leaves to
get wrong is kept in two rules: a `Crossing` is ordered before the device goes on with its result, and an extent is not
touched on the host before its crossing is over (`Extent.settle`).  Held by `CommContext`; called by sharding and activations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from .tier import OVER, Crossing, Extent, Ticket

ROOMS = 2  # that may still be copied from when a new one is made


class Ferry:
    """The one of a device without memory of its own: a copy is over when the call that asked for it returns.

    overlaps: whether it is worth asking for a copy before its result is needed.
    """

    overlaps = False

    @contextmanager
    def inward(self, extent: Extent) -> Iterator[Crossing]:
        """What is copied in this block (non_blocking) out of an extent and sent on to other ranks."""
        yield OVER

    @contextmanager
    def outward(self, extent: Extent, finish: Callable[[], None]) -> Iterator[None]:
        """What is copied in this block (non_blocking) into an extent.  finish: called when its source is free again."""
        yield
        finish()

    def land(self) -> None:
        """Nothing more goes out for a while: the sources of what went are free."""

    def mirror(self, there: Tensor, *, is_read: bool) -> Mirror | None:
        """What lets the host work on a tensor of the device; None where nothing need.  is_read: not only written."""
        return None


@dataclass(frozen=True)
class Streamed:
    """What had been asked of a stream when `event` was recorded."""

    event: torch.Event
    device: torch.device

    def wait(self) -> None:
        self.event.synchronize()

    def is_done(self) -> bool:
        return bool(self.event.query())

    def order(self) -> None:
        torch.accelerator.current_stream(self.device).wait_event(self.event)


class Streams(Ferry):
    """The one of an accelerator."""

    overlaps = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._inward, self._outward = torch.Stream(device=device), torch.Stream(device=device)
        self._last_out: tuple[Crossing, Callable[[], None]] | None = None
        self._rooms: dict[tuple[torch.dtype, int], list[tuple[Crossing, Tensor]]] = defaultdict(list)

    @contextmanager
    def inward(self, extent: Extent) -> Iterator[Crossing]:
        with self.beside(is_inward=True) as crossing:
            yield crossing
        extent.crossing = crossing

    @contextmanager
    def outward(self, extent: Extent, finish: Callable[[], None]) -> Iterator[None]:
        """The source stays taken until the next one is on its way: to wait for it at once would be to copy instead of
        computing.
        """
        with self.beside(is_inward=False) as crossing:
            yield
        extent.crossing = crossing
        self.land()
        self._last_out = crossing, finish

    def land(self) -> None:
        last, self._last_out = self._last_out, None
        if last is not None:
            crossing, finish = last
            crossing.order()  # whoever takes the source next asks the device for it after this
            finish()

    def mirror(self, there: Tensor, *, is_read: bool) -> Mirror | None:
        return Mirror(there, self, is_read) if there.device.type == self.device.type else None

    @contextmanager
    def beside(self, *, is_inward: bool) -> Iterator[Crossing]:
        """A block whose copies wait for all that the device was asked for before, and for nothing after."""
        stream = self._inward if is_inward else self._outward
        stream.wait_stream(torch.accelerator.current_stream(self.device))
        crossing = Streamed(torch.Event(device=self.device), self.device)
        with stream:
            yield crossing
            stream.record_event(crossing.event)

    def room(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Host memory for so many elements and some more, page-locked where that makes copies faster."""
        size = 1 << max(0, numel - 1).bit_length()  # so that there are few sizes; torch locks no other in any case
        given = self._rooms[dtype, size]
        if not given or (len(given) <= ROOMS and not given[0][0].is_done()):
            return torch.empty(size, dtype=dtype, pin_memory=self.device.type == "cuda")
        crossing, room = given.pop(0)
        crossing.wait()
        return room

    def give(self, room: Tensor, crossing: Crossing) -> None:
        """It is free for others when a crossing is over."""
        self._rooms[room.dtype, room.numel()].append((crossing, room))


class Mirror:
    """A tensor of the device that the host works on: each tile comes ahead of its turn and goes back behind it."""

    def __init__(self, there: Tensor, ferry: Streams, is_read: bool) -> None:
        self.there, self.ferry, self.is_read = there, ferry, is_read
        self._here: dict[tuple[int, int], tuple[Crossing, Tensor]] = {}

    def fetch(self, low: int, high: int) -> Ticket:
        """Let these elements come to the host."""
        if (low, high) not in self._here:
            room = self.ferry.room(high - low, self.there.dtype)
            self._here[low, high] = OVER, room
            if self.is_read:
                with self.ferry.beside(is_inward=False) as crossing:
                    room[: high - low].copy_(self.there[low:high], non_blocking=True)
                self._here[low, high] = crossing, room
        return self._here[low, high][0]

    def held(self, low: int, high: int) -> Tensor | None:
        """What came, to be written until `store`: a view; None where nothing was fetched."""
        if (low, high) not in self._here:
            return None
        crossing, room = self._here[low, high]
        crossing.wait()
        return room[: high - low]

    def store(self, low: int, high: int) -> Ticket:
        """Let them go back; what the device is asked for next sees them."""
        held = self.held(low, high)
        assert held is not None, "stored before it was fetched"
        with self.ferry.beside(is_inward=True) as crossing:
            self.there[low:high].copy_(held, non_blocking=True)
        crossing.order()
        self._leave(low, high, crossing)
        return crossing

    def drop(self, low: int, high: int) -> None:
        """They have not changed."""
        if self.held(low, high) is not None:
            self._leave(low, high, OVER)

    def clear(self) -> None:
        """Nothing that came counts: an update ended with an error."""
        for low, high in list(self._here):
            self.drop(low, high)

    def _leave(self, low: int, high: int, crossing: Crossing) -> None:
        self.ferry.give(self._here.pop((low, high))[1], crossing)


def ferry_of(device: torch.device) -> Ferry:
    """The one between a device and the host."""
    return Ferry() if device.type == "cpu" else Streams(device)
