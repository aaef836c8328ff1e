"""Measures the sizes of src/ for the contract test and for scripts/sizes; the ceilings stand here and nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CEILINGS = {
    "file": 500,  # lines
    "function": 60,  # lines, signature and docstring included
    "methods": 20,  # of a class
    "attributes": 15,  # assigned as self.x in a class
    "arguments": 6,  # named ones, without self and cls
}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Size:
    """One measured thing: `where` is path or path::qualified.name."""

    kind: str
    where: str
    value: int


def measure(root: Path) -> Iterator[Size]:
    """Every size under root/src, of every kind in CEILINGS."""
    for path in sorted((root / "src").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        where = path.relative_to(root).as_posix()
        yield Size("file", where, len(text.splitlines()))
        yield from _measure_body(ast.parse(text, where), f"{where}::", in_class=False)


def _measure_body(node: ast.AST, prefix: str, in_class: bool) -> Iterator[Size]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _FUNCTIONS):
            where = prefix + child.name
            yield Size("function", where, (child.end_lineno or 0) - child.lineno + 1)
            yield Size("arguments", where, _count_arguments(child, in_class))
            yield from _measure_body(child, f"{where}.", in_class=False)
        elif isinstance(child, ast.ClassDef):
            where = prefix + child.name
            yield Size("methods", where, sum(isinstance(item, _FUNCTIONS) for item in child.body))
            yield Size("attributes", where, len(_own_attributes(child)))
            yield from _measure_body(child, f"{where}.", in_class=True)
        else:
            yield from _measure_body(child, prefix, in_class)


def _count_arguments(function: ast.FunctionDef | ast.AsyncFunctionDef, in_class: bool) -> int:
    arguments = function.args
    static = any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in function.decorator_list)
    count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
    return count - (in_class and not static)


def _own_attributes(node: ast.ClassDef) -> set[str]:
    return {
        item.attr
        for item in ast.walk(node)
        if isinstance(item, ast.Attribute)
        and isinstance(item.ctx, ast.Store)
        and isinstance(item.value, ast.Name)
        and item.value.id == "self"
    }
