"""scripts/test runs failed tests again on their own; tested in a project with one test file."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Each test counts its runs in a file next to it.
FLAKY = """
import pathlib, pytest

@pytest.mark.parametrize("number", range({count}))
def test_it(number):
    runs = pathlib.Path(__file__).with_name(f"runs{{number}}")
    passed = runs.read_text() if runs.exists() else ""
    runs.write_text(passed + "x")
    print("a line of test", number)
    assert len(passed) >= {failures}, "the first reason"

def test_passes():
    pass
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/test", *options]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def make_project(folder: Path, count: int, failures: int) -> None:
    """Write a project with `count` tests, each of which fails in its first `failures` runs."""
    (folder / "scripts").mkdir()
    (folder / "tests").mkdir()
    shutil.copy(ROOT / "scripts" / "test", folder / "scripts")
    shutil.copy(ROOT / "tests" / "failure_reports.py", folder / "tests")
    (folder / "tests" / "__init__.py").touch()
    (folder / "pytest.ini").write_text(
        "[pytest]\naddopts = --import-mode=importlib\n", encoding="utf-8"
    )
    (folder / "tests" / "test_flaky.py").write_text(
        FLAKY.format(count=count, failures=failures), encoding="utf-8"
    )


@pytest.mark.parametrize("options", [(), ("tests",)], ids=["workers", "one process"])
def test_a_test_that_fails_once_is_named_flaky_with_its_first_output(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    make_project(tmp_path, 2, 1)
    done = run(tmp_path, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-2:]
    assert sorted(last) == [f"flaky tests/test_flaky.py::test_it[{number}]" for number in (0, 1)]
    shown = done.stdout.split("passed alone; its first output:")[1]
    assert "the first reason" in shown
    assert "a line of test" in shown


def test_a_test_that_fails_twice_fails(tmp_path: Path) -> None:
    make_project(tmp_path, 1, 2)
    done = run(tmp_path)
    assert done.returncode == 1
    assert "running what failed once more" in done.stdout
    assert "flaky tests" not in done.stdout


def test_more_than_five_failures_are_not_run_again(tmp_path: Path) -> None:
    make_project(tmp_path, 6, 1)
    done = run(tmp_path)
    assert done.returncode == 1
    assert "once more" not in done.stdout
    assert "6 failed" in done.stdout


def test_a_run_that_passes_is_not_repeated(tmp_path: Path) -> None:
    make_project(tmp_path, 1, 0)
    done = run(tmp_path)
    assert done.returncode == 0
    assert "once more" not in done.stdout


def test_a_file_that_cannot_be_imported_fails(tmp_path: Path) -> None:
    make_project(tmp_path, 0, 0)
    (tmp_path / "tests" / "test_broken.py").write_text(
        "import nothing_of_this_name\n", encoding="utf-8"
    )
    done = run(tmp_path)
    assert done.returncode not in (0, 5)
