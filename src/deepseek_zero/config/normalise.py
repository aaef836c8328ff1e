"""From a plain dict to known keys in their types: aliases, unknown keys, forgiving spellings, "auto" set aside.

Every problem goes into `Problems`; nothing is raised here.  Called by `load`, before the model checks the bounds.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType
from typing import Any, get_args

from pydantic.fields import FieldInfo

from deepseek_zero.base.errors import article, shown
from deepseek_zero.config.coerce import NO_INF, Mismatch, coerce, quoted_number
from deepseek_zero.config.fields import AUTO, Section, Status
from deepseek_zero.config.problems import Problems
from deepseek_zero.config.schema import Config
from deepseek_zero.config.table import advice, declared, rows, subsection

_NULLS = ("none", "null")
_FEW = 3  # a key found in more sections than this (enabled, dtype) has no home to point at
_ZERO = "zero_optimization"
_SCHEMA = "$schema"  # tells an editor which schema to check the file by
_DEEPEST = 30
_LONGEST_NAME = 100  # beyond it nobody looks for names that are spelled alike


@dataclass(frozen=True)
class Alias:
    """A deprecated key: `new` replaces it; a true boolean becomes `when_true` (a false one is dropped)."""

    old: str
    new: str
    when_true: Any = None


ALIASES = (
    Alias("bfloat16", "bf16"),
    Alias("allgather_size", "zero_optimization.allgather_bucket_size"),
    Alias("zero_optimization.cpu_offload", "zero_optimization.offload_optimizer", {"device": "cpu"}),
    Alias("zero_optimization.cpu_offload_param", "zero_optimization.offload_param", {"device": "cpu"}),
    Alias("zero_optimization.cpu_offload_use_pin_memory", "zero_optimization.offload_optimizer.pin_memory"),
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


class Normaliser:
    """Walks a dict along the schema; the result is `values`, with the "auto" keys in `autos`."""

    def __init__(self, problems: Problems, unknown_is_error: bool) -> None:
        self.problems, self.unknown_is_error = problems, unknown_is_error
        self.autos: set[str] = set()

    def walk(self, given: Mapping[Any, Any]) -> dict[str, Any]:
        """The known keys of `given`, in their types."""
        config = self._copied(given, "", _DEEPEST)
        config.pop(_SCHEMA, None)
        return self._section(Config, self._without_aliases(config), "")

    def _copied(self, given: Mapping[Any, Any], prefix: str, depth: int) -> dict[str, Any]:
        """Objects and lists as dicts and lists of our own, so that the caller's stay as they are; keys are texts."""
        values: dict[str, Any] = {}
        for name, value in given.items():
            if isinstance(name, str):
                values[name] = self._copied_value(value, prefix + name, depth)
            else:
                self._unknown_kind(name, value, prefix)
        return values

    def _copied_value(self, value: Any, path: str, depth: int) -> Any:
        if not isinstance(value, Mapping | list):
            return value
        if not depth:
            self.problems.add(path, f"is nested deeper than {_DEEPEST} levels", "does it hold itself?", value)
            return None
        if isinstance(value, Mapping):
            return self._copied(value, path + ".", depth - 1)
        return [self._copied_value(item, path, depth - 1) for item in value]

    def _unknown_kind(self, name: Any, value: Any, prefix: str) -> None:
        told = f"{prefix}{shown(name)}"
        if self.unknown_is_error or prefix:
            self.problems.add(told, f"a key must be a text, not {article(name)}", "write it in quotes", value)
        else:
            self.problems.warn(told, f"a key that is {article(name)} and no text, ignored")

    def _section(self, model: type[Section], given: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, value in given.items():
            info = model.model_fields.get(name)
            if info is None:
                self._unknown(model, name, value, prefix)
                continue
            inner = subsection(info)
            found = self._enter(inner, value, prefix + name) if inner else self._leaf(info, value, prefix + name)
            if found is not _SILENT:
                values[name] = found
        return values

    def _enter(self, model: type[Section], value: Any, path: str) -> Any:
        if value is None or (isinstance(value, str) and value.lower() in (*_NULLS, AUTO)):
            return _SILENT  # a section that says null or "auto" is one that says nothing
        if isinstance(value, Mapping):
            return self._section(model, value, path + ".")
        example = '{"enabled": true}' if "enabled" in model.model_fields else "{...}"
        self.problems.add(path, "must be an object", f"write {example}, or null for its defaults", value)
        return _SILENT

    def _leaf(self, info: FieldInfo, value: Any, path: str) -> Any:
        about = declared(info)
        said = isinstance(value, str) and value.strip().lower() == AUTO and not about.get("auto_is_value")
        if said or (type(value) is int and value in about.get("means_auto", ())):
            self.autos.add(path)
            return _SILENT
        if value is None and NoneType not in get_args(info.annotation):
            return _SILENT  # a key that cannot be null says nothing
        try:
            found, note = coerce(value, info.annotation, about.get("inf", NO_INF))
        except Mismatch as mismatch:
            self.problems.add(path, str(mismatch), advice(Config, path), value)
            return _SILENT
        if note:
            self.problems.warn(path, note)
        if about.get("status") == Status.ACCEPTED and found != info.default:
            self.problems.without_effect(path, found, about["reason"])
        return self._open_object(found, path) if isinstance(found, dict) else found

    def _open_object(self, given: dict[str, Any], path: str) -> dict[str, Any]:
        """Arguments whose names we do not know: set "auto" aside, read quoted numbers."""
        values: dict[str, Any] = {}
        for name, value in given.items():
            number = quoted_number(value) if isinstance(value, str) else None
            if isinstance(value, str) and value.strip().lower() == AUTO:
                self.autos.add(f"{path}.{name}")
            elif number is not None:
                self.problems.warn(f"{path}.{name}", f"read the text {shown(value)} as a number; remove the quotes")
                values[name] = number
            else:
                values[name] = value
        return values

    def _unknown(self, model: type[Section], name: str, value: Any, prefix: str) -> None:
        fix = nearest(name, model, prefix)
        if self.unknown_is_error:
            self.problems.add(prefix + name, "no such key", fix, value)
        else:
            self.problems.warn(prefix + name, f"no such key, ignored; {fix}")

    def _without_aliases(self, given: Mapping[str, Any]) -> dict[str, Any]:
        config = dict(given)
        zero = config.get(_ZERO)
        if isinstance(zero, bool):
            self.problems.warn(_ZERO, f'{zero} is deprecated, write {{"stage": {int(zero)}}}')
            config[_ZERO] = {"stage": int(zero)}
        for alias in ALIASES:
            self._replace(config, alias)
        return config

    def _replace(self, config: dict[str, Any], alias: Alias) -> None:
        *path, old = alias.old.split(".")
        holder = _copy_down(config, path)
        if holder is None or old not in holder:
            return
        value = holder.pop(old)
        *path, new = alias.new.split(".")
        target = _copy_down(config, path, make=True)
        if target is not None and new in target:
            self.problems.add(
                alias.old,
                f"Cannot provide deprecated parameter '{alias.old}' and replacing parameter '{alias.new}' together",
                f"keep {alias.new} only",
                value,
            )
            return
        self.problems.warn(alias.old, f"Config parameter {alias.old} is deprecated use {alias.new} instead")
        if alias.when_true is not None and isinstance(value, bool):
            value = dict(alias.when_true) if value else None
        if target is not None:
            target[new] = value


class _Silent:
    """A key that says nothing: null for the default, or "auto"."""


_SILENT = _Silent()


def _copy_down(config: dict[str, Any], path: list[str], make: bool = False) -> dict[str, Any] | None:
    """The mapping at `path`, each step copied so that the caller's object stays as it is."""
    for name in path:
        inner = config.get(name)
        if inner is None and make:
            inner = {}
        if not isinstance(inner, Mapping):
            return None
        copied = dict(inner)
        config[name] = copied
        config = copied
    return config


def nearest(name: str, model: type[Section], prefix: str) -> str:
    """Advice for an unknown key: a sibling that is spelled alike, or the section where the key belongs."""
    if len(name) > _LONGEST_NAME:
        return "remove it; docs/reference/config.md lists every key"
    homes = _homes().get(name.rsplit(".", 1)[-1], ())
    if "." in name and name in homes:
        return f"a dot does not nest: put {name.rsplit('.', 1)[1]} inside the object {name.rsplit('.', 1)[0]}"
    close = difflib.get_close_matches(name, model.model_fields, n=1, cutoff=0.75)
    if close:
        return f"did you mean {prefix}{close[0]}?"
    if 0 < len(homes) <= _FEW:
        return f"it belongs at {' or '.join(homes)}"
    anywhere = difflib.get_close_matches(name, [*model.model_fields, *_homes()], n=1, cutoff=0.6)
    if anywhere:
        return f"did you mean {(_homes().get(anywhere[0]) or (prefix + anywhere[0],))[0]}?"
    return "remove it; docs/reference/config.md lists every key"


@cache
def _homes() -> dict[str, tuple[str, ...]]:
    homes: dict[str, tuple[str, ...]] = {}
    for row in rows(Config):
        last = row.path.rsplit(".", 1)[-1]
        homes[last] = (*homes.get(last, ()), row.path)
    return homes
