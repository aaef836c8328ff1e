"""Declaration of a configuration key, and its row in the table of keys.

A declaration has a type, a default, a unit, one sentence and a status. A key is *effective* (it
changes the run) or *accepted* (read and ignored, for a stated reason). `rows` lists every key of a
model. Known keys that are not implemented are in the table in not_built.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from .problems import Values

AUTO = "auto"
NO_INF = object()


class Status(StrEnum):
    """Whether a configuration key changes the run, or is accepted without effect."""

    EFFECTIVE = "effective"
    ACCEPTED = "accepted"


_OF_PYDANTIC = ("gt", "ge", "le", "repr")


class Section(BaseModel):
    """A group of keys: frozen, strict and built on first use.

    Values are converted to their types before validation.
    """

    # Without defer_build, importing would build the validator of some 350 keys.
    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        defer_build=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    def get(self, key: str, default: Any = None) -> Any:
        """Return a key as a dict does.

        Programs for DeepSpeed read `engine.config.get("zero_optimization", {}).get("stage")`.

        Args:
            key: The name of the key.
            default: Returned if there is no such key.

        Returns:
            The value of the key, with a section as a `Section`.
        """
        return getattr(self, key) if key in type(self).model_fields else default

    def __getitem__(self, key: str) -> Any:
        """Return a key, as `get` does.

        Raises:
            KeyError: There is no such key.
        """
        if key not in type(self).model_fields:
            raise KeyError(key)
        return getattr(self, key)

    def __contains__(self, key: object) -> bool:
        return key in self.model_fields_set

    def stated(self, path: str, default: Any = None) -> Any:
        """Return the value that the user set for a key, or a section as a dict.

        Args:
            path: The key's dotted path below this section, for example "offload_param.device".
            default: Returned if the key, or a section on its path, is not set.

        Returns:
            The value as the user set it, or `default`.
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

    def stated_values(self) -> Values:
        """Return the keys that the user set and their values, sections as dicts."""
        fields = type(self).model_fields
        return {name: self.stated(name) for name in fields if name in self.model_fields_set}

    def changed(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with new values for some keys.

        Args:
            values: The new values by key. A section is a nested mapping.
        """
        changes: Values = {}
        for name, value in values.items():
            here = getattr(self, name)
            is_below = isinstance(value, Mapping)
            if is_below and isinstance(here, Section):
                value = here.changed(value)
            elif is_below and isinstance(here, Mapping):
                value = {**here, **value}
            changes[name] = value
        return self.model_copy(update=changes)


def _declare(status: Status, default: Any, sentence: str, reason: str, facts: Values) -> Any:
    given = {name: facts.pop(name) for name in _OF_PYDANTIC if name in facts}
    extra = {"status": status, "reason": reason, **facts}
    return Field(default=default, description=sentence, json_schema_extra=extra, **given)


def effective(default: Any, sentence: str, **facts: Any) -> Any:
    """Return the declaration of a key that changes the run.

    Args:
        default: Value of the key if it is not set.
        sentence: The meaning of the key.
        **facts: Other attributes of its `FieldRow`, and pydantic's `gt`, `ge`, `le` and `repr`.

    Returns:
        The pydantic field to assign to the attribute of the section.
    """
    return _declare(Status.EFFECTIVE, default, sentence, "", facts)


def accepted(default: Any, sentence: str, reason: str, **facts: Any) -> Any:
    """Return the declaration of a key that is read and has no effect.

    Args:
        default: Value of the key if it is not set.
        sentence: The meaning of the key.
        reason: Why it is right to ignore the key.
        **facts: Other attributes of its `FieldRow`, and pydantic's `gt`, `ge`, `le` and `repr`.

    Returns:
        The pydantic field to assign to the attribute of the section.
    """
    return _declare(Status.ACCEPTED, default, sentence, reason, facts)


def section(model: type[Section], sentence: str) -> Any:
    """Return the declaration of a section, which has its defaults if it is not set.

    Args:
        model: Class of the section.
        sentence: The meaning of the group.

    Returns:
        The pydantic field to assign to the attribute of the section.
    """
    # All configurations share one object, because sections are frozen and most of the thirty have
    # only defaults.
    return Field(default_factory=cache(model), description=sentence)


@dataclass(frozen=True)
class FieldRow:
    """The description of one configuration key: its type, default, unit and meaning.

    The reference of the configuration is generated from these descriptions.

    Attributes:
        path: The dotted path of the key in the configuration.
        kind: The type annotation of the key.
        default: The default value.
        sentence: One sentence that states the meaning of the key.
        status: Whether the key changes the run, or is accepted without effect.
        reason: The reason why the key has no effect; empty for a key that changes the run.
        unit: The unit of the value.
        example: A valid value other than the default; None if there is none. For a key of type bool
            it is the opposite of the default.
        auto: How the value is chosen if the key is missing, null or "auto".
        means_auto: The numbers that mean "auto".
        auto_is_value: Whether "auto" is itself a valid value of the key.
        inf: The value that replaces an infinite number. `NO_INF` means that an infinite number is
            an error.
    """

    path: str
    kind: Any
    default: Any
    sentence: str
    status: Status
    reason: str
    unit: str = ""
    example: Any = None
    auto: str = ""
    means_auto: tuple[int, ...] = ()
    auto_is_value: bool = False
    inf: Any = NO_INF


@cache
def rows(model: type[Section]) -> tuple[FieldRow, ...]:
    """Return every key of a model and its sections, in the order of the schema."""
    return tuple(_rows(model, ""))


def advice(model: type[Section], path: str) -> str:
    """Return a fix for a key: a valid value and the meaning of the key.

    Args:
        model: Class of the section, or `Config`.
        path: Dotted path of the key.

    Returns:
        A clause for an error message; "" if there is no such key.
    """
    row = next((row for row in rows(model) if row.path == path), None)
    if row is None:
        return ""
    value = row.default if row.example is None else row.example
    return f'write for example {value!r}, or "auto"; the key means: {row.sentence}'


@cache
def subsections(model: type[Section]) -> dict[str, type[Section]]:
    """Return the models of the fields that are sections, by name."""
    fields = model.model_fields.items()
    return {name: inner for name, info in fields if (inner := subsection(info)) is not None}


def subsection(info: FieldInfo) -> type[Section] | None:
    """Return the model of a field that is a section or an optional one, else None."""
    options = get_args(info.annotation) or (info.annotation,)
    return next(
        (kind for kind in options if isinstance(kind, type) and issubclass(kind, Section)), None
    )


def declared(info: FieldInfo) -> Values:
    """Return the declaration of a key; empty for a section."""
    return info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}


def _rows(model: type[Section], prefix: str) -> Iterator[FieldRow]:
    for name, info in model.model_fields.items():
        path = prefix + name
        about = declared(info)
        if about:
            if info.annotation is bool:
                about = {"example": not info.default, **about}
            yield FieldRow(path, info.annotation, info.default, info.description or "", **about)
        inner = subsection(info)
        if inner is not None:
            yield from _rows(inner, path + ".")
