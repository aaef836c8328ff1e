"""Every python block in README.md and docs/ runs, unless its fence says `python no-run`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract import run_blocks

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    path
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if path.exists() and any(run_blocks.blocks(path.read_text(encoding="utf-8")))
]


@pytest.mark.parametrize("page", [str(path.relative_to(ROOT)) for path in PAGES])
def test_the_python_blocks_of_a_page_run(page: str) -> None:
    done = _run(ROOT / page)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_block_that_fails_is_named_by_page_and_line_and_no_run_is_left_out(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Text\n\n```python\nx = 1\n```\n\n```python no-run\n1 / 0\n```\n\n- item\n  ```python\n  1 / x\n  ```\n"
    )
    done = _run(page)
    assert done.returncode == 1
    assert f"{page}:13: this block failed" in done.stderr
    assert "NameError: name 'x' is not defined" in done.stderr


def _run(page: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, run_blocks.__file__, str(page)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
