"""Ranks save and load in lockstep: a step that fails on one rank fails on all of them."""

from __future__ import annotations

from collections.abc import Callable

from ..base.errors import CheckpointError
from ..comm.agreement import gather_outcomes
from ..comm.collectives import Comm


def run_and_gather(comm: Comm, what: str, action: Callable[[], str]) -> list[str]:
    """Run `action` on every rank, and return what each rank's action returned, in the order of
    ranks.  Collective.

    what: the step, in errors.  CheckpointError on every rank where the action of one failed, so
    that no rank goes on alone or waits for ever.
    """
    return gather_outcomes(comm, what, action, str, CheckpointError)[1]
