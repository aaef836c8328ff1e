"""Record which code reads the sections of a configuration and the settings derived from them.

A value may be copied from a section to settings and on to other settings. Copying or printing a
value does not prove that it is used. A read therefore counts only in code outside the assembly
(engine/settings.py, assemble.py, features.py and, for sections, engine/optimizer.py).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import deepseek_zero
from deepseek_zero.config import Config
from deepseek_zero.config.fields import Section, subsection

PACKAGE = str(Path(deepseek_zero.__file__).parent)
PASS_ON = ("/engine/settings.py", "/engine/assemble.py", "/engine/features.py")
PASS_SECTIONS_ON = (*PASS_ON, "/engine/optimizer.py")
# __post_init__ validates and does not use values
PRINTS = {"__repr__", "describe", "__post_init__"}
READERS_OF_CONFIG = f"{PACKAGE}/config/"

Leaf = tuple[type, str]


@cache
def settings_classes() -> tuple[type, ...]:
    """Return every dataclass of the library that carries settings."""
    found = set()
    for module in pkgutil.walk_packages(deepseek_zero.__path__, "deepseek_zero."):
        if module.name.startswith(
            ("deepseek_zero.compat.deepspeed._dropin", "deepseek_zero.__main__")
        ):
            continue
        try:
            names = vars(importlib.import_module(module.name))
        except ModuleNotFoundError as error:
            assert error.name == "llvmlite"  # an extra, which some kernels need
            continue
        for value in names.values():
            named = isinstance(value, type) and (
                value.__name__.endswith("Settings") or value.__name__ in SETTINGS
            )
            if (
                named
                and dataclasses.is_dataclass(value)
                and value.__module__.startswith("deepseek_zero")
            ):
                found.add(value)
    return tuple(found)


SETTINGS = ("Policy", "Retention")


@cache
def home_of(path: str) -> Leaf:
    """Return the section class of a dotted key and the field's name in it."""
    *sections, name = path.split(".")
    model: type[Section] = Config
    for section in sections:
        inner = subsection(model.model_fields[section])
        assert inner is not None
        model = inner
    return model, name


@dataclasses.dataclass
class Reads:
    """The reads and values during a recording.

    Attributes:
        used: Fields read by code that uses them.
        touched: Fields of sections read by any code of the library, including the assembly.
        values: All values of each field of settings.
    """

    used: set[Leaf] = dataclasses.field(default_factory=set)
    touched: set[Leaf] = dataclasses.field(default_factory=set)
    values: dict[Leaf, set[str]] = dataclasses.field(default_factory=lambda: defaultdict(set))

    def saw(self, kind: type, name: str, file: str, function: str) -> None:
        if not file.startswith(PACKAGE) or file.startswith(READERS_OF_CONFIG) or function in PRINTS:
            return
        is_section = issubclass(kind, Section)
        if is_section:
            self.touched.add((kind, name))
        if not file.endswith(PASS_SECTIONS_ON if is_section else PASS_ON):
            self.used.add((kind, name))

    def built(self, made: Any) -> None:
        for field in dataclasses.fields(made):
            value = object.__getattribute__(made, field.name)
            # Nested settings have fields of their own, so reading the outer field proves nothing.
            if not isinstance(value, settings_classes()):
                self.values[type(made), field.name].add(repr(value))


@contextmanager
def recording() -> Iterator[Reads]:
    """Record every read of sections and settings, and every value with which settings are built."""
    reads, undo = Reads(), list[Callable[[], None]]()
    for kind in (Section, *settings_classes()):
        undo.append(_replace(kind, "__getattribute__", _asking(kind, reads)))
    for kind in settings_classes():
        undo.append(_replace(kind, "__init__", _building(kind, reads)))
    try:
        yield reads
    finally:
        for step in undo:
            step()


def _replace(kind: type, name: str, value: Any) -> Callable[[], None]:
    own = vars(kind).get(name)
    setattr(kind, name, value)
    return lambda: setattr(kind, name, own) if own is not None else delattr(kind, name)


def _asking(kind: type, reads: Reads) -> Any:
    plain = kind.__getattribute__
    sections = issubclass(kind, Section)

    def ask(self: Any, name: str) -> Any:
        cls = type(self)
        if not name.startswith("_") and name in (
            cls.model_fields if sections else cls.__dataclass_fields__
        ):
            code = sys._getframe(1).f_code
            reads.saw(cls, name, code.co_filename, code.co_name)
        return plain(self, name)

    return ask


def _building(kind: Any, reads: Reads) -> Any:
    plain = kind.__init__

    @functools.wraps(plain)
    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        if type(self) is kind:
            reads.built(self)

    return build


def carriers(moved: Reads, still: Reads) -> set[Leaf]:
    """Return the fields of settings whose values differ between two runs."""
    return {
        leaf
        for leaf in {*moved.values, *still.values}
        if moved.values.get(leaf) != still.values.get(leaf)
    }
