"""Long work reports its progress and rate in log lines or, on a terminal, in one line."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import deepseek_zero
from deepseek_zero.base import progress
from deepseek_zero.base.progress import LongWork
from deepseek_zero.tiers.tier import Tier
from tests.models import Gpt, seeded


class Clock:
    """A clock that the test sets; each reading advances it by `step` seconds."""

    def __init__(self, step: float = 0.0) -> None:
        self.now, self.step = 1000.0, step

    def monotonic(self) -> float:
        self.now += self.step
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(progress.logger, "propagate", True)
    caplog.set_level(logging.INFO, "deepseek_zero")
    monkeypatch.setattr(progress.logger, "info", lambda line: found.append(line))
    found: list[str] = []
    return found


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_short_work_shows_no_progress(clock: Clock, lines: list[str]) -> None:
    with LongWork("building", 100) as work:
        for _ in range(100):
            clock.now += 0.019
            work.advance(1)
    assert not lines


def test_a_log_gets_a_line_every_few_seconds_with_rate_and_remaining_time(
    clock: Clock, lines: list[str]
) -> None:
    with LongWork("writing weights", 40 << 30) as work:
        for _ in range(40):
            clock.now += 1.0
            work.advance(1 << 30)
    assert lines == [
        "writing weights: 2.00 GiB of 40.0 GiB (5%), 1.00 GiB/s, 38.0 s left",
        "writing weights: 12.0 GiB of 40.0 GiB (30%), 1.00 GiB/s, 28.0 s left",
        "writing weights: 22.0 GiB of 40.0 GiB (55%), 1.00 GiB/s, 18.0 s left",
        "writing weights: 32.0 GiB of 40.0 GiB (80%), 1.00 GiB/s, 8.00 s left",
        "writing weights: 40.0 GiB of 40.0 GiB (100%), 1.00 GiB/s, 40.0 s in all",
    ]


def test_a_terminal_has_one_line_that_is_rewritten(
    clock: Clock, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    for name in ("stderr", "__stderr__"):
        monkeypatch.setattr(sys, name, terminal)
    with pytest.raises(ValueError), LongWork("building", 10, "parameters") as work:
        for _ in range(8):
            clock.now += 1.0
            work.advance(1)
        raise ValueError
    written = terminal.getvalue()
    assert not lines and written.count("\n") == 1 and written.endswith("\n"), (
        "whatever comes next has a line of its own"
    )
    assert written.count("\r") == 7
    assert (
        "\rbuilding: 8 parameters of 10 parameters (80%), 1 parameters/s, 2.00 s left\x1b[K\n"
        in written
    )


def test_a_terminal_that_is_gone_is_no_error(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    class GoneTerminal(Terminal):
        def write(self, text: str) -> int:
            if len(self.getvalue()) > 0:
                raise OSError(5, "Input/output error")
            return super().write(text)

    screen = GoneTerminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(sys, "__stderr__", screen)
    with LongWork("reading", 100) as work:
        clock.now += progress.QUIET_SECONDS
        work.advance(50)
        work.advance(50)
    assert work.done == 100


def test_other_ranks_log_nothing(
    clock: Clock, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "is_rank_zero", lambda: False)
    with LongWork("building", 10) as work:
        clock.now += 60.0
        work.advance(5)
    assert not lines


@pytest.mark.parametrize("tier", ["device", "cpu", "nvme", "auto"])
def test_an_engine_shows_each_long_part_of_its_start_its_first_step_and_its_files(
    tier: str, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "time", Clock(step=11.0))
    place = {"device": tier, "nvme_path": str(tmp_path / "states")}
    zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}
    if tier != "device":
        zero |= {"offload_param": place, "offload_optimizer": place}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": zero,
    }
    if tier == "auto":
        config["memory_budget"] = {"device": 3_000_000, "host": 500_000}
    engine = deepseek_zero.initialize(model=seeded(Gpt, width=96), config=config)[0]
    tokens = torch.zeros(2, 7, dtype=torch.long)
    shown = {line.partition(":")[0] for line in lines}
    start = {"building the engine"}
    if tier == "cpu":  # with "auto", only shared weights are on the host
        start.add("reserving host memory")
    assert shown == start
    if tier == "auto":
        places = engine.runtime.settings.unit_tiers
        used = {each.weights for each in places} | {each.states for each in places}
        assert used == set(Tier), "the device, the host and the disk"
    for _ in range(2):
        engine.backward(engine(tokens, tokens))
        engine.step()
    engine.state_dict()  # runs the deferred updates
    shown = {line.partition(":")[0] for line in lines}
    assert shown == {*start, "first forward pass", "first backward pass", "first update"}
    assert sum("100%" in line for line in lines if line.startswith("first update")) == 1
    lines.clear()
    engine.backward(engine(tokens, tokens))
    engine.step()
    engine.state_dict()
    assert not lines, "a step is not long work"
    engine.save_checkpoint(str(tmp_path / "checkpoint"), wait=True)
    engine.load_checkpoint(str(tmp_path / "checkpoint"))
    engine.export(str(tmp_path / "weights"))
    engine.load_weights(str(tmp_path / "weights"))
    shown = {line.partition(":")[0] for line in lines}
    assert shown >= {
        "writing the checkpoint",
        "checking the checkpoint",
        "reading the checkpoint",
        "writing weights",
    }
    assert all("of" in line and "/s" in line for line in lines)
    engine.destroy()
