"""Run the steps of a save or load so that an error on one rank fails all ranks."""

from __future__ import annotations

from collections.abc import Callable

from ..base.errors import CheckpointError
from ..comm.agreement import gather_outcomes
from ..comm.collectives import Comm


def run_and_gather(comm: Comm, what: str, action: Callable[[], str]) -> list[str]:
    """Run `action` on every rank and return the results of all ranks, in rank order.

    Args:
        comm: The communicator.
        what: Name of the step in error messages.
        action: Called once on every rank; returns text.

    Raises:
        CheckpointError: The action failed on a rank. It is raised on every rank, so no rank
            continues or waits forever.

    Note:
        Collective: every rank of `comm` must call it.
    """
    return gather_outcomes(comm, what, action, str, CheckpointError)[1]
