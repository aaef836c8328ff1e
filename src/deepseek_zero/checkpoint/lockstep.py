"""Run the steps of a save or load so that an error on one rank fails all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from ..base.errors import CheckpointError
from ..comm.agreement import gather_outcomes
from ..comm.collectives import Comm

T = TypeVar("T")


def run_and_gather(comm: Comm, what: str, action: Callable[[], str | None]) -> list[str]:
    """Run `action` on every rank and return the results of all ranks, in rank order.

    Args:
        comm: The communicator.
        what: Name of the step in error messages.
        action: Called once on every rank; returns text, or None for an empty text.

    Raises:
        CheckpointError: The action failed on a rank. It is raised on every rank, so no rank
            continues or waits forever.

    Note:
        Collective: every rank of `comm` must call it.
    """
    return gather_outcomes(comm, what, lambda: action() or "", str, CheckpointError)[1]


def run_and_gather_values(comm: Comm, what: str, action: Callable[[], Any]) -> list[Any]:
    """Run `action` on every rank and return the results of all ranks, in rank order.

    It works as `run_and_gather`, but `action` returns JSON values.
    """
    texts = run_and_gather(comm, what, lambda: json.dumps(action()))
    return [json.loads(text) for text in texts]


def run_on_all(comm: Comm, what: str, action: Callable[[], T]) -> T:
    """Run `action` on every rank and return this rank's result.

    An error on one rank is raised on every rank, as in `run_and_gather`.
    """
    return gather_outcomes(comm, what, action, lambda _: "", CheckpointError)[0]


def run_on_first_rank(comm: Comm, what: str, action: Callable[[], object]) -> None:
    """Run `action` on rank 0; an error of it is raised on every rank, as in `run_and_gather`."""

    def run() -> None:
        if comm.rank == 0:
            action()

    run_and_gather(comm, what, run)
