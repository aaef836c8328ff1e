"""The modules of the drop-in, made on import from two tables: what is provided, and every name that
DeepSpeed has.

A name of DeepSpeed's that nothing here stands behind can be imported all the same, because a
program that never uses
it must not fail at its imports: constants have DeepSpeed's values, classes can be named and asked
about (isinstance), and whoever calls one gets an error that says why it is not built, from
missing.py.
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

# DeepSpeed's version whose names these are, and that it is not DeepSpeed; the drop-in's metadata
# says the same.
VERSION = "0.19.8+dz1"

_INVENTORY = Path(__file__).with_name("inventory.json")


@cache
def inventory() -> dict[str, dict[str, Any]]:
    """Return DeepSpeed's modules: {"class": names, "other": names, "from": {module: names},
    "values": {name: value}}.

    A module's "from" says "*" where it takes every name of another.
    """
    found: dict[str, dict[str, Any]] = json.loads(_INVENTORY.read_text(encoding="utf-8"))
    return found


@cache
def homes(module: str) -> dict[str, str]:
    """Return name -> our module that provides it; "*" -> one that is asked for every other name."""
    rows = PROVIDED.get(module, {})
    return {name: home for home, names in rows.items() for name in names.split()}


@cache
def submodules(module: str) -> frozenset[str]:
    """Return the last parts of the names of the modules right below one."""
    below = f"{module}."
    return frozenset(
        name[len(below) :].partition(".")[0] for name in _modules() if name.startswith(below)
    )


@cache
def _modules() -> frozenset[str]:
    """Return the names of all modules, with the packages that only hold modules."""
    named = {*PROVIDED, *inventory()}
    return frozenset(name.rsplit(".", up)[0] for name in named for up in range(name.count(".") + 1))


@cache
def kinds(module: str) -> dict[str, str]:
    """Return name -> "class", "other", "values" or the module of DeepSpeed's that it comes from."""
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
    """Return every name that a module of the drop-in has, its submodules too."""
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
    """Return one name of a module of the drop-in: provided, a submodule, or one that can be
    imported and not used.
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
    """Return what stands for a class or a function of DeepSpeed's that is not built: calling it is
    a NotBuiltError.
    """

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotBuiltError(
            f"{module}.{name} is not provided by deepseek_zero, which stands in for DeepSpeed "
            "here.",
            why_missing(module, name),
            "see docs/reference/deepspeed-names.md for what serves instead.",
        )

    if kinds(module)[name] == "class":
        return type(name, (), {"__module__": module, "__new__": refuse})
    refuse.__name__ = refuse.__qualname__ = name
    refuse.__module__ = module
    return refuse


class _Modules(MetaPathFinder, InspectLoader):
    """Find and make the modules below `deepspeed`, where that is the drop-in."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if (
            not fullname.startswith("deepspeed.")
            or not is_dropin_imported()
            or fullname not in _modules()
        ):
            return None
        # `python -m` runs no package, and gives the origin to the program as its own name.
        return ModuleSpec(fullname, self, origin=fullname, is_package=bool(submodules(fullname)))

    def exec_module(self, module: ModuleType) -> None:
        names: Any = module
        names.__getattr__, names.__dir__ = names_of(module.__name__)
        names.__doc__ = f"`{module.__name__}`, under DeepSpeed's path."
        # A name that is a submodule's, too, means the function, as in DeepSpeed; importing the
        # submodule would set it.
        for name in submodules(module.__name__) & kinds(module.__name__).keys():
            import_module(f"{module.__name__}.{name}")
            setattr(module, name, look_up(module.__name__, name))

    def get_source(self, fullname: str) -> str:
        """Return what `python -m` runs: the module's `main`, which raises an error if it is not
        built.
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
    """Set up this process for a program that imports `deepspeed`: its modules, and DeepSpeed's
    first log level.
    """
    find_below()
    set_first_level("WARNING")


def find_below() -> None:
    """Let `import deepspeed.x` find the modules of the drop-in.  Python asks them first, once for
    all: folders that an older version left behind, with nothing in them but compiled files, are
    packages to Python's own finders.
    """
    if not any(isinstance(finder, _Modules) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Modules())
