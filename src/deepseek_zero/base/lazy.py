"""Names of a package that are imported on first use.

A feature that few programs use does not slow down the start of the others.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any


def loads_on_first_use(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` (PEP 562) for a package.

    Args:
        package: The full name of the package.
        homes: For each module of the package, the names it defines, separated by spaces.

    Returns:
        A function that imports the module of a name and returns the name's value.
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
    """Import a module while the garbage collector is disabled, and return it.

    Importing creates almost no garbage. A collection visits about a million objects of torch and
    takes 0.1 s, and the import of several hundred modules would trigger one.
    """
    with no_collection():
        return import_module(name)


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable Python's garbage collector in a block.

    One collection takes a third of a second after torch was imported, and a block that creates
    thousands of objects would trigger one.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
