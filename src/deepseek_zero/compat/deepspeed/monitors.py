"""DeepSpeed's monitor classes, for programs that create one themselves.

Rank 0 writes with the writers of report/monitor.py. On every rank, the fields of the section are
attributes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from ...base.world import is_rank_zero
from ...report.monitor import CometWriter, CsvWriter, Scalar, TensorBoardWriter, WandbWriter


class Monitor:
    """Base class of monitors.

    Args:
        config: Section of the configuration, such as a TensorBoardConfig. If it is disabled, events
            are ignored.
    """

    writer_class: ClassVar[Any]

    def __init__(self, config: Any) -> None:
        self.monitor_config = config
        vars(self).update(dict(config))
        self.writer: Any = None
        if config.enabled and is_rank_zero():
            self.writer = self.writer_class(config)

    def write_events(self, event_list: Iterable[Scalar]) -> None:
        """Write events (tag, value, samples) on rank 0."""
        if self.writer is not None:
            self.writer.write_events([event[:3] for event in event_list])

    def flush(self) -> None:
        """Do nothing: events are written immediately."""


class TensorBoardMonitor(Monitor):
    """Monitor that writes each event to TensorBoard files, on rank 0."""

    writer_class = TensorBoardWriter


class csvMonitor(Monitor):
    """Monitor that writes the events of each tag to a CSV file, on rank 0."""

    writer_class = CsvWriter


class WandbMonitor(Monitor):
    """Monitor that logs each event to a Weights & Biases run, on rank 0."""

    writer_class = WandbWriter


class CometMonitor(Monitor):
    """Monitor that logs each event to a Comet experiment, on rank 0."""

    writer_class = CometWriter

    @property
    def experiment(self) -> Any:
        """Return Comet's experiment object; None if this rank does not write."""
        return self.writer.experiment if self.writer is not None else None


# section -> its monitor
KINDS: dict[str, type[Monitor]] = {
    "tensorboard": TensorBoardMonitor,
    "wandb": WandbMonitor,
    "csv_monitor": csvMonitor,
    "comet": CometMonitor,
}


class MonitorMaster(Monitor):
    """Write events with all monitors that the configuration enables.

    Args:
        config: A DeepSpeedMonitorConfig.
    """

    def __init__(self, config: Any) -> None:
        self.monitor_config = config
        self.monitors = [
            kind(getattr(config, name))
            for name, kind in KINDS.items()
            if getattr(config, name).enabled
        ]
        self.enabled = bool(self.monitors)

    def write_events(self, event_list: Iterable[Scalar]) -> None:
        """Write events (tag, value, samples) on rank 0 with each enabled monitor."""
        events = list(event_list)
        for each in self.monitors:
            each.write_events(events)
