"""ARCHITECTURE.md names every package of the library and no name that is gone."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "deepseek_zero"
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def rooms_of_the_house() -> set[str]:
    """Return every package except the one that only re-exports and has no paragraph."""
    return {path.parent.name for path in SOURCE.glob("*/__init__.py")} - {"utils"}


def names_of_the_house() -> set[str]:
    """Return every class, function and method, methods as Class.method."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            if isinstance(node, ast.ClassDef):
                found |= {
                    f"{node.name}.{each.name}"
                    for each in node.body
                    if isinstance(each, ast.FunctionDef)
                }
    return found


def test_every_package_has_a_paragraph_and_every_paragraph_a_package() -> None:
    named = {
        name.partition("/")[0]
        for name in re.findall(r"^\*\*`([\w/]+)/`\*\*|\. \*\*`([\w/]+)/`\*\*", PAGE, re.M)
        for name in name
        if name
    }
    assert named == rooms_of_the_house()


def test_the_page_names_no_file_that_is_not_there() -> None:
    named = set(re.findall(r"\b[\w/]+\.py\b", PAGE))
    assert {name for name in named if not is_there(name)} == set()


def is_there(name: str) -> bool:
    """Return whether a file that the page names by the end of its path is in the repository."""
    places = [SOURCE, *(ROOT / folder for folder in ("tests", "examples", "benchmarks"))]
    return any(
        f"/{path.relative_to(ROOT)}".endswith(f"/{name}")
        for place in places
        for path in place.rglob("*.py")
    )


def test_the_page_names_no_class_or_method_that_is_not_there() -> None:
    named = set(re.findall(r"`([A-Z]\w+\.\w+)`", PAGE))
    assert len(named) > 10
    attributes = {"PlanSettings.window_numel"}
    assert named - names_of_the_house() - attributes == set()
