"""Compares what ranks are about to do before they do it, and raises on all of them if one cannot.

Differences found here are named; found later they would be wrong gradients or ranks that wait for
each other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from ..base.errors import DeepSeekZeroError, ModelMismatchError, PeerError, shown
from .collectives import Comm

T = TypeVar("T")
MOST_KEYS = 8  # that an error lists


def agree(comm: Comm, lines: Sequence[str], what: str, why: str, fix: str) -> None:
    """Raise on every rank, with the first line that differs, unless all ranks bring the same lines.
    Collective.

    what: the subject of the collective's name ("the model").  why, fix: the error's second and
    third sentence.
    """
    if comm.size == 1:
        return
    digests = comm.all_gather_text(hashlib.sha256("\n".join(lines).encode()).hexdigest(), what)
    if len(set(digests)) == 1:
        return
    everyone = [
        json.loads(text)
        for text in comm.all_gather_text(json.dumps(list(lines)), f"{what} in full")
    ]
    different = next(rank for rank, found in enumerate(digests) if found != digests[0])
    first = everyone[0]
    other = everyone[different]
    at = next(
        (k for k, (a, b) in enumerate(zip(first, other, strict=False)) if a != b),
        min(len(first), len(other)),
    )
    a, b = (found[at] if at < len(found) else "nothing" for found in (first, other))
    raise ModelMismatchError(
        f"ranks differ in {what}: rank 0 has '{a}', rank {different} has '{b}'.", why, fix
    )


def agree_on(comm: Comm, values: Mapping[str, Any], what: str, why: str, fix: str) -> None:
    """Raise on every rank if values differ between ranks; the error names each such key.
    Collective.

    values: plain values by key, in the same order on every rank; `values_in` takes a dataclass
    apart.  what, why, fix: as `agree` takes them.
    """
    if comm.size == 1:
        return
    document = json.dumps({key: shown(value) for key, value in values.items()})
    if len(set(comm.all_gather_text(hashlib.sha256(document.encode()).hexdigest(), what))) == 1:
        return
    everyone = [json.loads(text) for text in comm.all_gather_text(document, f"{what} in full")]
    different = []
    for key in dict.fromkeys(key for found in everyone for key in found):
        said = [found.get(key, "nothing") for found in everyone]
        other = next((rank for rank, value in enumerate(said) if value != said[0]), None)
        if other is not None:
            different.append(f"{key}: rank 0 has {said[0]}, rank {other} has {said[other]}")
    more = f"; and {len(different) - MOST_KEYS} more" if len(different) > MOST_KEYS else ""
    raise ModelMismatchError(
        f"ranks differ in {what}: {'; '.join(different[:MOST_KEYS])}{more}.", why, fix
    )


def values_in(value: Any, name: str) -> dict[str, Any]:
    """Return the plain values in a dataclass, a pydantic model or a mapping, by dotted names that
    begin with `name`.
    """
    if is_dataclass(value) and not isinstance(value, type):
        parts = {each.name: getattr(value, each.name) for each in fields(value)}
    elif hasattr(type(value), "model_fields"):
        parts = {each: getattr(value, each) for each in type(value).model_fields}
    elif isinstance(value, Mapping):
        parts = {str(key): inner for key, inner in value.items()}
    else:
        return {name: value}
    found: dict[str, Any] = {}
    for key, inner in parts.items():
        path = f"{name}.{key}" if name else key
        found |= values_in(inner, path)
    return found


class AllRanks:
    """Around what may fail on one rank alone: leaving raises its error there, and `PeerError`
    elsewhere.  Collective.

    what: is done inside, for the error of the other ranks.
    """

    def __init__(self, comm: Comm, what: str) -> None:
        self._comm = comm
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: Any, problem: BaseException | None, _trace: Any) -> None:
        # A rank that is told to end tells by ending
        if problem is None or isinstance(problem, Exception):
            outcome = {"said": ""} if problem is None else _told(problem)
            _hear(
                self._comm,
                self._what,
                outcome,
                PeerError,
                problem,
            )


def gather_outcomes(
    comm: Comm,
    what: str,
    action: Callable[[], T],
    say: Callable[[T], str],
    failure: type[DeepSeekZeroError] = PeerError,
) -> tuple[T, list[str]]:
    """Call a function under `AllRanks`, and return what it returned with what every rank says of
    that.  Collective.

    failure: the error to raise if another rank failed. This rank raises it too, unless its own
    error is of that kind already; if `failure` is `PeerError`, its own error is always raised.
    """
    problem: Exception | None = None
    try:
        done = action()
        answer = {"said": say(done)}
    except Exception as error:  # whatever it is, the other ranks must hear of it
        problem = error
        answer = _told(error)
    said = _hear(comm, what, answer, failure, problem)
    if problem is not None:
        raise problem
    return done, said


def _told(problem: BaseException) -> dict[str, str]:
    """Return what other ranks hear of an error."""
    known = isinstance(problem, DeepSeekZeroError)
    return {"error": str(problem) if known else f"{type(problem).__name__}: {problem}"}


def _hear(
    comm: Comm,
    what: str,
    answer: dict[str, str],
    failure: type[DeepSeekZeroError],
    problem: BaseException | None,
) -> list[str]:
    """Return what all ranks say; raise where another rank failed, unless this one raises its own.
    Collective.
    """
    heard = [json.loads(text) for text in comm.all_gather_text(json.dumps(answer), what)]
    if problem is None or not (failure is PeerError or isinstance(problem, failure)):
        for rank, each in enumerate(heard):
            if "error" in each:
                raise failure(f"rank {rank} failed in '{what}': {each['error']}") from problem
    return [each.get("said", "") for each in heard]
