"""What `initialize` takes as a configuration.  For type checkers: no run loads its hundreds of
keys.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..config.keywords import ConfigKeywords

__all__ = ["ConfigKeywords", "Configuration"]

# A dict that a program has put together is any Mapping; annotate it as ConfigKeywords to have its
# keys checked.
Configuration = ConfigKeywords | Mapping[str, Any] | str | os.PathLike[str] | None
