"""The interface of a transport: two movements of flat tensors between ranks, from which every
collective is made.

gloo.py sends point to point, nccl.py uses NCCL's own collectives, shared_memory.py lets ranks of
one host read each other's pages, and composed.py combines two of them. A transport knows nothing of
the order of lanes or of errors (lanes.py, waits.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...base.memory import HUGE_PAGE, private_pages
from ..ids import CollectiveId

POLL_SECONDS = 1.0  # how long a wait lasts before its caller is asked whether to go on


class ConnectionLost(Exception):
    """A transport cannot go on because another rank is gone. Every other error keeps its own type.

    rank: which one, as the world counts them, where the transport knows it. is_silence: its host
    answers nothing.
    """

    def __init__(self, text: str, rank: int | None = None, *, is_silence: bool = False) -> None:
        super().__init__(text)
        self.rank = rank
        self.is_silence = is_silence


def poll_interval_of(cid: CollectiveId) -> float:
    """Return how long a wait for a collective lasts before its caller is asked whether to go on."""
    return POLL_SECONDS if cid.poll_interval is None else cid.poll_interval()


Wait = Callable[[], None]
Use = Callable[[Sequence[Tensor]], None]


class Transport(Protocol):
    """The two movements that collectives are made of. `full` is (size * slice,), rank r's slice at
    [r*slice, (r+1)*slice).

    Both return a function that waits until the data is here; it raises `ConnectionLost` if it never
    will be, and TimeoutError after `patience_of` the collective. They raise TimeoutError themselves
    if there is no room to begin; then nothing has begun.
    """

    @property
    def reads_in_place(self) -> bool:
        """Return whether other ranks' pieces can be read in their memory, so that `exchange` needs
        no inbox.
        """
        ...

    @property
    def description(self) -> str:
        """What carries tensors, for people."""
        ...

    @property
    def limitation(self) -> str:
        """Why nothing faster carries tensors; empty if there is nothing to say."""
        ...

    @property
    def reports_arrival(self) -> bool:
        """Whether a collective records that its data is here, before it is waited for."""
        ...

    @property
    def page_sharing(self) -> PageSharing | None:
        """What gives all ranks of the group pages of memory that all of them map; None without."""
        ...

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate a buffer in the memory that travels best; its contents are arbitrary."""
        ...

    def all_gather(self, full: Tensor, cid: CollectiveId) -> Wait:
        """Fill every slice of `full` with its owner's; this rank's own slice is already in
        place.
        """
        ...

    def exchange(
        self, pieces: Sequence[Tensor], inbox: Sequence[Tensor | None], cid: CollectiveId, use: Use
    ) -> Wait:
        """Send pieces[s] to rank s; receive rank s's piece for us into inbox[s], its own entry
        ignored.

        use(received) is called once, when everything is here and no later than the wait's end:
        received[s] is inbox[s], or a view where that is None.
        """
        ...

    def is_read(self, tensor: Tensor) -> bool:
        """Return whether another rank may still read this buffer, as far as this one has heard."""
        ...

    def wait_until_read(self, tensor: Tensor) -> None:
        """Wait until no other rank reads this buffer any more; TimeoutError after a while, to be
        called again.
        """
        ...

    @property
    def expects(self) -> bool:
        """Return whether something is under way that `progress` may complete."""
        ...

    def progress(self) -> None:
        """Do what can be done without waiting."""
        ...

    def end_engine(self, engine: str) -> None:
        """Drop all that was kept for the lanes of an engine that is gone."""
        ...


@dataclass(eq=False)
class SymmetricMemory:
    """One state cut into a slice for each rank, in memory through which this rank sees every slice.

    own: (slice,), which this rank writes. whole: (ranks * slice,), to be read when every rank has
    written.
    """

    own: Tensor
    whole: Tensor

    def release(self) -> None:
        """End a use of the whole; what was written into it in place, which no other rank sees, is
        dropped.
        """


class PageSharing(Protocol):
    """Gives all ranks of a group pages of memory that all of them map."""

    def symmetric_memory(
        self, numel: int, dtype: torch.dtype, cid: CollectiveId
    ) -> Callable[[], SymmetricMemory]:
        """Return a function that waits for pages for `numel` elements, a slice for each rank.

        Note:
            Collective over the group.
        """
        ...

    def barrier(self, cid: CollectiveId) -> Wait:
        """Return a function that waits until every rank of the group has come here."""
        ...


class CopyingTransport:
    """Base of the transports that copy: a sent buffer is free at once, and nothing needs
    `progress`.
    """

    description = "copies"
    limitation = ""
    reads_in_place = False
    reports_arrival = True
    page_sharing: PageSharing | None = None
    device = torch.device("cpu")

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        if self.device.type == "cpu" and numel * dtype.itemsize >= HUGE_PAGE:
            # A pool's go back to the system after each step, and come again
            return private_pages(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=self.device)

    def is_read(self, tensor: Tensor) -> bool:
        return False

    @property
    def expects(self) -> bool:
        return False

    def wait_until_read(self, tensor: Tensor) -> None:
        pass

    def progress(self) -> None:
        pass

    def end_engine(self, engine: str) -> None:
        pass


class SingleRank(CopyingTransport):
    """The transport of a world of one: nothing travels."""

    description = "nothing: one rank"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def all_gather(self, full: Tensor, cid: CollectiveId) -> Wait:
        return no_wait

    def exchange(
        self, pieces: Sequence[Tensor], inbox: Sequence[Tensor | None], cid: CollectiveId, use: Use
    ) -> Wait:
        use(pieces)
        return no_wait


def filled(inbox: Sequence[Tensor | None], own: Tensor, rank: int) -> list[Tensor]:
    """Return the inbox of a transport that copies: every entry is there, this rank's own is the
    piece it would send itself.
    """
    received = []
    for peer, box in enumerate(inbox):
        assert box is not None or peer == rank
        piece = own if peer == rank or box is None else box
        received.append(piece)
    return received


def first_line(error: BaseException) -> str:
    """Return an error's own words: without the C++ file before them and the C++ frames behind
    them.
    """
    line = (str(error).splitlines() or [""])[0]
    return line[line.find("] ") + 2 if line.startswith("[") else 0 :][:200]


def once(wait: Wait, finish: Callable[[], object]) -> Wait:
    """Return a function that waits, then finishes; a wait that timed out is called again."""

    def both() -> None:
        wait()
        finish()

    return both


def no_wait() -> None:
    """Return at once: nothing travels."""
