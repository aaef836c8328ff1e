"""Records of a run can be read back even if the process was killed while writing a line."""

from __future__ import annotations

import csv
import json
import math
from contextlib import closing
from pathlib import Path

import pytest
import torch

import deepseek_zero
from deepseek_zero.base.errors import UsageError
from deepseek_zero.config import Config
from deepseek_zero.engine.observer import Observer
from deepseek_zero.report.records import (
    CSV_NAME,
    JSONL_NAME,
    RecordWriter,
    StepRecord,
)
from tests.step_records import read_records


def record(step: int, loss: float = 2.5, **other: object) -> StepRecord:
    return StepRecord(step, loss, 1e-3, 0.7, 1e4, 2**20, 4096, 0.1, **other)  # type: ignore[arg-type]


def write(folder: Path, *records: StepRecord) -> None:
    with closing(RecordWriter(folder)) as writer:
        for item in records:
            writer.write(item)


def test_records_are_read_as_written(tmp_path: Path) -> None:
    wrote = [
        record(1, 1 / 3),
        record(2, held_out_loss=2.25),
        record(3, loss_scale=1024.0, skipped=True),
    ]
    write(tmp_path, *wrote)
    assert read_records(tmp_path) == wrote


def test_every_record_is_on_disk_before_the_next_step(tmp_path: Path) -> None:
    with closing(RecordWriter(tmp_path)) as writer:
        writer.write(record(1))
        assert read_records(tmp_path) == [record(1)]


def test_the_csv_file_has_one_column_per_field_and_one_header_after_a_restart(
    tmp_path: Path,
) -> None:
    write(tmp_path, record(1))
    write(tmp_path, record(2, 1.25))
    with (tmp_path / CSV_NAME).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["loss"], row["held_out_loss"]) for row in rows] == [
        ("1", "2.5", ""),
        ("2", "1.25", ""),
    ]


@pytest.mark.parametrize("name", [JSONL_NAME, CSV_NAME])
@pytest.mark.parametrize("half", ['{"step": 3, "lo', "x" * 200_000])
def test_a_half_written_last_line_is_dropped_when_the_files_are_opened_again(
    tmp_path: Path, name: str, half: str
) -> None:
    write(tmp_path, record(1), record(2))
    whole = (tmp_path / name).read_text()
    (tmp_path / name).write_text(whole + half)
    write(tmp_path, record(3))
    text = (tmp_path / name).read_text()
    assert text.startswith(whole)
    assert text.count("\n") == whole.count("\n") + 1
    assert [item.step for item in read_records(tmp_path)] == [1, 2, 3]


def test_a_file_with_an_incomplete_line_is_restarted(tmp_path: Path) -> None:
    (tmp_path / CSV_NAME).write_text("step,lo")
    write(tmp_path, record(1))
    assert (tmp_path / CSV_NAME).read_text().startswith("step,loss,lr,")


def test_a_loss_that_is_not_finite_stays_valid_json(tmp_path: Path) -> None:
    write(tmp_path, record(1, math.inf))
    line = (tmp_path / JSONL_NAME).read_text()
    assert json.loads(line, parse_constant=pytest.fail)["loss"] is None


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "a,b\n1,2", "a,b"])
def test_a_csv_file_of_another_program_is_refused_and_unchanged(tmp_path: Path, text: str) -> None:
    (tmp_path / CSV_NAME).write_text(text)
    with pytest.raises(UsageError, match="has the columns 'a,b'"):
        RecordWriter(tmp_path)
    assert (tmp_path / CSV_NAME).read_text() == text


def test_only_rank_zero_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = Config.model_validate({"records": {"path": str(tmp_path / "run")}})
    assert Observer(config, torch.device("cpu")).writer is None
    assert not (tmp_path / "run").exists()


def test_a_plan_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "plan.txt").mkdir()
    config = {"train_batch_size": 1, "records": {"path": str(tmp_path)}}
    engine, *_ = deepseek_zero.initialize(model=torch.nn.Linear(1, 1), config=config)
    assert "plan.txt cannot be written" in caplog.text
    engine.destroy()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
@pytest.mark.parametrize("name", [JSONL_NAME, CSV_NAME])
def test_a_full_disk_ends_the_records_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "records": {"path": str(tmp_path)},
    }
    engine, *_ = deepseek_zero.initialize(model=torch.nn.Linear(1, 1), config=config)
    with open("/dev/full", "w") as full:
        observer = engine.observer
        assert observer.writer is not None
        attribute = "_lines" if name == JSONL_NAME else "_table"
        getattr(observer.writer, attribute).close()
        setattr(observer.writer, attribute, full)
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 1)).sum())
            engine.step()
        engine.destroy()
        assert engine.global_steps == 2
        assert caplog.text.count("records of step 1 and later ones are not written") == 1
