"""Loading restores hyper-parameters on all ranks, including ranks without a shard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepseek_zero.compat.deepspeed.engine import DeepSpeedEngine
from tests.compositions import Here, config_of, engines_of_threads
from tests.in_process import Rank, run_ranks

RANKS = 2


def build(
    here: Here, rank: Rank, stage: int, layout: str, width: int, *, freezes: bool = False
) -> Any:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
    if freezes:
        model.requires_grad_(False)
        model[2].bias.requires_grad_(True)
    groups = [
        {"params": list(model[0].parameters()), "lr": 0.01, "name": "first"},
        {"params": list(model[2].parameters()), "lr": 0.02, "weight_decay": 0.0},
    ]
    config = config_of(stage, "fp32") | {"gradient_accumulation_steps": 1}
    if layout == "deepspeed":
        config["checkpoint"] = {"layout": "deepspeed"}
    return here.start(
        rank, model, config, DeepSpeedEngine, optimizer=torch.optim.AdamW(groups, lr=0.3)
    )


def step(engine: Any, number: int, rank: int, width: int) -> None:
    x: Tensor = torch.randn(2, width, generator=torch.Generator().manual_seed(10 * number + rank))
    engine.backward(engine(x).square().mean())
    engine.step()


def hypers(engine: Any) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in each.items() if key != "params"}
        for each in engine.optimizer.param_groups
    ]


@pytest.mark.parametrize("width", [8, 64])
@pytest.mark.parametrize(
    ("stage", "layout"), [(0, ""), (1, ""), (3, ""), (1, "deepspeed"), (3, "deepspeed")]
)
def test_edited_groups_are_restored_on_every_rank(
    tmp_path: Path, stage: int, layout: str, width: int
) -> None:
    def body(here: Here, rank: Rank) -> tuple[list[dict[str, Any]], list[dict[str, Any]], bool]:
        engine = build(here, rank, stage, layout, width)
        step(engine, 0, rank.index, width)
        engine.optimizer.param_groups[0].update(lr=0.1, betas=(0.5, 0.9), weight_decay=0.5)
        saved = hypers(engine)
        engine.save_checkpoint(tmp_path)
        engine.destroy()
        again = build(here, rank, stage, layout, width)
        again.load_checkpoint(tmp_path)
        found = (
            hypers(again),
            saved,
            any(shards for shards in again.optimizer.shard_set.shards_by_group),
        )
        step(again, 1, rank.index, width)
        again.destroy()
        return found

    with engines_of_threads() as here:
        results = run_ranks(RANKS, lambda rank: body(here, rank), reads_in_place=True)
    for found, saved, _ in results:
        assert found == saved and found[0]["lr"] == 0.1 and found[0]["betas"] == (0.5, 0.9)
    if width == 8 and stage > 0:
        assert [has_shards for *_, has_shards in results] == [True, False], (
            "a rank without a slice is what this tests"
        )


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_that_are_unfrozen_after_a_load_have_the_loaded_rates(
    tmp_path: Path, stage: int
) -> None:
    width = 64

    def body(here: Here, rank: Rank) -> list[Tensor]:
        engine = build(here, rank, stage, "", width, freezes=True)
        step(engine, 0, rank.index, width)
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0
            group["weight_decay"] = 0.0
        engine.save_checkpoint(tmp_path)
        engine.destroy()
        again = build(here, rank, stage, "", width, freezes=True)
        again.load_checkpoint(tmp_path)
        again.module.requires_grad_(True)
        step(again, 1, rank.index, width)
        weights = [value.clone() for value in again.module.state_dict().values()]
        again.destroy()
        return weights

    torch.manual_seed(3)
    untouched = nn.Linear(width, width)
    with engines_of_threads() as here:
        found = run_ranks(RANKS, lambda rank: body(here, rank), reads_in_place=True)
    for weights in found:  # the learning rates are zero
        assert torch.equal(weights[0], untouched.weight) and torch.equal(weights[1], untouched.bias)
