"""Checks arguments of which only some kinds can be right: returns the value, or raises `UsageError` with what it
was.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .errors import UsageError, shown


def refuse(call: str, name: str, value: Any, wanted: str, fix: str) -> UsageError:
    """Return the error for an argument of the wrong kind. call: as the caller wrote it. wanted: a noun, "a
    directory".
    """
    return UsageError(f"{call}({name}={shown(value)}) cannot be used.", f"{name} is {wanted}.", fix)


def path_of(call: str, name: str, value: Any) -> Path:
    """Return a path that a caller gave as text or as a path."""
    if isinstance(value, str | os.PathLike):
        text = os.fspath(value)
        if isinstance(text, str) and "\0" not in text:
            return Path(text)
    raise refuse(call, name, value, "the path of a file or a directory", "pass a text or a pathlib.Path.")


def whole_number(call: str, name: str, value: Any, least: int, most: int | None = None) -> int:
    """Return a count that a caller gave."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if is_whole and value >= least and (most is None or value <= most):
        return int(value)
    limits = f"{least} or more" if most is None else f"{least} to {most}"
    raise refuse(call, name, value, f"a whole number, {limits}", f"pass one, for example {name}={max(least, 1)}.")
