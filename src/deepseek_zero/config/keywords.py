"""Types of a configuration for type checkers and editors, which read keywords.pyi.

`scripts/config_keywords` generates keywords.pyi from the schema. At run time the types have no
keys.
"""

from __future__ import annotations

from typing import TypedDict


class ConfigKeywords(TypedDict, total=False):
    """The keys of `initialize(config=...)`."""


class ZeroKeywords(TypedDict, total=False):
    """The keyword arguments of `DeepSeekZeRO3(model, ...)`."""
