"""The record of a step contains the mean of its losses, for every method of running backward."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepseek_zero
from deepseek_zero.base.errors import UsageError
from deepseek_zero.engine.observer import summary
from deepseek_zero.report.records import JSONL_NAME

MICRO = 2


def engine_of(**more: Any) -> Any:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO,
        "steps_per_print": None,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **more,
    }
    return deepseek_zero.initialize(model=nn.Linear(4, 4), config=config)[0]


def x_of(micro: int) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(micro))


def differentiate(engine: Any, way: str, loss: Tensor) -> None:
    if way == "engine.backward":
        engine.backward(loss)
    elif way == "engine.scale":
        engine.scale(loss).backward()
    elif way == "autograd.backward":
        torch.autograd.backward([loss])
    else:
        loss.backward()


@pytest.mark.parametrize(
    "way", ["engine.backward", "engine.scale", "autograd.backward", "loss.backward"]
)
@pytest.mark.parametrize("is_scaled", [False, True])
def test_the_mean_of_the_losses_is_recorded(way: str, is_scaled: bool) -> None:
    engine = engine_of(
        **({"fp16": {"enabled": True, "initial_scale_power": 4}} if is_scaled else {})
    )
    other = engine_of()
    for _ in range(2):
        seen = []
        for micro in range(MICRO):
            loss = engine(x_of(micro)).float().square().mean()
            seen.append(loss.item())
            differentiate(engine, way, loss)
            torch.ones((), requires_grad=True).backward()  # not part of an engine
            with torch.no_grad():
                other(x_of(9))
            engine.step()
        assert engine.observer.record.loss == pytest.approx(sum(seen) / MICRO, rel=1e-6)
    assert other.observer.record is None
    engine.destroy()
    other.destroy()


def test_two_engines_have_the_losses_of_their_own_backwards() -> None:
    engines = [engine_of(gradient_accumulation_steps=1) for _ in range(2)]
    losses = [engine(x_of(number)).square().mean() for number, engine in enumerate(engines)]
    for engine, loss in zip(reversed(engines), reversed(losses), strict=True):
        loss.backward()
        engine.step()
    assert [engine.observer.record.loss for engine in engines] == [
        pytest.approx(loss.item()) for loss in losses
    ]
    for engine in engines:
        engine.destroy()


def test_a_step_without_a_scalar_has_no_loss(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    engine = engine_of(
        gradient_accumulation_steps=1, records={"path": str(folder)}, csv_monitor=monitor
    )
    output = engine(x_of(0))
    output.backward(torch.ones_like(output))
    engine.step()
    assert engine.observer.record.loss is None
    assert "loss" not in summary(engine.observer.record)
    engine.destroy()
    (line,) = (folder / JSONL_NAME).read_text().splitlines()
    assert json.loads(line)["loss"] is None
    assert not list(tmp_path.glob("job/*train_loss*"))


def test_a_nan_loss_is_recorded() -> None:
    engine = engine_of(gradient_accumulation_steps=1)
    (engine(x_of(0)).square().mean() * math.nan).backward()
    engine.step()
    assert math.isnan(engine.observer.record.loss)
    engine.destroy()


@pytest.mark.parametrize("loss", [3.0, None])
def test_a_loss_that_is_no_tensor_is_not_scaled(loss: Any) -> None:
    with pytest.raises(UsageError, match=f"engine.scale got a {type(loss).__name__}"):
        engine_of().scale(loss)


def test_tokens_are_integers_and_masks_are_not() -> None:
    observer = engine_of().observer
    observer.saw((x_of(0), torch.ones(2, 4, dtype=torch.bool)))
    assert observer.micro_tokens is None
    observer.saw((torch.ones(2, dtype=torch.bool), torch.ones(2, 7, dtype=torch.long)))
    assert observer.micro_tokens == 14
