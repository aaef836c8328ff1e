"""The schema as rows: what the reference page prints and what contract tests walk.

`off_default_config` gives, for one key, a configuration in which that key and nothing else that matters has moved.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from deepseek_zero.config.fields import Section, Status
from deepseek_zero.config.raw import put

_WORDS = {int: "int", float: "float", bool: "bool", str: "text", dict: "object", types.NoneType: "null", Any: "any"}


@dataclass(frozen=True)
class FieldRow:
    """One key of the grammar.

    default: as documented ("auto: ..." where it is found).  switch: the dotted keys that must be on for a later key
    to be read.  needs: keys an effective key needs beside it.  effect: "parts", or "check" where the key only
    verifies the run.
    """

    path: str
    type: str
    default: Any
    unit: str
    status: Status
    sentence: str
    reason: str
    example: Any = None
    needs: dict[str, Any] = field(default_factory=dict)
    requires: str = ""
    effect: str = "parts"
    auto: str = ""
    switch: tuple[str, ...] = ()


@cache
def rows(model: type[Section]) -> tuple[FieldRow, ...]:
    """Every key of a model, sections entered, in the order of the schema."""
    return tuple(_rows(model, "", (), ""))


def advice(model: type[Section], path: str) -> str:
    """What to write for a key: a value that is right, and what the key means."""
    row = next((row for row in rows(model) if row.path == path), None)
    if row is None:
        return ""
    value = row.default if row.example is None else row.example
    return f'write for example {value!r}, or "auto"; the key means: {row.sentence}'


def subsection(info: FieldInfo) -> type[Section] | None:
    """The model of a field that is a section (or an optional one), else None."""
    options = get_args(info.annotation) or (info.annotation,)
    return next((kind for kind in options if isinstance(kind, type) and issubclass(kind, Section)), None)


def declared(info: FieldInfo) -> dict[str, Any]:
    """What `fields` declared about a key; empty for a section."""
    return info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}


def _rows(model: type[Section], prefix: str, switch: tuple[str, ...], part: str) -> Iterator[FieldRow]:
    part = model.part.value if model.part else part
    switch = tuple(prefix + name for name in model.gate) or switch
    for name, info in model.model_fields.items():
        path = prefix + name
        about = declared(info)
        if about:
            yield _row(path, info, about, tuple(key for key in switch if key != path), part)
        inner = subsection(info)
        if inner is not None:
            yield from _rows(inner, path + ".", switch if not about else (path,), part)


def _row(path: str, info: FieldInfo, about: dict[str, Any], switch: tuple[str, ...], part: str) -> FieldRow:
    status = Status(about["status"])
    return FieldRow(
        path=path,
        type=_spell(info.annotation),
        default=info.default,
        unit=about.get("unit", ""),
        status=status,
        sentence=info.description or "",
        reason=about["reason"] or (part if status is Status.LATER else ""),
        example=about.get("example"),
        needs=about.get("needs", {}),
        requires=about.get("requires", ""),
        effect=about.get("effect", "parts"),
        auto=about.get("auto", ""),
        switch=switch if status is Status.LATER else (),
    )


def _spell(kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " / ".join(str(option) for option in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(_spell(option) for option in inner)
    if origin is tuple:
        return f"list of {_spell(inner[0])}"
    if isinstance(kind, type) and issubclass(kind, Section):
        return "section"
    return _WORDS.get(origin or kind, str(kind))


def off_default_example(model: type[Section], path: str) -> Any:
    """A valid value for `path` that is not its default."""
    row = next((row for row in rows(model) if row.path == path), None)
    if row is None:
        raise KeyError(path)
    return row.example


def off_default_config(model: type[Section], path: str) -> dict[str, Any]:
    """A configuration that moves `path` off its default and sets what it needs beside it."""
    row = next(row for row in rows(model) if row.path == path)
    config: dict[str, Any] = {}
    for key, value in row.needs.items():
        put(config, key, value)
    for key in row.switch[:1]:
        put(config, key, off_default_example(model, key) if not _is_section(model, key) else {})
    put(config, path, row.example)
    return config


def _is_section(model: type[Section], path: str) -> bool:
    inner: type[Section] | None = model
    for name in path.split("."):
        inner = subsection(inner.model_fields[name]) if inner else None
    return inner is not None
