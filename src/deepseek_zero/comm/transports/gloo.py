"""Point to point over gloo, and the numbers (tags) that its messages carry.

Messages are matched by tag: 31 bits, in which no two collectives under way are alike.  A collective
is its lane and its place in that lane.  Sockets between ranks of one host carry both in full
(`CollectiveId.tag`).  A tag of torch's gloo is one positive int32, so an engine gets one of 63
slots while it lives, and places wrap around: a lane has fewer collectives under way than places.
The bits that are left check the name, so that a rank that strayed finds no partner, but for one
chance in 8192 (docs/design/transports.md).
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
from ..net.channel import end_with_the_host
from . import base
from .base import ConnectionLost, CopyingTransport, Use, Wait, filled, first_line, once

# 31 in all
SLOT_BITS = 6
LANE_BITS = 2
PLACE_BITS = 10
CHECK_BITS = 13
SLOTS = 1 << SLOT_BITS
WINDOW = 1 << PLACE_BITS


class Tags:
    """The tags of one world; thread-safe, since gloo's waiting threads report the end of
    collectives.
    """

    def __init__(self) -> None:
        self._slots = {WORLD_LANE: 0}
        self._left: set[str] = set()  # engines that have ended
        self._under_way: Counter[str] = Counter()  # by lane
        self._changed = threading.Condition()

    def free_slots(self) -> int:
        """Return as bits, slot 1 first, the slots in which this rank has nothing under way, and no
        engine.
        """
        with self._changed:
            # A copy: the garbage collector may end another engine of this thread meanwhile, which
            # is released here.
            for engine in [engine for engine in tuple(self._left) if not self._is_busy(engine)]:
                self._left.discard(engine)
                self._slots.pop(engine, None)
            taken = set(self._slots.values())
        return sum(1 << slot - 1 for slot in range(1, SLOTS) if slot not in taken)

    def take(self, engine: str, free: int) -> None:
        """Give an engine the lowest slot that is free on every rank. free: the intersection of all
        ranks' `free_slots`.
        """
        if not free:
            raise UsageError(
                f"a world has room for {SLOTS - 1} engines, and they are alive or ended in the "
                "midst of a collective.",
                "Each needs numbers of its own for its messages.",
                "drop engines that are no longer used (`del engine`), or start the program again "
                "after such failures.",
            )
        with self._changed:
            self._slots[engine] = (free & -free).bit_length()

    def release(self, engine: str) -> None:
        """Release an engine's slot; it is free as soon as nothing of it is under way."""
        with self._changed:
            self._left.add(engine)

    def begin(self, cid: CollectiveId) -> int:
        """Return the tag of a collective that begins; raise TimeoutError if its lane has no room
        for a while.
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
        """Note that one of a lane's collectives is over on this rank: all its messages are sent and
        received.
        """
        with self._changed:
            self._under_way[lane] -= 1
            self._changed.notify_all()

    def is_any_under_way(self) -> bool:
        """Return whether messages of a collective may still be in flight, including a failed
        collective.
        """
        with self._changed:
            return any(self._under_way.values())

    def _is_busy(self, engine: str) -> bool:
        return any(count for lane, count in self._under_way.items() if engine_of(lane) == engine)


def open_files() -> dict[int, int]:
    """Return the open files of this process, as the inode by descriptor; {} if the system does not
    list them.
    """
    found = dict[int, int]()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # that of the listing itself
                found[int(name)] = os.fstat(int(name)).st_ino
    return found


def end_with_their_hosts(files: Mapping[int, int], seconds: float) -> int:
    """Have the kernel end gloo's connections to a host that has answered nothing for so long;
    return how many it has.

    files: those that gloo opened, as of `open_files`.  gloo itself hears of a silent host when its
    kernel gives up what it sends, after a quarter of an hour, and never while it only waits.
    """
    return _for_connections(files, lambda connection: end_with_the_host(connection, seconds))


def shut_down(files: Mapping[int, int]) -> int:
    """End gloo's connections, so that every wait for a message over them fails; return how many
    they are.

    What has been sent still arrives.  files: as for `end_with_their_hosts`.
    """
    return _for_connections(files, lambda connection: connection.shutdown(socket.SHUT_RDWR))


def _for_connections(files: Mapping[int, int], act: Callable[[socket.socket], None]) -> int:
    """Act on the connections to other ranks among these files, if they are still the same; return
    their number.
    """
    found = 0
    for descriptor, inode in files.items():
        with contextlib.suppress(OSError):  # closed, not a socket, or a listening socket
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


Jobs = queue.SimpleQueue[tuple[list[dist.Work | None], "_Completion", Callable[[], None]] | None]


class Gloo(CopyingTransport):
    """Point-to-point over gloo: half the bytes of its reduce-scatter, 2-4 times faster, and matched
    by tag.
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
        """ranks: the members, as torch's `group` counts them.  rank, peers: indices into them.
        limitation: as `Transport.limitation`.
        """
        self.limitation = limitation
        self.rank = rank
        self.ranks = ranks
        self.size = len(ranks)
        self.group = group
        self.peers = peers
        self.tags = tags
        # gloo's wait with a time limit closes the connection when it passes, so waits without one
        # run in threads: one per lane, since a message of one lane may have to arrive before
        # another lane's can be sent.
        self._jobs: dict[str, Jobs] = {}

    def end_engine(self, engine: str) -> None:
        """End the waiting threads of an engine."""
        for lane in [lane for lane in list(self._jobs) if engine_of(lane) == engine]:
            self._jobs.pop(lane).put(None)

    def all_gather(self, full: Tensor, cid: CollectiveId) -> Wait:
        slices = full.chunk(self.size)
        return self._start({peer: (slices[self.rank], slices[peer]) for peer in self.peers}, cid)

    def exchange(
        self, pieces: Sequence[Tensor], inbox: Sequence[Tensor | None], cid: CollectiveId, use: Use
    ) -> Wait:
        received = filled(inbox, pieces[self.rank], self.rank)
        wait = self._start({peer: (pieces[peer], received[peer]) for peer in self.peers}, cid)
        return once(wait, lambda: use(received))

    def _start(self, messages: Mapping[int, tuple[Tensor, Tensor]], cid: CollectiveId) -> Wait:
        works: list[dist.Work | None] = []
        tag = self.tags.begin(cid)
        completion = _Completion(cid)
        try:
            # Every receive before any send: gloo tells a sender over the same connection that there
            # is room for its message, and that notice queues behind what this rank is sending
            # already: one direction at a time.
            for peer, (_, incoming) in messages.items():
                if incoming.numel():
                    works.append(
                        dist.irecv(incoming, group=self.group, group_src=self.ranks[peer], tag=tag)
                    )
            for peer, (outgoing, _) in messages.items():
                if outgoing.numel():
                    works.append(
                        dist.isend(outgoing, group=self.group, group_dst=self.ranks[peer], tag=tag)
                    )
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


class _Completion:
    """Set by the waiting thread; `wait` gives up after a while so that its caller can read the
    flight recorder.
    """

    def __init__(self, cid: CollectiveId) -> None:
        self._event = threading.Event()
        self._cid = cid
        self.error: Exception | None = None

    def set(self, error: Exception | None) -> None:
        self._cid.arrived.append(time.perf_counter())
        self.error = error
        self._event.set()

    def wait(self) -> None:
        if not self._event.wait(base.poll_interval_of(self._cid)):
            raise TimeoutError
        if self.error is not None:
            raise self.error


def _wait_for_each(jobs: Jobs) -> None:
    while (job := jobs.get()) is not None:
        works, completion, end = job
        error = _outcome(works)
        if error is None:
            end()  # what failed keeps its tag: some of its messages may still be on their way
        completion.set(error)
        del job, works, completion, end, error


def _outcome(works: list[dist.Work | None]) -> Exception | None:
    """Wait for each message and drop it (it holds its tensor) before any waiter learns that all
    have arrived.
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
    """Return `ConnectionLost` for an error of gloo's transport about a peer that is gone; any other
    error as it is.

    torch passes gloo's own exceptions on as RuntimeErrors, which begin with the file of gloo's that
    raised them.
    """
    is_gloos = re.match(r"\[[^]]*gloo/transport/", str(error))
    return (
        ConnectionLost(first_line(error))
        if is_gloos or isinstance(error, _NETWORK_ERRORS)
        else error
    )


_NETWORK_ERRORS = (dist.DistNetworkError, dist.DistStoreError)
