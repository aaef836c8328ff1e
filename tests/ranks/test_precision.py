"""Loss scaling agreed by all ranks, and precision "auto", which promotes units that overflow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepseek_zero as dz
from deepseek_zero.extensions.adaptive_precision import AdaptivePrecision
from deepseek_zero.kernels.choice import VARIABLE


class Block(nn.Module):
    """Squares `gain` times its input: fp16 overflows if the gain exceeds about 255."""

    def __init__(self, width: int, gain: float) -> None:
        super().__init__()
        self.up, self.down, self.gain = (
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
            gain,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        return x + self.down(torch.sqrt((hidden * self.gain) ** 2 + 1) / self.gain)


class Net(nn.Module):
    def __init__(self, gains: tuple[float, ...] = (1.0, 1.0)) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.blocks = nn.ModuleList(Block(32, gain) for gain in gains)
        self.head = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(stage: int, gains: tuple[float, ...] = (1.0, 1.0), **more: Any) -> Any:
    torch.manual_seed(0)
    engine, *_ = dz.initialize(
        model=Net(gains),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "steps_per_print": None,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            **more,
        },
    )
    return engine


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(16, 8, generator=generator)
    return x, x.sum(1, keepdim=True)


def loss_of(engine: Any, poison: float = 1.0) -> torch.Tensor:
    x, y = data()
    return ((engine(x).float() * poison - y) ** 2).mean()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_changes_nothing(stage: int) -> None:
    engine = build(stage, fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1})
    engine.backward(loss_of(engine))
    engine.step()
    before = {name: value.clone() for name, value in engine.module.state_dict().items()}
    moments = [
        value.clone() for state in engine.optimizer.state.values() for value in state.values()
    ]
    engine.backward(loss_of(engine, poison=float("inf") if dist.get_rank() == 1 else 1.0))
    engine.step()
    assert engine.skipped_steps == 1
    assert not engine.was_step_applied()
    assert engine.parts.scaler.scale == 2.0**7
    for name, value in engine.module.state_dict().items():
        assert torch.equal(value, before[name]), name
    after = [value for state in engine.optimizer.state.values() for value in state.values()]
    assert all(torch.equal(a, b) for a, b in zip(after, moments, strict=True))
    engine.backward(loss_of(engine))
    engine.step()
    assert engine.was_step_applied()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_plain_backward_scales_as_the_engine_does(stage: int, accumulation: int) -> None:
    found = []
    for plain in (False, True):
        engine = build(
            stage,
            fp16={"enabled": True, "initial_scale_power": 6},
            gradient_accumulation_steps=accumulation,
        )
        for _ in range(2 * accumulation):
            loss = loss_of(engine)
            loss.backward() if plain else engine.backward(loss)
            engine.step()
        assert engine.global_steps == 2
        assert engine.skipped_steps == 0
        found.append(engine.module.state_dict())
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, atol=2e-3, rtol=2e-2)


class Pictures(nn.Module):
    """A small network of seed 002's kind: convolutions, batch norms and residuals."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.norm = (
                nn.Conv2d(6, 6, 3, padding=1, bias=False),
                nn.BatchNorm2d(6),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.relu(self.norm(self.convolution(x)))

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.blocks = nn.Sequential(self.Part(), self.Part())
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_batch_norms_keep_fp32_statistics_under_16_bits(kind: str, stage: int) -> None:
    torch.manual_seed(0)
    images, labels = torch.randn(8, 3, 6, 6), torch.arange(8) % 4
    plain, model = Pictures(), Pictures()
    model.load_state_dict(plain.state_dict())
    engine, *_ = dz.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 8,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            kind: {"enabled": True},
        },
    )
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(4):
        loss = nn.functional.cross_entropy(engine(images).float(), labels)
        engine.backward(loss)
        engine.step()
        expected = nn.functional.cross_entropy(plain(images), labels)
        reference.zero_grad()
        expected.backward()
        reference.step()
        assert loss.item() == pytest.approx(expected.item(), abs=0.05)
    state = engine.module.state_dict()
    for name, value in plain.state_dict().items():
        if "norm" in name:
            assert state[name].dtype == value.dtype, name
        torch.testing.assert_close(state[name].to(value.dtype), value, atol=0.05, rtol=0.1)


@pytest.mark.ranks("world")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("kernels", ["torch", "compiled"])
def test_precision_auto_promotes_the_unit_that_overflows_and_continues(
    world: int, stage: int, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "compiled":
        pytest.importorskip("llvmlite")
    monkeypatch.setenv(VARIABLE, kernels)
    config = {
        "precision": "auto",
        "fp16": {"enabled": True, "initial_scale_power": 4},
        "records": {"path": str(tmp_path / "records")},
    }
    engine = build(stage, gains=(1.0, 1e3, 1.0), **config)
    losses = []
    for _ in range(10):
        loss = loss_of(engine)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    assert engine.optimizer.policy(AdaptivePrecision).promoted == ["blocks.1"]
    dtypes = {name: param.dtype for name, param in engine.module.named_parameters()}
    assert dtypes["blocks.1.up.weight"] == torch.float32
    assert dtypes["blocks.0.up.weight"] == torch.float16
    assert engine.was_step_applied()
    assert all(torch.isfinite(torch.tensor(losses[4:])))
    if engine.mesh.rank == 0:
        text = "\n".join(engine.plan().explain()) + "\n"
        assert (tmp_path / "records" / "plan.txt").read_text() == text
    engine.save_checkpoint(str(tmp_path), tag="lifted")
    engine.destroy()
    again = build(stage, gains=(1.0, 1e3, 1.0), **config)
    again.load_checkpoint(str(tmp_path), tag="lifted")
    assert again.optimizer.policy(AdaptivePrecision).promoted == ["blocks.1"]
    assert again.plan() == engine.plan()
    again.backward(loss_of(again))
    again.step()
    assert again.was_step_applied()


@pytest.mark.ranks(2)
def test_bf16_main_weights_start_from_the_fp32_originals() -> None:
    torch.manual_seed(0)
    original = {name: param.detach().clone() for name, param in Net().named_parameters()}
    engine = build(3, bf16={"enabled": True})
    for name, param in engine.module.named_parameters():
        master = dz.utils.safe_get_full_fp32_param(param)
        assert torch.equal(master, original[name]), name
        assert param.dtype == torch.bfloat16


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_autocast_keeps_fp32_weights_and_trains(stage: int) -> None:
    engine = build(stage, torch_autocast={"enabled": True, "dtype": "bf16"})
    losses = []
    for _ in range(8):
        loss = loss_of(engine)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    assert all(param.dtype == torch.float32 for param in engine.module.parameters())
    assert losses[-1] < 0.75 * losses[0]


def bf16(value: torch.Tensor) -> torch.Tensor:
    return value.bfloat16().float()


# Communication settings, and how they reduce the gradients of two ranks.
REDUCTIONS: dict[
    str, tuple[dict[str, Any], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]
] = {
    "mean": ({}, lambda a, b: (a + b) / 2),
    "bf16 on the way": ({"communication_data_type": "bf16"}, lambda a, b: (bf16(a) + bf16(b)) / 2),
    "sum": ({"gradient_allreduce_op": "sum"}, lambda a, b: a + b),
    "prescale": ({"prescale_gradients": True}, lambda a, b: a / 2 + b / 2),
    "predivide": ({"gradient_predivide_factor": 4.0}, lambda a, b: (a / 4 + b / 4) / 0.5),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("how", REDUCTIONS)
def test_gradients_are_reduced_as_configured_bit_for_bit(how: str, stage: int) -> None:
    more, reduced = REDUCTIONS[how]
    engine = build(stage, **{**more, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}})
    torch.manual_seed(0)
    plain = Net()
    x, y = data()
    grads = []
    for rank in range(2):
        plain.zero_grad()
        ((plain(x * (rank + 1)) - y) ** 2).mean().backward()
        grads.append({name: param.grad.clone() for name, param in plain.named_parameters()})
    loss = ((engine(x * (dist.get_rank() + 1)) - y) ** 2).mean()
    engine.backward(loss)
    engine.step()
    state = engine.module.state_dict()
    for name, param in plain.named_parameters():
        expected = param.detach() - 0.5 * reduced(grads[0][name], grads[1][name])
        assert torch.equal(state[name], expected), name
