"""A configuration before "auto" is resolved.

`load` creates it, and `auto.resolve` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # importing pydantic takes longer than importing this package
    from .schema import Config


@dataclass(frozen=True)
class RawConfig:
    """A validated configuration whose "auto" keys are unresolved.

    Attributes:
        config: The typed keys. Keys that are not stated or "auto" have their defaults and are not
            in `model_fields_set`.
        autos: The dotted keys that are "auto".
        source: A file name, "dict", "args" or "base64".
        given: The object that the caller passed, unchanged.
        notes: The warnings, which are logged already.
        not_built: Stated keys that are not built, if the run continues without them, by dotted key.
    """

    config: Config
    autos: frozenset[str]
    source: str
    given: Any
    notes: tuple[str, ...] = ()
    not_built: Mapping[str, Any] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the stated value of a dotted key, or a section as a dict.

        Args:
            key: The dotted key.
            default: Returned if the key is missing or "auto".
        """
        return self.config.stated(key, default)

    @property
    def values(self) -> dict[str, Any]:
        """Return the stated keys as nested dicts."""
        return self.config.stated_values()

    def changed(self, values: Mapping[str, Any]) -> RawConfig:
        """Return a copy in which the keys of `values` are stated.

        `values` has nested mappings for sections.
        """
        return replace(self, config=self.config.changed(values))
