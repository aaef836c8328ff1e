"""How flat tensors travel between ranks: point-to-point over gloo, NCCL, or through the host where ranks share a GPU.

Each transport has two movements, everything else is made of them.  Knows nothing of lanes' order or of errors
(collectives.py, links.py).  Called by collectives.py.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

POLL_SECONDS = 1.0  # how long a wait lasts before its caller is asked whether to go on


class Mark(NamedTuple):
    """What sets one collective's messages apart.  tag: its number on the wire."""

    lane: str
    tag: int


class Transport(Protocol):
    """The two movements everything is made of.  `full` is (size * slice,), rank r's slice at [r*slice, (r+1)*slice)."""

    def all_gather(self, full: Tensor, mark: Mark) -> Callable[[], None]:
        """Fill every slice of `full` with its owner's; this rank's own slice is already in place."""
        ...

    def exchange(self, pieces: Sequence[Tensor], inbox: Sequence[Tensor], mark: Mark) -> Callable[[], None]:
        """Send pieces[s] to rank s; receive rank s's piece for us into inbox[s].  Own entries are ignored."""
        ...


Jobs = queue.SimpleQueue[tuple[list[dist.Work | None], "_Completion"] | None]


class Gloo:
    """Point-to-point over gloo: half the bytes of its reduce-scatter, 2-4 times faster, and matched by tag."""

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None) -> None:
        self.rank, self.size, self.group = rank, size, group
        # gloo's wait with a time limit closes the connection when it passes, so waits without one run in threads:
        # one per lane, since a message of one lane may have to arrive before another lane's can be sent.
        self._jobs: dict[str, Jobs] = {}

    def end_lane(self, lane: str) -> None:
        """Let the thread of a lane that nobody uses any more go."""
        jobs = self._jobs.pop(lane, None)
        if jobs is not None:
            jobs.put(None)

    def all_gather(self, full: Tensor, mark: Mark) -> Callable[[], None]:
        slices = full.chunk(self.size)
        return self._start([(slices[self.rank], slices[peer]) for peer in range(self.size)], mark)

    def exchange(self, pieces: Sequence[Tensor], inbox: Sequence[Tensor], mark: Mark) -> Callable[[], None]:
        return self._start([(pieces[peer], inbox[peer]) for peer in range(self.size)], mark)

    def _start(self, messages: list[tuple[Tensor, Tensor]], mark: Mark) -> Callable[[], None]:
        works: list[dist.Work | None] = []
        for peer, (outgoing, incoming) in enumerate(messages):
            if peer != self.rank and outgoing.numel():
                works.append(dist.isend(outgoing, group=self.group, group_dst=peer, tag=mark.tag))
            if peer != self.rank and incoming.numel():
                works.append(dist.irecv(incoming, group=self.group, group_src=peer, tag=mark.tag))
        completion = _Completion()
        self._jobs_of(mark.lane).put((works, completion))
        return completion.wait

    def _jobs_of(self, lane: str) -> Jobs:
        if lane not in self._jobs:
            jobs = self._jobs[lane] = queue.SimpleQueue()
            name = f"deepseek-zero-wait-{lane}"
            threading.Thread(target=_wait_for_each, args=(jobs,), daemon=True, name=name).start()
        return self._jobs[lane]


class _Completion:
    """Set by the waiting thread; `wait` gives up after POLL_SECONDS so that its caller can look at the board."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.error: Exception | None = None

    def set(self, error: Exception | None) -> None:
        self.error = error
        self._event.set()

    def wait(self) -> None:
        if not self._event.wait(POLL_SECONDS):
            raise TimeoutError
        if self.error is not None:
            raise self.error


def _wait_for_each(jobs: Jobs) -> None:
    while (job := jobs.get()) is not None:
        works, completion = job
        completion.set(_outcome(works))
        del job, works, completion


def _outcome(works: list[dist.Work | None]) -> Exception | None:
    """Wait for each message and let go of it (it holds its tensor) before anybody learns that all have arrived."""
    error: Exception | None = None
    while works:
        work = works.pop(0)
        try:
            if work is not None:
                work.wait()
        except RuntimeError as caught:
            error = caught
    return error


class Nccl:
    """Native collectives of a CUDA group; `wait` orders streams and does not block the host."""

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None) -> None:
        self.rank, self.size, self.group = rank, size, group

    def all_gather(self, full: Tensor, mark: Mark) -> Callable[[], None]:
        work = dist.all_gather_into_tensor(full, full.chunk(self.size)[self.rank], group=self.group, async_op=True)
        return lambda: _nccl_wait(work)

    def exchange(self, pieces: Sequence[Tensor], inbox: Sequence[Tensor], mark: Mark) -> Callable[[], None]:
        own = torch.empty_like(pieces[self.rank])
        into = [own if peer == self.rank else piece for peer, piece in enumerate(inbox)]
        work = dist.all_to_all(into, list(pieces), group=self.group, async_op=True)
        return lambda: _nccl_wait(work)


def _nccl_wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


class Staged:
    """CUDA tensors through the host and gloo: for ranks that share a GPU, which NCCL refuses.  Not fast."""

    def __init__(self, gloo: Gloo) -> None:
        self.gloo = gloo

    def all_gather(self, full: Tensor, mark: Mark) -> Callable[[], None]:
        host = torch.empty_like(full, device="cpu")
        own = full.chunk(self.gloo.size)[self.gloo.rank]
        host.chunk(self.gloo.size)[self.gloo.rank].copy_(own)
        wait = self.gloo.all_gather(host, mark)
        return _then(wait, lambda: full.copy_(host))

    def exchange(self, pieces: Sequence[Tensor], inbox: Sequence[Tensor], mark: Mark) -> Callable[[], None]:
        outgoing = [piece.cpu() for piece in pieces]
        incoming = [torch.empty_like(box, device="cpu") for box in inbox]
        wait = self.gloo.exchange(outgoing, incoming, mark)

        def arrive() -> None:
            for rank, (box, host) in enumerate(zip(inbox, incoming, strict=True)):
                if rank != self.gloo.rank:
                    box.copy_(host)

        return _then(wait, arrive)


def _then(wait: Callable[[], None], finish: Callable[[], object]) -> Callable[[], None]:
    def both() -> None:
        wait()
        finish()

    return both


def nothing() -> None:
    """What there is to wait for when nothing travels."""
