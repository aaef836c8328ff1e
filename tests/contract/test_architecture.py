"""ARCHITECTURE.md shows the house as it stands: every file, and no name that is gone."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "deepseek_zero"
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
# Named on the page as what the design had and the house has not.
NOT_BUILT = {"comm/codecs.py", "comm/buckets.py"}


def files_of_the_tree() -> set[str]:
    """`room/file.py` of every file that the tree on the page shows."""
    tree = next(block for block in PAGE.split("```") if block.startswith("\nsrc/deepseek_zero/"))
    found, room = set(), ""
    for line in tree.splitlines():
        if opened := re.match(r"[├└]── ([\w/]+)/(?:\s|$)", line):
            room = opened[1] + "/"
        elif re.match(r"[├└]── ", line):
            room = ""
        found |= {room + name for name in re.findall(r"\b[\w/]+\.py\b", line)}
    return found


def files_of_the_house() -> set[str]:
    paths = [path.relative_to(SOURCE) for path in SOURCE.rglob("*.py")]
    return {
        str(path)
        for path in paths
        if path.name not in ("__init__.py", "__main__.py") and path.parts[0] != "utils" and "_dropin" not in path.parts
    }


def names_of_the_house() -> set[str]:
    """Every class, function and method, methods as Class.method."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            if isinstance(node, ast.ClassDef):
                found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


def test_the_tree_shows_every_file_of_the_house() -> None:
    assert files_of_the_house() - files_of_the_tree() == set()


def test_the_page_names_no_file_that_is_not_there() -> None:
    named = set(re.findall(r"\b[\w/]+\.py\b", PAGE)) - NOT_BUILT
    assert {name for name in named if not is_there(name)} == set()


def test_nothing_is_called_not_built_that_is_built() -> None:
    assert not {name for name in NOT_BUILT if is_there(name)}
    assert {name for name in NOT_BUILT if name not in PAGE} == set()


def test_the_tree_shows_no_file_in_a_room_where_it_is_not() -> None:
    assert {name for name in files_of_the_tree() if not (SOURCE / name).exists()} == set()


def is_there(name: str) -> bool:
    """Whether a file that the page names by its last folders, or by its name alone, is part of the repository."""
    places = [SOURCE, *(ROOT / folder for folder in ("tests", "examples", "benchmarks"))]
    return any(f"/{path.relative_to(ROOT)}".endswith(f"/{name}") for place in places for path in place.rglob("*.py"))


def test_the_page_names_no_class_or_method_that_is_not_there() -> None:
    named = set(re.findall(r"`([A-Z]\w+\.\w+)`", PAGE))
    assert len(named) > 10
    attributes = {"PlanSettings.window_numel"}
    assert named - names_of_the_house() - attributes == set()
