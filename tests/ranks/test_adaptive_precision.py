"""Precision "auto" promotes only units whose gradients underflow in fp16.

A unit is demoted when its gradients fit into fp16 again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import deepseek_zero as dz
from deepseek_zero.extensions.adaptive_precision import AdaptivePrecision
from deepseek_zero.parallel.sequence_model import own_part
from tests.unit.parallel.tiny import LENGTH, VOCABULARY, tiny

WINDOW = 2
UNSCALED = {"enabled": True, "loss_scale": 1.0}
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {"fp16": UNSCALED},
    "auto": {"fp16": UNSCALED, "precision": "auto", "precision_window": WINDOW},
}


class Fade(torch.autograd.Function):
    """Identity in forward; multiplies the gradient by a factor in backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


class Part(nn.Module):
    """A block that scales its inner gradients by `fade`.

    Only the gradients of its weights are scaled. Adam cancels the factor.
    """

    def __init__(self, *, is_curved: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.is_curved, self.fade = is_curved, 1.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(Fade.apply(x, 1 / self.fade))
        return x + Fade.apply(
            self.down(torch.tanh(hidden) if self.is_curved else hidden), self.fade
        )


class Net(nn.Module):
    """A network in which only the first part can be nonlinear."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Linear(8, 16), nn.Linear(16, 5)
        self.parts = nn.ModuleList([Part(is_curved=True), Part(is_curved=False)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for part in self.parts:
            x = part(x)
        return self.head(x)


def start(kind: str, stage: int, fade: float) -> Any:
    model = Net()
    model.parts[0].fade = fade
    config = {
        "train_micro_batch_size_per_gpu": 128,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-15}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **KINDS[kind],
    }
    return dz.initialize(model=model, config=config)[0]


def train(engine: Any, steps: int) -> list[float]:
    """Train on this rank's half of the samples and return the global losses."""
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
    y = (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > x[:, 3]).long() * 2
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    losses = []
    for _ in range(steps):
        loss = functional.cross_entropy(engine(x[mine]).float(), y[mine])
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    return losses


def switches(engine: Any) -> list[tuple[int, str, bool]]:
    return [
        (each.step, each.unit, each.is_promoted)
        for each in engine.optimizer.policy(AdaptivePrecision).decisions
    ]


@pytest.mark.ranks(2)
def test_only_a_layer_whose_gradient_underflows_in_fp16_is_promoted(
    tmp_path: Path,
) -> None:
    losses = {}
    for kind in KINDS:
        engine = start(kind, 3, 1e-6)
        losses[kind] = train(engine, 64)[-1]
        if kind == "auto":
            assert switches(engine) == [(2 * WINDOW, "parts.0", True)]
            dtypes = {name: param.dtype for name, param in engine.module.named_parameters()}
            lifted = {name for name, dtype in dtypes.items() if dtype == torch.float32}
            assert lifted == {name for name in dtypes if name.startswith("parts.0.")}
            told = engine.explain()
            assert (
                "'parts.0' in fp32" in told
                and "100.0% of its gradient is below fp16's range" in told
            )
            assert engine.observer.record.promoted == 1
            engine.export(tmp_path / "whole")
            engine.load_weights(tmp_path / "whole")  # changes no precision
            assert engine.optimizer.policy(AdaptivePrecision).promoted == ["parts.0"]
        engine.destroy()
    assert losses["auto"] == pytest.approx(losses["fp32"], rel=0.01)
    assert losses["fp16"] > 1.05 * losses["fp32"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_it_is_demoted_when_the_scale_is_undone_and_a_resumed_run_repeats_the_switches(
    stage: int, tmp_path: Path
) -> None:
    undone, steps = 7, 26
    found = []
    for saved_at in (None, 3, 15):
        engine = start("auto", stage, 1e-6)
        for step in range(steps):
            if step == saved_at:
                engine.save_checkpoint(str(tmp_path), tag=f"{step}")
                engine.destroy()
                engine = start("auto", stage, 1e-6 if step < undone else 1.0)
                engine.load_checkpoint(str(tmp_path), tag=f"{step}")
            if step == undone:
                engine.module.parts[0].fade = 1.0
            train(engine, 1)
        # Windows end at even steps: bad ones at 2 and 4, good ones at 8, 10, ... 22.
        assert switches(engine) == [(4, "parts.0", True), (22, "parts.0", False)]
        assert all(param.dtype == torch.float16 for param in engine.module.parameters())
        masters = [dz.utils.safe_get_full_fp32_param(param) for param in engine.module.parameters()]
        found.append(masters)
        engine.destroy()
    for again in found[1:]:
        assert all(map(torch.equal, again, found[0]))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axis", ["tp", "sp"])
def test_ranks_that_share_layers_or_sequences_decide_alike(axis: str) -> None:
    pytest.importorskip("transformers")
    model = tiny("llama", num_key_value_heads=2)
    layer = model.model.layers[0]
    layer.register_forward_pre_hook(lambda _, args: (Fade.apply(args[0], 1e6), *args[1:]))
    layer.register_forward_hook(lambda _, args, output: Fade.apply(output, 1e-6))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-15}},
        "zero_optimization": {"stage": 2},
        **KINDS["auto"],
    }
    engine = dz.initialize(model=model, config=config, mesh={axis: 2})[0]
    tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(2))
    for _ in range(6):
        batch = {"input_ids": tokens, "labels": tokens}
        if axis == "sp":
            batch = own_part(engine.module, batch)
        engine.backward(engine(**batch).loss)
        engine.step()
    assert switches(engine) == [(4, "model.layers.0", True)]
    everywhere = [None, None]
    dist.all_gather_object(everywhere, switches(engine))
    assert everywhere[0] == everywhere[1]
