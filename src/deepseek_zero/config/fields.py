"""How one configuration key is declared: type, default, unit, one sentence, and what the key does today.

A key is *effective* (it changes the run), *accepted* (read and ignored, for a stated reason) or *later* (known, not
built: moved off its default it is an error).  Used by the schema files; read back by `table`, `normalise` and
`checks`.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from typing import Any, ClassVar, TypedDict, Unpack

from pydantic import BaseModel, ConfigDict, Field

AUTO = "auto"


class Status(StrEnum):
    """What a key does in this version."""

    EFFECTIVE = "effective"
    ACCEPTED = "accepted"
    LATER = "later"


class Part(StrEnum):
    """The part of the library that brings a key which is not built yet."""

    TIERS = "the host and NVMe tiers (ZeRO-Offload, ZeRO-Infinity)"
    CHECKPOINTS = "durable, reshapable checkpoints"
    SPEED = "the speed work (compressed and hierarchical communication, compilation, profiling)"
    CLIENTS = "client compatibility (Hugging Face, Lightning, plain DeepSpeed scripts)"
    PARALLEL = "tensor, pipeline, sequence and expert parallelism"
    ATTENTION = "sparse attention"
    UNPLANNED = "no part that is planned"


class About(TypedDict, total=False):
    """The optional facts of a key.

    example: a valid value off the default.  needs: other keys that must be set for it to matter.  requires: an
    optional package.  auto: how the value is found when the key is missing, null or "auto".  means_auto: numbers that
    say "auto".  also: values that count as the default. effect: "check" when the key verifies the run instead of
    changing its parts.  inf: what an infinite number means.
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
    part: ClassVar[Part | None] = None

    def get(self, key: str, default: Any = None) -> Any:
        """A key as of a dict: clients of DeepSpeed read `engine.config.get("zero_optimization", {}).get("stage")`."""
        return getattr(self, key) if key in type(self).model_fields else default


def _declare(status: Status, default: Any, sentence: str, reason: str, about: About) -> Any:
    facts: dict[str, Any] = dict(about)
    bounds = {name: facts.pop(name) for name in _BOUNDS if name in facts}
    extra = {"status": status.value, "reason": reason, **facts}
    return Field(default=default, description=sentence, json_schema_extra=extra, **bounds)


def effective(default: Any, sentence: str, **about: Unpack[About]) -> Any:
    """A key that changes the run."""
    return _declare(Status.EFFECTIVE, default, sentence, "", about)


def accepted(default: Any, sentence: str, reason: str, **about: Unpack[About]) -> Any:
    """A key that is read without effect; `reason` says why that is right."""
    return _declare(Status.ACCEPTED, default, sentence, reason, about)


def later(default: Any, sentence: str, part: Part | None = None, **about: Unpack[About]) -> Any:
    """A key that is not built; `part` brings it (None: the part of its section)."""
    return _declare(Status.LATER, default, sentence, part.value if part else "", about)


def section(model: type[Section], sentence: str) -> Any:
    """A group of keys that is always there, filled with defaults where the configuration is silent."""
    # One for all: a section is frozen, and most of the thirty rest at their defaults.
    return Field(default_factory=cache(model), description=sentence)
