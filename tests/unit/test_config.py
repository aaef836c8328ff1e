"""Both entry points accept a random configuration or raise the library's own error.

A foreign error or a warning fails the tests.
"""

from __future__ import annotations

import gc
import logging
import random
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepseek_zero as dz
from deepseek_zero.activations import recompute
from deepseek_zero.api.wrap import configuration_of
from deepseek_zero.base.errors import DeepSeekZeroError, shown
from deepseek_zero.base.log import logger
from deepseek_zero.config import Facts, resolve
from deepseek_zero.config.load import load
from tests import configs
from tests.pairwise import is_full

COUNT = 50_000 if is_full() else 20_000  # per entry point
SECONDS = 45.0  # CPU seconds of this process, for slow machines
BUILT = 150
LONGEST_LINE = 2000


@pytest.fixture(autouse=True)
def _quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(level)


class Findings:
    """Foreign errors by the source line that raised them."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self.answers: Counter[str] = Counter()

    def try_one(self, given: Any, call: Callable[[], Any]) -> bool:
        """Return whether the configuration was accepted."""
        began = time.process_time()
        try:
            call()
        except DeepSeekZeroError as error:
            self.answers["refused"] += 1
            self._judge(str(error), given)
            return False
        except Exception as error:
            place = next(
                f"{at.name}:{at.lineno}"
                for at in reversed(traceback.extract_tb(error.__traceback__))
            )
            ours = [
                at
                for at in traceback.extract_tb(error.__traceback__)
                if "deepseek_zero" in at.filename
            ]
            where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else place
            self.found.setdefault(
                f"{type(error).__name__} at {where}",
                f"{shown(str(error), 200)} of {shown(given, 1000)}",
            )
            return False
        self.answers["taken"] += 1
        if time.process_time() - began > 5:
            self.found.setdefault("slow", shown(given, 1000))
        return True

    def _judge(self, message: str, given: Any) -> None:
        unwritable = "\0" in message or any(
            "\ud800" <= letter <= "\udfff" for letter in set(message)
        )
        if max(map(len, message.splitlines())) > LONGEST_LINE or unwritable:
            self.found.setdefault(
                "an unreadable message", f"{shown(message, 300)} of {shown(given, 500)}"
            )

    def none(self) -> None:
        assert not self.found, "\n".join(f"{place}: {about}" for place, about in self.found.items())


def facts(rng: random.Random) -> Facts:
    return Facts(
        world_size=rng.choice([1, 2, 3]),
        device_type=rng.choice(["cpu", "cuda"]),
        has_bf16=rng.random() < 0.5,
        launched=rng.random() < 0.5,
        hidden_size=rng.choice([None, 8]),
        loader_micro_batch=rng.choice([None, 4]),
        client_optimizer=rng.choice([{}, {"lr": 0.1, "betas": (0.9, 0.99)}]),
    )


def read_at(door: str, rng: random.Random) -> tuple[Any, Callable[[], Any]]:
    if door == "initialize":
        given: Any = configs.made(rng)
        given = configs.written(rng, given) if rng.random() < 0.2 else given
        unknown = "warn" if rng.random() < 0.5 else "error"
        return given, lambda: resolve(load(given, unknown=unknown), facts(rng))  # type: ignore[arg-type]
    given = configs.keywords(rng)
    return given, lambda: resolve(load(configuration_of(given)), facts(rng))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("door", ["initialize", "DeepSeekZeRO3"])
def test_every_configuration_is_accepted_or_raises_the_librarys_error(door: str) -> None:
    rng, findings, ends = random.Random(14), Findings(), time.process_time() + SECONDS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        while findings.answers.total() < COUNT and time.process_time() < ends:
            findings.try_one(*read_at(door, rng))
    findings.none()
    assert (
        min(findings.answers["taken"], findings.answers["refused"]) > 0.1 * findings.answers.total()
    )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x.to(self.first.weight.dtype))))


def step_with(config: Any) -> None:
    engine, *_ = dz.initialize(model=Net(), config=config)
    try:
        engine.backward(engine(torch.ones(4, 4)).float().square().mean())
        if engine.optimizer is not None:
            engine.step()
    finally:
        engine.destroy()


def step_through(keywords: dict[str, Any]) -> None:
    model = Net()
    door = dz.DeepSeekZeRO3(model, **keywords)
    optimizer = dz.optimizer.ZeroOptimizer(model.parameters())
    door(torch.ones(4, 4)).float().square().mean().backward()
    optimizer.step()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("door", ["initialize", "DeepSeekZeRO3"])
def test_an_accepted_configuration_runs_a_step_or_raises_the_librarys_error(door: str) -> None:
    rng, findings, ends = random.Random(15), Findings(), time.process_time() + SECONDS
    tried, is_engine = 0, door == "initialize"
    while tried < BUILT and time.process_time() < ends:
        given = configs.made(rng, meant=0.9) if is_engine else configs.keywords(rng, meant=0.9)
        try:
            resolve(load(given if is_engine else configuration_of(given)), Facts(launched=False))
        except DeepSeekZeroError:
            continue
        tried += 1
        findings.try_one(given, partial(step_with if is_engine else step_through, given))
    findings.none()
    assert findings.answers["taken"] > 0.5 * tried
    gc.collect()
    assert recompute.current() is None, (
        "what an engine says of the process's checkpoints goes with it"
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_optimizers_and_schedules_step_or_are_refused_with_any_arguments() -> None:
    rng, findings, ends = random.Random(16), Findings(), time.process_time() + SECONDS
    while findings.answers.total() < 10 * BUILT and time.process_time() < ends:
        given = configs.trained(rng)
        findings.try_one(given, partial(step_with, given))
    findings.none()
    assert findings.answers["taken"] > 0.1 * findings.answers.total()
