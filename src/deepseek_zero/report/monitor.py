"""Send events (tag, value, step) to the monitors that DeepSpeed supports.

These are TensorBoard, CSV files, Weights & Biases and Comet. Rank 0 sends the events, and the
engine decides which events exist. The check of the configuration reports missing packages.

Each writer takes the configuration's section of that name (config/schema.py), or an object with
the same attributes.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ..base.log import logger
from ..base.world import is_rank_zero
from .records import csv_line, open_for_append

Scalar = tuple[str, float, int]
MOST_DROPPED = 512  # calls whose events are dropped between two attempts of a monitor that fails


class MonitorMaster:
    """Send events to every enabled monitor; ranks other than 0 send none.

    Args:
        config: The configuration, which has the sections `tensorboard`, `csv_monitor`, `wandb` and
            `comet`.
    """

    def __init__(self, config: Any) -> None:
        sections = {name: getattr(config, name) for name in _WRITERS}
        wanted = {name: section for name, section in sections.items() if section.enabled}
        self.enabled = bool(wanted)
        self._monitors: list[_Monitor] = []
        if is_rank_zero():
            self._monitors = [_Monitor(_WRITERS[name](section)) for name, section in wanted.items()]

    def write_events(self, events: Sequence[Scalar]) -> None:
        """Record (tag, value, step) events on rank 0.

        A monitor that fails causes a warning and is tried again at a later call.

        Raises:
            ValueError: An event has not three values.
        """
        events = [(tag, value, step) for tag, value, step in events]
        for monitor in self._monitors:
            monitor.write_events(events)

    def close(self) -> None:
        """Close every monitor; later events are dropped."""
        monitors = self._monitors
        self._monitors = []
        for monitor in monitors:
            monitor.close()


@dataclass(eq=False)
class _Monitor:
    """A writer whose errors do not stop training.

    After an error, the events of some calls are dropped, because each attempt may take long: of one
    call after the first error, and of twice as many after each further error in a row.
    """

    writer: Any
    _pause: int = 0  # calls to drop after the last error
    _dropped: int = 0  # calls dropped since then
    _has_warned: bool = False

    def write_events(self, events: Sequence[Scalar]) -> None:
        """Write the events, unless they are dropped after an error."""
        if self._dropped < self._pause:
            self._dropped += 1
            return
        try:
            self.writer.write_events(events)
            self._pause = 0
        except Exception as error:  # only rank 0 writes, and the other ranks go on
            self._pause = min(2 * self._pause, MOST_DROPPED) or 1
            self._dropped = 0
            if not self._has_warned:
                self._has_warned = True
                self._warn("failed, and is tried again later; events are lost until then", error)

    def close(self) -> None:
        """Close the writer."""
        try:
            self.writer.close()
        except Exception as error:  # the other writers are closed, too
            self._warn("could not be closed", error)

    def _warn(self, what: str, error: Exception) -> None:
        logger.warning(f"monitor: {type(self.writer).__name__} {what} ({str(error)[:300]})")


class CsvWriter:
    """Write one CSV file per tag.

    The tag `Train/Samples/lr` is written to Train_Samples_lr.csv with the columns step and lr.
    """

    def __init__(self, section: Any) -> None:
        self._folder = Path(section.output_path) / section.job_name
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

    def __init__(self, section: Any) -> None:
        folder = Path(section.output_path) / section.job_name
        folder.mkdir(parents=True, exist_ok=True)
        self._writer: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter(
            str(folder)
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

    def __init__(self, section: Any) -> None:
        wandb = importlib.import_module("wandb")
        self._run: Any = wandb.init(
            project=section.project, group=section.group, entity=section.team
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

    def __init__(self, section: Any) -> None:
        names = ("api_key", "project", "workspace", "experiment_key", "mode", "online")
        stated = {
            name: getattr(section, name) for name in names if getattr(section, name) is not None
        }
        self.experiment: Any = importlib.import_module("comet_ml").start(**stated)
        if section.experiment_name is not None:
            self.experiment.set_name(section.experiment_name)
        self._interval = section.samples_log_interval
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
