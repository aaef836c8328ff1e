"""`engine.optimizer.step()` updates weights, counters, rates and tags like `engine.step()`."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepseek_zero.base.errors import UsageError
from deepseek_zero.compat.deepspeed.engine import DeepSpeedEngine
from tests.compositions import Here, config_of, engines_of_threads
from tests.in_process import Rank, run_ranks

WIDTH, STEPS = 64, 3
Told = tuple[dict[str, Tensor], list[tuple[Any, ...]], int]


def data(step: int, micro: int, rank: int) -> Tensor:
    seed = 100 * step + 10 * micro + rank
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))


def start(here: Here, rank: Rank, stage: int, accumulation: int, **more: Any) -> Any:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    config = config_of(stage, "fp32") | {"gradient_accumulation_steps": accumulation} | more
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    engine = here.start(rank, model, config, DeepSpeedEngine, optimizer=optimizer)
    engine.lr_scheduler = schedule
    return engine


def train(here: Here, rank: Rank, stage: int, accumulation: int, *, directly: bool) -> Told:
    engine, hooks = start(here, rank, stage, accumulation), [0]

    def hook(*_: Any) -> None:
        hooks[0] += 1

    engine.optimizer.register_step_post_hook(hook)
    told = []
    for step in range(STEPS):
        for micro in range(accumulation):
            loss = engine(data(step, micro, rank.index)).square().mean()
            engine.backward(loss)
            if not directly:
                engine.step()
        if directly:
            engine.optimizer.step()
        rate = engine.optimizer.param_groups[0]["lr"]
        told.append(
            (
                engine.global_steps,
                engine.micro_steps,
                engine.global_samples,
                engine.was_step_applied(),
                rate,
            )
        )
    weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.destroy()
    return weights, told, hooks[0]


def on_ranks(body: Any) -> list[Any]:
    with engines_of_threads() as here:
        return run_ranks(2, lambda rank: body(here, rank), reads_in_place=True)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_direct_step_counts_and_moves_the_rates(stage: int, accumulation: int) -> None:
    expected = on_ranks(lambda here, rank: train(here, rank, stage, accumulation, directly=False))
    found = on_ranks(lambda here, rank: train(here, rank, stage, accumulation, directly=True))
    for (weights, told, hooks), (wanted, right, right_hooks) in zip(found, expected, strict=True):
        assert (told, hooks) == (right, right_hooks)
        assert told[-1][0] == STEPS and told[-1][-1] == 0.01 * 0.5**STEPS
        for name, value in wanted.items():
            torch.testing.assert_close(weights[name], value, msg=name)


def test_saves_after_direct_steps_have_tags_of_their_own(tmp_path: Path) -> None:
    def body(here: Here, rank: Rank) -> None:
        engine = start(here, rank, 2, 1)
        for step in range(2):
            engine(data(step, 0, rank.index)).square().mean().backward()
            engine.optimizer.step()
            engine.save_checkpoint(tmp_path)
        engine.destroy()

    on_ranks(body)
    assert {"global_step1", "global_step2"} <= {path.name for path in tmp_path.iterdir()}


def test_a_direct_step_inside_no_sync_is_refused() -> None:
    def body(here: Here, rank: Rank) -> None:
        engine = start(here, rank, 1, 1)
        with pytest.raises(UsageError, match="no_sync"), engine.no_sync():
            engine.optimizer.step()
        engine.destroy()

    on_ranks(body)


def test_an_engine_may_end_before_its_optimizer() -> None:
    def body(here: Here, rank: Rank) -> None:
        engine = start(here, rank, 1, 1)
        optimizer = engine.optimizer
        assert optimizer.take_step().__self__ is engine
        engine.destroy()
        del engine
        gc.collect()
        assert optimizer.take_step() is None

    on_ranks(body)
