"""Registry of what packages above the core add to it, by topic or by name.

The core imports nothing from the packages above. A package that adds something, such as a
checkpoint layout, a command or names of a public module, has a file `plugin.py` that calls
`contribute` and `contribute_names`. That file is imported at the first query; the modules it names
are imported when they are used. A missing package contributes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

# The topics, and what a module of each topic defines
# A module of this topic calls `register_layout` when it is imported; `CONVERTERS` maps formats to
# functions of a checkpoint and a target.
CHECKPOINT_LAYOUTS = "checkpoint layouts"
# `add_commands(app)`, `findings()` of `doctor`, and `child_environment(environment)`, the variables
# that `run --as-deepspeed` adds
COMMANDS = "commands"
DIALECT = "dialect"  # `choose()` returns the dialect of a call (api/dialect.py)

EVERY_OTHER = "*"  # in place of a name: all names that are not listed

_ROOT = __name__.partition(".")[0]
_modules: dict[str, list[str]] = {}
_homes: dict[str, dict[str, str]] = {}


def contribute(topic: str, module: str) -> None:
    """Add a module to a topic.

    Args:
        topic: `CHECKPOINT_LAYOUTS`, `COMMANDS` or `DIALECT`.
        module: The full name of the module.
    """
    _modules.setdefault(topic, []).append(module)


def contributions(topic: str) -> list[ModuleType]:
    """Import the modules that `contribute` added to a topic, and return them in that order."""
    _load_plugins()
    return [import_module(module) for module in _modules.get(topic, [])]


def contribute_names(package: str, homes: Mapping[str, str]) -> None:
    """Add names to a package of the library.

    Args:
        package: The full name of the package whose `__getattr__` calls `contributed_name`.
        homes: The module of each name; `EVERY_OTHER` means all other names.
    """
    _homes.setdefault(package, {}).update(homes)


def contributed_names(package: str) -> list[str]:
    """Return the names that were listed for a package, without importing their modules."""
    _load_plugins()
    return [name for name in _homes.get(package, {}) if name != EVERY_OTHER]


def contributed_name(package: str, name: str) -> Any:
    """Return the value of a name that was added to a package.

    Args:
        package: The full name of the package.
        name: Name to look up in the package.

    Returns:
        The value, imported from the module that was contributed for the name.

    Raises:
        AttributeError: No name of the package is contributed, or its module does not have it.
    """
    _load_plugins()
    homes = _homes.get(package, {})
    home = homes.get(name) or homes.get(EVERY_OTHER)
    if home is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return getattr(import_module(home), name)


@cache
def _load_plugins() -> None:
    """Import `plugin.py` of every package of the library that has one."""
    for folder in sorted(Path(__file__).resolve().parents[1].iterdir()):
        if (folder / "plugin.py").is_file():
            import_module(f"{_ROOT}.{folder.name}.plugin")
