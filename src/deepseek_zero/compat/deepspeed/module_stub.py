"""Modules of the drop-in, which are created on import from two tables.

The tables are the names that this library provides (provided.py) and all names of DeepSpeed
(inventory.json). Names without an implementation can also be imported, so that a program that never
uses them does not fail on import. Constants have DeepSpeed's values, and classes work with
isinstance(). Calling a class or function raises an error with the reason from missing.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn

from ...base.errors import NotBuiltError
from ...base.log import set_first_level
from .dropin import is_dropin_imported
from .missing import module_name_missing, why_missing
from .provided import PROVIDED

# Version of DeepSpeed whose names these are, with a suffix that distinguishes it from DeepSpeed.
# The drop-in's metadata has the same version.
VERSION = "0.19.8+dz1"

_INVENTORY = Path(__file__).with_name("inventory.json")


@cache
def inventory() -> dict[str, dict[str, Any]]:
    """Return DeepSpeed's modules and their names.

    Each module has {"class": names, "other": names, "from": {module: names}, "values": {name:
    value}}. In "from", "*" means all names of the other module.
    """
    found: dict[str, dict[str, Any]] = json.loads(_INVENTORY.read_text(encoding="utf-8"))
    return found


@cache
def homes(module: str) -> dict[str, str]:
    """Return, for each name of a module of the drop-in, our module that provides it.

    "*" maps to a module for all other names.
    """
    rows = PROVIDED.get(module, {})
    return {name: home for home, names in rows.items() for name in names.split()}


@cache
def submodules(module: str) -> frozenset[str]:
    """Return the names of the direct submodules of a module."""
    below = f"{module}."
    return frozenset(
        name[len(below) :].partition(".")[0] for name in _modules() if name.startswith(below)
    )


@cache
def _modules() -> frozenset[str]:
    """Return the paths of all modules, including packages that only contain modules."""
    named = {*PROVIDED, *inventory()}
    return frozenset(name.rsplit(".", up)[0] for name in named for up in range(name.count(".") + 1))


@cache
def kinds(module: str) -> dict[str, str]:
    """Return the kind of each name: "class", "other", "values", or the module that defines it."""
    entry = inventory().get(module, {})
    found: dict[str, str] = {}
    for home, names in entry.get("from", {}).items():
        for name in names.split():
            found |= (
                dict.fromkeys([*kinds(home), *homes(home)], home) if name == "*" else {name: home}
            )
    for kind in ("class", "other"):
        found |= dict.fromkeys(entry.get(kind, "").split(), kind)
    found |= dict.fromkeys(entry.get("values", {}), "values")
    found.pop("*", None)
    return found


def public_names(module: str) -> list[str]:
    """Return all names of a module of the drop-in, including its submodules."""
    return sorted({*homes(module), *kinds(module), *submodules(module)} - {"*"})


def names_of(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for one module of the drop-in."""

    def get(name: str) -> Any:
        if name == "__all__":
            return [name for name in public_names(module) if name not in submodules(module)]
        if name.startswith("__") and name not in homes(module):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return look_up(module, name)

    return get, lambda: public_names(module)


def look_up(module: str, name: str) -> Any:
    """Return the value of a name in a module of the drop-in.

    The value is a provided object, a submodule, a constant, or a placeholder that raises when it is
    called.

    Args:
        module: Path of the module.
        name: Name in the module.

    Returns:
        The provided object, submodule, constant or placeholder.

    Raises:
        UnknownNameError: DeepSpeed does not have the name.
    """
    home = homes(module).get(name)
    if home is not None:
        return getattr(import_module(home), name)
    if (every := homes(module).get("*")) is not None:
        try:
            return getattr(import_module(every), name)
        except AttributeError:
            pass
    kind = kinds(module).get(name)
    if kind is None and name in submodules(module):
        return import_module(f"{module}.{name}")
    if kind is None:
        raise module_name_missing(module, name, public_names(module))
    if kind == "values":
        return inventory()[module]["values"][name]
    return placeholder(module, name) if kind in ("class", "other") else look_up(kind, name)


@cache
def placeholder(module: str, name: str) -> Any:
    """Return a class or function that raises NotBuiltError when it is called.

    Args:
        module: Path of the module.
        name: Name of the class or function.

    Returns:
        A class if DeepSpeed's object is a class, else a function.
    """

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotBuiltError(
            f"{module}.{name} is not provided by deepseek_zero, which replaces DeepSpeed here.",
            why_missing(module, name),
            "see docs/reference/deepspeed-names.md for alternatives.",
        )

    if kinds(module)[name] == "class":
        return type(name, (), {"__module__": module, "__new__": refuse})
    refuse.__name__ = refuse.__qualname__ = name
    refuse.__module__ = module
    return refuse


class _Modules(MetaPathFinder, InspectLoader):
    """Find and load the submodules of `deepspeed` if it is the drop-in."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of the drop-in, or None.

        Args:
            fullname: Path of the module.
            path: Ignored.
            target: Ignored.
        """
        if (
            not fullname.startswith("deepspeed.")
            or not is_dropin_imported()
            or fullname not in _modules()
        ):
            return None
        # `python -m` does not run a package, and the program gets the origin as its own name.
        return ModuleSpec(fullname, self, origin=fullname, is_package=bool(submodules(fullname)))

    def exec_module(self, module: ModuleType) -> None:
        names: Any = module
        names.__getattr__, names.__dir__ = names_of(module.__name__)
        names.__doc__ = f"`{module.__name__}`, under DeepSpeed's path."
        # If a function has the name of a submodule, the name means the function, as in DeepSpeed.
        # The submodule is imported first, because its import sets the name.
        for name in submodules(module.__name__) & kinds(module.__name__).keys():
            import_module(f"{module.__name__}.{name}")
            setattr(module, name, look_up(module.__name__, name))

    def get_source(self, fullname: str) -> str:
        """Return the code that `python -m` runs, which calls the module's `main`.

        A module without `main` exits with a message.
        """
        if "main" in public_names(fullname):
            return f"from {fullname} import main\nraise SystemExit(main())\n"
        return (
            f"raise SystemExit('{fullname} is no program in deepseek_zero, which stands in for "
            "DeepSpeed here.')\n"
        )

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.get_source(fullname), f"<{fullname}>", "exec")


def begin() -> None:
    """Install the finder of the drop-in's modules and set DeepSpeed's log level."""
    find_below()
    set_first_level("WARNING")


def find_below() -> None:
    """Install the finder for the modules of the drop-in.

    It precedes Python's own finders. They would take a directory that an older version left behind,
    with only compiled files in it, for a package.
    """
    if not any(isinstance(finder, _Modules) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Modules())
