"""Report the training of an engine: timers, records, monitor events, lines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from .. import extensions
from ..base.device import allocated_bytes
from ..base.errors import StorageError
from ..base.log import log_once, logger
from ..base.mesh import Mesh
from ..base.nested import is_of_integers
from ..base.quantities import format_bytes, format_count, format_seconds
from ..base.world import is_rank_zero
from ..optim.sharded import ShardedOptimizer
from ..planner.plan import Plan
from ..report.flops import ForwardCost, flops_table
from ..report.monitor import MonitorMaster
from ..report.records import RecordWriter, StepRecord
from ..report.timers import Timers
from ..sharding.runtime import Runtime

if TYPE_CHECKING:  # as in engine.py
    from ..config import Config

PLAN_NAME = "plan.txt"


class Observed(Protocol):
    """Interface of an engine whose steps an `Observer` reports."""

    module: nn.Module
    mesh: Mesh
    optimizer: ShardedOptimizer | None
    global_steps: int
    global_samples: int

    @property
    def runtime(self) -> Runtime:
        """The runtime of the sharded model, with its units and meters."""
        ...

    def plan(self) -> Plan:
        """The current plan of this rank, with the expected bytes of its states."""
        ...


def summary(record: StepRecord) -> str:
    """Return a one-line summary of a step for the log; unknown values are left out."""
    loss = "" if record.loss is None else f"loss {record.loss:.4f}, "
    pace = ""
    if record.tokens_per_second:
        pace = f", {format_count(record.tokens_per_second)} tokens/s"
    return (
        f"step {record.step}: {loss}lr {record.lr:.3g}, grad norm {record.grad_norm:.3f}, "
        f"{format_seconds(record.step_seconds)}{pace}, {format_bytes(record.memory_bytes)} in "
        f"memory, {format_bytes(record.comm_bytes)} sent"
    )


class Observer:
    """Writes the reports about an engine's steps on rank 0. Other ranks only run timers.

    Args:
        config: The run's configuration, which selects the reports.
        device: The training device, on which timers run.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.timers = Timers(device) if config.wall_clock_breakdown else None
        path = config.records.path
        try:
            self.monitor = MonitorMaster(config)
            self.writer = RecordWriter(Path(path)) if path and is_rank_zero() else None
        except OSError as error:
            raise StorageError(
                f"the run's records cannot be written: {str(error)[:300]}.",
                "records.path, or the output_path of a monitor, is a directory that cannot be "
                "created or written.",
                "set another directory, or disable it.",
            ) from error
        self._record: StepRecord | None = None
        self._unread: list[Tensor] = []  # losses of the last step that are not in its record yet
        self._losses: list[Tensor] = []
        # Profile of the forward that flops_profiler selects, after it has run
        self.profile: ForwardCost | None = None
        self._began = time.perf_counter()
        self._sent = self._tokens = 0
        self.micro_tokens: int | None = None  # tokens of the last micro-batch
        if config.log_level is not None:
            logger.setLevel(config.log_level.upper())

    @property
    def record(self) -> StepRecord | None:
        """The record of the last step.

        On a GPU its loss is read here and not earlier, so that the host does not wait for the
        device in every step.
        """
        self._read_loss()
        return self._record

    def _read_loss(self) -> None:
        if self._record is not None and self._unread:
            loss = float(torch.stack([each.float().reshape(()) for each in self._unread]).mean())
            self._record = replace(self._record, loss=loss)
            self._unread = []

    def planned(self, plan: Plan) -> None:
        """Write the plan as a text file next to the step records.

        It is called again after the precision of a unit has changed. A file that cannot be written
        causes a warning.
        """
        if self.writer is not None:
            text = "\n".join(plan.explain()) + "\n"
            path = self.writer.folder / PLAN_NAME
            try:
                path.write_text(text, encoding="utf-8")
            except OSError as error:  # only this rank writes it, and the others go on
                logger.warning(f"{path} cannot be written ({str(error)[:300]})")

    def timed(self, name: str) -> AbstractContextManager[Any]:
        """Time a part of the step if `wall_clock_breakdown` is on."""
        return self.timers.timed(name) if self.timers is not None else nullcontext()

    def profiled(self, engine: Observed) -> AbstractContextManager[Any]:
        """Count the operations of one forward on rank 0.

        `flops_profiler` sets the number of steps before it.
        """
        wanted = self.config.flops_profiler
        is_due = (
            wanted.enabled
            and self.profile is None
            and engine.global_steps >= wanted.profile_step
            and is_rank_zero()
        )
        return self._profile(engine) if is_due else nullcontext()

    @contextmanager
    def _profile(self, engine: Observed) -> Iterator[None]:
        wanted = self.config.flops_profiler
        self.profile = cost = ForwardCost(engine.module)
        cost.start()
        try:
            yield
        finally:
            cost.stop()
        table = flops_table(
            cost,
            wanted.profile_step,
            wanted.recompute_fwd_factor,
            wanted.module_depth,
            wanted.detailed,
        )
        if wanted.output_file is None:
            logger.info(table)
            return
        try:
            Path(wanted.output_file).write_text(table + "\n", encoding="utf-8")
        except OSError as error:  # a failed report must not end the run
            logger.warning(
                f"flops_profiler.output_file cannot be written ({str(error)[:300]}):\n{table}"
            )

    def saw(self, args: tuple[Any, ...]) -> None:
        """Count the tokens of a micro-batch.

        They are the elements of the first integer tensor among the arguments. A boolean tensor is
        a mask.
        """
        for value in args:
            if is_of_integers(value):
                self._tokens += value.numel()
                self.micro_tokens = value.numel()
                return

    def loss(self, loss: Tensor) -> None:
        """Store the loss of a micro-batch for `record`."""
        if loss.numel() == 1:
            self._losses.append(loss.detach())

    def stepped(self, engine: Observed) -> None:
        """Record a finished step: its time, tokens, loss, learning rate and memory."""
        optimizer = engine.optimizer
        assert optimizer is not None and optimizer.last is not None
        now = time.perf_counter()
        seconds = now - self._began
        self._began = now
        total = engine.runtime.comm.meter.total_bytes()
        sent = total - self._sent
        self._sent = total
        self._unread = self._losses
        self._losses = []
        tokens = self._tokens
        self._tokens = 0
        promoted = 0
        is_replanned = False
        for policy in optimizer.policies:
            if isinstance(policy, extensions.AdaptivePrecision):
                promoted = len(policy.promoted)
                is_replanned = policy.changed
        lr = 0.0
        if optimizer.inner.param_groups:
            lr = float(optimizer.inner.param_groups[0]["lr"])
        self._record = StepRecord(
            step=engine.global_steps,
            loss=None,
            lr=lr,
            grad_norm=optimizer.last.norm,
            tokens_per_second=tokens * engine.mesh.reduce_size / seconds,
            memory_bytes=allocated_bytes(self.device),
            comm_bytes=sent,
            step_seconds=seconds,
            loss_scale=optimizer.scaler.scale if optimizer.scaler is not None else 1.0,
            skipped=optimizer.last.overflow,
            promoted=promoted,
        )
        if self.device.type == "cpu":  # no device to wait for, so the loss is read at once
            self._read_loss()
        self._tell(engine)
        if is_replanned:
            self.planned(engine.plan())

    def _tell(self, engine: Observed) -> None:
        step = engine.global_steps
        every = self.config.steps_per_print
        writes = self.writer is not None and step % self.config.records.every == 0
        prints = bool(every) and step % (every or 1) == 0
        if not (writes or prints or self.monitor.enabled):
            return
        record = self.record
        assert record is not None
        if writes and self.writer is not None:
            try:
                self.writer.write(record)
            except OSError as error:  # only this rank writes, and the others go on
                logger.warning(
                    f"records of step {step} and later ones are not written to "
                    f"{self.writer.folder} ({str(error)[:300]})"
                )
                self._close_records()
        if self.monitor.enabled:
            values = {"train_loss": record.loss, "lr": record.lr}
            if engine.optimizer is not None and engine.optimizer.scaler is not None:
                values["loss_scale"] = record.loss_scale
            self.monitor.write_events(
                [
                    (f"Train/Samples/{name}", value, engine.global_samples)
                    for name, value in values.items()
                    if value is not None
                ]
            )
        if prints:
            log_once(summary(record))
            if self.timers is not None:
                log_once(self.timers.report())
            if self.config.memory_breakdown:
                log_once(f"memory: {format_bytes(record.memory_bytes)}")

    def close(self) -> None:
        """Close the monitors, which write their remaining records."""
        self.monitor.close()
        self._close_records()

    def _close_records(self) -> None:
        if self.writer is not None:
            with suppress(OSError):  # on a full disk, the last lines cannot be written
                self.writer.close()
            self.writer = None
