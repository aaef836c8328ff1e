"""scripts/gpu runs each part in a process with a time limit and continues after failures.

Each result is written immediately. The parts in these tests are small programs; CI runs the real
ones with tiny models (`make gpu-dry-run`).
"""

from __future__ import annotations

import json
import time
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.gpu import run
from benchmarks.gpu.results import Result
from benchmarks.gpu.run import PARTS, REQUIRED, ROOT, Part, Report

PROGRAMS = {
    "good": "from benchmarks.gpu.results import Result, write_result\nprint('hello', end='')\n"
    "write_result(Result('one', figures={'ms': 1.5}))\nwrite_result(Result('two'))\n",
    "raising": "from benchmarks.gpu.results import attempt\nattempt('first', lambda: 1 / 0)\n"
    "attempt('second', lambda: {'ms': 2})\nraise SystemExit(3)\n",
    "hanging": "import subprocess, sys, time\n"
    "from benchmarks.gpu.results import Result, write_result\n"
    "write_result(Result('before'))\n"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\ntime.sleep(60)\n",
    "silent": "",
}


class Clock:
    """Real time plus the seconds by which a test advances the clock."""

    passed = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.passed


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Part, ...]:
    folder = tmp_path / "programs"
    folder.mkdir()
    for name, text in PROGRAMS.items():
        (folder / f"part_{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):  # a dry run sets these variables
        monkeypatch.setenv(name, "")
    made = [Part(name, f"a part that is {name}", 60.0, module=f"part_{name}") for name in PROGRAMS]
    return (Part("absent", "a part without its package", 5.0, needs=("no_such_package",)), *made)


def test_a_part_that_fails_or_hangs_does_not_end_the_others_and_all_results_are_written(
    parts: tuple[Part, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "facts", lambda asked: {"device": "none", "torch": "2.11"})
    clock, add = Clock(), Report.add

    def add_and_wait(report: Report, part: str, result: Result) -> None:
        add(report, part, result)
        if result.name == "before":
            clock.passed += 100.0  # exceeds the time limit of the part

    monkeypatch.setattr(run, "time", clock)
    monkeypatch.setattr(Report, "add", add_and_wait)
    out = tmp_path / "out"
    assert run.main(["--out", str(out)], parts) == 1
    rows = json.loads((out / "gpu.json").read_text())["results"]
    found = [(row["part"], row["name"], row["verdict"]) for row in rows]
    assert found == [
        ("absent", "a part without its package", "skipped"),
        ("good", "one", "ok"),
        ("good", "two", "ok"),
        ("raising", "first", "FAILED"),
        ("raising", "second", "ok"),
        ("raising", "a part that is raising", "FAILED"),
        ("hanging", "before", "ok"),
        ("hanging", "a part that is hanging", "FAILED"),
        ("silent", "a part that is silent", "FAILED"),
    ]
    why = {row["name"]: row["why"] for row in rows}
    assert why["a part without its package"] == "no_such_package is not installed"
    assert why["first"] == "ZeroDivisionError: division by zero"
    assert "exit code 3" in why["a part that is raising"]
    assert why["a part that is hanging"].startswith("not over after 1")
    table = (out / "gpu.md").read_text()
    assert (
        "| good | one | ok | ms 1.5 |" in table
        and "| raising | first | FAILED | ZeroDivisionError" in table
    )
    assert (
        "hello" in (out / "good.log").read_text()
        and "Traceback" in (out / "raising.log").read_text()
    )
    shown = capsys.readouterr().out.splitlines()
    assert len([line for line in shown if line.startswith(("ok ", "FAILED ", "skipped "))]) == len(
        rows
    )


def test_one_part_can_run_by_itself_and_none_starts_after_the_limit(
    parts: tuple[Part, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "facts", lambda asked: {"device": "none", "torch": "2.11"})
    assert run.main(["--dry-run", "--only", "good", "--out", str(tmp_path / "one")], parts) == 0
    assert {
        row["part"] for row in json.loads((tmp_path / "one" / "gpu.json").read_text())["results"]
    } == {"good"}
    assert run.main(["--dry-run", "--seconds", "1", "--out", str(tmp_path / "none")], parts) == 0
    rows = json.loads((tmp_path / "none" / "gpu.json").read_text())["results"]
    assert {row["verdict"] for row in rows} == {"skipped"} and rows[1]["why"] == "the 1 s are over"


def test_all_missing_dependencies_are_named_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        run, "find_spec", lambda name: None if name in ("torch", "rich") else find_spec(name)
    )
    assert run.main(["--dry-run"]) == 2
    assert "not installed: torch, rich." in capsys.readouterr().err


def test_the_dependencies_are_those_of_the_library() -> None:
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {line.partition(">")[0].replace("py-cpuinfo", "cpuinfo") for line in stated}
    assert names == set(REQUIRED)


def test_every_part_is_a_module_and_the_order_is_that_of_use() -> None:
    assert [
        part.name for part in PARTS
    ] == "smoke tests speed host capped shared kernels checks".split()
    assert all((ROOT / "benchmarks" / "gpu" / f"{part.name}.py").exists() for part in PARTS)
    assert PARTS[0].seconds <= 60


def test_a_result_is_one_line() -> None:
    assert (
        Result("a", figures={"ms": 1.23456, "events": 12}, why="so").line()
        == "a: ms 1.235, events 12, so"
    )
    assert Result("a").line() == "a"
