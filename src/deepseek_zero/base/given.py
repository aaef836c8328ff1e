"""Validate arguments: return the value, or raise `UsageError` with the value in it."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Collection, Iterable
from numbers import Integral
from pathlib import Path
from typing import Any

from .errors import NotBuiltError, UnknownNameError, UsageError, shown

# At least two letters, because "C:/x" is a path. One slash is enough, because pathlib turns
# "s3://x" into "s3:/x".
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def refuse(call: str, name: str, value: Any, wanted: str, fix: str) -> UsageError:
    """Return the error for an argument of the wrong type or value.

    Args:
        call: The name of the called function.
        name: The name of the argument.
        value: Value that the caller passed.
        wanted: A noun phrase for what is expected, such as "a directory".
        fix: What the user can do.

    Returns:
        The error, which the caller raises.
    """
    return UsageError(f"{call}({name}={shown(value)}) cannot be used.", f"{name} is {wanted}.", fix)


def path_of(call: str, name: str, value: Any) -> Path:
    """Return an argument as a `Path`.

    Args:
        call: The name of the called function.
        name: The name of the argument.
        value: The value, a string or a path.

    Returns:
        The path, which need not exist.

    Raises:
        UsageError: The value is neither.
        NotBuiltError: The value is a URL.
    """
    if isinstance(value, str | os.PathLike):
        text = os.fspath(value)
        if isinstance(text, str) and "\0" not in text:
            refuse_url(f"{call}({name}={shown(value)})", text)
            return Path(text)
    raise refuse(
        call, name, value, "the path of a file or a directory", "pass a string or a pathlib.Path."
    )


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether a path begins with the scheme of a URL, such as s3:// or file://."""
    return _URL.match(os.fspath(path)) is not None


URL_REASON = "Files must be on a mounted file system; object stores are not built."
URL_FIX = (
    "mount the store and pass its folder, or write to a local folder and copy it; write ./ before "
    "the name of a local folder s3:."
)


def refuse_url(what: str, path: str | os.PathLike[str]) -> None:
    """Raise NotBuiltError if a path is a URL.

    Args:
        what: The path as the caller wrote it, for the message.
        path: Path to check.
    """
    if is_url(path):
        raise NotBuiltError(f"{what} is a URL.", URL_REASON, URL_FIX)


def did_you_mean(name: str, choices: Collection[str]) -> str:
    """Return " (did you mean ...?)" with the closest of `choices`, or "".

    Args:
        name: Name that was not found.
        choices: Names to compare it with.

    Returns:
        Text to append to a message; "" if no choice is similar.
    """
    by_case = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(name.lower(), list(by_case), n=1, cutoff=0.6)
    return f" (did you mean {by_case[close[0]]!r}?)" if close else ""


class NoSuchNameError(AttributeError):
    """An attribute that does not exist, with a suggestion of a similar name.

    The text is built when it is read, so `hasattr` does not pay for it.

    Args:
        owner: Name of the object, for the message.
        name: The name of the attribute.
        choices: A function that returns the existing names.
    """

    def __init__(self, owner: str, name: str, choices: Callable[[], Iterable[str]]) -> None:
        super().__init__(f"{owner} has no attribute {name!r}", name=name)
        self._wanted = name
        self._choices = choices

    def __str__(self) -> str:
        public = {choice for choice in self._choices() if not choice.startswith("_")}
        return f"{self.args[0]}{did_you_mean(self._wanted, public)}"

    def __reduce__(self) -> tuple[object, ...]:
        return AttributeError, (str(self),)


def with_suggestion(
    error: AttributeError, owner: str, name: str, choices: Callable[[], Iterable[str]]
) -> AttributeError:
    """Return an error that suggests a similar name.

    Args:
        error: The error of the failed lookup; returned unchanged if it is an `UnknownNameError`.
        owner: Name of the object, for the message.
        name: The name of the attribute.
        choices: A function that returns the existing names.
    """
    if isinstance(error, UnknownNameError):
        return error
    return NoSuchNameError(owner, name, choices)


def whole_number(call: str, name: str, value: Any, least: int, most: int | None = None) -> int:
    """Return an argument as an int.

    Args:
        call: The name of the called function.
        name: The name of the argument.
        value: Value that the caller passed.
        least: The smallest allowed value.
        most: The largest allowed value, if there is one.

    Returns:
        The value as an int.

    Raises:
        UsageError: The value is not an integer within the limits.
    """
    # NumPy's integers are Integral, too
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if is_whole and value >= least and (most is None or value <= most):
        return int(value)
    limits = f"{least} or more" if most is None else f"{least} to {most}"
    raise refuse(
        call,
        name,
        value,
        f"a whole number, {limits}",
        f"pass one, for example {name}={max(least, 1)}.",
    )
