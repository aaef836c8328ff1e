"""Every optimizer on shards gives the result on full parameters, also if it needs full tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import deepseek_zero as dz
from deepseek_zero.optimizers.registry import resolve_optimizer

RANKS = 2


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 21) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 23)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(0, 23, (3, 9), generator=generator)
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def plain(name: str, params: dict[str, Any], steps: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Net()
    spec = resolve_optimizer(name, params)
    optimizer = spec.build(spec.parameter_groups(model))
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(RANKS):
            (loss_of(model, step, rank) / RANKS).backward()
        optimizer.step()
    return {key: value.clone() for key, value in model.state_dict().items()}


CASES: dict[str, dict[str, Any]] = {
    "Adam": {"lr": 1e-2},
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1},
    "SGD": {"lr": 1e-1, "momentum": 0.9},
    "Adagrad": {"lr": 1e-2},
    "RMSprop": {"lr": 1e-3},
    "Lion": {"lr": 1e-3, "weight_decay": 0.1},
    "Lamb": {"lr": 1e-2, "weight_decay": 0.1},
    "Muon": {"lr": 1e-2},
}


@pytest.mark.ranks(RANKS)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_an_optimizer_over_slices_matches_the_whole(name: str, stage: int) -> None:
    torch.manual_seed(0)
    engine, *_ = dz.initialize(
        model=Net(),
        config={
            "train_micro_batch_size_per_gpu": 3,
            "steps_per_print": None,
            "optimizer": {"type": name, "params": CASES[name]},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        },
    )
    for step in range(3):
        engine.backward(loss_of(engine, step, torch.distributed.get_rank()))
        engine.step()
    expected = plain(name, CASES[name], steps=3)
    for key, value in engine.module.state_dict().items():
        torch.testing.assert_close(
            value, expected[key], atol=2e-5, rtol=2e-4, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.ranks(RANKS)
def test_groups_keep_their_own_learning_rate_and_decay() -> None:
    torch.manual_seed(0)
    model = Net()
    decay = [param for name, param in model.named_parameters() if name.endswith("weight")]
    rest = [param for name, param in model.named_parameters() if not name.endswith("weight")]
    groups = [
        {"params": decay, "weight_decay": 0.5, "lr": 1e-2},
        {"params": rest, "weight_decay": 0.0, "lr": 0.0},
    ]
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    engine, *_ = dz.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups),
        config={
            "train_micro_batch_size_per_gpu": 3,
            "steps_per_print": None,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        },
    )
    engine.backward(loss_of(engine, 0, torch.distributed.get_rank()))
    engine.step()
    for name, value in engine.module.state_dict().items():
        assert torch.equal(value, before[name]) != name.endswith("weight"), name
