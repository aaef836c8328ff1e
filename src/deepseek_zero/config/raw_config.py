"""A configuration before "auto" is resolved: `load` makes it, and `auto.resolve` reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # pydantic takes longer than all of this package
    from .schema import Config


@dataclass(frozen=True)
class RawConfig:
    """A validated configuration whose "auto" keys are still open.

    config: the typed keys; those that are not stated, or said "auto", have their defaults and are
    not in `model_fields_set`.  autos: dotted keys that said "auto".  source: file name, "dict",
    "args", "base64".  given: the object the caller passed, untouched.  notes: the warnings, already
    logged.  not_built: stated keys that are not built and that the run goes on without, by dotted
    key.
    """

    config: Config
    autos: frozenset[str]
    source: str
    given: Any
    notes: tuple[str, ...] = ()
    not_built: Mapping[str, Any] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        """Return what is stated of a dotted key, of a section as a dict.

        Args:
            key: The dotted key.
            default: Returned if the key is missing or says "auto".
        """
        return self.config.stated(key, default)

    @property
    def values(self) -> dict[str, Any]:
        """The stated keys as nested dicts."""
        return self.config.stated_values()

    def changed(self, values: Mapping[str, Any]) -> RawConfig:
        """Return a copy in which the keys of `values`, nested mappings for sections, are stated."""
        return replace(self, config=self.config.changed(values))
