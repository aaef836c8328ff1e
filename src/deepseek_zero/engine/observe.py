"""Reports an engine's training: timers, records, monitor events, one line per N steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..base.device import allocated_bytes
from ..base.errors import StorageError
from ..base.log import log_once, logger
from ..base.quantities import format_bytes, format_count, format_seconds
from ..base.world import is_rank_zero
from ..report.flops import FlopsSettings, ForwardCost, flops_table
from ..report.monitor import MonitorMaster, MonitorSettings
from ..report.records import RecordWriter, StepRecord
from ..report.timers import Timers

if TYPE_CHECKING:
    from .engine import Engine


PLAN_NAME = "plan.txt"


@dataclass(frozen=True)
class ObserverSettings:
    """What is reported, how often and where. steps_per_print: None prints nothing."""

    steps_per_print: int | None = 10
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    dump_state: bool = False
    log_level: str | None = None
    records_path: str | None = None
    records_every: int = 1
    monitor: MonitorSettings = field(default_factory=MonitorSettings)
    flops: FlopsSettings | None = None


def summary(record: StepRecord) -> str:
    """A step in one line.  Tokens are left out where the model was given none."""
    pace = f", {format_count(record.tokens_per_second)} tokens/s" if record.tokens_per_second else ""
    return (
        f"step {record.step}: loss {record.loss:.4f}, lr {record.lr:.3g}, grad norm {record.grad_norm:.3f}, "
        f"{format_seconds(record.step_seconds)}{pace}, {format_bytes(record.memory_bytes)} in memory, "
        f"{format_bytes(record.comm_bytes)} sent"
    )


class Observer:
    """Reports of rank 0; the other ranks keep only timers."""

    def __init__(self, settings: ObserverSettings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.timers = Timers(device) if settings.wall_clock_breakdown else None
        path = settings.records_path
        try:
            self.monitor = MonitorMaster(settings.monitor)
            self.writer = RecordWriter(Path(path)) if path and is_rank_zero() else None
        except OSError as error:
            raise StorageError(
                f"the run's records cannot be written: {str(error)[:300]}.",
                "records.path, or the output_path of a monitor, names a directory that cannot be made or written.",
                "name another directory, or switch it off.",
            ) from error
        self._record: StepRecord | None = None
        self._unread: list[Tensor] = []  # losses of the last step, which its record lacks
        self._losses: list[Tensor] = []
        self._profiled = False
        self._began = time.perf_counter()
        self._sent = self._tokens = 0
        if settings.log_level is not None:
            logger.setLevel(settings.log_level.upper())

    @property
    def record(self) -> StepRecord | None:
        """Return the record of the last step. On a GPU its loss is read here, not before: until then the host has
        not waited for it.
        """
        self._read_loss()
        return self._record

    def _read_loss(self) -> None:
        if self._record is not None and self._unread:
            loss = float(torch.stack([each.float().reshape(()) for each in self._unread]).mean())
            self._record, self._unread = replace(self._record, loss=loss), []

    def planned(self, plan: str) -> None:
        """Write the plan as text beside the records, again after a unit was promoted."""
        if self.writer is not None:
            (self.writer.folder / PLAN_NAME).write_text(plan + "\n", encoding="utf-8")

    def timed(self, name: str) -> AbstractContextManager[Any]:
        """Time a part of the step when wall_clock_breakdown asks for it."""
        return self.timers.timed(name) if self.timers is not None else nullcontext()

    def profiled(self, engine: Engine) -> AbstractContextManager[Any]:
        """Count the operations of one forward on rank 0: the first one after as many steps as flops_profiler says."""
        wanted = self.settings.flops
        due = wanted is not None and not self._profiled and engine.global_steps >= wanted.step and is_rank_zero()
        return self._profile(engine, wanted) if due and wanted is not None else nullcontext()

    @contextmanager
    def _profile(self, engine: Engine, wanted: FlopsSettings) -> Iterator[None]:
        self._profiled, cost = True, ForwardCost(engine.module)
        cost.start()
        try:
            yield
        finally:
            cost.stop()
        table = flops_table(cost, wanted)
        if wanted.output_file is None:
            logger.info(table)
        else:
            try:
                Path(wanted.output_file).write_text(table + "\n", encoding="utf-8")
            except OSError as error:  # no reason to lose a run in its forward
                logger.warning(f"flops_profiler.output_file cannot be written ({str(error)[:300]}):\n{table}")

    def saw(self, args: tuple[Any, ...]) -> None:
        """Count the tokens of a micro-batch: the elements of the first integer tensor the model is given."""
        for value in args:
            if isinstance(value, Tensor) and not value.is_floating_point():
                self._tokens += value.numel()
                return

    def loss(self, loss: Tensor) -> None:
        """Remember a micro-batch's loss; see `record`."""
        if loss.numel() == 1:
            self._losses.append(loss.detach())

    def stepped(self, engine: Engine) -> None:
        """Record a finished step."""
        optimizer = engine.optimizer
        assert optimizer is not None and optimizer.last is not None
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        total = engine.runtime.comm.meter.total_bytes()
        sent, self._sent = total - self._sent, total
        self._unread, self._losses = self._losses, []
        tokens, self._tokens = self._tokens, 0
        self._record = StepRecord(
            step=engine.global_steps,
            loss=float("nan"),
            lr=float(optimizer.param_groups[0]["lr"]) if optimizer.param_groups else 0.0,
            grad_norm=optimizer.last.norm,
            tokens_per_second=tokens * engine.mesh.data_size / seconds,
            memory_bytes=allocated_bytes(self.device),
            comm_bytes=sent,
            step_seconds=seconds,
            loss_scale=optimizer.scaler.scale if optimizer.scaler is not None else 1.0,
            skipped=optimizer.overflow,
        )
        if self.device.type == "cpu":  # nothing to wait for, and no tensor to keep
            self._read_loss()
        self._tell(engine)
        if optimizer.fallback is not None and optimizer.fallback.changed:
            self.planned(engine.plan())

    def _tell(self, engine: Engine) -> None:
        step, every = engine.global_steps, self.settings.steps_per_print
        writes = self.writer is not None and step % self.settings.records_every == 0
        prints = bool(every) and step % (every or 1) == 0
        if not (writes or prints or self.monitor.enabled):
            return
        record = self.record
        assert record is not None
        if writes and self.writer is not None:
            self.writer.write(record)
        if self.monitor.enabled:
            samples = engine.global_samples
            events = [("Train/Samples/train_loss", record.loss, samples), ("Train/Samples/lr", record.lr, samples)]
            if engine.parts.scaler is not None:
                events.append(("Train/Samples/loss_scale", record.loss_scale, samples))
            self.monitor.write_events(events)
        if prints:
            log_once(summary(record))
            if self.timers is not None:
                log_once(self.timers.report())
            if self.settings.memory_breakdown:
                log_once(f"memory: {format_bytes(record.memory_bytes)}")

    def close(self) -> None:
        self.monitor.close()
        if self.writer is not None:
            self.writer.close()
            self.writer = None
