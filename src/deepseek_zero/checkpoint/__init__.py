"""Bytes on a disk that outlive the run.  Imports nothing, so that naming a layout's module costs
nothing.
"""

from __future__ import annotations

# Modules that call `register_layout` when they are imported, which happens when a folder is first
# looked at.  Whoever stands above this room adds to it: the package itself does.
LAYOUT_MODULES: list[str] = []
