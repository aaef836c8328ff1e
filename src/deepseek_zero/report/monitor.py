"""Send events (tag, value, step) to the monitors that DeepSpeed supports.

These are TensorBoard, CSV files, Weights & Biases and Comet. Rank 0 sends the events, and the
engine decides which events exist. The check of the configuration reports missing packages.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ..base.world import is_rank_zero
from .records import csv_line, open_for_append

Scalar = tuple[str, float, int]


@dataclass(frozen=True)
class FileSettings:
    """Settings of TensorBoard or CSV files, which are written to output_path/job_name."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"

    @property
    def folder(self) -> Path:
        """Return the folder of this run."""
        return Path(self.output_path) / self.job_name


@dataclass(frozen=True)
class WandbSettings:
    """Settings of a Weights & Biases run; `team` is its entity."""

    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


@dataclass(frozen=True)
class CometSettings:
    """Settings of a Comet experiment.

    A tag is sent at most once every `samples_log_interval` samples.
    """

    enabled: bool = False
    samples_log_interval: int = 100
    project: str | None = None
    workspace: str | None = None
    api_key: str | None = field(default=None, repr=False)  # a secret, excluded from printed plans
    experiment_name: str | None = None
    experiment_key: str | None = None
    online: bool | None = None
    mode: str | None = None


@dataclass(frozen=True)
class MonitorSettings:
    """Settings of the four monitors."""

    tensorboard: FileSettings = FileSettings()
    csv_monitor: FileSettings = FileSettings()
    wandb: WandbSettings = WandbSettings()
    comet: CometSettings = CometSettings()


class MonitorMaster:
    """Send events to every enabled monitor; ranks other than 0 send none."""

    def __init__(self, settings: MonitorSettings) -> None:
        wanted = [name for name in _WRITERS if getattr(settings, name).enabled]
        self.enabled = bool(wanted)
        self._writers: list[Any] = []
        if is_rank_zero():
            self._writers = [_WRITERS[name](getattr(settings, name)) for name in wanted]

    def write_events(self, events: Sequence[Scalar]) -> None:
        """Record (tag, value, step) events on rank 0."""
        for writer in self._writers:
            writer.write_events(events)

    def close(self) -> None:
        """Close every monitor; later events are dropped."""
        for writer in self._writers:
            writer.close()
        self._writers = []


class CsvWriter:
    """Write one CSV file per tag.

    The tag `Train/Samples/lr` is written to Train_Samples_lr.csv with the columns step and lr.
    """

    def __init__(self, settings: FileSettings) -> None:
        self._folder = settings.folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, IO[str]] = {}

    def write_events(self, events: Sequence[Scalar]) -> None:
        """Append each event to the file of its tag."""
        for tag, value, step in events:
            file = self._file(tag)
            file.write(csv_line([step, value]))
            file.flush()

    def _file(self, tag: str) -> IO[str]:
        if tag not in self._files:
            name = tag.replace("/", "_").replace(" ", "_")
            header = csv_line(["step", tag.rpartition("/")[2]])
            self._files[tag] = open_for_append(self._folder / f"{name}.csv", header)
        return self._files[tag]

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()


class TensorBoardWriter:
    """Write TensorBoard event files."""

    def __init__(self, settings: FileSettings) -> None:
        settings.folder.mkdir(parents=True, exist_ok=True)
        self._writer: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter(
            str(settings.folder)
        )

    def write_events(self, events: Sequence[Scalar]) -> None:
        """Add a scalar for each event."""
        for tag, value, step in events:
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WandbWriter:
    """Log to a Weights & Biases run."""

    def __init__(self, settings: WandbSettings) -> None:
        wandb = importlib.import_module("wandb")
        self._run: Any = wandb.init(
            project=settings.project, group=settings.group, entity=settings.team
        )

    def write_events(self, events: Sequence[Scalar]) -> None:
        """Log each event at its step."""
        for tag, value, step in events:
            self._run.log({tag: value}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class CometWriter:
    """Log to a Comet experiment; the configured number of samples limits how often."""

    def __init__(self, settings: CometSettings) -> None:
        names = ("api_key", "project", "workspace", "experiment_key", "mode", "online")
        stated = {
            name: getattr(settings, name) for name in names if getattr(settings, name) is not None
        }
        self.experiment: Any = importlib.import_module("comet_ml").start(**stated)
        if settings.experiment_name is not None:
            self.experiment.set_name(settings.experiment_name)
        self._interval = settings.samples_log_interval
        self._last_sent: dict[str, int] = {}

    def write_events(self, events: Sequence[Scalar]) -> None:
        """Log the events whose tag reaches its interval."""
        for tag, value, step in events:
            if tag not in self._last_sent or step - self._last_sent[tag] >= self._interval:
                self._last_sent[tag] = step
                self.experiment.log_metric(tag, value, step=step)

    def close(self) -> None:
        """End the experiment."""
        self.experiment.end()


_WRITERS: dict[str, Any] = {
    "tensorboard": TensorBoardWriter,
    "csv_monitor": CsvWriter,
    "wandb": WandbWriter,
    "comet": CometWriter,
}
