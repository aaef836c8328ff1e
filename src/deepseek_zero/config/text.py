"""Convert a configuration (dict, path, JSON text, base64) to a plain dict.

No keys are interpreted here. JSON may contain comments (// # /* */) and trailing commas. The
lenient mode also accepts Hjson, as DeepSpeed does: keys and strings without quotes, lines without
commas.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError, article, shown
from .problems import Values, readable

# Strings are matched first, so a comment sign inside of one is not a comment.
_COMMENTS = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
_LONGEST_LINE = 200
_TRAILING_COMMAS = re.compile(r'"(?:[^"\\]|\\.)*"|,(?=\s*[}\]])', re.DOTALL)

Source = Mapping[str, Any] | str | os.PathLike[str] | None


@dataclass(frozen=True)
class Document:
    """The keys of a configuration file, text or dict before they are checked.

    Attributes:
        values: The keys as nested dicts.
        source: The name of the configuration in error messages.
        duplicates: Keys that occur twice.
    """

    values: Mapping[str, Any]
    source: str
    duplicates: tuple[str, ...] = ()


def read(source: Source, origin: str | None = None, lenient: bool = False) -> Document:
    """Read a configuration without interpreting its keys.

    Args:
        source: A dict, a path, JSON text or base64.
        origin: The name in messages, in place of the default.
        lenient: Whether to accept Hjson if the text is not JSON.

    Returns:
        The keys as nested dicts, and the name of the source.

    Raises:
        ConfigError: The configuration cannot be read.
    """
    if source is None:
        return Document({}, origin or "defaults")
    if isinstance(source, Mapping):
        return Document(source, origin or "dict")
    if not isinstance(source, str | os.PathLike) or isinstance(os.fspath(source), bytes):
        raise ConfigError(
            f"a configuration cannot be {article(source)}: {shown(source)}.",
            fix="pass a dict, a path, JSON text, or base64 of JSON.",
        )
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return parse(source, origin or "text", lenient)
    return _read_file_or_base64(source, origin, lenient)


def parse(text: str, source: str, lenient: bool = False) -> Document:
    """Parse JSON with comments and trailing commas.

    Args:
        text: JSON text, or Hjson if `lenient`.
        source: The name in messages.
        lenient: Whether to accept Hjson if the text is not JSON.

    Returns:
        The keys as nested dicts, and the name of the source.

    Raises:
        ConfigError: The text cannot be parsed, or is not an object.
    """
    duplicates: list[str] = []

    def keep_last(pairs: list[tuple[str, Any]]) -> Values:
        duplicates.extend(
            sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        )
        return dict(pairs)

    try:
        values = json.loads(strip_comments(text), object_pairs_hook=keep_last)
    except json.JSONDecodeError as error:
        if lenient and (found := _hjson(text, keep_last)) is not None:
            return Document(found, source, tuple(duplicates))
        line = readable(text.split("\n")[error.lineno - 1].strip(), _LONGEST_LINE)
        raise ConfigError(
            f"{source} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}: "
            f"{line}",
            fix=(
                "comments and trailing commas are allowed; the literals are true, false and null; "
                "keys are in double quotes"
            ),
        ) from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # a number with thousands of digits, or endless brackets
        raise ConfigError(
            f"{source} cannot be read as JSON: {error}.",
            fix="look for very long numbers and very deep nesting.",
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"{source} holds a JSON {type(values).__name__}, not an object",
            fix="write { ... } around it",
        )
    return Document(values, source, tuple(duplicates))


def _hjson(text: str, keep_last: Any) -> Values | None:
    try:
        found = import_module("hjson").loads(text, object_pairs_hook=keep_last)
    except (
        ValueError,
        LookupError,
        RecursionError,
        ImportError,
    ):  # hjson reads past the end of "{/*"
        return None
    return found if isinstance(found, dict) else None


def strip_comments(text: str) -> str:
    """Return JSON text with comments and trailing commas replaced by blanks."""

    def blank(match: re.Match[str]) -> str:
        found = match[0]
        return found if found.startswith('"') else re.sub(r"[^\n]", " ", found)

    return _TRAILING_COMMAS.sub(blank, _COMMENTS.sub(blank, text))


def _read_file_or_base64(
    source: str | os.PathLike[str], origin: str | None, lenient: bool
) -> Document:
    path = Path(source)
    if os.path.isfile(path):  # a long base64 text, which is not a valid file name, raises nothing
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the configuration {path}: {error}") from None
        return parse(text, origin or str(path), lenient)
    decoded = _decode(os.fspath(source))
    if decoded is not None:
        return parse(decoded, origin or "base64", lenient)
    raise ConfigError(
        "Expected a string path to an existing deepspeed config, or a dictionary or a valid "
        f"base64. Received: {readable(str(source), _LONGEST_LINE)}",
        why=(
            "that is a directory"
            if os.path.isdir(path)
            else "no such file, and the text is not base64 of a JSON object"
        ),
        fix="check the path; relative paths start at the current directory",
    )


def _decode(text: str) -> str | None:
    padded = text + "=" * (-len(text) % 4)  # url-safe base64 often has no padding
    try:
        decoded = base64.b64decode(padded, altchars=b"-_", validate=True).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None
