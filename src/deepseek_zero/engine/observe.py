"""What an engine tells while it trains: timers, records, monitor events, one line per N steps."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..base.device import allocated_bytes
from ..base.log import is_rank_zero, log_once, logger
from ..base.mesh import Mesh
from ..config import Config
from ..report.monitor import CometSettings, FileSettings, MonitorMaster, MonitorSettings, WandbSettings
from ..report.records import RecordWriter, StepRecord
from ..report.timers import Timers
from .assemble import Parts

if TYPE_CHECKING:
    from .engine import Engine


def monitor_settings_of(config: Config) -> MonitorSettings:
    """DeepSpeed's four monitor blocks."""
    return MonitorSettings(
        FileSettings(**config.tensorboard.model_dump()),
        FileSettings(**config.csv_monitor.model_dump()),
        WandbSettings(**config.wandb.model_dump()),
        CometSettings(**config.comet.model_dump()),
    )


class Observer:
    """Rank 0's eyes; the other ranks keep only timers."""

    def __init__(self, config: Config, mesh: Mesh, parts: Parts) -> None:
        self.config, self.mesh, self.parts = config, mesh, parts
        self.timers = Timers(mesh.device) if config.wall_clock_breakdown else None
        self.monitor = MonitorMaster(monitor_settings_of(config))
        path = config.records.path
        self.writer = RecordWriter(Path(path)) if path and is_rank_zero() else None
        self.record: StepRecord | None = None
        self._losses: list[Tensor] = []
        self._began = time.perf_counter()
        self._sent = 0
        if config.log_level is not None:
            logger.setLevel(config.log_level.upper())

    def timed(self, name: str) -> AbstractContextManager[Any]:
        """Time a part of the step when wall_clock_breakdown asks for it."""
        return self.timers.timed(name) if self.timers is not None else nullcontext()

    def loss(self, loss: Tensor) -> None:
        """Remember a micro-batch's loss; read at the step, not before, so that a GPU is not made to wait."""
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
        loss = (
            float(torch.stack([each.float().reshape(()) for each in self._losses]).mean())
            if self._losses
            else float("nan")
        )
        self._losses.clear()
        self.record = StepRecord(
            step=engine.global_steps,
            loss=loss,
            lr=float(optimizer.param_groups[0]["lr"]) if optimizer.param_groups else 0.0,
            grad_norm=optimizer.last.norm,
            tokens_per_second=0.0,
            memory_bytes=allocated_bytes(self.mesh.device),
            comm_bytes=sent,
            step_seconds=seconds,
            loss_scale=self.parts.scaler.scale if self.parts.scaler is not None else 1.0,
            skipped=optimizer.overflow,
        )
        self._tell(engine, self.record)

    def _tell(self, engine: Engine, record: StepRecord) -> None:
        if self.writer is not None and record.step % self.config.records.every == 0:
            self.writer.write(record)
        if self.monitor.enabled:
            samples = engine.global_samples
            events = [("Train/Samples/train_loss", record.loss, samples), ("Train/Samples/lr", record.lr, samples)]
            if self.parts.scaler is not None:
                events.append(("Train/Samples/loss_scale", record.loss_scale, samples))
            self.monitor.write_events(events)
        every = self.config.steps_per_print
        if every and record.step % every == 0:
            log_once(
                f"step {record.step}: loss {record.loss:.4f}, lr {record.lr:.3g}, grad norm {record.grad_norm:.3f}, "
                f"{record.step_seconds:.3f} s, {record.comm_bytes / 2**20:.1f} MiB sent"
            )
            if self.timers is not None:
                log_once(self.timers.report())
            if self.config.memory_breakdown:
                log_once(f"memory: {record.memory_bytes / 2**20:.0f} MiB")

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None
