"""The layers of pyproject.toml hold, and the check would notice if they did not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_layers_hold() -> None:
    done = _lint(ROOT / "src")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("room", "line", "broken"),
    [
        ("base", "import deepseek_zero.engine", "Nothing imports upward"),
        ("comm", "import deepseek_zero.precision", "siblings never import each other"),
        ("sharding", "import deepseek_zero.config", "Only the doors and the engine"),
        ("report", "import deepseek_zero.config", "Only the doors and the engine"),
        ("engine", "from deepseek_zero.compat.deepspeed.dropin import is_dropin_imported", "Nothing imports upward"),
    ],
)
def test_a_forbidden_import_is_noticed(tmp_path: Path, room: str, line: str, broken: str) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "src" / "deepseek_zero" / room / "planted.py").write_text(line)
    done = _lint(tmp_path / "src")
    assert done.returncode == 1
    kept_or_broken = [found for found in done.stdout.splitlines() if broken in found]
    assert any("BROKEN" in found for found in kept_or_broken), done.stdout + done.stderr


def _lint(source: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the package under `source` with the project's own contracts."""
    command = [
        str(Path(sys.executable).with_name("lint-imports")),
        "--no-cache",
        "--no-logo",
        "--config",
        str(ROOT / "pyproject.toml"),
    ]
    environment = os.environ | {"PYTHONPATH": str(source)}
    return subprocess.run(
        command, cwd=source, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
