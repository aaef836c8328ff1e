"""What a configuration says before anything is resolved, and the record of what resolving decided.

Plain data between `load` (writes it) and `auto.resolve` (reads it); doors keep it to show users their own words.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Decision:
    """A value nobody stated, and why it was taken; `asked` when the configuration said "auto"."""

    key: str
    value: Any
    why: str
    asked: bool

    def __str__(self) -> str:
        return f"{self.key} = {self.value!r}: {self.why}"


@dataclass(frozen=True)
class RawConfig:
    """A validated configuration whose "auto" keys are still open.

    values: nested, known keys only, concrete values as stated.  autos: dotted keys that said "auto".  source: file
    name, "dict", "args", "base64".  given: the object the caller passed, untouched.  notes: the warnings, already
    logged.
    """

    values: Mapping[str, Any]
    autos: frozenset[str]
    source: str
    given: Any
    notes: tuple[str, ...] = ()

    def get(self, key: str, default: Any = None) -> Any:
        """The stated value of a dotted key; `default` when it is missing or "auto"."""
        return lookup(self.values, key, default)


def lookup(values: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """The value at a dotted key of nested mappings."""
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


def copied(value: Any) -> Any:
    """Objects and lists copied all the way down; what stands in them is anybody's, and stays."""
    if isinstance(value, Mapping):
        return {name: copied(inner) for name, inner in value.items()}
    return [copied(item) for item in value] if isinstance(value, list) else value
