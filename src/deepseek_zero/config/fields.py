"""How a configuration key is declared (type, default, unit, one sentence, what it does today), and
read back as a row.

A key is *effective* (it changes the run) or *accepted* (read and ignored, for a stated reason).
`rows` lists every key of a model.  Keys that are known and not built are rows of the table in
not_built.py.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any, Literal, Self, TypedDict, Union, Unpack, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

AUTO = "auto"


class Status(StrEnum):
    """What a key does in this version."""

    EFFECTIVE = "effective"
    ACCEPTED = "accepted"


class About(TypedDict, total=False):
    """The optional facts of a key.

    example: a valid value off the default.  needs: other keys that must be set for it to matter.
    requires: an
    optional package.  auto: how the value is found when the key is missing, null or "auto".
    means_auto: numbers that say "auto".  effect: "check" when the key verifies the run instead of
    changing its parts.  inf: what an infinite number means.
    """

    example: Any
    unit: str
    needs: dict[str, Any]
    requires: str
    auto: str
    means_auto: tuple[int, ...]
    effect: str
    inf: int | None
    auto_is_value: bool
    gt: float
    ge: float
    le: float


_BOUNDS = ("gt", "ge", "le")


class Section(BaseModel):
    """A group of keys; frozen, strict (values are coerced before they arrive) and built on first
    use.
    """

    # defer_build: building the validator of some 350 keys would be paid at import otherwise.
    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        defer_build=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    def get(self, key: str, default: Any = None) -> Any:
        """Return a key as a dict would: clients of DeepSpeed read
        `engine.config.get("zero_optimization", {}).get("stage")`.
        """
        return getattr(self, key) if key in type(self).model_fields else default

    def stated(self, path: str, default: Any = None) -> Any:
        """Return what a configuration states of a key, a section as a dict.

        Args:
            path: The key's dotted path below this section, for example "offload_param.device".
            default: Returned if the key, or a section on its path, is not stated.
        """
        name, _, rest = path.partition(".")
        if name not in self.model_fields_set:
            return default
        found = getattr(self, name)
        if not rest:
            return found.stated_values() if isinstance(found, Section) else found
        if isinstance(found, Section):
            return found.stated(rest, default)
        return found.get(rest, default) if isinstance(found, Mapping) else default

    def stated_values(self) -> dict[str, Any]:
        """Return the stated keys and their values, sections as dicts."""
        found: dict[str, Any] = {}
        for name in type(self).model_fields:
            if name in self.model_fields_set:
                value = getattr(self, name)
                found[name] = value.stated_values() if isinstance(value, Section) else value
        return found

    def changed(self, values: Mapping[str, Any]) -> Self:
        """Return a copy in which the keys of `values`, nested mappings for sections, are stated."""
        changes: dict[str, Any] = {}
        for name, value in values.items():
            here = getattr(self, name)
            is_below = isinstance(value, Mapping)
            if is_below and isinstance(here, Section):
                value = here.changed(value)
            elif is_below and isinstance(here, Mapping):
                value = {**here, **value}
            changes[name] = value
        return self.model_copy(update=changes)


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


def section(model: type[Section], sentence: str) -> Any:
    """Declare a group of keys that is always there, filled with defaults where the configuration is
    silent.
    """
    # One for all: a section is frozen, and most of the thirty rest at their defaults.
    return Field(default_factory=cache(model), description=sentence)


_WORDS = {
    int: "int",
    float: "float",
    bool: "bool",
    str: "text",
    dict: "object",
    types.NoneType: "null",
    Any: "any",
}


@dataclass(frozen=True)
class FieldRow:
    """One key of the grammar.

    default: as documented ("auto: ..." where it is found).  needs: keys an effective key needs
    beside it.  effect: "parts", or "check" where the key only verifies the run.
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


@cache
def rows(model: type[Section]) -> tuple[FieldRow, ...]:
    """Return every key of a model, sections entered, in the order of the schema."""
    return tuple(_rows(model, ""))


def advice(model: type[Section], path: str) -> str:
    """Say what to write for a key: a value that is right, and what the key means."""
    row = next((row for row in rows(model) if row.path == path), None)
    if row is None:
        return ""
    value = row.default if row.example is None else row.example
    return f'write for example {value!r}, or "auto"; the key means: {row.sentence}'


@cache
def subsections(model: type[Section]) -> dict[str, type[Section]]:
    """Return the models of the fields that are sections, by name."""
    found: dict[str, type[Section]] = {}
    for name, info in model.model_fields.items():
        inner = subsection(info)
        if inner is not None:
            found[name] = inner
    return found


def subsection(info: FieldInfo) -> type[Section] | None:
    """Return the model of a field that is a section (or an optional one), else None."""
    options = get_args(info.annotation) or (info.annotation,)
    return next(
        (kind for kind in options if isinstance(kind, type) and issubclass(kind, Section)), None
    )


def declared(info: FieldInfo) -> dict[str, Any]:
    """Return what was declared about a key; empty for a section."""
    return info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}


def _rows(model: type[Section], prefix: str) -> Iterator[FieldRow]:
    for name, info in model.model_fields.items():
        path = prefix + name
        about = declared(info)
        if about:
            yield _row(path, info, about)
        inner = subsection(info)
        if inner is not None:
            yield from _rows(inner, path + ".")


def _row(path: str, info: FieldInfo, about: dict[str, Any]) -> FieldRow:
    return FieldRow(
        path=path,
        type=spelled(info.annotation),
        default=info.default,
        unit=about.get("unit", ""),
        status=Status(about["status"]),
        sentence=info.description or "",
        reason=about["reason"],
        example=about.get("example"),
        needs=about.get("needs", {}),
        requires=about.get("requires", ""),
        effect=about.get("effect", "parts"),
        auto=about.get("auto", ""),
    )


def spelled(kind: Any) -> str:
    """Return the name of a type as the reference page has it."""
    origin = get_origin(kind)
    inner = get_args(kind)
    if origin is Literal:
        return " / ".join(str(option) for option in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(spelled(option) for option in inner)
    if origin is tuple:
        return f"list of {spelled(inner[0])}"
    if isinstance(kind, type) and issubclass(kind, Section):
        return "section"
    return _WORDS.get(origin or kind, str(kind))
