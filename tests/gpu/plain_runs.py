"""Train a small model by plain PyTorch and by an engine.

Run as a program, it is one rank of an engine's run. It does not need pytest, because
benchmarks/gpu/smoke.py and shared.py use it, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import deepseek_zero as dz
from deepseek_zero.precision.policy import cast_master

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 96, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 61)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class LossNet(Net):
    """Return the loss in forward, as a model of pipeline stages must."""

    @property
    def dummy_inputs(self) -> dict[str, torch.Tensor]:
        """Return example arguments of forward, from which the model is split into stages."""
        tokens, targets = batch(0)
        return {"tokens": tokens, "targets": targets}

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        logits = super().forward(tokens)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def config(stage: int, dtype: str, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": None,
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
        },
        **more,
    }


def batch(step: int, rank: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, 61, (4, 17), generator=generator).to(DEVICE)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, step: int, rank: int = 0) -> torch.Tensor:
    x, y = batch(step, rank)
    return nn.functional.cross_entropy(model(x).float().flatten(0, 1), y.flatten())


def adamw_of(params: Iterable[nn.Parameter], place: str) -> torch.optim.AdamW:
    """Return AdamW as the library runs it at this place: fused on the host."""
    return torch.optim.AdamW(params, lr=1e-2, fused=place == "cpu", foreach=False)


def plain_run(dtype: str, ranks: int, steps: int, place: str = "none") -> list[torch.Tensor]:
    """Train on every rank's micro-batches in one process.

    Gradients are summed in rank order in fp32 and rounded once. place: "cpu" updates on the host.
    """
    torch.manual_seed(0)
    model = Net().to(DEVICE)
    home = torch.device("cpu") if place == "cpu" else DEVICE
    masters = [nn.Parameter(param.detach().to(home, copy=True)) for param in model.parameters()]
    low = torch.bfloat16 if dtype == "bf16" else torch.float32

    def refresh() -> None:
        for param, master in zip(model.parameters(), masters, strict=True):
            weight = torch.empty_like(master, dtype=low)
            cast_master(master.detach().reshape(-1), weight.view(-1))
            param.data = weight.to(DEVICE)

    optimizer = adamw_of(masters, place)
    refresh()
    for step in range(steps):
        grads = [
            torch.autograd.grad(loss_of(model, step, rank), list(model.parameters()))
            for rank in range(ranks)
        ]
        for number, master in enumerate(masters):
            total = grads[0][number].float().clone()
            for rank in range(1, ranks):
                total += grads[rank][number]
            master.grad = (total / ranks).to(low).to(home).float()
        optimizer.step()
        refresh()
    return [param.detach().clone() for param in model.parameters()]


def engine_run(
    stage: int, dtype: str, steps: int, rank: int = 0, place: str = "none"
) -> list[torch.Tensor]:
    """Train with an engine. place: device of the optimizer states."""
    torch.manual_seed(0)
    model = Net().to(DEVICE)
    optimizer = adamw_of(model.parameters(), place)
    settings = config(stage, dtype)
    if place != "none":
        settings["zero_optimization"] |= {"offload_optimizer": {"device": place}}
    engine, *_ = dz.initialize(model=model, optimizer=optimizer, config=settings)
    for step in range(steps):
        engine.backward(loss_of(engine, step, rank))
        engine.step()
    return list(model.state_dict().values())


def pipeline_run(stage: int, dtype: str, steps: int) -> list[torch.Tensor]:
    """Train in two pipeline stages, one per rank, on the rows of rank 0."""
    torch.manual_seed(0)
    model = LossNet().to(DEVICE)
    optimizer = adamw_of(model.parameters(), "none")
    settings = config(stage, dtype, pipeline={"stages": 2})
    engine, *_ = dz.initialize(model=model, optimizer=optimizer, config=settings)
    for step in range(steps):
        engine.backward(engine(*batch(step)))
        engine.step()
    return list(engine.module.state_dict().values())


if __name__ == "__main__":
    number = int(os.environ["RANK"])
    asked = int(os.environ["GPU_STAGE"]), os.environ["GPU_DTYPE"]
    if os.environ.get("GPU_PIPELINE"):
        weights = pipeline_run(*asked, steps=3)
    else:
        place = os.environ.get("GPU_PLACE", "none")
        weights = engine_run(*asked, steps=3, rank=number, place=place)
    if number == 0:
        torch.save(weights, Path(os.environ["GPU_OUT"]) / "weights.pt")
