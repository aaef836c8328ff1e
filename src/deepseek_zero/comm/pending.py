"""Pending collectives, and a queue of collectives that wait for a transfer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..base.errors import UsageError
from ..base.work import Work
from .transports.base import Wait, no_wait

Finish = Callable[[], None]


def _error_of_later_waits(error: BaseException) -> Exception:
    """Return what later waits raise after a wait that ended with `error`."""
    if isinstance(error, Exception):
        return error
    return UsageError(
        f"the engine is used after {type(error).__name__} ended its wait for other ranks.",
        "The data of that collective may be incomplete, and it cannot be repeated on one rank.",
        "create the engine again and load the last checkpoint, or end the program.",
    )


@dataclass
class Pending:
    """Handle of a collective that was issued.

    Attributes:
        is_here: A function that returns whether the data has arrived; None if `wait()` does not
            wait for other ranks.
    """

    _wait: Wait
    _finish: Finish | None = None
    is_here: Callable[[], bool] | None = None
    _issue: Callable[[], None] | None = None
    _done: bool = False
    _error: Exception | None = None  # Set if the collective failed; later waits raise it

    def wait(self) -> None:
        """Wait until the data may be used.

        Raises:
            PeerError: Another rank failed or called a different collective.
            UsageError: Ctrl-C or an exit ended an earlier wait.
        """
        if self._error is not None:
            raise self._error
        if not self._done:
            self._done = True
            # Drop the callbacks before they run: they hold views of pooled buffers, and the pool
            # accepts no buffer that has views
            wait = self._wait
            self._wait = no_wait
            self._issue = None
            try:
                wait()
                del wait
                finish = self._finish
                self._finish = None
                if finish is not None:
                    finish()
            except BaseException as error:
                self._error = _error_of_later_waits(error)
                raise

    def then(self, finish: Finish) -> Pending:
        """Return this collective followed by `finish`, which `wait()` calls."""
        return Pending(self.wait, finish, self.is_done, self._issue)

    def issue_all(self) -> None:
        """Issue all messages, waiting for the first ones if too many are in flight.

        Note:
            Collective: all ranks must call it in the same order within the lane.
        """
        if self._issue is not None:
            self._issue()

    def is_done(self) -> bool:
        """Return whether `wait()` would return without waiting for other ranks."""
        return self._done or self.is_here is None or self.is_here()


DONE = Pending(no_wait)


def all_of(pendings: Sequence[Pending]) -> Pending:
    """Return one handle for several collectives; its `wait()` waits for all of them."""

    def wait() -> None:
        for pending in pendings:
            pending.wait()

    return Pending(wait, is_here=lambda: all(pending.is_done() for pending in pendings))


class OrderedIssueQueue:
    """Issue collectives in order, each after a transfer that it depends on.

    They are issued in the order in which they were added, which is the same on all ranks.
    """

    def __init__(self) -> None:
        self._waiting: deque[QueuedCollective] = deque()
        self._is_issuing = False

    @property
    def is_open(self) -> bool:
        """Return whether a collective still waits to be issued."""
        return bool(self._waiting)

    def add(self, transfer: Work, start: Callable[[], Pending]) -> Pending:
        """Add a collective that is issued after a transfer.

        Args:
            transfer: The transfer, or another collective.
            start: Issues the collective. It is called when the transfer is complete, at the latest
                by `wait()` of the result.

        Returns:
            A handle of the collective, whose `wait()` issues it if necessary.
        """
        queued = QueuedCollective(transfer, start)
        self._waiting.append(queued)
        self.advance()
        return Pending(lambda: self._finish(queued), is_here=queued.is_done)

    def advance(self) -> None:
        """Issue the first collectives whose transfers are complete, without waiting.

        The call returns at once if a collective is being issued: a wait for its transfer may call
        this method again.
        """
        while not self._is_issuing and self._waiting and self._waiting[0].transfer.is_done():
            self._issue_first()

    def issue_all(self) -> None:
        """Issue every collective, waiting for their transfers."""
        while self._waiting:
            self._issue_first()

    def _issue_first(self) -> None:
        self._is_issuing = True
        try:
            self._waiting[0].issue()
        finally:
            self._is_issuing = False
            self._waiting.popleft()

    def _finish(self, queued: QueuedCollective) -> None:
        while queued.pending is None:
            self._issue_first()
        queued.pending.wait()


@dataclass(eq=False)
class QueuedCollective:
    """One collective in the queue.

    Attributes:
        transfer: Must end before the collective is issued.
        start: Issues the collective.
        pending: The issued collective, or a handle that raises the error of a failed issue; None
            before.
    """

    transfer: Work
    start: Callable[[], Pending]
    pending: Pending | None = None

    def issue(self) -> None:
        """Wait for the transfer and issue the collective."""
        try:
            self.transfer.wait()
            self.pending = self.start()
        except BaseException as error:
            self.pending = Pending(no_wait, _error=_error_of_later_waits(error))
            raise

    def is_done(self) -> bool:
        """Return whether it was issued and its data has arrived."""
        return self.pending is not None and self.pending.is_done()
