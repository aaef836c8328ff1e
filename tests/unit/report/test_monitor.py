"""Monitors write in DeepSpeed's layout on rank 0; a missing package is an error on every rank."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from deepseek_zero.config.schema import Comet, CsvMonitor, TensorBoard, Wandb
from deepseek_zero.report.monitor import MonitorMaster

EVENTS = [("Train/Samples/train_loss", 2.5, 8), ("Train/Samples/lr", 0.001, 8), ("my loss", 1.0, 8)]


def master_with(**sections: Any) -> MonitorMaster:
    disabled = {
        "tensorboard": TensorBoard(),
        "csv_monitor": CsvMonitor(),
        "wandb": Wandb(),
        "comet": Comet(),
    }
    return MonitorMaster(SimpleNamespace(**(disabled | sections)))


def csv_master(folder: Path) -> MonitorMaster:
    section = CsvMonitor(enabled=True, output_path=str(folder), job_name="job")
    return master_with(csv_monitor=section)


class Recorder:
    """A fake run object that records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


def install(
    monkeypatch: pytest.MonkeyPatch, name: str, starter: str
) -> tuple[Recorder, dict[str, Any]]:
    """Install a fake package `name` with a function `starter` that returns a Recorder."""
    recorder, started = Recorder(), {}
    package = ModuleType(name)

    def start(**kwargs: Any) -> Recorder:
        started.update(kwargs)
        return recorder

    setattr(package, starter, start)
    monkeypatch.setitem(sys.modules, name, package)
    return recorder, started


def test_nothing_is_enabled_by_default() -> None:
    master = master_with()
    master.write_events(EVENTS)
    assert not master.enabled


def test_the_csv_monitor_writes_one_file_per_tag_in_the_layout_of_deepspeed(tmp_path: Path) -> None:
    master = csv_master(tmp_path)
    assert master.enabled
    master.write_events(EVENTS)
    master.write_events([("Train/Samples/train_loss", 2.25, 16)])
    master.close()
    files = {path.name: path.read_text() for path in (tmp_path / "job").iterdir()}
    assert files == {
        "Train_Samples_train_loss.csv": "step,train_loss\n8,2.5\n16,2.25\n",
        "Train_Samples_lr.csv": "step,lr\n8,0.001\n",
        "my_loss.csv": "step,my loss\n8,1.0\n",
    }


def test_a_restarted_csv_monitor_appends_under_one_header(tmp_path: Path) -> None:
    for step in (8, 16):
        master = csv_master(tmp_path)
        master.write_events([("Train/Samples/lr", 0.5, step)])
        master.close()
    assert (tmp_path / "job" / "Train_Samples_lr.csv").read_text() == "step,lr\n8,0.5\n16,0.5\n"


def test_other_ranks_are_enabled_but_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    master = csv_master(tmp_path)
    master.write_events(EVENTS)
    assert master.enabled
    assert not list(tmp_path.iterdir())


def test_wandb_receives_each_event_at_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run, started = install(monkeypatch, "wandb", "init")
    section = Wandb(enabled=True, group="g", team="t", project="p")
    master = master_with(wandb=section)
    master.write_events(EVENTS[:1])
    master.close()
    assert started == {"project": "p", "group": "g", "entity": "t"}
    assert run.calls == [
        ("log", ({"Train/Samples/train_loss": 2.5},), {"step": 8}),
        ("finish", (), {}),
    ]


def test_comet_receives_a_tag_again_only_after_its_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experiment, started = install(monkeypatch, "comet_ml", "start")
    section = Comet(
        enabled=True,
        samples_log_interval=10,
        project="p",
        experiment_name="trial",
        online=False,
    )
    master = master_with(comet=section)
    for step in (8, 16, 18):
        master.write_events([("loss", 1.0, step)])
    assert started == {"project": "p", "online": False}
    assert experiment.calls == [
        ("set_name", ("trial",), {}),
        ("log_metric", ("loss", 1.0), {"step": 8}),
        ("log_metric", ("loss", 1.0), {"step": 18}),
    ]


def test_the_key_of_a_comet_account_is_never_printed() -> None:
    assert "secret" not in repr(Comet(api_key="secret"))


def test_tensorboard_writes_an_event_file(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    section = TensorBoard(enabled=True, output_path=str(tmp_path), job_name="job")
    master = master_with(tensorboard=section)
    master.write_events(EVENTS)
    master.close()
    assert [
        path.name.startswith("events.out.tfevents") for path in (tmp_path / "job").iterdir()
    ] == [True]


def test_a_monitor_that_fails_is_tried_again_and_the_others_get_all_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, _ = install(monkeypatch, "wandb", "init")
    section = CsvMonitor(enabled=True, output_path=str(tmp_path), job_name="job")
    master = master_with(wandb=Wandb(enabled=True), csv_monitor=section)
    folder = tmp_path / "job" / "loss.csv"
    folder.mkdir()
    for step in range(1, 8):
        if step == 6:
            folder.rmdir()
        master.write_events([("loss", float(step), step)])
    master.close()
    assert caplog.text.count("CsvWriter failed, and is tried again later") == 1
    written = folder.read_text().splitlines()
    assert written == ["step,loss", "6,6.0", "7,7.0"], "tried in steps 1, 3 and 6"
    assert [name for name, *_ in run.calls] == ["log"] * 7 + ["finish"]
