"""Point-to-point messages over gloo, and their tags.

Messages are matched by tag, so no two collectives in flight may have the same tag. The sockets of
this library carry the lane and the sequence number in full (`comm/ids.py`). A tag of torch's gloo
is a positive int32, so each engine has one of 63 slots while it exists, and sequence numbers wrap
around. A lane never has as many collectives in flight as there are numbers. The remaining bits
check the name, so a rank that calls a different collective finds no partner, except with a
probability of 1 in 8192 (docs/design/transports.md).
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from ...base.errors import UsageError
from ..ids import LANES, WORLD_LANE, CollectiveId, engine_of, lane_of
from . import base
from .base import Completion, ConnectionLost, PointToPoint, Wait, first_line

# 31 bits in all
SLOT_BITS = 6
LANE_BITS = 2
PLACE_BITS = 10
CHECK_BITS = 13
SLOTS = 1 << SLOT_BITS
WINDOW = 1 << PLACE_BITS


class Tags:
    """The tags of one world.

    The class is thread-safe, because gloo's waiting threads report the end of collectives.
    """

    def __init__(self) -> None:
        self._slots = {WORLD_LANE: 0}
        self._left: set[str] = set()  # Engines that have ended
        self._under_way: Counter[str] = Counter()  # By lane
        self._changed = threading.Condition()

    def free_slots(self) -> int:
        """Return a bit mask of the slots that are free on this rank, slot 1 first.

        A slot is free if it has no engine and no collective in flight.
        """
        with self._changed:
            # A copy: meanwhile the garbage collector may end another engine on this thread, which
            # calls `release`
            for engine in [engine for engine in tuple(self._left) if not self._is_busy(engine)]:
                self._left.discard(engine)
                self._slots.pop(engine, None)
            taken = set(self._slots.values())
        return sum(1 << slot - 1 for slot in range(1, SLOTS) if slot not in taken)

    def take(self, engine: str, free: int) -> None:
        """Assign to an engine the lowest slot that is free on every rank.

        Args:
            engine: The name of the engine.
            free: The intersection of all ranks' `free_slots`.

        Raises:
            UsageError: No slot is free on every rank.
        """
        if not free:
            raise UsageError(
                f"a world supports {SLOTS - 1} engines, and all of them exist or ended in the "
                "middle of a collective.",
                "Each engine needs separate tags for its messages.",
                "delete engines that are no longer used (`del engine`), or restart the program "
                "after such failures.",
            )
        with self._changed:
            self._slots[engine] = (free & -free).bit_length()

    def release(self, engine: str) -> None:
        """Release an engine's slot once none of its messages is in flight."""
        with self._changed:
            self._left.add(engine)

    def begin(self, cid: CollectiveId) -> int:
        """Return the tag of a collective that begins.

        Raises:
            TimeoutError: The lane has too many collectives in flight.
        """
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._under_way[cid.lane] < WINDOW, base.POLL_SECONDS
            ):
                raise TimeoutError
            self._under_way[cid.lane] += 1
            slot = self._slots[engine_of(cid.lane)]
        place = cid.sequence % WINDOW
        lane = slot << LANE_BITS | LANES.index(lane_of(cid.lane))
        return (lane << PLACE_BITS | place) << CHECK_BITS | cid.check % (1 << CHECK_BITS)

    def end(self, lane: str) -> None:
        """Record that a collective of the lane has sent and received all its messages."""
        with self._changed:
            self._under_way[lane] -= 1
            self._changed.notify_all()

    def is_any_under_way(self) -> bool:
        """Return whether messages of any collective, even a failed one, may be in flight."""
        with self._changed:
            return any(self._under_way.values())

    def _is_busy(self, engine: str) -> bool:
        return any(count for lane, count in self._under_way.items() if engine_of(lane) == engine)


def open_files() -> dict[int, int]:
    """Return the inode of every open file descriptor of this process.

    The result is empty if the system does not list them.
    """
    found = dict[int, int]()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # The descriptor of the listing itself
                found[int(name)] = os.fstat(int(name)).st_ino
    return found


def for_connections(files: Mapping[int, int], act: Callable[[socket.socket], None]) -> int:
    """Call a function for each of gloo's connections to another rank that is still open.

    Args:
        files: The descriptors that gloo opened, as returned by `open_files`.
        act: Function that is called with each socket.

    Returns:
        The number of connections.
    """
    found = 0
    for descriptor, inode in files.items():
        with contextlib.suppress(OSError):  # Closed, not a socket, or a listening socket
            if os.fstat(descriptor).st_ino != inode:
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if (
                    connection.family in (socket.AF_INET, socket.AF_INET6)
                    and connection.type == socket.SOCK_STREAM
                ):
                    connection.getpeername()
                    act(connection)
                    found += 1
    return found


Jobs = queue.SimpleQueue[tuple[list[dist.Work | None], Completion, Callable[[], None]] | None]


class Gloo(PointToPoint):
    """Point-to-point messages over gloo, matched by tag.

    An exchange sends half the bytes of gloo's reduce-scatter and is 2 to 4 times faster.

    Args:
        rank: This rank's index in `ranks`.
        ranks: The members, as ranks of `group`.
        group: The torch.distributed group.
        peers: The indices of the ranks to exchange with.
        tags: The tags of this world.
        limitation: Why no faster transport is used (`Transport.limitation`).
    """

    description = "gloo"

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        group: dist.ProcessGroup | None,
        peers: Sequence[int],
        tags: Tags,
        limitation: str = "",
    ) -> None:
        super().__init__(rank, ranks, peers)
        self.limitation = limitation
        self.group = group
        self.tags = tags
        # A gloo wait with a timeout closes the connection when it expires, so waits without a
        # timeout run in threads. There is one thread per lane, because a message of one lane may
        # have to arrive before another lane's can be sent.
        self._jobs: dict[str, Jobs] = {}

    def end_engine(self, engine: str) -> None:
        """End the threads that wait for collectives of an engine that no longer exists."""
        for lane in [lane for lane in list(self._jobs) if engine_of(lane) == engine]:
            self._jobs.pop(lane).put(None)

    def start(self, messages: Mapping[int, tuple[Tensor, Tensor]], cid: CollectiveId) -> Wait:
        works: list[dist.Work | None] = []
        group = self.group
        tag = self.tags.begin(cid)
        completion = Completion(cid)
        try:
            # Post every receive before any send: gloo notifies a sender over the same connection
            # that the receiver is ready. That notice would wait for data that this rank already
            # sends, and only one direction would be busy at a time.
            for peer, (_, incoming) in messages.items():
                if incoming.numel():
                    works.append(dist.irecv(incoming, group=group, group_src=peer, tag=tag))
            for peer, (outgoing, _) in messages.items():
                if outgoing.numel():
                    works.append(dist.isend(outgoing, group=group, group_dst=peer, tag=tag))
        except RuntimeError as caught:
            raise _gloo_error(caught) from None
        finally:
            self._jobs_of(cid.lane).put((works, completion, lambda: self.tags.end(cid.lane)))
        return completion.wait

    def _jobs_of(self, lane: str) -> Jobs:
        if lane not in self._jobs:
            jobs = self._jobs[lane] = queue.SimpleQueue()
            name = f"deepseek-zero-wait-{lane}"
            threading.Thread(target=_wait_for_each, args=(jobs,), daemon=True, name=name).start()
        return self._jobs[lane]


def _wait_for_each(jobs: Jobs) -> None:
    while (job := jobs.get()) is not None:
        works, completion, end = job
        error = _outcome(works)
        if error is None:
            # A failed collective keeps its tag, because some of its messages may still be in flight
            end()
        completion.cid.arrived.append(time.perf_counter())
        completion.error = error
        completion.event.set()
        del job, works, completion, end, error


def _outcome(works: list[dist.Work | None]) -> Exception | None:
    """Wait for all messages and drop them, which releases their tensors.

    Return the error of a failed message, or None.
    """
    error: Exception | None = None
    while works:
        work = works.pop(0)
        try:
            if work is not None:
                work.wait()
        except RuntimeError as caught:
            error = _gloo_error(caught)
    return error


def _gloo_error(error: RuntimeError) -> Exception:
    """Return `ConnectionLost` for an error of gloo's transport, else the error.

    torch raises gloo's exceptions as RuntimeErrors that begin with the name of a gloo source file.
    """
    is_gloos = re.match(r"\[[^]]*gloo/transport/", str(error))
    if is_gloos or isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
        return ConnectionLost(first_line(error))
    return error
