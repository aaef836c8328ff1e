"""Types of a configuration for type checkers and editors, which read keywords.pyi.

`scripts/config_keywords` generates keywords.pyi from the schema. At run time the types have no
keys.
"""

from __future__ import annotations

from typing import TypedDict


class ConfigKeywords(TypedDict, total=False):
    """Type of a configuration dict for `initialize(config=...)`.

    Type checkers and editors use it. The file keywords.pyi declares the keys. At run time this
    class has none.
    """


class ZeroKeywords(TypedDict, total=False):
    """Type of the keyword arguments of `DeepSeekZeRO3`, for type checkers and editors."""
