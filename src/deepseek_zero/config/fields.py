"""How a configuration key is declared (type, default, unit, one sentence, what it does today), and read back as a row.

A key is *effective* (it changes the run), *accepted* (read and ignored, for a stated reason) or *later* (known, not
built: moved off its default it is an error).  `rows` lists every key of a model; `off_default_config` gives a
configuration in which one key, and nothing else that matters, has moved.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any, ClassVar, Literal, TypedDict, Union, Unpack, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from .raw_config import put

AUTO = "auto"


class Status(StrEnum):
    """What a key does in this version."""

    EFFECTIVE = "effective"
    ACCEPTED = "accepted"
    LATER = "later"


class Milestone(StrEnum):
    """The part of the library that brings a key which is not built yet."""

    TIERS = "the host and NVMe tiers (ZeRO-Offload, ZeRO-Infinity)"
    CHECKPOINTS = "durable, reshapable checkpoints"
    SPEED = "the speed work (compressed and hierarchical communication, compilation, profiling)"
    CLIENTS = "client compatibility (Hugging Face, Lightning, plain DeepSpeed scripts)"
    EXPERTS = "expert parallelism"
    UNPLANNED = "no part that is planned"


class About(TypedDict, total=False):
    """The optional facts of a key.

    example: a valid value off the default.  needs: other keys that must be set for it to matter.  requires: an
    optional package.  auto: how the value is found when the key is missing, null or "auto".  means_auto: numbers that
    say "auto".  also: values that count as the default. effect: "check" when the key verifies the run instead of
    changing its parts.  inf: what an infinite number means.  instead: what a run does without a key that is not built,
    where that is right as well: behind DeepSpeed's name it does so, with a warning.  removed: since when, and why,
    DeepSpeed has a key no more; use: what to do instead.
    """

    example: Any
    unit: str
    needs: dict[str, Any]
    requires: str
    auto: str
    means_auto: tuple[int, ...]
    also: tuple[Any, ...]
    effect: str
    inf: int | None
    instead: str
    removed: str
    use: str
    auto_is_value: bool
    off_when: str
    gt: float
    ge: float
    le: float


_BOUNDS = ("gt", "ge", "le")


class Section(BaseModel):
    """A group of keys; frozen, strict (values are coerced before they arrive) and built on first use."""

    # defer_build: building the validator of some 350 keys would be paid at import otherwise.
    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", defer_build=True, allow_inf_nan=False, protected_namespaces=()
    )
    # Dotted keys that switch the section on; while all rest at their defaults nothing else in it is read.
    gate: ClassVar[tuple[str, ...]] = ()
    part: ClassVar[Milestone | None] = None
    instead: ClassVar[str] = ""  # of every key of the section that is not built, as `About` has it

    def get(self, key: str, default: Any = None) -> Any:
        """Return a key as a dict would: clients of DeepSpeed read `engine.config.get("zero_optimization",
        {}).get("stage")`.
        """
        return getattr(self, key) if key in type(self).model_fields else default


def _declare(status: Status, default: Any, sentence: str, reason: str, about: About) -> Any:
    facts: dict[str, Any] = dict(about)
    bounds = {name: facts.pop(name) for name in _BOUNDS if name in facts}
    extra = {"status": status.value, "reason": reason, **facts}
    return Field(default=default, description=sentence, json_schema_extra=extra, **bounds)


def effective(default: Any, sentence: str, **about: Unpack[About]) -> Any:
    """Declare a key that changes the run."""
    return _declare(Status.EFFECTIVE, default, sentence, "", about)


def accepted(default: Any, sentence: str, reason: str, **about: Unpack[About]) -> Any:
    """Declare a key that is read without effect; `reason` says why that is right."""
    return _declare(Status.ACCEPTED, default, sentence, reason, about)


def later(default: Any, sentence: str, part: Milestone | None = None, **about: Unpack[About]) -> Any:
    """Declare a key that is not built; `part` brings it (None: the part of its section)."""
    return _declare(Status.LATER, default, sentence, part.value if part else "", about)


def section(model: type[Section], sentence: str) -> Any:
    """Declare a group of keys that is always there, filled with defaults where the configuration is silent."""
    # One for all: a section is frozen, and most of the thirty rest at their defaults.
    return Field(default_factory=cache(model), description=sentence)


_WORDS = {int: "int", float: "float", bool: "bool", str: "text", dict: "object", types.NoneType: "null", Any: "any"}


@dataclass(frozen=True)
class FieldRow:
    """One key of the grammar.

    default: as documented ("auto: ..." where it is found).  switch: the dotted keys that must be on for a later key
    to be read.  needs: keys an effective key needs beside it.  effect: "parts", or "check" where the key only
    verifies the run.  instead, removed: as `About` has them.
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
    instead: str = ""
    removed: str = ""


@cache
def rows(model: type[Section]) -> tuple[FieldRow, ...]:
    """Return every key of a model, sections entered, in the order of the schema."""
    return tuple(_rows(model, "", (), ""))


def advice(model: type[Section], path: str) -> str:
    """Say what to write for a key: a value that is right, and what the key means."""
    row = next((row for row in rows(model) if row.path == path), None)
    if row is None:
        return ""
    value = row.default if row.example is None else row.example
    return f'write for example {value!r}, or "auto"; the key means: {row.sentence}'


def subsection(info: FieldInfo) -> type[Section] | None:
    """Return the model of a field that is a section (or an optional one), else None."""
    options = get_args(info.annotation) or (info.annotation,)
    return next((kind for kind in options if isinstance(kind, type) and issubclass(kind, Section)), None)


def declared(info: FieldInfo) -> dict[str, Any]:
    """Return what was declared about a key; empty for a section."""
    return info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}


def instead_of(model: type[Section], info: FieldInfo) -> str:
    """Return what a run does without a key of a section that is not built, where that is right; else nothing."""
    return str(declared(info).get("instead", model.instead))


def _rows(model: type[Section], prefix: str, switch: tuple[str, ...], part: str) -> Iterator[FieldRow]:
    part = model.part.value if model.part else part
    switch = tuple(prefix + name for name in model.gate) or switch
    for name, info in model.model_fields.items():
        path = prefix + name
        about = declared(info)
        if about:
            yield _row(path, info, about, tuple(key for key in switch if key != path), part, instead_of(model, info))
        inner = subsection(info)
        if inner is not None:
            yield from _rows(inner, path + ".", switch if not about else (path,), part)


def _row(
    path: str, info: FieldInfo, about: dict[str, Any], switch: tuple[str, ...], part: str, instead: str
) -> FieldRow:
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
        instead=instead if status is Status.LATER else "",
        removed=about.get("removed", ""),
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
    """Return a valid value for `path` that is not its default."""
    row = next((row for row in rows(model) if row.path == path), None)
    if row is None:
        raise KeyError(path)
    return row.example


def kind_of(model: type[Section], path: str) -> Any:
    """Return the type of a key's values, as its field declares it."""
    *sections, last = path.split(".")
    for name in sections:
        inner = subsection(model.model_fields[name])
        if inner is None:
            raise KeyError(path)
        model = inner
    return model.model_fields[last].annotation


def off_default_config(model: type[Section], path: str) -> dict[str, Any]:
    """Return a configuration that moves `path` off its default and sets what it needs beside it."""
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
