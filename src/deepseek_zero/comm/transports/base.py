"""Interface of a transport: two operations from which every collective is built.

`gloo.py` sends point to point, `nccl.py` uses NCCL's collectives, `shared_memory.py` lets ranks of
one host read each other's pages, and `composed.py` combines two transports. A transport does not
depend on the order of lanes, and does not turn its errors into named ones (`lanes.py`, `waits.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...base.device import CPU
from ...base.memory import HUGE_PAGE, SegmentView, private_pages
from ..ids import CollectiveId

# Default seconds after which a wait raises TimeoutError, so that its caller can check for failures
POLL_SECONDS = 1.0


class ConnectionLost(Exception):
    """Raised if a transport cannot continue because the process of another rank has ended.

    Any other error of a transport keeps its own type.

    Args:
        text: The message.
        rank: World rank whose process has ended; None if the transport cannot determine it.
        is_silence: Whether the host of that rank does not answer.
    """

    def __init__(self, text: str, rank: int | None = None, *, is_silence: bool = False) -> None:
        super().__init__(text)
        self.rank = rank
        self.is_silence = is_silence


class Completion:
    """The end of a collective that another thread completes.

    Args:
        cid: The identity of the collective.

    Attributes:
        event: Set when the collective has ended.
        error: The error of a failed collective.
    """

    def __init__(self, cid: CollectiveId) -> None:
        self.cid = cid
        self.event = threading.Event()
        self.error: Exception | None = None

    def wait(self) -> None:
        """Wait until the collective has ended.

        Raises:
            TimeoutError: It has not ended within the poll interval; the call may be repeated.
            Exception: The error of a failed collective.
        """
        if not self.event.wait(poll_interval_of(self.cid)):
            raise TimeoutError
        if self.error is not None:
            raise self.error


def poll_interval_of(cid: CollectiveId) -> float:
    """Return the seconds after which a wait for a collective raises TimeoutError."""
    return POLL_SECONDS if cid.poll_interval is None else cid.poll_interval()


Wait = Callable[[], None]
Use = Callable[[Sequence[Tensor]], None]
Inbox = Sequence[Tensor | None]  # receive buffers by rank; None to read a piece in place


class Transport:
    """The two operations that collectives are built from.

    Both return a function that waits until the data is here. It raises `ConnectionLost` if the data
    will never arrive, and `TimeoutError` after `poll_interval_of` the collective; then it may be
    called again. The operations themselves raise `TimeoutError` if too many messages are in
    flight; then nothing has begun.

    The defaults describe a transport that copies: a sent buffer may be written immediately, and
    nothing needs `progress`.

    Attributes:
        description: A description of the transport, for reports.
        limitation: Why no faster transport is used; empty if there is nothing to report.
        shares_pages: Whether `symmetric_memory` and `barrier` are implemented.
        reads_in_place: Whether pieces are read in other ranks' memory, without an inbox.
        reports_arrival: Whether a collective records that its data is here before it is waited for.
        device: The device of the tensors.
    """

    description = "copies"
    limitation = ""
    shares_pages = False
    reads_in_place = False
    reports_arrival = True
    device = CPU

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized buffer in the memory that this transport prefers.

        Args:
            numel: Number of elements.
            dtype: Dtype of the elements.

        Returns:
            A 1-D tensor.
        """
        if self.device.type == "cpu" and numel * dtype.itemsize >= HUGE_PAGE:
            # Buffers of a pool return to the system after each step and are allocated again
            return private_pages(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=self.device)

    def all_gather(self, full: Tensor, cid: CollectiveId) -> Wait:
        """Start to fill every slice of `full` with the slice of its owner.

        Args:
            full: Shape ``(size * slice,)``; the slice of rank r is at ``[r * slice, (r + 1) *
                slice)``. This rank's slice must be in place.
            cid: The identity of the collective.

        Returns:
            A function that waits until `full` may be read.
        """
        raise NotImplementedError

    def exchange(self, pieces: Sequence[Tensor], inbox: Inbox, cid: CollectiveId, use: Use) -> Wait:
        """Start to send `pieces[r]` to rank r, and to receive the piece of rank r into `inbox[r]`.

        Args:
            pieces: One flat tensor per rank.
            inbox: One flat tensor per rank; this rank's own is ignored. With `reads_in_place` a
                tensor may be None.
            cid: The identity of the collective.
            use: Called once, when all pieces are here, at the latest before the wait returns. Its
                argument has `inbox[r]` for rank r, or a view of the owner's memory if that is None.

        Returns:
            A function that waits until `use` was called.
        """
        raise NotImplementedError

    def symmetric_memory(
        self, numel: int, dtype: torch.dtype, cid: CollectiveId
    ) -> Callable[[], SymmetricMemory]:
        """Return a function that waits for memory with one slice per rank of the group.

        Args:
            numel: Number of elements of all slices together.
            dtype: Dtype of the elements.
            cid: The identity of the collective.

        Returns:
            A function without arguments. Its result contains the slices of all ranks.

        Note:
            Collective: every rank of the group must call it.
        """
        raise NotImplementedError

    def barrier(self, cid: CollectiveId) -> Wait:
        """Return a function that waits until every rank has called this method."""
        raise NotImplementedError

    def is_read(self, tensor: Tensor) -> bool:
        """Return whether another rank may still read this buffer.

        The answer uses the messages that this rank has received so far.
        """
        return False

    def wait_until_read(self, tensor: Tensor) -> None:
        """Wait until no other rank reads this buffer.

        Raises:
            TimeoutError: A rank still reads it; the call may be repeated.
        """

    @property
    def expects(self) -> bool:
        """Return whether something is in flight that `progress` may complete."""
        return False

    def progress(self) -> None:
        """Receive and send as much as possible without waiting."""

    def end_engine(self, engine: str) -> None:
        """Free everything that was kept for the lanes of an engine that no longer exists."""


@dataclass(eq=False)
class SymmetricMemory:
    """One state with a slice per rank, in memory that every rank of the host maps.

    Attributes:
        own: Shape ``(slice,)``, which this rank writes.
        whole: Shape ``(ranks * slice,)``, which may be read when every rank has written.
        mapping: The copy-on-write mapping of `whole`; None in a group of one rank.
    """

    own: Tensor
    whole: Tensor
    mapping: SegmentView | None = None

    def release(self) -> None:
        """End the use of `whole`.

        In-place writes to `whole`, which change only private pages of this rank, are discarded.
        """
        if self.mapping is not None and self.mapping.was_written():
            self.mapping.clear_written()


class PointToPoint(Transport):
    """Base of the transports that send a separate message to each rank.

    Args:
        rank: This rank's index in `ranks`.
        ranks: The members of the group, with the numbers that `start` uses.
        peers: The indices of the ranks to exchange with.
    """

    def __init__(self, rank: int, ranks: Sequence[int], peers: Sequence[int]) -> None:
        self.rank = rank
        self.ranks = ranks
        self.peers = peers

    def start(self, messages: Mapping[int, tuple[Tensor, Tensor]], cid: CollectiveId) -> Wait:
        """Start to send a tensor to each of these ranks, and to receive one from each.

        Args:
            messages: By world rank, a pair of the tensor to send and the tensor to receive into.
                Empty tensors are not sent.
            cid: The identifier of the collective.

        Returns:
            A function that waits until all tensors were sent and received.
        """
        raise NotImplementedError

    def all_gather(self, full: Tensor, cid: CollectiveId) -> Wait:
        slices = full.chunk(len(self.ranks))
        own = slices[self.rank]
        return self.start({self.ranks[peer]: (own, slices[peer]) for peer in self.peers}, cid)

    def exchange(self, pieces: Sequence[Tensor], inbox: Inbox, cid: CollectiveId, use: Use) -> Wait:
        received = filled(inbox, pieces[self.rank], self.rank)
        messages = {self.ranks[peer]: (pieces[peer], received[peer]) for peer in self.peers}
        return once(self.start(messages, cid), lambda: use(received))


class SingleRank(Transport):
    """The transport of a world of one rank, which sends nothing."""

    description = "none: one rank"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def all_gather(self, full: Tensor, cid: CollectiveId) -> Wait:
        return no_wait

    def exchange(self, pieces: Sequence[Tensor], inbox: Inbox, cid: CollectiveId, use: Use) -> Wait:
        use(pieces)
        return no_wait


def filled(inbox: Inbox, own: Tensor, rank: int) -> list[Tensor]:
    """Return the inbox of a copying transport, with this rank's own tensor in its place.

    Args:
        inbox: One tensor per rank; only this rank's may be None.
        own: The piece that this rank would send to itself.
        rank: Index of this rank in the group.

    Returns:
        One tensor per rank, in rank order.
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

    Returns:
        A function without arguments.
    """

    def both() -> None:
        wait()
        finish()

    return both


def leave_in_place(received: object) -> None:
    """Do nothing with received pieces: the default of `use`, which leaves them in the inbox."""


def no_wait() -> None:
    """Return immediately: the wait function of a collective that sends nothing."""
