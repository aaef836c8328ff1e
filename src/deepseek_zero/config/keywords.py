"""Types of a configuration for type checkers and editors, which read them from keywords.pyi.

`scripts/config_keywords` generates keywords.pyi from the schema. At run time the types have no
keys.
"""

from __future__ import annotations

from typing import TypedDict


class ConfigKeywords(TypedDict, total=False):
    """The keys that `initialize(config=...)` takes."""


class ZeroKeywords(TypedDict, total=False):
    """The keywords that `DeepSeekZeRO3(model, ...)` takes."""
