"""A collective under way, and collectives that wait for a transfer before they are issued."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .transports.base import Wait, no_wait

Finish = Callable[[], None]


@dataclass
class Pending:
    """A collective under way.  `wait()` returns when its data may be used, or raises `PeerError`.

    is_here: whether its data has come; None: its wait is no wait for other ranks.  _issue: issues
    what of it has not been; None: all has.
    """

    _wait: Wait
    _finish: Finish | None = None
    is_here: Callable[[], bool] | None = None
    _issue: Callable[[], None] | None = None
    _done: bool = False
    _error: Exception | None = None  # it ended so: there is no data, however often `wait` is called

    def wait(self) -> None:
        if self._error is not None:
            raise self._error
        if not self._done:
            self._done = True
            # Each is dropped as it runs: they hold views of lent buffers, and the pool takes no
            # viewed buffer back.
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
            except Exception as error:
                self._error = error
                raise

    def then(self, finish: Finish) -> Pending:
        """Return this collective followed by local work, which `wait()` does."""
        return Pending(self.wait, finish, self.is_done, self._issue)

    def issue_all(self) -> None:
        """Issue all of it, waiting for its first messages where there is no room for more.
        Collective within its lane.
        """
        if self._issue is not None:
            self._issue()

    def is_done(self) -> bool:
        """Return whether `wait` would return without other ranks' doing.  Local."""
        return self._done or self.is_here is None or self.is_here()


DONE = Pending(no_wait)


def all_of(pendings: Sequence[Pending]) -> Pending:
    """Return several collectives as one."""

    def wait() -> None:
        for pending in pendings:
            pending.wait()

    return Pending(wait, is_here=lambda: all(pending.is_done() for pending in pendings))


class Precondition(Protocol):
    """What a collective waits for: a transfer between memories, or another collective."""

    def wait(self) -> None: ...

    def is_done(self) -> bool:
        """Return whether `wait` would return at once."""


class OrderedIssueQueue:
    """Collectives that wait for a transfer first, issued in the order they were added, which is the
    same on all ranks.
    """

    def __init__(self) -> None:
        self._waiting: deque[QueuedCollective] = deque()
        self._is_issuing = False

    @property
    def is_open(self) -> bool:
        """Return whether a collective still waits to be issued."""
        return bool(self._waiting)

    def add(self, transfer: Precondition, start: Callable[[], Pending]) -> Pending:
        """Add a collective, which `start` issues when the transfer is over, at the latest when it
        is waited for.
        """
        queued = QueuedCollective(transfer, start)
        self._waiting.append(queued)
        self.advance()
        return Pending(lambda: self._finish(queued), is_here=queued.is_done)

    def advance(self) -> None:
        """Issue the first collectives whose transfers are over.  Returns at once where one is being
        issued: whoever waits for its transfer comes here.
        """
        while not self._is_issuing and self._waiting and self._waiting[0].transfer.is_done():
            self._issue_first()

    def issue_all(self) -> None:
        """Issue every collective, however long its transfer takes."""
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
    """One collective in the queue."""

    transfer: Precondition
    start: Callable[[], Pending]
    pending: Pending | None = None

    def issue(self) -> None:
        self.transfer.wait()
        self.pending = self.start()

    def is_done(self) -> bool:
        """Return whether it has been issued and its data is here."""
        return self.pending is not None and self.pending.is_done()
