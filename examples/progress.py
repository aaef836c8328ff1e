"""Print the progress of a training run.

A terminal shows a progress bar. Terminals and logs get one line every few steps; logs contain no
control characters. Only rank 0 prints.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from deepseek_zero.base.quantities import format_bytes, format_count, format_seconds
from deepseek_zero.base.world import is_rank_zero
from deepseek_zero.report.records import StepRecord


@dataclass
class _Window:
    """Sums since the last printed line, so that a line covers all of its steps."""

    steps: int = 0
    trained: int = 0
    loss: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, record: StepRecord) -> None:
        self.steps += 1
        self.tokens += record.tokens_per_second * record.step_seconds
        self.seconds += record.step_seconds
        if not record.skipped and record.loss is not None:
            self.trained += 1
            self.loss += record.loss

    @property
    def mean_loss(self) -> float | None:
        return self.loss / self.trained if self.trained else None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class Progress:
    """Print progress over `total_steps`.

    A line is printed at the first and the last step, and every `every` steps. Use it as a context
    manager, and call `step` once per optimizer step.

    Attributes:
        total_steps: Number of steps of the run.
        every: Interval of the printed lines in steps.
        console: Where to print; None means standard output.
    """

    total_steps: int
    every: int = 10
    console: Console | None = None
    _window: _Window = field(default_factory=_Window, init=False)
    _skipped: int = field(default=0, init=False)
    _bar: Bar | None = field(default=None, init=False)
    _task: TaskID = field(default=TaskID(0), init=False)

    def __post_init__(self) -> None:
        self._started = time.monotonic()
        self._console = (self.console or Console()) if is_rank_zero() else None

    def __enter__(self) -> Progress:
        self._started = time.monotonic()
        if self._console and self._console.is_terminal and not self._console.is_dumb_terminal:
            self._bar = _bar(self._console)
            self._task = self._bar.add_task("training", total=self.total_steps, loss="", speed="")
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def step(self, record: StepRecord) -> None:
        """Advance to `record.step`; the first step is 1."""
        if self._console is None:
            return
        self._window.add(record)
        self._skipped += record.skipped
        if self._bar is not None:
            speed = f"{format_count(record.tokens_per_second)} tok/s"
            loss = "" if record.loss is None else f"loss {record.loss:.3f}"
            self._bar.update(self._task, completed=record.step, loss=loss, speed=speed)
        if (
            record.step in (1, self.total_steps)
            or record.step % self.every == 0
            or record.held_out_loss is not None
        ):
            self.print_line(self._line(record))
            self._window = _Window()

    def print_line(self, text: str) -> None:
        """Print an additional line above the bar, on rank 0 only."""
        if self._console is not None:
            self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def _line(self, record: StepRecord) -> str:
        width = len(str(self.total_steps))
        mean = self._window.mean_loss
        parts = [
            f"step {record.step:>{width}}/{self.total_steps}",
            *([] if mean is None else [f"loss {mean:.3f}"]),
            f"lr {record.lr:.2e}",
            f"grad norm {record.grad_norm:.2f}",
            f"{format_count(self._window.tokens_per_second)} tok/s",
            f"memory {format_bytes(record.memory_bytes)}",
            f"comm {format_bytes(record.comm_bytes)}",
        ]
        if record.held_out_loss is not None:
            place = 1 if mean is None else 2
            parts.insert(place, f"held-out {record.held_out_loss:.3f}")
        if record.loss_scale != 1.0:
            parts.append(f"loss scale {record.loss_scale:g}")
        if self._skipped:
            parts.append(f"skipped {self._skipped}")
        parts.append(f"elapsed {format_seconds(time.monotonic() - self._started)}")
        return "  ".join(parts)


def _bar(console: Console) -> Bar:
    return Bar(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=None, complete_style="cyan", finished_style="green"),
        MofNCompleteColumn(),
        TextColumn("[cyan]{task.fields[loss]}"),
        TextColumn("[dim]{task.fields[speed]}"),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        console=console,
        refresh_per_second=4,  # ten would use a noticeable share of a core that is also training
        expand=True,
    )
