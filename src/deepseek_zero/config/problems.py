"""Problems of a configuration, and decisions about values that were not set.

A problem has the key, its value and origin, a description and a fix. All problems are raised as one
error.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..base.errors import ConfigError, DeepSeekZeroError, NotBuiltError, shown

Values = dict[str, Any]  # the values of keys; a section is a nested mapping


@dataclass(frozen=True)
class AutoDecision:
    """A value that the library chose for one configuration key, and the reason.

    Most of these keys are missing or "auto". `resolve` also chooses a value for a key that is set,
    in three cases: a train batch size that counts all ranks of each model replica, a number of
    data-parallel ranks in a process without a launcher, and the key `enabled` of the section that
    `precision` selects.

    Attributes:
        key: Dotted path of the key.
        value: The chosen value. None for an "auto" key of `optimizer.params` or `scheduler.params`
            means that the optimizer or schedule uses its own default.
        why: The reason for the choice, as text.
        asked: Whether the user set the key to "auto".
    """

    key: str
    value: Any
    why: str
    asked: bool

    def __str__(self) -> str:
        return f"{self.key} = {self.value!r}: {self.why}"


def lookup(values: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Return the value of a dotted key in nested mappings.

    Args:
        values: Nested mappings to search.
        key: Dotted path of the key.
        default: Returned if the key is missing.

    Returns:
        The value of the key, or `default`.
    """
    here: Any = values
    for name in key.split("."):
        if not isinstance(here, Mapping) or name not in here:
            return default
        here = here[name]
    return here


def put(values: MutableMapping[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested mappings, and create missing sections.

    Args:
        values: Nested mappings to change.
        key: Dotted path of the key.
        value: Value to set.
    """
    *path, last = key.split(".")
    for name in path:
        values = values.setdefault(name, {})
    values[last] = value


_LONGEST_KEY = 120


@dataclass(frozen=True)
class Problem:
    """A problem with one configuration key, and what to write instead.

    Attributes:
        key: The dotted key.
        what: A clause about the key that states the problem.
        fix: What to write instead; "" if nothing is known.
        value: The value that the user set.
        not_built: Whether the problem is that the key is not implemented.
    """

    key: str
    what: str
    fix: str = ""
    value: Any = None
    not_built: bool = False

    def describe(self, source: str) -> str:
        """Return two lines: the problem with its origin, and the fix."""
        stated = f"{readable(self.key)} = {shown(self.value)}" if self.key else shown(self.value)
        fix = f"\n     fix: {self.fix}" if self.fix else ""
        return f"{stated} (from {source}): {self.what}{fix}"


@dataclass
class Problems:
    """The problems and warnings of one configuration.

    Attributes:
        source: The name of the configuration in messages.
        goes_on: Whether keys that DeepSpeed accepts are allowed if the run is right without them.
        found: The problems.
        notes: The warnings.
        ignored: Keys that have no effect, with the reason.
    """

    source: str
    goes_on: bool = False
    found: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    def add(self, key: str, what: str, fix: str = "", value: Any = None) -> None:
        """Record an error.

        Args:
            key: Dotted path of the key.
            what: A clause about the key.
            fix: What to write instead.
            value: The value that the user set.
        """
        self.found.append(Problem(key, what, fix, value))

    def warn(self, key: str, note: str) -> None:
        """Record a warning.

        Args:
            key: Dotted path of the key.
            note: Text of the warning.
        """
        self.notes.append(f"config {self.source}: {readable(key)}: {note}")

    def without_effect(self, key: str, value: Any, reason: str) -> None:
        """Record a key with another value than its default that has no effect.

        Args:
            key: Dotted path of the key.
            value: The value that the user set.
            reason: Why it has no effect.
        """
        self.ignored.append(f"{key} = {shown(value)} ({reason})")

    def raise_if_any(self) -> None:
        """Raise one error that lists all problems.

        Raises:
            ConfigError: There are problems.
            NotBuiltError: The only problems are keys that are not implemented.
        """
        if self.found:
            raise as_error(self.found, self.source)


def as_error(found: Sequence[Problem], source: str) -> DeepSeekZeroError:
    """Return the error for a list of problems.

    Args:
        found: Problems that the error lists.
        source: The name of the configuration.

    Returns:
        `NotBuiltError` if every problem is a key that is not implemented, else `ConfigError`.
    """
    count = "1 problem" if len(found) == 1 else f"{len(found)} problems"
    lines = [f"  {number}. {problem.describe(source)}" for number, problem in enumerate(found, 1)]
    what = "\n".join([f"{count} in the configuration {source}:", *lines])
    kind = NotBuiltError if all(problem.not_built for problem in found) else ConfigError
    return kind(what)


def readable(text: str, longest: int = _LONGEST_KEY) -> str:
    """Return a key, or another text, for a message: quoted and cut if it needs to be."""
    return text if text.isprintable() and len(text) <= longest else shown(text, longest)
