"""Interface of a transport: two operations from which every collective is built.

`gloo.py` sends point to point, `nccl.py` uses NCCL's collectives, `shared_memory.py` lets ranks of
one host read each other's pages, and `composed.py` combines two transports. A transport does not
know the order of lanes, and does not turn its errors into named ones (`lanes.py`, `waits.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...base.memory import HUGE_PAGE, private_pages
from ..ids import CollectiveId

# Default seconds after which a wait raises TimeoutError, so that its caller can check for failures
POLL_SECONDS = 1.0


class ConnectionLost(Exception):
    """A transport cannot continue because another rank is gone.

    Any other error of a transport keeps its own type.

    Args:
        text: The message.
        rank: The world rank that is gone, if the transport knows it.
        is_silence: The host of that rank does not answer.
    """

    def __init__(self, text: str, rank: int | None = None, *, is_silence: bool = False) -> None:
        super().__init__(text)
        self.rank = rank
        self.is_silence = is_silence


def poll_interval_of(cid: CollectiveId) -> float:
    """Return the seconds after which a wait for a collective raises TimeoutError."""
    return POLL_SECONDS if cid.poll_interval is None else cid.poll_interval()


Wait = Callable[[], None]
Use = Callable[[Sequence[Tensor]], None]


class Transport(Protocol):
    """The two operations that collectives are built from.

    Both return a function that waits until the data is here. It raises `ConnectionLost` if the data
    will never arrive, and `TimeoutError` after `poll_interval_of` the collective; then it may be
    called again. The operations themselves raise `TimeoutError` if there is no room to begin; then
    nothing has begun.
    """

    @property
    def reads_in_place(self) -> bool:
        """Return whether pieces are read in other ranks' memory, without an inbox."""
        ...

    @property
    def description(self) -> str:
        """A description of the transport, for people."""
        ...

    @property
    def limitation(self) -> str:
        """Why no faster transport is used; empty if there is nothing to report."""
        ...

    @property
    def reports_arrival(self) -> bool:
        """Whether a collective records that its data is here before it is waited for."""
        ...

    @property
    def page_sharing(self) -> PageSharing | None:
        """Allocates pages that all ranks of the group map; None if that is impossible."""
        ...

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate an uninitialized buffer in the memory that this transport prefers.

        Args:
            numel: Number of elements.
            dtype: Dtype of the elements.
        """
        ...

    def all_gather(self, full: Tensor, cid: CollectiveId) -> Wait:
        """Fill every slice of `full` with the slice of its owner.

        Args:
            full: Shape ``(size * slice,)``; the slice of rank r is at ``[r * slice, (r + 1) *
                slice)``. This rank's slice must be in place.
            cid: The identity of the collective.
        """
        ...

    def exchange(
        self, pieces: Sequence[Tensor], inbox: Sequence[Tensor | None], cid: CollectiveId, use: Use
    ) -> Wait:
        """Send `pieces[r]` to rank r, and receive the piece of rank r into `inbox[r]`.

        Args:
            pieces: One flat tensor per rank.
            inbox: One flat tensor per rank; this rank's entry is ignored. With `reads_in_place` an
                entry may be None.
            cid: The identity of the collective.
            use: Called once, when all pieces are here, at the latest before the wait returns. Its
                argument has `inbox[r]` for rank r, or a view of the owner's memory if that is None.
        """
        ...

    def is_read(self, tensor: Tensor) -> bool:
        """Return whether another rank may still read this buffer.

        The answer uses the messages that this rank has received so far.
        """
        ...

    def wait_until_read(self, tensor: Tensor) -> None:
        """Wait until no other rank reads this buffer.

        Raises:
            TimeoutError: A rank still reads it; the call may be repeated.
        """
        ...

    @property
    def expects(self) -> bool:
        """Return whether something is in flight that `progress` may complete."""
        ...

    def progress(self) -> None:
        """Receive and send what is possible without waiting."""
        ...

    def end_engine(self, engine: str) -> None:
        """Free everything that was kept for the lanes of an engine that no longer exists."""
        ...


@dataclass(eq=False)
class SymmetricMemory:
    """One state with a slice per rank, in memory where this rank sees every slice.

    Attributes:
        own: Shape ``(slice,)``, which this rank writes.
        whole: Shape ``(ranks * slice,)``, which may be read when every rank has written.
    """

    own: Tensor
    whole: Tensor

    def release(self) -> None:
        """End the use of `whole`.

        In-place writes to `whole`, which no other rank sees, are discarded.
        """


class PageSharing(Protocol):
    """Allocates pages of memory that all ranks of a group map."""

    def symmetric_memory(
        self, numel: int, dtype: torch.dtype, cid: CollectiveId
    ) -> Callable[[], SymmetricMemory]:
        """Return a function that waits for memory with one slice per rank.

        Args:
            numel: Number of elements of all slices together.
            dtype: Dtype of the elements.
            cid: The identity of the collective.

        Note:
            Collective over the group.
        """
        ...

    def barrier(self, cid: CollectiveId) -> Wait:
        """Return a function that waits until every rank has called this method."""
        ...


class CopyingTransport:
    """Base of the transports that copy.

    A sent buffer is free at once, and nothing needs `progress`.
    """

    description = "copies"
    limitation = ""
    reads_in_place = False
    reports_arrival = True
    page_sharing: PageSharing | None = None
    device = torch.device("cpu")

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate an uninitialized buffer in the memory that this transport prefers.

        Args:
            numel: Number of elements.
            dtype: Dtype of the elements.
        """
        if self.device.type == "cpu" and numel * dtype.itemsize >= HUGE_PAGE:
            # Buffers of a pool return to the system after each step and are allocated again
            return private_pages(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=self.device)

    def is_read(self, tensor: Tensor) -> bool:
        """Return False, because sent buffers are copied."""
        return False

    @property
    def expects(self) -> bool:
        """Return False, because nothing needs `progress`."""
        return False

    def wait_until_read(self, tensor: Tensor) -> None:
        """Return at once, because sent buffers are copied."""

    def progress(self) -> None:
        """Do nothing."""

    def end_engine(self, engine: str) -> None:
        """Do nothing."""


class SingleRank(CopyingTransport):
    """The transport of a world of one rank, which sends nothing."""

    description = "none: one rank"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def all_gather(self, full: Tensor, cid: CollectiveId) -> Wait:
        """Fill `full` with the slices of all ranks; see `Transport.all_gather`.

        Args:
            full: Shape ``(size * slice,)``, with this rank's slice in place.
            cid: The identity of the collective.

        Returns:
            A function that waits for the data.
        """
        return no_wait

    def exchange(
        self, pieces: Sequence[Tensor], inbox: Sequence[Tensor | None], cid: CollectiveId, use: Use
    ) -> Wait:
        """Exchange one piece with every other rank; see `Transport.exchange`.

        Args:
            pieces: The piece for each rank.
            inbox: The output for each rank's piece.
            cid: The identity of the collective.
            use: Called once with the received pieces.

        Returns:
            A function that waits for the data.
        """
        use(pieces)
        return no_wait


def filled(inbox: Sequence[Tensor | None], own: Tensor, rank: int) -> list[Tensor]:
    """Return the inbox of a copying transport, with this rank's entry replaced.

    Args:
        inbox: One tensor per rank; only this rank's entry may be None.
        own: The piece that this rank would send to itself.
        rank: This rank.
    """
    received = []
    for peer, box in enumerate(inbox):
        assert box is not None or peer == rank
        piece = own if peer == rank or box is None else box
        received.append(piece)
    return received


def first_line(error: BaseException) -> str:
    """Return the first line of an error without its C++ file prefix.

    The C++ frames after the first line are dropped, too. At most 200 characters are returned.
    """
    line = (str(error).splitlines() or [""])[0]
    return line[line.find("] ") + 2 if line.startswith("[") else 0 :][:200]


def once(wait: Wait, finish: Callable[[], object]) -> Wait:
    """Return a function that waits, then calls `finish`.

    If the wait raises TimeoutError, the function may be called again.

    Args:
        wait: Waits for the data.
        finish: Called after the wait.
    """

    def both() -> None:
        wait()
        finish()

    return both


def no_wait() -> None:
    """Return at once: nothing is in flight."""
