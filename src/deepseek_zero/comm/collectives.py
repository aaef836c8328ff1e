"""Moves flat tensors between the ranks of one group: all-gather, reduce-scatter, all-reduce, small rows.

Each call returns a `Pending`; its data may be used after `wait()`.  Sums have one order, ranks ascending with
partials in fp32 (`ordered_sum`), whatever the transport, so that every stage and every transport gives the same bits.
On gloo every message is sent under a tag made of (lane, sequence, name): a rank that strays finds no partner and
never delivers wrong bytes, and the board (comm/board.py) turns the silence into a named error.
"""

from __future__ import annotations

import itertools
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.errors import PeerError
from ..base.mesh import PATIENCE, shares_gpu
from .board import raised_in
from .links import Lane, Links
from .meter import Meter
from .transports import Mark, Nccl, Staged, Transport, nothing

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
            wait, self._wait = self._wait, nothing
            wait()
            del wait
            finish, self._finish = self._finish, None
            if finish is not None:
                finish()

    def then(self, finish: Finish) -> Pending:
        """This collective followed by local work, done by whoever waits."""
        return Pending(self.wait, finish)


DONE = Pending(nothing)


class Comm:
    """The collectives of one group.  Making one is collective; its name keeps two engines' messages apart."""

    _made = itertools.count()

    def __init__(self, device: torch.device, *, deterministic: bool = False) -> None:
        # Engines are made in the same order on every rank, so their numbers agree.
        self.name, self.meter, self.deterministic = f"engine {next(self._made)}", Meter(), deterministic
        self.rank, self.size = 0, 1
        self._gave_up = False  # whether a wait ended in an error of other ranks' making
        self._links: Links | None = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            links = self._links = Links.of_this_world()
            self.rank, self.size = links.rank, links.size
            self._transport: Transport = links.gloo
            self._host_transport: Transport = links.gloo
            if device.type == "cuda":
                self._transport = Staged(links.gloo) if shares_gpu() else self._nccl()
            weakref.finalize(self, links.forget, self.name).atexit = False

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
        if self._links is not None and not self._gave_up:
            first_line = (str(error).splitlines() or [""])[0]
            self._links.board.post(raised_in(self.name), f"{type(error).__name__}: {first_line}"[:300])

    def withdraw_error(self) -> None:
        """This rank goes on after all."""
        self._gave_up = False
        if self._links is not None:
            self._links.board.withdraw(raised_in(self.name))

    def _count(self, kind: str, sent_bytes: int) -> None:
        self.meter.count(kind, sent_bytes)

    def _issue(self, lane_name: str, what: str, start: Callable[[Mark], Callable[[], None]]) -> Pending:
        links = self._links
        if links is None:  # a world of one: every slice is already here
            return DONE
        links.board.withdraw("waiting")  # a wait that ended in an error left its line for the others to read
        lane = links.lane(f"{self.name}/{lane_name}")
        sequence = lane.next(what)
        tag = zlib.crc32(f"{lane.name}/{sequence}/{what}".encode()) & 0x7FFFFFFF
        try:
            wait = start(Mark(lane.name, tag))
        except RuntimeError as caught:
            raise self._lost(links, what, caught) from caught
        return Pending(lambda: self._wait(links, wait, lane, sequence, what))

    def _wait(self, links: Links, wait: Callable[[], None], lane: Lane, sequence: int, what: str) -> None:
        began = time.perf_counter()
        while True:
            try:
                wait()
                break
            except TimeoutError:
                if error := links.board.evidence(links.position(lane.name, sequence), self.name):
                    self._gave_up = True
                    raise error from None
            except RuntimeError as caught:
                raise self._lost(links, what, caught) from caught
        self.meter.waited(lane.name.rpartition("/")[2], time.perf_counter() - began)
        links.board.withdraw("waiting")

    def _lost(self, links: Links, what: str, caught: Exception) -> PeerError:
        """The connection broke; the board may know more than the socket does."""
        self._gave_up = True
        if error := links.board.bad_news(f"rank {self.rank} was in '{what}'", self.name):
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
