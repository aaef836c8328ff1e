"""Normalize a plain dict: known keys in their types, with "auto" collected.

ALIASES is the table of DeepSpeed's old names of keys. `coerce` accepts several spellings of values
(`5e8` for an int, "8" for a number, "none" for null, "Warn" for "warn"). Every problem is added to
`Problems`; nothing is raised here.

pydantic does not handle these spellings, because a warning about one contains its key, and a
validator does not know the path of its value. pydantic then checks the bounds of values in
`validate` (load.py).
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from ..base.errors import article, shown
from .fields import AUTO, NO_INF, Section, Status, advice, declared, rows, subsections
from .not_built import NOT_BUILT, NotBuilt, kind_of, names_below, paths_not_built
from .problems import Problems, Values, lookup, put
from .schema import Config

_NULLS = ("none", "null")
_FEW = 3  # a key in more sections (enabled, dtype) is not suggested
_ZERO = "zero_optimization"
_SCHEMA = "$schema"  # read by editors, which check the file with it
_DEEPEST = 30
# A value in the place of a section is probably meant for the first of these keys that it has
_MAIN_KEYS = ("stage", "device", "type")
_LONGEST_NAME = 100  # longer names are not compared with others


@dataclass(frozen=True)
class Alias:
    """A deprecated name of a configuration key, and its replacement.

    Attributes:
        old: The deprecated key.
        new: Its replacement.
        when_true: The value that replaces true; false is dropped.
    """

    old: str
    new: str
    when_true: Any = None


ALIASES = (
    Alias("bfloat16", "bf16"),
    Alias("allgather_size", "zero_optimization.allgather_bucket_size"),
    Alias(
        "zero_optimization.cpu_offload", "zero_optimization.offload_optimizer", {"device": "cpu"}
    ),
    Alias(
        "zero_optimization.cpu_offload_param", "zero_optimization.offload_param", {"device": "cpu"}
    ),
    Alias(
        "zero_optimization.cpu_offload_use_pin_memory",
        "zero_optimization.offload_optimizer.pin_memory",
    ),
    Alias(
        "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    ),
    *(
        Alias(f"zero_optimization.{name}", f"zero_optimization.stage3_{name}")
        for name in (
            "max_live_parameters",
            "max_reuse_distance",
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "gather_16bit_weights_on_model_save",
            "module_granularity_threshold",
            "use_all_reduce_for_fetch_params",
            "allgather_sequential",
        )
    ),
)


@dataclass
class Normaliser:
    """Converts a dict according to the schema.

    Attributes:
        problems: The object to which found problems are added.
        unknown_is_error: Whether unknown keys are errors or warnings.
        autos: The "auto" keys.
        not_built: The set keys that are not implemented.
    """

    problems: Problems
    unknown_is_error: bool
    autos: set[str] = field(default_factory=set)
    not_built: Values = field(default_factory=dict)

    def walk(self, given: Mapping[Any, Any]) -> Values:
        """Return the known keys of `given`, in their types."""
        config = self._copied(given, "", _DEEPEST)
        config.pop(_SCHEMA, None)
        self._replace_aliases(config)
        return self._section(Config, config, "")

    def _copied(self, given: Mapping[Any, Any], prefix: str, depth: int) -> Values:
        """Copy nested objects and lists, so that the caller's are not changed."""
        values: Values = {}
        for name, value in given.items():
            if isinstance(name, str):
                values[name] = self._copied_value(value, prefix + name, depth)
            else:
                self._unknown_kind(name, value, prefix)
        return values

    def _copied_value(self, value: Any, path: str, depth: int) -> Any:
        """Copy a value; one that is nested too deep is recorded as a problem."""
        if not isinstance(value, Mapping | list):
            return value
        if not depth:
            self.problems.add(
                path, f"is nested deeper than {_DEEPEST} levels", "does it contain itself?", value
            )
            return None
        if isinstance(value, Mapping):
            return self._copied(value, path + ".", depth - 1)
        return [self._copied_value(item, path, depth - 1) for item in value]

    def _unknown_kind(self, name: Any, value: Any, prefix: str) -> None:
        """Record a key that is not a string."""
        path = f"{prefix}{shown(name)}"
        if self.unknown_is_error or prefix:
            self.problems.add(
                path, f"a key must be a string, not {article(name)}", "write it in quotes", value
            )
        else:
            self.problems.warn(path, f"a key that is {article(name)} instead of a string, ignored")

    def _section(self, model: type[Section], given: Mapping[str, Any], prefix: str) -> Values:
        """Return the known keys of a section, in their types."""
        values: Values = {}
        inner = subsections(model)
        for name, value in given.items():
            path = prefix + name
            found = _SILENT
            if name in inner:
                found = self._enter(inner[name], value, path)
            elif name in model.model_fields:
                found = self._leaf(model.model_fields[name], value, path)
            elif path in NOT_BUILT:
                self._not_built(NOT_BUILT[path], value)
            else:
                self._unknown((*model.model_fields, *names_below(prefix)), name, value, prefix)
            if found is not _SILENT:
                values[name] = found
        return values

    def _enter(self, model: type[Section], value: Any, path: str) -> Any:
        """Return the keys of a section, or _SILENT if the value is not an object."""
        inner = self._object(value, path, model.model_fields)
        return _SILENT if inner is None else self._section(model, inner, path + ".")

    def _object(self, value: Any, path: str, names: Collection[str]) -> Mapping[str, Any] | None:
        """Return the object of a section with keys of these names, or None.

        Null and "auto" state nothing. Other values are recorded as a problem.
        """
        if isinstance(value, Mapping):
            return value
        if value is not None and _word(value) not in (*_NULLS, AUTO):
            example = "{...}"
            if "enabled" in names:
                example = '{"enabled": true}'
            elif key := next((key for key in _MAIN_KEYS if key in names), None):
                example = f'{{"{key}": {json.dumps(value, default=repr)}}}'
            self.problems.add(
                path, "must be an object", f"write {example}, or null for its defaults", value
            )
        return None

    def _not_built(self, row: NotBuilt, value: Any) -> None:
        """Collect the set values of a key or a section that is not implemented."""
        if not row.keys:
            found = self._value_not_built(row, row.path, value, row.default)
            if found is not _SILENT:
                self.not_built[row.path] = found
            return
        inner = self._object(value, row.path, row.defaults)
        if inner is None:
            return
        stated: Values = {}
        self.not_built[row.path] = stated
        for name, each in inner.items():
            if name not in row.defaults:
                self._unknown(tuple(row.defaults), name, each, f"{row.path}.")
                continue
            found = self._value_not_built(row, f"{row.path}.{name}", each, row.defaults[name])
            if found is not _SILENT:
                stated[name] = found

    def _value_not_built(self, row: NotBuilt, path: str, value: Any, default: Any) -> Any:
        """Return the value in its type, or _SILENT for null and "auto"."""
        may_be_null = default is None and path.rpartition(".")[2] not in row.strict
        words = (*_NULLS, AUTO) if may_be_null else (AUTO,)
        if value is None or _word(value) in words:
            return _SILENT
        return self._coerced(value, row.kind or kind_of(default), NO_INF, path, row.fix)

    def _leaf(self, info: FieldInfo, value: Any, path: str) -> Any:
        """Return the value of a key in its type, or _SILENT if it is unset or "auto"."""
        about = declared(info)
        is_auto = _word(value) == AUTO and not about.get("auto_is_value")
        if is_auto or (type(value) is int and value in about.get("means_auto", ())):
            self.autos.add(path)
            return _SILENT
        if value is None and NoneType not in get_args(info.annotation):
            return _SILENT  # null means unset if the key cannot be null
        found = self._coerced(value, info.annotation, about.get("inf", NO_INF), path)
        if found is _SILENT:
            return found
        # Compare types first, because arrays have no truth value
        is_same = type(found) is type(info.default) and found == info.default
        if about.get("status") == Status.ACCEPTED and not is_same:
            self.problems.without_effect(path, found, about["reason"])
        return self._open_object(found, path) if isinstance(found, dict) else found

    def _coerced(self, value: Any, kind: Any, inf: Any, path: str, fix: str = "") -> Any:
        """Return the value in its type, or record a problem and return _SILENT."""
        try:
            found, note = coerce(value, kind, inf)
        except Mismatch as mismatch:
            self.problems.add(path, str(mismatch), fix or advice(Config, path), value)
            return _SILENT
        if note:
            self.problems.warn(path, note)
        return found

    def _open_object(self, given: Values, path: str) -> Values:
        """Convert arguments with arbitrary names: collect "auto", convert quoted numbers."""
        values: Values = {}
        for name, value in given.items():
            number = quoted_number(value) if isinstance(value, str) else None
            if _word(value) == AUTO:
                self.autos.add(f"{path}.{name}")
            elif number is not None:
                note = f"read the string {shown(value)} as a number; remove the quotes"
                self.problems.warn(f"{path}.{name}", note)
                values[name] = number
            else:
                values[name] = value
        return values

    def _unknown(self, names: Sequence[str], name: str, value: Any, prefix: str) -> None:
        """Record an unknown key; `names` are those of its section."""
        fix = nearest(name, names, prefix)
        if self.unknown_is_error:
            self.problems.add(prefix + name, "no such key", fix, value)
        else:
            self.problems.warn(prefix + name, f"no such key, ignored; {fix}")

    def _replace_aliases(self, config: Values) -> None:
        """Replace all deprecated names in place."""
        zero = config.get(_ZERO)
        if isinstance(zero, bool):
            self.problems.warn(_ZERO, f'{zero} is deprecated, write {{"stage": {int(zero)}}}')
            config[_ZERO] = {"stage": int(zero)}
        for alias in ALIASES:
            self._replace(config, alias)

    def _replace(self, config: Values, alias: Alias) -> None:
        """Move the value of a deprecated name to its replacement.

        Both names together are an error, or a warning if both are at the top level and unknown keys
        are only warnings.
        """
        section, _, old = alias.old.rpartition(".")
        holder = lookup(config, section) if section else config
        if not isinstance(holder, dict) or old not in holder:
            return
        value = holder.pop(old)
        if lookup(config, alias.new, _SILENT) is not _SILENT:
            if not (section or self.unknown_is_error):
                self.problems.warn(alias.old, f"ignored, because {alias.new} is set")
                return
            self.problems.add(
                alias.old,
                f"Cannot provide deprecated parameter '{alias.old}' and replacing parameter "
                f"'{alias.new}' together",
                f"keep {alias.new} only",
                value,
            )
            return
        self.problems.warn(
            alias.old, f"Config parameter {alias.old} is deprecated use {alias.new} instead"
        )
        if alias.when_true is not None and isinstance(value, bool):
            value = dict(alias.when_true) if value else None
        section, _, new = alias.new.rpartition(".")
        if section and lookup(config, section) is None:
            put(config, section, {})
        target = lookup(config, section) if section else config
        if isinstance(target, dict):
            target[new] = value


_SILENT = object()  # the value of a key that is unset: null for the default, or "auto"


def nearest(name: str, siblings: Sequence[str], prefix: str) -> str:
    """Return a fix for an unknown key: a similar key, or the section of the key.

    Args:
        name: Key that the schema does not have.
        siblings: The keys of its section.
        prefix: The path of its section, with a dot at the end.

    Returns:
        A sentence for an error message.
    """
    if len(name) > _LONGEST_NAME:
        return "remove it; docs/reference/config.md lists every key"
    section, _, last = name.rpartition(".")
    homes = _homes().get(last, ())
    if section and name in homes:
        return f"a dot does not nest: put {last} inside the object {section}"
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.75)
    if close:
        return f"did you mean {prefix}{close[0]}?"
    if "params" in siblings:
        return f"write {prefix}params.{name} if it is an option of the {prefix[:-1]}"
    if 0 < len(homes) <= _FEW:
        return f"it belongs at {' or '.join(homes)}"
    anywhere = difflib.get_close_matches(name, [*siblings, *_homes()], n=1, cutoff=0.6)
    if anywhere:
        return f"did you mean {(_homes().get(anywhere[0]) or (prefix + anywhere[0],))[0]}?"
    return "remove it; docs/reference/config.md lists every key"


@cache
def _homes() -> dict[str, tuple[str, ...]]:
    """Return the paths of all keys, by the last name of the path."""
    homes: dict[str, tuple[str, ...]] = {}
    known = [row.path for row in rows(Config)]
    for path in dict.fromkeys([*known, *NOT_BUILT, *paths_not_built()]):
        last = path.rsplit(".", 1)[-1]
        homes[last] = (*homes.get(last, ()), path)
    return homes


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_BOOLS = {"true": True, "false": False}
_DTYPES = {
    **dict.fromkeys(("float32", "float", "fp32", "torch.float32", "torch.float"), "fp32"),
    **dict.fromkeys(("float16", "half", "fp16", "torch.float16", "torch.half"), "fp16"),
    **dict.fromkeys(("bfloat16", "bf16", "bfp16", "torch.bfloat16"), "bf16"),
}
_SURROGATE = re.compile("[\ud800-\udfff]")
_LARGEST = 2**63 - 1


class Mismatch(Exception):
    """Raised if a value has the wrong type.

    The text is a clause such as "must be true or false".
    """


def _word(value: Any) -> str:
    """Return a string in lower case and without blanks around it; "" for another value."""
    return value.strip().lower() if isinstance(value, str) else ""


def coerce(value: Any, kind: Any, inf: Any = NO_INF) -> tuple[Any, str]:
    """Return a value in the type of its key.

    Args:
        value: Value that the user set.
        kind: The type annotation of the key.
        inf: The value that replaces infinity; without it infinity is rejected.

    Returns:
        The value, and a note if its spelling deserves a warning.

    Raises:
        Mismatch: The value does not fit the type.
    """
    if kind is Any:
        return value, ""
    form = get_origin(kind)
    if form in (Union, UnionType):
        inner, *words = (option for option in get_args(kind) if option is not NoneType)
        if value is None or _word(value) in _NULLS:
            return None, ""
        for option in words:  # words that a key accepts in addition to its values
            if _word(value) in get_args(option):
                return coerce(value, option, inf)
        return coerce(value, inner, inf)
    if form is Literal:
        return _literal(value, get_args(kind))
    if form is tuple:
        return _sequence(value, get_args(kind)[0])
    if form is dict:
        return _mapping(value)
    if kind in (int, float):
        return _number(value, kind, inf)
    return _bool(value) if kind is bool else _text(value)


def quoted_number(value: str) -> int | float | None:
    """Return the number that a string spells, or None."""
    if not _NUMBER.fullmatch(value.strip()):
        return None
    number = float(value)  # infinite if it has too many digits
    return int(number) if number.is_integer() and not re.search(r"[.eE]", value) else number


def _number(value: Any, kind: type, inf: Any) -> tuple[Any, str]:
    """Return a finite number as an int or a float; `inf` replaces infinity."""
    note = ""
    article = "an integer" if kind is int else "a number"
    if isinstance(value, str):
        number = math.inf if _word(value) in ("inf", "infinity") else quoted_number(value)
        if number is None:
            raise Mismatch(f"must be {article}, not the string {shown(value)}")
        note = f"read the string {shown(value)} as a number; remove the quotes"
        value = number
    if isinstance(value, bool) or not isinstance(value, Real):
        raise Mismatch(f"must be {article}, not {_called(value)}")
    if not isinstance(value, Integral):
        value = float(value)
        if value == math.inf and inf is not NO_INF:
            return inf, note
        if not math.isfinite(value):
            raise Mismatch("must be finite")
        if kind is float:
            return value, note
        if not value.is_integer():
            raise Mismatch("must be a whole number")
    if not -_LARGEST <= value <= _LARGEST:
        raise Mismatch("must be a number of at most 64 bits")
    return kind(value), note


def _bool(value: Any) -> tuple[bool, str]:
    """Return a boolean that is given as such, as a word, or as 0 or 1."""
    if isinstance(value, bool):
        return value, ""
    if _word(value) in _BOOLS:
        note = f"read the string {shown(value)} as a boolean; remove the quotes"
        return _BOOLS[_word(value)], note
    if isinstance(value, int) and value in (0, 1):
        return bool(value), f"read {value} as {str(bool(value)).lower()}"
    raise Mismatch(f"must be true or false, not {_called(value)}")


def _text(value: Any) -> tuple[str, str]:
    """Return a string, or a path as a string."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        raise Mismatch(f"must be a string, not {_called(value)}")
    if "\0" in value or (not value.isascii() and _SURROGATE.search(value)):
        raise Mismatch("must be a string without null characters and without lone surrogates")
    return value, ""


def _literal(value: Any, options: tuple[Any, ...]) -> tuple[Any, str]:
    """Return the option that a value spells, in any case; a dtype has several spellings."""
    allowed = ", ".join(str(option) for option in options)
    if all(isinstance(option, int) for option in options):
        number, note = _number(value, int, NO_INF)
        if number in options:
            return number, note
        raise Mismatch(f"must be one of {allowed}")
    if value is None or type(value).__name__ == "dtype":
        value = str(value)
    if not isinstance(value, str):
        raise Mismatch(f"must be one of {allowed}, not {_called(value)}")
    spelled = _word(value)
    if "fp16" in options:
        spelled = _DTYPES.get(spelled, spelled)
    for option in options:
        if spelled == option.lower():
            return option, ""
    raise Mismatch(f"must be one of {allowed}")


def _sequence(value: Any, kind: Any) -> tuple[tuple[Any, ...], str]:
    """Return a list as a tuple with items in a type; a single value is a list of one."""
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        value = [value]
    if not isinstance(value, Sequence):
        raise Mismatch(f"must be a list, not {_called(value)}")
    pairs = [coerce(item, kind) for item in value]
    return tuple(item for item, _ in pairs), next((note for _, note in pairs if note), "")


def _mapping(value: Any) -> tuple[Values, str]:
    if not isinstance(value, Mapping):
        raise Mismatch(f"must be an object {{...}}, not {_called(value)}")
    return dict(value), ""


def _called(value: Any) -> str:
    """Return a JSON name of the type of a value, for error messages."""
    words = {
        bool: "true or false",
        str: "a string",
        dict: "an object",
        list: "a list",
        NoneType: "null",
    }
    return words.get(type(value), article(value))
