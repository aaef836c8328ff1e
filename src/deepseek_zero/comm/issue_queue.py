"""Collectives that wait for something of this rank's own first, and are issued in one order on every rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from .collectives import Pending


class Precondition(Protocol):
    """What a collective waits for: a transfer between memories, or another collective."""

    def wait(self) -> None: ...

    def is_done(self) -> bool:
        """Return whether `wait` would return at once."""


class OrderedIssueQueue:
    """Collectives that wait for a transfer first, issued in the order they were added, which is the same on all
    ranks.
    """

    def __init__(self) -> None:
        self._waiting: deque[QueuedCollective] = deque()
        self._is_issuing = False

    @property
    def is_open(self) -> bool:
        """Return whether a collective still waits to be issued."""
        return bool(self._waiting)

    def add(self, transfer: Precondition, start: Callable[[], Pending]) -> Pending:
        """Add a collective, which `start` issues when the transfer is over, at the latest when it is waited for."""
        turn = QueuedCollective(transfer, start)
        self._waiting.append(turn)
        self.advance()
        return Pending(lambda: self._finish(turn), is_here=turn.is_done)

    def advance(self) -> None:
        """Issue the first collectives whose transfers are over.  Returns at once where one is being issued: whoever
        waits for its transfer comes here.
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

    def _finish(self, turn: QueuedCollective) -> None:
        while turn.pending is None:
            self._issue_first()
        turn.pending.wait()


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
