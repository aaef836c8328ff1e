"""Compares what ranks are about to do before they do it, and raises on all of them if one cannot.

Differences found here are named; found later they would be wrong gradients or ranks that wait for each other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..base.errors import DeepSeekZeroError, ModelMismatchError, PeerError
from .collectives import Comm

T = TypeVar("T")


def agree(comm: Comm, lines: Sequence[str], what: str, why: str, fix: str) -> None:
    """Raise on every rank, with the first line that differs, unless all ranks bring the same lines.  Collective.

    what: the subject of the collective's name ("the model").  why, fix: the error's second and third sentence.
    """
    if comm.size == 1:
        return
    digests = comm.all_gather_text(hashlib.sha256("\n".join(lines).encode()).hexdigest(), what)
    if len(set(digests)) == 1:
        return
    everyone = [json.loads(text) for text in comm.all_gather_text(json.dumps(list(lines)), f"{what} in full")]
    different = next(rank for rank, found in enumerate(digests) if found != digests[0])
    first, other = everyone[0], everyone[different]
    at = next((k for k, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), min(len(first), len(other)))
    a, b = (found[at] if at < len(found) else "nothing" for found in (first, other))
    raise ModelMismatchError(f"ranks differ in {what}: rank 0 has '{a}', rank {different} has '{b}'.", why, fix)


def run_on_all_ranks(comm: Comm, what: str, action: Callable[[], T]) -> T:
    """Call a function that may fail on one rank alone; then raise its error there, and `PeerError` elsewhere.
    Collective.
    """
    done, _ = gather_outcomes(comm, what, action, lambda _: "")
    return done


def gather_outcomes(
    comm: Comm,
    what: str,
    action: Callable[[], T],
    say: Callable[[T], str],
    failure: type[DeepSeekZeroError] = PeerError,
) -> tuple[T, list[str]]:
    """Call as `run_on_all_ranks` does, and return every rank's text. Collective.

    failure: the error to raise if another rank failed. This rank raises it too, unless its own error is of that kind
    already; if `failure` is `PeerError`, its own error is always raised.
    """
    problem: Exception | None = None
    try:
        done = action()
        answer = {"said": say(done)}
    except Exception as error:  # whatever it is, the other ranks must hear of it
        problem = error
        answer = {"error": str(error) if isinstance(error, DeepSeekZeroError) else f"{type(error).__name__}: {error}"}
    heard = [json.loads(text) for text in comm.all_gather_text(json.dumps(answer), what)]
    if problem is not None and (failure is PeerError or isinstance(problem, failure)):
        raise problem
    for rank, each in enumerate(heard):
        if "error" in each:
            raise failure(f"rank {rank} failed in '{what}': {each['error']}") from problem
    return done, [each["said"] for each in heard]
