"""Problems of a configuration, and the values that nobody stated.

A problem has the key, its value, where it came from, what is wrong, and what to write instead. All
problems are raised as one error.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..base.errors import ConfigError, DeepSeekZeroError, NotBuiltError, shown


@dataclass(frozen=True)
class AutoDecision:
    """A value nobody stated, and why it was taken; `asked` when the configuration said "auto"."""

    key: str
    value: Any
    why: str
    asked: bool

    def __str__(self) -> str:
        return f"{self.key} = {self.value!r}: {self.why}"


def lookup(values: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Return the value at a dotted key of nested mappings."""
    here: Any = values
    for name in key.split("."):
        if not isinstance(here, Mapping) or name not in here:
            return default
        here = here[name]
    return here


def put(values: MutableMapping[str, Any], key: str, value: Any) -> None:
    """Set a dotted key, making the sections on the way."""
    *path, last = key.split(".")
    for name in path:
        values = values.setdefault(name, {})
    values[last] = value


_LONGEST_KEY = 120


@dataclass(frozen=True)
class Problem:
    """One thing wrong: `what` is a clause about `key`, `fix` says what to write instead."""

    key: str
    what: str
    fix: str = ""
    value: Any = None
    not_built: bool = False

    def describe(self, source: str) -> str:
        """Return two lines: the fact with its origin, and the fix."""
        stated = f"{_cut(self.key)} = {shown(self.value)}" if self.key else shown(self.value)
        return f"{stated} (from {source}): {self.what}" + (
            f"\n     fix: {self.fix}" if self.fix else ""
        )


@dataclass
class Problems:
    """The problems and warnings met while one configuration is read; ignored: keys that change
    nothing, and why.

    goes_on: what DeepSpeed accepts is no problem where the run is right without it.
    """

    source: str
    goes_on: bool = False
    found: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    def add(self, key: str, what: str, fix: str = "", value: Any = None) -> None:
        """Record an error."""
        self.found.append(Problem(key, what, fix, value))

    def warn(self, key: str, note: str) -> None:
        """Record something that is accepted and deserves a line."""
        self.notes.append(f"config {self.source}: {_cut(key)}: {note}")

    def without_effect(self, key: str, value: Any, reason: str) -> None:
        """Record a key that is off its default and changes nothing."""
        self.ignored.append(f"{key} = {shown(value)} ({reason})")

    def raise_if_any(self) -> None:
        """Raise one error that lists them all; a NotBuiltError where nothing else is wrong."""
        if self.found:
            raise as_error(self.found, self.source)


def as_error(found: Sequence[Problem], source: str) -> DeepSeekZeroError:
    """Make the error for a list of problems."""
    count = "1 problem" if len(found) == 1 else f"{len(found)} problems"
    lines = [f"  {number}. {problem.describe(source)}" for number, problem in enumerate(found, 1)]
    what = "\n".join([f"{count} in the configuration {source}:", *lines])
    kind = NotBuiltError if all(problem.not_built for problem in found) else ConfigError
    return kind(what)


def _cut(key: str) -> str:
    """Shorten a key for messages: nobody reads one of a hundred thousand characters."""
    return key if key.isprintable() and len(key) <= _LONGEST_KEY else shown(key, _LONGEST_KEY)
