"""Compare values between ranks and raise the same error on every rank.

A difference that is found here is named in the error. Found later, it would show as wrong gradients
or as ranks that wait for each other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import zip_longest
from typing import Any, TypeVar

from ..base.errors import (
    LONGEST_SHOWN,
    DeepSeekZeroError,
    ModelMismatchError,
    PeerError,
    shown,
)
from .collectives import Comm

T = TypeVar("T")
MOST_KEYS = 8  # Number of differing keys that an error lists
LONGEST_COMPARED = 100_000  # Characters of a value


def agree(comm: Comm, lines: Sequence[str], what: str, why: str, fix: str) -> None:
    """Raise an error on every rank if the lines differ between ranks.

    The error names the first line that differs.

    Args:
        comm: Communicator of the ranks to compare.
        lines: Lines of text of this rank, which must equal those of the other ranks.
        what: The subject of the comparison ("the model"), also the name of the collective.
        why: The second sentence of the error.
        fix: The third sentence of the error.

    Raises:
        ModelMismatchError: The lines of two ranks differ.

    Note:
        Collective: every rank of `comm` must call it.
    """
    everyone = _documents_that_differ(comm, list(lines), what)
    for rank, other in enumerate(everyone):
        for a, b in zip_longest(everyone[0], other, fillvalue="nothing"):
            if a != b:
                raise ModelMismatchError(
                    f"ranks differ in {what}: rank 0 has '{a}', rank {rank} has '{b}'.", why, fix
                )


def agree_on(comm: Comm, values: Mapping[str, Any], what: str, why: str, fix: str) -> None:
    """Raise an error on every rank if values differ between ranks.

    The error names every key whose values differ, up to `MOST_KEYS`.

    Args:
        comm: Communicator of the ranks to compare.
        values: Plain values by key, in the same order on every rank. `values_in` flattens a
            dataclass into this form.
        what: The subject of the comparison, also the name of the collective.
        why: The second sentence of the error.
        fix: The third sentence of the error.

    Raises:
        ModelMismatchError: The values of two ranks differ.

    Note:
        Collective: every rank of `comm` must call it.
    """
    if comm.size == 1:  # nothing to compare, so the values are not formatted
        return
    texts = {key: shown(value, LONGEST_COMPARED) for key, value in values.items()}
    everyone = _documents_that_differ(comm, texts, what)
    if not everyone:
        return
    different = []
    for key in dict.fromkeys(key for found in everyone for key in found):
        said = [found.get(key, "nothing") for found in everyone]
        other = next((rank for rank, value in enumerate(said) if value != said[0]), None)
        if other is not None:
            pairs = enumerate(zip(said[0], said[other], strict=False))
            start = next((place for place, (a, b) in pairs if a != b), len(said[0]))
            own = _part_at(start, said[0])
            others = _part_at(start, said[other])
            different.append(f"{key}: rank 0 has {own}, rank {other} has {others}")
    more = f"; and {len(different) - MOST_KEYS} more" if len(different) > MOST_KEYS else ""
    raise ModelMismatchError(
        f"ranks differ in {what}: {'; '.join(different[:MOST_KEYS])}{more}.", why, fix
    )


def _part_at(place: int, text: str) -> str:
    """Return a text, or of a long one the part around the character at `place`."""
    if len(text) <= LONGEST_SHOWN:
        return text
    start = max(0, place - LONGEST_SHOWN // 2)
    stop = start + LONGEST_SHOWN
    before = "..." if start else ""
    after = "..." if stop < len(text) else ""
    return f"{before}{text[start:stop]}{after}"


def _documents_that_differ(comm: Comm, document: Any, what: str) -> list[Any]:
    """Return the documents of all ranks if two of them differ, else an empty list.

    Only checksums are exchanged if all documents are equal. Every rank must call this.
    """
    if comm.size == 1:
        return []
    text = json.dumps(document)
    if len(set(comm.all_gather_text(hashlib.sha256(text.encode()).hexdigest(), what))) == 1:
        return []
    return [json.loads(each) for each in comm.all_gather_text(text, f"{what} in full")]


def values_in(value: Any, name: str) -> dict[str, Any]:
    """Return a nested value as plain values by dotted name.

    Args:
        value: A dataclass, a pydantic model, a mapping, or a plain value.
        name: The prefix of all names; may be empty.

    Returns:
        A dictionary from dotted names to plain values.
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


@dataclass
class AllRanks:
    """Context manager for an action that may fail on some ranks only.

    On exit, a rank that failed raises its own error, and the other ranks raise `PeerError`.

    Attributes:
        comm: Communicator of the ranks that enter the block.
        what: A description of the action, for the error of the other ranks.

    Note:
        Collective: every rank of `comm` must enter and leave the block.
    """

    comm: Comm
    what: str

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: Any, problem: BaseException | None, _trace: Any) -> None:
        # A rank that is asked to exit (not an `Exception`) is noticed by its exit
        if problem is None or isinstance(problem, Exception):
            _gather_outcomes(self.comm, self.what, "", PeerError, problem)


def gather_outcomes(
    comm: Comm,
    what: str,
    action: Callable[[], T],
    say: Callable[[T], Any],
    failure: type[DeepSeekZeroError] = PeerError,
) -> tuple[T, list[Any]]:
    """Call a function on every rank, and raise on all ranks if it fails on one.

    Args:
        comm: Communicator of the ranks that call it.
        what: A description of the action, for the error of the other ranks.
        action: The function to call.
        say: Converts the result of `action` into the JSON values that other ranks receive.
        failure: The error to raise if another rank failed. This rank raises it too, unless its own
            error already has this type. With `PeerError`, this rank always raises its own error.

    Returns:
        The result of `action`, and the JSON values of all ranks by rank.

    Raises:
        DeepSeekZeroError: An error of type `failure`, if `action` failed on another rank.

    Note:
        Collective: every rank of `comm` must call it.
    """
    problem: Exception | None = None
    text = ""
    try:
        done = action()
        text = json.dumps(say(done))
    except Exception as error:  # Other ranks must be informed of any error
        problem = error
    texts = _gather_outcomes(comm, what, text, failure, problem)
    if problem is not None:
        raise problem
    return done, [json.loads(each) for each in texts]


def _gather_outcomes(
    comm: Comm,
    what: str,
    text: str,
    failure: type[DeepSeekZeroError],
    problem: BaseException | None,
) -> list[str]:
    """Exchange outcomes; raise `failure` if another rank failed.

    If this rank failed with an error that takes precedence, return and let the caller raise it.
    Every rank must call this.
    """
    outcome = {"said": text}
    if isinstance(problem, DeepSeekZeroError):
        outcome = {"error": str(problem)}
    elif problem is not None:
        outcome = {"error": f"{type(problem).__name__}: {problem}"}
    heard = [json.loads(each) for each in comm.all_gather_text(json.dumps(outcome), what)]
    if problem is None or not (failure is PeerError or isinstance(problem, failure)):
        for rank, each in enumerate(heard):
            if "error" in each:
                raise failure(f"rank {rank} failed in '{what}': {each['error']}") from problem
    return [each.get("said", "") for each in heard]
