"""The journal resumes after recorded results and never mixes code versions or machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import journal
from benchmarks.journal import Journal, fingerprint, read, write
from benchmarks.launch import merge

RUN: dict[str, Any] = {"cell": "tiny-fp32", "system": "ddp", "kind": "time", "round": 1, "ranks": 2}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(journal, "ASIDE", tmp_path / "aside")
    return tmp_path / "cpu.json"


def test_a_journal_resumes_after_recorded_results_and_repeats_failures(
    path: Path,
) -> None:
    first = Journal(path)
    first.add(RUN)
    first.add(RUN | {"round": 2, "failed": "rank 0 ended with 1"})
    assert len(path.read_text().splitlines()) == 2 + 2 + 1
    again = Journal(path)
    assert again.runs == [RUN]
    assert again.moved is None


@pytest.mark.parametrize("other", [{"code": "0" * 16}, {"machine": {"cpu": "another"}}])
def test_results_of_other_code_or_another_machine_are_moved_aside(
    path: Path, other: dict[str, Any]
) -> None:
    first = Journal(path)
    write(path, {"about": first.about | other, "runs": [RUN]})
    again = Journal(path)
    assert again.runs == []
    assert again.moved is not None
    assert read(again.moved)["runs"] == [RUN]
    assert not path.exists()


def test_the_fingerprint_changes_with_what_is_measured_and_with_nothing_else(
    tmp_path: Path,
) -> None:
    systems = tmp_path / "benchmarks" / "systems"
    systems.mkdir(parents=True)
    (tmp_path / "src" / "deepseek_zero").mkdir(parents=True)
    for name in ("cells", "launch", "model", "probes", "worker", "tables"):
        (tmp_path / "benchmarks" / f"{name}.py").write_text("")
    before = fingerprint(tmp_path)
    (tmp_path / "benchmarks" / "tables.py").write_text("changed = True\n")
    assert fingerprint(tmp_path) == before
    (systems / "ours.py").write_text("changed = True\n")
    assert fingerprint(tmp_path) != before


def test_the_record_of_a_timed_run_has_means_of_the_steps_and_the_worst_start() -> None:
    reports = [
        {
            "seconds": {"import": 1.0 + rank, "first": 3.0},
            "steps": [1.0, 2.0 + rank],
            "losses": [5.0 + rank],
            "cpu_seconds": 1.0,
            "wire_bytes": 10.0,
            "sent_bytes": None,
            "settings": {},
            "versions": {"torch": "2.13.0"},
        }
        for rank in range(2)
    ]
    record = merge(reports)
    assert record["steps"] == [1.0, 2.5]
    assert record["losses"] == [5.5]
    assert record["seconds"] == {"import": 2.0, "first": 3.0}
    json.dumps(record)


def test_the_record_of_a_memory_run_has_the_largest_of_the_ranks() -> None:
    reports = [
        {"losses": [5.0], "versions": {}, "memory": {"steady": {"pss": 10 * rank, "uss": 5}}}
        for rank in range(2)
    ]
    assert merge(reports)["memory"] == {"steady": {"pss": 10, "uss": 5}}
