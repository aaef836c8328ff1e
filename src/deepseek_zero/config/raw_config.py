"""A configuration before "auto" is resolved.

`load` creates it, and `auto.resolve` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .problems import Values

if TYPE_CHECKING:  # importing pydantic takes longer than importing this package
    from .schema import Config


@dataclass(frozen=True)
class RawConfig:
    """A validated configuration whose "auto" keys are unresolved.

    Attributes:
        config: The typed keys. Keys that are not set, or are "auto", have their defaults and are
            not in `model_fields_set`.
        autos: The dotted keys that are "auto".
        source: A file name, "dict", "args" or "base64".
        notes: The warnings, which are logged already.
        not_built: Values of set keys that are not implemented and without which the run continues,
            by dotted key.
    """

    config: Config
    autos: frozenset[str]
    source: str
    notes: tuple[str, ...] = ()
    not_built: Mapping[str, Any] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value that the user set for a dotted key, or a section as a dict.

        Args:
            key: Dotted path of the key.
            default: Returned if the key is missing or "auto".

        Returns:
            The value that the user set, or `default`.
        """
        return self.config.stated(key, default)

    @property
    def values(self) -> Values:
        """Return the keys that the user set, as nested dicts."""
        return self.config.stated_values()

    def changed(self, values: Mapping[str, Any]) -> RawConfig:
        """Return a copy with new values for some keys.

        Args:
            values: The new values by key. A section is a nested mapping.
        """
        return replace(self, config=self.config.changed(values))
