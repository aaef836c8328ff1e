"""From a JSON `params` dictionary to the keyword arguments of a class, with every problem reported at once.

Owns: which names a class accepts, nearest spellings, "auto", lists for tuples.  Does not own: what the values mean.
Called by registry.py (optimizers) and lr_schedules.py (schedules).
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Mapping
from numbers import Real
from typing import Any

from torch import Tensor

from deepseek_zero.base.errors import ConfigError, shown

REQUIRED: Any = inspect.Parameter.empty
_LONGEST_NAME = 100  # beyond it nobody looks for names that are spelled alike
_NOT_SETTINGS = frozenset({"self", "params", "optimizer"})


def known_arguments(cls: type) -> dict[str, Any]:
    """Each argument a class takes from a config, with its default or `REQUIRED`.

    A class that keeps its arguments in a dataclass names it `Settings`; any other is asked for its signature.
    """
    settings = getattr(cls, "Settings", None)
    signature = inspect.signature(cls.__init__ if settings is None else settings)  # type: ignore[misc]
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        name: parameter.default
        for name, parameter in signature.parameters.items()
        if parameter.kind in by_keyword and name not in _NOT_SETTINGS
    }


def checked_arguments(
    owner: str, cls: type, params: Mapping[str, Any], also_valid: Collection[str] = ()
) -> dict[str, Any]:
    """`params` as keyword arguments of `cls`, or one ConfigError that lists every problem.

    owner: how the message names the thing, "optimizer 'Adam'".  also_valid: names the caller handled before.
    A value "auto" that nobody resolved leaves the default of the class.
    """
    known = known_arguments(cls)
    given = {name: value for name, value in params.items() if not _is_auto(value)}
    problems = [_unknown(name, [*known, *also_valid]) for name in given if name not in known]
    missing = [name for name, default in known.items() if default is REQUIRED and name not in given]
    problems += [f"{name!r} is missing and has no default" for name in missing]
    fitted = {name: _fit(value, known[name]) for name, value in given.items() if name in known}
    wrong = {name: _mismatch(value, known[name]) for name, value in fitted.items()}
    problems += [f"{name!r} must be {wish}, not {shown(fitted[name])}" for name, wish in wrong.items() if wish]
    if problems:
        raise ConfigError(
            f"{owner}: " + "; ".join(problems) + ".",
            fix=f"valid parameters are {', '.join(sorted({*known, *also_valid}))}.",
        )
    return fitted


def nearest(name: str, choices: Collection[str]) -> str:
    """' (did you mean ...?)' with the closest of `choices`, or nothing."""
    by_case = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(name.lower(), list(by_case), n=1, cutoff=0.6)
    return f" (did you mean {by_case[close[0]]!r}?)" if close else ""


def _unknown(name: str, valid: Collection[str]) -> str:
    return f"{shown(name)} is not a parameter{nearest(name[:_LONGEST_NAME], valid)}"


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == "auto"


def _is_number(default: object) -> bool:
    return isinstance(default, Real) and not isinstance(default, bool)


def _mismatch(value: Any, default: Any) -> str:
    """What a value must be whose class has such a default; "" where it may be right, which the class then decides."""
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    if _is_number(default):
        return "a number" if isinstance(value, bool | str | bytes | Mapping | set) else ""
    if isinstance(default, tuple) and any(map(_is_number, default)):
        fits = isinstance(value, tuple) and len(value) == len(default) and all(map(_is_number_or_none, value))
        return "" if fits else f"{len(default)} numbers"
    return ""


def _is_number_or_none(value: object) -> bool:
    return value is None or isinstance(value, Tensor) or _is_number(value)


def _fit(value: Any, default: Any) -> Any:
    """JSON has no tuples, and people write 1e3 for a count."""
    if isinstance(default, tuple) and isinstance(value, list):
        return tuple(value)
    if isinstance(default, int) and not isinstance(default, bool) and isinstance(value, float) and value.is_integer():
        return int(value)
    return value
