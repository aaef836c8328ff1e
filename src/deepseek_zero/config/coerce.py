"""One value against the type of its key: the forgiving spellings users write, and a clause for what cannot be right.

`5e8` for an int, "8" for a number, "none" for null, "Warn" for "warn".  Called by `normalise` for every leaf.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from deepseek_zero.base.errors import article, shown

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_NULLS = ("none", "null")
_BOOLS = {"true": True, "false": False}
_DTYPES = {
    **dict.fromkeys(("float32", "float", "fp32", "torch.float32", "torch.float"), "fp32"),
    **dict.fromkeys(("float16", "half", "fp16", "torch.float16", "torch.half"), "fp16"),
    **dict.fromkeys(("bfloat16", "bf16", "bfp16", "torch.bfloat16"), "bf16"),
}
_SURROGATE = re.compile("[\ud800-\udfff]")
_LARGEST = 2**63 - 1
NO_INF = object()


class Mismatch(Exception):
    """The value does not fit; the text is a clause such as "must be true or false"."""


def coerce(value: Any, kind: Any, inf: Any = NO_INF) -> tuple[Any, str]:
    """The value in the key's type, and a note when its spelling deserves one.  Raises Mismatch.

    inf: what infinity stands for in this key; without it infinity is refused.
    """
    if kind is Any:
        return value, ""
    if get_origin(kind) in (Union, UnionType):
        inner = next(option for option in get_args(kind) if option is not NoneType)
        if value is None or (isinstance(value, str) and value.lower() in _NULLS):
            return None, ""
        return coerce(value, inner, inf)
    if get_origin(kind) is Literal:
        return _literal(value, get_args(kind))
    if get_origin(kind) is tuple:
        return _sequence(value, get_args(kind)[0])
    if get_origin(kind) is dict:
        return _mapping(value)
    if kind in (int, float):
        return _number(value, kind, inf)
    return _bool(value) if kind is bool else _text(value)


def quoted_number(value: str) -> int | float | None:
    """The number a string spells, or None."""
    if not _NUMBER.fullmatch(value.strip()):
        return None
    number = float(value)  # infinite where it has too many digits
    return int(number) if number.is_integer() and not re.search(r"[.eE]", value) else number


def _number(value: Any, kind: type, inf: Any) -> tuple[Any, str]:
    note = ""
    article = "an integer" if kind is int else "a number"
    if isinstance(value, str):
        number = math.inf if value.strip().lower() in ("inf", "infinity") else quoted_number(value)
        if number is None:
            raise Mismatch(f"must be {article}, not the text {shown(value)}")
        note, value = f"read the text {shown(value)} as a number; remove the quotes", number
    if isinstance(value, bool) or not isinstance(value, Real):
        raise Mismatch(f"must be {article}, not {_called(value)}")
    value = int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, int) and not -_LARGEST <= value <= _LARGEST:
        raise Mismatch("must be a number of at most 64 bits")
    if math.isinf(value) and value > 0 and inf is not NO_INF:
        return inf, note
    if not math.isfinite(value):
        raise Mismatch("must be finite")
    if kind is float:
        return float(value), note
    if value != int(value):
        raise Mismatch("must be a whole number")
    if not -_LARGEST <= value <= _LARGEST:
        raise Mismatch("must be a number of at most 64 bits")
    return int(value), note


def _bool(value: Any) -> tuple[bool, str]:
    if isinstance(value, bool):
        return value, ""
    if isinstance(value, str) and value.strip().lower() in _BOOLS:
        return _BOOLS[value.strip().lower()], f"read the text {shown(value)} as a word; remove the quotes"
    if isinstance(value, int) and value in (0, 1):
        return bool(value), f"read {value} as {str(bool(value)).lower()}"
    raise Mismatch(f"must be true or false, not {_called(value)}")


def _text(value: Any) -> tuple[str, str]:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        raise Mismatch(f"must be a text, not {_called(value)}")
    if "\0" in value or (not value.isascii() and _SURROGATE.search(value)):
        raise Mismatch("must be a text that can be written: no null character, no half of a character")
    return value, ""


def _literal(value: Any, options: tuple[Any, ...]) -> tuple[Any, str]:
    allowed = ", ".join(str(option) for option in options)
    if all(isinstance(option, int) for option in options):
        number, note = _number(value, int, NO_INF)
        if number in options:
            return number, note
        raise Mismatch(f"must be one of {allowed}")
    spelled = "none" if value is None else str(value) if type(value).__name__ == "dtype" else value
    if not isinstance(spelled, str):
        raise Mismatch(f"must be one of {allowed}, not {_called(value)}")
    spelled = spelled.strip().lower()
    if "fp16" in options:
        spelled = _DTYPES.get(spelled, spelled)
    for option in options:
        if spelled == option.lower():
            return option, ""
    raise Mismatch(f"must be one of {allowed}")


def _sequence(value: Any, kind: Any) -> tuple[tuple[Any, ...], str]:
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        value = [value]
    if not isinstance(value, Sequence):
        raise Mismatch(f"must be a list, not {_called(value)}")
    pairs = [coerce(item, kind) for item in value]
    return tuple(item for item, _ in pairs), next((note for _, note in pairs if note), "")


def _mapping(value: Any) -> tuple[dict[str, Any], str]:
    if not isinstance(value, Mapping):
        raise Mismatch(f"must be an object {{...}}, not {_called(value)}")
    return dict(value), ""


def _called(value: Any) -> str:
    words = {bool: "true or false", str: "a text", dict: "an object", list: "a list", NoneType: "null"}
    return words.get(type(value), article(value))
