"""Run the steps of a save or load so that an error on one rank fails all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..base.errors import CheckpointError
from ..comm.agreement import gather_outcomes
from ..comm.collectives import Comm

T = TypeVar("T")


def run_and_gather(comm: Comm, what: str, action: Callable[[], Any]) -> list[Any]:
    """Run an action on every rank and return the results of all ranks, in rank order.

    Args:
        comm: Communicator of the ranks.
        what: Name of the step in error messages.
        action: Called once on every rank; returns JSON values.

    Returns:
        The values of each rank.

    Raises:
        CheckpointError: The action failed on a rank. It is raised on every rank, so no rank
            continues or waits forever.

    Note:
        Collective: every rank of `comm` must call it.
    """
    return gather_outcomes(comm, what, action, lambda found: found, CheckpointError)[1]


def run_on_all(comm: Comm, what: str, action: Callable[[], T]) -> T:
    """Run an action on every rank and return this rank's result.

    Args:
        comm: Communicator of the ranks.
        what: Name of the step in error messages.
        action: Called once on every rank.

    Returns:
        The return value of `action` on this rank.

    Raises:
        CheckpointError: The action failed on a rank. It is raised on every rank.

    Note:
        Collective: every rank of `comm` must call it.
    """
    return gather_outcomes(comm, what, action, lambda _: None, CheckpointError)[0]


def run_on_first_rank(comm: Comm, what: str, action: Callable[[], object]) -> None:
    """Run an action on rank 0 only, and wait for it on every rank.

    Args:
        comm: Communicator of the ranks.
        what: Name of the step in error messages.
        action: Called once on rank 0.

    Raises:
        CheckpointError: The action failed. It is raised on every rank.

    Note:
        Collective: every rank of `comm` must call it.
    """

    def run() -> None:
        if comm.rank == 0:
            action()

    run_and_gather(comm, what, run)
