"""A class name has one meaning in the library.

Names with a leading underscore are private to their file. `compat` repeats names because they are
DeepSpeed's, `config/keywords.py` has the names of the generated stub, and a class of `api` may have
the name of its base in the core.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "deepseek_zero"
ELSEWHERE = ("compat/", "config/keywords.py")


def is_subclass_of_its_name(node: ast.ClassDef) -> bool:
    """Return whether a class is derived from one with the same name: `class Init(init.Init)`."""
    names = [base.attr for base in node.bases if isinstance(base, ast.Attribute)]
    return node.name in names


def files_by_class() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        file = path.relative_to(SOURCE).as_posix()
        if file.startswith(ELSEWHERE):
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            is_class = isinstance(node, ast.ClassDef)
            if is_class and not node.name.startswith("_") and not is_subclass_of_its_name(node):
                found[node.name].append(file)
    return found


def test_a_class_name_has_one_meaning() -> None:
    repeated = {name: files for name, files in files_by_class().items() if len(files) > 1}
    assert not repeated
