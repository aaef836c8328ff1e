"""Names of a package that load on first use: a room that few runs enter costs the others no
start-up time.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


def loads_on_first_use(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's `__getattr__` (PEP 562).  homes: by module of the package, the names it
    has, with spaces.
    """
    found = {name: home for home, names in homes.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in found:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{found[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return load


def import_at_once(name: str) -> ModuleType:
    """Import a module with those that it imports, without Python's garbage collection in their
    midst.

    Modules leave next to no garbage; a pass over all objects, of which torch has a million, takes a
    tenth of a second, and some hundred modules made one due.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return import_module(name)
    finally:
        if was_enabled:
            gc.enable()
