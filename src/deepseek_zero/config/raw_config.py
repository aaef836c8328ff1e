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
    """A validated configuration, before values are chosen for its "auto" keys.

    Attributes:
        config: The keys with their types converted. Keys that are not set, or are in `autos`, have
            their default values and are not in `config.model_fields_set`.
        autos: The dotted paths of the keys that are "auto". Keys for which "auto" is itself a
            value, such as `precision`, are not included.
        source: The name of the configuration in messages: a path, "dict", "text", "base64",
            "defaults", or the argument `origin` of `load`.
        notes: The warnings about the configuration, which have already been logged.
        not_built: The keys that the user set but the library does not implement, with their values.
            The run ignores these keys.
    """

    config: Config
    autos: frozenset[str]
    source: str
    notes: tuple[str, ...] = ()
    not_built: Mapping[str, Any] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value that the user set for a dotted key.

        Args:
            key: Dotted path of a key or of a section.
            default: The value to return if the key is not set, or is in `autos` or `not_built`.

        Returns:
            The value that the user set, converted to the type of the key, or `default`. For a
            section, the keys that the user set in it, as nested dicts.
        """
        return self.config.stated(key, default)

    @property
    def values(self) -> Values:
        """Return the keys that the user set and their converted values, as nested dicts.

        Keys in `autos` or `not_built` are omitted.
        """
        return self.config.stated_values()

    def changed(self, values: Mapping[str, Any]) -> RawConfig:
        """Return a copy of the configuration with new values for some keys.

        The new values are not validated, and count as set by the user. `autos` and the other
        attributes are the same in the copy.

        Args:
            values: The new values by key. The values for a section are a nested mapping. Other keys
                of the section keep their values.

        Raises:
            AttributeError: There is no such key.
        """
        return replace(self, config=self.config.changed(values))
