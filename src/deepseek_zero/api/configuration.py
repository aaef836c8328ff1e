"""The type of the `config` argument of `initialize`.

For type checkers only; at run time nothing imports its hundreds of keys.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..config.keywords import ConfigKeywords

__all__ = ["ConfigKeywords", "Configuration"]

# A dict that a program builds at run time is accepted as any Mapping. Annotate it as ConfigKeywords
# to have its keys checked.
Configuration = ConfigKeywords | Mapping[str, Any] | str | os.PathLike[str] | None
