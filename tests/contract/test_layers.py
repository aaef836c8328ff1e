"""The import layers of pyproject.toml hold and no imports are circular; the checks detect
violations.
"""

from __future__ import annotations

import ast
import graphlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_import_contracts_are_satisfied() -> None:
    done = _lint(ROOT / "src")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("room", "line", "broken"),
    [
        ("base", "import deepseek_zero.engine", "Nothing imports upward"),
        ("comm", "import deepseek_zero.precision", "siblings never import each other"),
        ("sharding", "import deepseek_zero.config", "Only the doors and the engine"),
        ("optim", "import deepseek_zero.extensions", "Nothing imports upward"),
        ("sharding", "import deepseek_zero.extensions.delayed_update", "Nothing imports upward"),
        ("planner", "import deepseek_zero.extensions.policies", "Nothing imports upward"),
        ("report", "import deepseek_zero.config", "Only the doors and the engine"),
        ("api", "import deepseek_zero.compat.deepspeed.dropin", "Nothing imports upward"),
        ("cli", "import deepseek_zero.compat.deepspeed.dropin", "Nothing imports upward"),
        ("utils", "import deepseek_zero.compat.plugin", "Nothing imports upward"),
    ],
)
def test_a_forbidden_import_is_detected(tmp_path: Path, room: str, line: str, broken: str) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "src" / "deepseek_zero" / room / "planted.py").write_text(line)
    done = _lint(tmp_path / "src")
    assert done.returncode == 1
    kept_or_broken = [found for found in done.stdout.splitlines() if broken in found]
    assert any("BROKEN" in found for found in kept_or_broken), done.stdout + done.stderr


def test_no_file_imports_itself_by_way_of_others() -> None:
    graph = import_graph(ROOT / "src" / "deepseek_zero")
    assert len(graph) > 200
    ring = first_ring(graph)
    assert not ring, " imports\n".join(ring)


@pytest.mark.parametrize(
    "line",
    [
        "if TYPE_CHECKING:\n    from .above import Kind",
        "def late():\n    from .above import Kind",
        "from . import above",
        "from deepseek_zero.base import above",
        "import deepseek_zero.base.above",
        "from .. import zero",
        "from ..zero import Init",
    ],
)
def test_a_circular_import_is_detected(tmp_path: Path, line: str) -> None:
    """A circular import between two files of a package is detected.

    The lower one of the two files has one import too many.
    """
    package = tmp_path / "deepseek_zero"
    (package / "base").mkdir(parents=True)
    files = {
        "__init__": "",
        "zero": "from .base.above import verb",
        "base/__init__": "",
        "base/below": "",
    }
    for name, text in {**files, "base/above": "from .below import verb"}.items():
        (package / f"{name}.py").write_text(text)
    assert first_ring(import_graph(package)) == []
    (package / "base" / "below.py").write_text(line)
    ring = first_ring(import_graph(package))
    assert {"deepseek_zero.base.above", "deepseek_zero.base.below"} <= set(ring)


def import_graph(package: Path) -> dict[str, set[str]]:
    """Map every file of a package to the files it imports, by dotted name.

    Imports for type checkers and in functions count.
    """
    paths = {_dotted(package, path): path for path in package.rglob("*.py")}
    graph = {}
    for name, path in paths.items():
        room = name if path.name == "__init__.py" else name.rpartition(".")[0]
        tree = ast.parse(path.read_text(encoding="utf-8"))
        graph[name] = {each for each in _imported(tree, room, set(paths)) if each != name}
    return graph


def first_ring(graph: dict[str, set[str]]) -> list[str]:
    """Return the files of a circular import in order, with the first one repeated at the end.

    The list is empty if there is none.
    """
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(reversed(error.args[1]))
    return []


def _dotted(package: Path, path: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(tree: ast.AST, room: str, known: set[str]) -> Iterator[str]:
    """Yield the files that a file in the package `room` imports.

    `from a import b` imports the file a.b if it exists, else a.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from {alias.name for alias in node.names} & known
        elif isinstance(node, ast.ImportFrom):
            above = room.split(".")[: len(room.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield from next(
                    ({each} for each in (f"{base}.{alias.name}", base) if each in known), set()
                )


def _lint(source: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the package below `source` with the project's contracts."""
    command = [
        str(Path(sys.executable).with_name("lint-imports")),
        "--no-cache",
        "--no-logo",
        "--config",
        str(ROOT / "pyproject.toml"),
    ]
    environment = os.environ | {"PYTHONPATH": str(source)}
    return subprocess.run(
        command,
        cwd=source,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
