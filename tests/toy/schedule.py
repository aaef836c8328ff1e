"""Record the host's stream operations on the toy device during a step, and replay them with a time
model.

The toy device computes while the host waits, so its real times are meaningless. It logs the order
in which the host submits computation and copies, records events, waits for them, and updates.
`replay` simulates this log with streams that run concurrently with the host: each span starts when
its stream is free, after the events that the stream waits for, and not before the host has
submitted it. The duration of a span is computed from its size (`Speeds`).
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepseek_zero
from deepseek_zero.base.work import Work
from deepseek_zero.optim.inner_step import Decision
from deepseek_zero.optim.master_shard import Tile
from deepseek_zero.optim.updater import Updater
from deepseek_zero.tiers.tier import CopyEvent, StagedLanding, StagedTile
from tests import toy

COMPUTING = "computing"
DOWN = "copies to the host"
UPDATES = "updates on the host"
UP = "copies to the device"
ROWS = (COMPUTING, DOWN, UPDATES, UP)
ON_HOST = -1  # used in place of a stream number

Logged = tuple[str, int, int, bool, str]  # what, stream, bytes or event, whether to the host, text


@dataclass(frozen=True)
class Speeds:
    """Durations of spans.

    Attributes:
        forward: Seconds per parameter of a unit's forward; its backward takes twice as long.
        copy: Seconds per byte.
        update: Seconds per parameter of an update.
    """

    forward: float
    copy: float
    update: float


@dataclass(frozen=True)
class Phase:
    """Work of one unit.

    Attributes:
        what: "forward", "backward", "gradient", "weight" or "update"; empty outside of a unit.
        unit: Number of the unit, from 1.
        step: Number of the step.
    """

    what: str
    unit: int
    step: int


NOTHING = Phase("", 0, 0)


@dataclass(frozen=True)
class Span:
    """Work of one row from `start` to `stop`, in seconds.

    Attributes:
        row: One of `ROWS`.
        what: As in `Phase`.
        unit: Number of the unit, from 1.
        start: Time at which the work starts.
        stop: Time at which the work ends.
    """

    row: str
    what: str
    unit: int
    start: float
    stop: float


class _Mark(torch.autograd.Function):
    """An identity that calls one function in forward and another one in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, in_forward: Callable[[], None], in_backward: Callable[[], None]
    ) -> Tensor:
        ctx.in_backward = in_backward
        in_forward()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.in_backward()
        return grads[0], None, None


class Block(nn.Module):
    """A unit that marks in the log where its forward and its backward begin and end."""

    def __init__(self, number: int, width: int, mark: Callable[[str], None]) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self._number = number
        self._mark = mark

    def forward(self, x: Tensor) -> Tensor:
        number = self._number
        begin, end = f"begin forward {number}", f"end forward {number}"
        last, first = f"end backward {number}", f"begin backward {number}"
        x = _Mark.apply(x, lambda: self._mark(begin), lambda: self._mark(last))
        x = x + self.down(torch.nn.functional.gelu(self.up(x)))
        return _Mark.apply(x, lambda: self._mark(end), lambda: self._mark(first))


class Blocks(nn.Module):
    """A model of equal units."""

    def __init__(self, units: int, width: int, mark: Callable[[str], None]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(number + 1, width, mark) for number in range(units))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@contextmanager
def marked(engine: Any, mark: Callable[[str], None]) -> Iterator[None]:
    """Mark the unit of each update and of each copy that begins in this block."""
    groups = engine.parts.runtime.trained_groups

    def unit_of(name: str) -> int:
        return int(name.split(".")[1]) + 1

    def unit_of_gradient(landing: StagedLanding) -> int:
        for group in groups:
            buffer = group.gradient.sum.buffer
            if buffer is not None and buffer.storage is landing.storage:
                return unit_of(group.members[0].name)
        raise AssertionError("a copy of no gradient")

    def unit_of_weight(mirror: StagedTile) -> int:
        for group in groups:
            if group.weight.memory.data_ptr() == mirror.on_device.data_ptr():
                return unit_of(group.members[0].name)
        raise AssertionError("a copy of no weight")

    def update(updater: Updater, tile: Tile, decision: Decision) -> None:
        originals[0](updater, tile, decision)
        for _, shard in tile:
            mark(f"update {unit_of(shard.names[0])} {shard.numel}")

    def send(landing: StagedLanding) -> None:
        mark(f"copy gradient {unit_of_gradient(landing)}")
        originals[1](landing)

    def fetch(mirror: StagedTile, low: int, high: int, after: CopyEvent) -> Work:
        mark(f"copy weight {unit_of_weight(mirror)}")
        return originals[2](mirror, low, high, after)

    def store(mirror: StagedTile, low: int, high: int) -> Work:
        mark(f"copy weight {unit_of_weight(mirror)}")
        return originals[3](mirror, low, high)

    methods = (Updater.update, StagedLanding.send, StagedTile.fetch, StagedTile.store)
    originals: tuple[Callable[..., Any], ...] = methods
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Updater, "update", update)
        patch.setattr(StagedLanding, "send", send)
        patch.setattr(StagedTile, "fetch", fetch)
        patch.setattr(StagedTile, "store", store)
        yield


def record(steps: int, units: int = 6, width: int = 64) -> tuple[list[Logged], int]:
    """Train a model with the optimizer on the host and clipping, and log the last steps.

    Args:
        steps: Number of logged steps, after two others.
        units: Units of the model.
        width: Width of its layers.

    Returns:
        The log, and the number of parameters of a unit.
    """
    library = toy.register(os.environ[toy.LIBRARY_VARIABLE])
    numel = 8 * width * width + 5 * width
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.01,
        "steps_per_print": None,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": numel // 4,
            "stage3_param_persistence_threshold": 0,
            "offload_optimizer": {"device": "cpu"},
        },
    }
    torch.manual_seed(0)
    model = Blocks(units, width, library.mark)
    engine = deepseek_zero.initialize(model=model, config=config)[0]
    with marked(engine, library.mark):
        for step in range(-2, steps):
            if step == 0:
                library.log_steps()
            library.mark(f"begin step {step}")
            x = torch.randn(2, 8, width).to(engine.device, torch.bfloat16)
            loss = engine(x).float().square().mean()
            engine.backward(loss)
            engine.step()
    log = library.logged_steps()
    engine.destroy()
    return log, numel


def replay(log: Sequence[Logged], numel: int, speeds: Speeds) -> list[Span]:
    """Return the spans of every stream.

    Args:
        log: The log of the toy device, with the marks of `record`.
        numel: Parameters of a unit.
        speeds: The durations of spans.
    """
    operations = _operations_by_phase(log)
    whole = {"forward": numel * speeds.forward, "backward": 2 * numel * speeds.forward}
    # time at which a stream has finished its work
    free: defaultdict[int, float] = defaultdict(float)
    events: dict[int, float] = {}
    spans: list[Span] = []
    phase = copied = NOTHING

    def run(stream: int, row: str, of: Phase, seconds: float) -> None:
        start = max(free[stream], free[ON_HOST])
        free[stream] = start + seconds
        if of.what:
            spans.append(Span(row, of.what, of.unit, start, free[stream]))

    for what, stream, value, is_to_host, text in log:
        if what == "mark":
            verb, *rest = text.split()
            if verb == "update":
                seconds = int(rest[1]) * speeds.update
                run(ON_HOST, UPDATES, Phase("update", int(rest[0]), 0), seconds)
            elif verb == "copy":
                copied = Phase(rest[0], int(rest[1]), 0)
            else:
                phase = _phase_after(phase, text)
        elif what == "compute":
            seconds = whole[phase.what] / operations[phase] if phase.what else 0.0
            run(stream, COMPUTING, phase, seconds)
        elif what == "copy":
            run(stream, DOWN if is_to_host else UP, copied, value * speeds.copy)
        elif what == "record":
            events[value] = free[stream]
        elif what == "wait":
            free[stream] = max(free[stream], events.get(value, 0.0))
        elif what == "host waits":
            free[ON_HOST] = max(free[ON_HOST], events.get(value, 0.0))
        elif what == "host waits for stream":
            free[ON_HOST] = max(free[ON_HOST], free[stream])
    return spans


def _phase_after(phase: Phase, text: str) -> Phase:
    """Return the phase after a mark "begin ..." or "end ..."."""
    verb, what, number = text.split()
    if what == "step":
        return Phase("", 0, int(number))
    return Phase(what, int(number), phase.step) if verb == "begin" else Phase("", 0, phase.step)


def _operations_by_phase(log: Sequence[Logged]) -> Counter[Phase]:
    """Return how many operations of the device each phase of computing has."""
    found = Counter[Phase]()
    phase = NOTHING
    for what, _, _, _, text in log:
        if what == "mark" and text.startswith(("begin", "end")):
            phase = _phase_after(phase, text)
        found[phase] += what == "compute"
    return found


def from_first_backward(spans: Sequence[Span]) -> list[Span]:
    """Return the spans that start with or after the first backward, which starts at 0."""
    began = min(span.start for span in spans if span.what == "backward")
    return [
        replace(span, start=span.start - began, stop=span.stop - began)
        for span in spans
        if span.start >= began
    ]


def overlapped_share(spans: Sequence[Span], row: str) -> float:
    """Return the share of a row's time in which the device computes.

    Args:
        spans: The spans of a replay.
        row: One of `ROWS`.
    """
    computing = [(span.start, span.stop) for span in spans if span.row == COMPUTING]
    seconds = hidden = 0.0
    for span in spans:
        if span.row != row:
            continue
        seconds += span.stop - span.start
        for start, stop in computing:  # computing spans do not overlap
            hidden += max(0.0, min(stop, span.stop) - max(start, span.start))
    return hidden / seconds
