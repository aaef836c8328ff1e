"""What every module of the drop-in is made of: a table of names and where they live, and an error for other names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from .missing import module_name_missing

# DeepSpeed's version whose names these are, and that it is not DeepSpeed; the drop-in's metadata says the same.
VERSION = "0.19.8+dz1"

# Each module of the drop-in that was imported, by name: its names and where they live; "" for its own submodules.
TABLES: dict[str, dict[str, str]] = {}


def stand_in(
    module: str, homes: Mapping[str, str] | None = None, rooms: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for one module of the drop-in.

    homes: our module -> the names it gives, blank-separated.  rooms: the drop-in's own submodules, likewise.
    """
    where = {name: home for home, names in (homes or {}).items() for name in names.split()}
    inside = rooms.split()
    public = sorted({*where, *inside})
    TABLES[module] = dict.fromkeys(inside, "") | where

    def get(name: str) -> Any:
        if name in inside:
            return import_module(f"{module}.{name}")
        if name in where:
            return getattr(import_module(where[name]), name)
        if name == "__all__":
            return public
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        raise module_name_missing(module, name, public)

    return get, lambda: public
