"""Moves flat tensors between the ranks of one group: all-gather, reduce-scatter, all-reduce, small rows.

Each call returns a `Pending`; its data may be used after `wait()`.  Sums have one order, ranks ascending with
partials in fp32 (`ordered_sum`), whatever the transport, so that every stage and every transport gives the same bits.
On gloo every message is sent under a tag made of (lane, sequence, name): a rank that strays finds no partner and
never delivers wrong bytes, and the board (comm/board.py) turns the silence into a named error.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.errors import PeerError
from ..base.mesh import PATIENCE, shares_gpu
from .board import Board, Position
from .meter import Meter

POLL_SECONDS = 1.0  # how long a wait lasts before the board is consulted
LOG_LENGTH = 64  # collectives remembered per lane, for the board
# ordered_sum's tile: 1 MiB of fp32 stays in a core's cache; a GPU wants few, large kernels.
TILE_NUMEL = {"cpu": 1 << 18, "cuda": 1 << 24}

Finish = Callable[[], None]


@dataclass
class Pending:
    """A collective under way.  `wait()` returns when its data may be used, or raises `PeerError`."""

    _wait: Callable[[], None]
    _finish: Finish | None = None
    _done: bool = False

    def wait(self) -> None:
        if not self._done:
            self._done = True
            # Each is dropped as it runs: they hold views of lent buffers, and the pool takes no viewed buffer back.
            wait, self._wait = self._wait, _nothing
            wait()
            del wait
            finish, self._finish = self._finish, None
            if finish is not None:
                finish()

    def then(self, finish: Finish) -> Pending:
        """This collective followed by local work, done by whoever waits."""
        return Pending(self.wait, finish)


def _nothing() -> None:
    return None


DONE = Pending(_nothing)


@dataclass
class Lane:
    """A sequence of collectives in one agreed order; different lanes may interleave differently on different ranks."""

    name: str
    issued: int = 0
    log: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=LOG_LENGTH))

    def next(self, name: str) -> int:
        self.log.append((self.issued, name))
        self.issued += 1
        return self.issued - 1


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
            weakref.finalize(self, jobs.put, None)
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


class Alone:
    """A world of one: every slice is already here."""

    def all_gather(self, full: Tensor, mark: Mark) -> Callable[[], None]:
        return _nothing

    def exchange(self, pieces: Sequence[Tensor], inbox: Sequence[Tensor], mark: Mark) -> Callable[[], None]:
        return _nothing


class Comm:
    """The collectives of one group.  Making one is collective; its name keeps two engines' messages apart."""

    _made = itertools.count()

    def __init__(self, device: torch.device, *, deterministic: bool = False) -> None:
        # Engines are made in the same order on every rank, so their numbers agree.
        self.name, self.meter, self.deterministic = f"engine {next(self._made)}", Meter(), deterministic
        distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
        self.board: Board | None = None
        self._gave_up = False  # whether a wait ended in an error of other ranks' making
        self._lanes: dict[str, Lane] = {}
        self._transport: Transport = Alone()
        self._host_transport: Transport = self._transport
        if distributed:
            group = dist.new_group(backend="gloo", timeout=PATIENCE)
            self.board = Board(self.rank, self.size, group)
            gloo = Gloo(self.rank, self.size, group)
            self._transport = self._host_transport = gloo
            if device.type == "cuda":
                self._transport = Staged(gloo) if shares_gpu() else self._nccl()

    def _nccl(self) -> Transport:
        return Nccl(self.rank, self.size, dist.new_group(backend="nccl", timeout=PATIENCE))

    def all_gather(self, full: Tensor, lane: str, what: str) -> Pending:
        """Fill `full` (size * slice,) from every rank's slice; this rank's own slice must be in place already.

        Collective within its lane.  The buffer belongs to the transport until `wait()`.
        """
        self._count("all_gather", full.numel() // self.size * (self.size - 1) * full.element_size())
        return self._issue(lane, f"gather {what}", lambda mark: self._transport.all_gather(full, mark))

    def exchange(self, pieces: Sequence[Tensor], inbox: Sequence[Tensor], lane: str, what: str) -> Pending:
        """Send pieces[s] to rank s and receive rank s's piece into inbox[s]; own entries are ignored.

        The first half of a reduce-scatter; `ordered_sum` is the second.
        """
        sent = sum(piece.numel() * piece.element_size() for rank, piece in enumerate(pieces) if rank != self.rank)
        self._count("reduce_scatter", sent)
        return self._issue(lane, f"reduce {what}", lambda mark: self._transport.exchange(pieces, inbox, mark))

    def rows(self, row: Tensor, what: str) -> Tensor:
        """Every rank's row, stacked: (size, len(row)). row: one-dimensional, on the host, same length on every rank."""
        table = torch.zeros(self.size, row.numel(), dtype=row.dtype)
        table[self.rank] = row
        self._count("rows", row.numel() * row.element_size() * (self.size - 1))
        full = table.view(-1)
        self._issue("rows", f"agree on {what}", lambda mark: self._host_transport.all_gather(full, mark)).wait()
        return table

    def texts(self, text: str, what: str) -> list[str]:
        """Every rank's text."""
        payload = text.encode()
        lengths = self.rows(torch.tensor([len(payload)]), what)[:, 0]
        padded = torch.zeros(int(lengths.max()) or 1, dtype=torch.uint8)
        padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else padded[:0]
        table = self.rows(padded, what)
        return [bytes(table[rank, : int(lengths[rank])].tolist()).decode() for rank in range(self.size)]

    def post_error(self, error: BaseException) -> None:
        """Tell ranks that wait for this one why it will not come; what follows from another rank's error is no news."""
        if self.board is not None and not self._gave_up:
            first_line = (str(error).splitlines() or [""])[0]
            self.board.post("raised", f"{type(error).__name__}: {first_line}"[:300])

    def withdraw_error(self) -> None:
        """This rank goes on after all."""
        self._gave_up = False
        if self.board is not None:
            self.board.withdraw("raised")

    def _count(self, kind: str, sent_bytes: int) -> None:
        self.meter.count(kind, sent_bytes)

    def _issue(self, lane_name: str, what: str, start: Callable[[Mark], Callable[[], None]]) -> Pending:
        lane = self._lanes.setdefault(lane_name, Lane(lane_name))
        sequence = lane.next(what)
        tag = zlib.crc32(f"{self.name}/{lane_name}/{sequence}/{what}".encode()) & 0x7FFFFFFF
        try:
            wait = start(Mark(lane_name, tag))
        except RuntimeError as caught:
            raise self._lost(what, caught) from caught
        return Pending(lambda: self._wait(wait, lane_name, sequence, what))

    def _wait(self, wait: Callable[[], None], lane: str, sequence: int, what: str) -> None:
        began = time.perf_counter()
        posted = False
        while True:
            try:
                wait()
                break
            except TimeoutError:
                posted = True
                if self.board and (error := self.board.evidence(self._position(lane, sequence))):
                    self._gave_up = True
                    raise error from None
            except RuntimeError as caught:
                raise self._lost(what, caught) from caught
        self.meter.waited(lane, time.perf_counter() - began)
        if posted and self.board:
            self.board.withdraw("waiting")

    def _position(self, lane: str, sequence: int) -> Position:
        lanes = self._lanes.values()
        return Position(
            lane,
            sequence,
            {each.name: each.issued for each in lanes},
            {each.name: {str(number): name for number, name in each.log} for each in lanes},
        )

    def _lost(self, what: str, caught: Exception) -> PeerError:
        """The connection broke; the board may know more than the socket does."""
        self._gave_up = True
        if self.board and (error := self.board.bad_news(f"rank {self.rank} was in '{what}'")):
            return error
        return PeerError(
            f"rank {self.rank} lost its connection to another rank in '{what}': {str(caught).splitlines()[0][:200]}",
            "A rank was killed, ran out of memory or lost its network.",
            "look at the end of the other ranks' output and at the system's log (dmesg) for the out-of-memory killer.",
        )


def ordered_sum(
    pieces: Sequence[Tensor], out: Tensor, scratch: Tensor, *, divisor: float = 1.0, add: bool = False
) -> None:
    """out = (pieces[0] + pieces[1] + ...) / divisor, summed in that order in fp32, rounded once; `add`: out += that.

    pieces: one per rank, one-dimensional, all of out's length, any float dtype.  scratch: fp32; its size is the tile's.
    This is the sum order of the truth contract; a native reduce-scatter keeps neither the order nor fp32 partials.
    """
    for start in range(0, out.numel(), scratch.numel()):
        stop = min(start + scratch.numel(), out.numel())
        total = scratch[: stop - start]
        total.copy_(pieces[0][start:stop])
        for piece in pieces[1:]:
            total.add_(piece[start:stop])
        if divisor != 1.0:
            total.div_(divisor)
        into = out[start:stop]
        into.add_(total) if add else into.copy_(total)
