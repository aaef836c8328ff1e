"""The interface of work that is in progress, such as a transfer or a collective."""

from __future__ import annotations

from typing import Protocol


class Work(Protocol):
    """Work in progress: a transfer between memories, or a collective."""

    def wait(self) -> None:
        """Wait until the work is complete, and raise the error if it failed."""

    def is_done(self) -> bool:
        """Return whether the work is complete, so that `wait` returns immediately."""
