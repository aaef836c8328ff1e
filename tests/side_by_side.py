"""Run one program on a sharded model, through both APIs, and on a plain torch model.

Used by tests that change gradients or freeze parameters between steps.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepseek_zero
from tests.models import Gpt, batch_of, seeded

Prepare = Callable[[nn.Module], Any]
# With this eps, gradients that should be zero cause only small updates.
ADAMW: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-4}


def nothing_first(model: nn.Module) -> None:
    """Do nothing to a model before it is wrapped."""


class Plainly:
    """Unsharded torch: `.grad` is the mean over both ranks' micro-batches and `accumulation`."""

    def __init__(self, accumulation: int = 1, prepare: Prepare = nothing_first) -> None:
        self.model, self.accumulation = seeded(Gpt), accumulation
        prepare(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **ADAMW)

    def backward(self, step: int, micro: int) -> None:
        params, ranks = list(self.model.parameters()), dist.get_world_size()
        wanted = [each for each in params if each.requires_grad]
        sums: list[Tensor] = []
        for rank in range(ranks):
            batch = batch_of(step, micro, rank)
            loss = self.model(batch.tokens, batch.targets) / self.accumulation
            grads = torch.autograd.grad(loss, wanted)
            sums = (
                [one + other for one, other in zip(sums, grads, strict=True)]
                if sums
                else list(grads)
            )
        for each, total in zip(wanted, sums, strict=True):
            each.grad = total / ranks + (0.0 if each.grad is None else each.grad)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class ByEngine:
    """The engine that `initialize` returns."""

    def __init__(
        self, stage: int, accumulation: int = 1, prepare: Prepare = nothing_first, **sections: Any
    ) -> None:
        self.model = seeded(Gpt)
        prepare(self.model)
        zero = {
            "stage": stage,
            "stage3_param_persistence_threshold": 20,
            "stage3_max_live_parameters": 0,
        }
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": accumulation,
            "steps_per_print": None,
            "optimizer": {"type": "AdamW", "params": ADAMW},
            **sections,
            "zero_optimization": zero | sections.get("zero_optimization", {}),
        }
        self.engine = deepseek_zero.initialize(model=self.model, config=config)[0]

    def backward(self, step: int, micro: int) -> None:
        batch = batch_of(step, micro, dist.get_rank())
        self.engine.backward(self.engine(batch.tokens, batch.targets))

    def step(self) -> None:
        self.engine.step()

    def end(self) -> None:
        self.engine.destroy()


class ByHand:
    """`DeepSeekZeRO3` and `ZeroOptimizer`, with plain backward, step and zero_grad."""

    def __init__(self, stage: int, prepare: Prepare = nothing_first, **zero: Any) -> None:
        self.model = seeded(Gpt)
        prepare(self.model)
        zero |= {"stage3_param_persistence_threshold": 20, "stage3_max_live_parameters": 0}
        self.wrapped = deepseek_zero.DeepSeekZeRO3(self.model, stage=stage, zero_optimization=zero)
        self.optimizer = deepseek_zero.ZeroOptimizer(
            self.model.parameters(), optimizer_type="adamw", **ADAMW
        )

    def backward(self, step: int, micro: int) -> None:
        batch = batch_of(step, micro, dist.get_rank())
        self.model(batch.tokens, batch.targets).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def end(self) -> None:
        self.wrapped.runtime.remove_hooks()


def offloaded(tier: str, stage: int, **keys: Any) -> dict[str, Any]:
    place = {"device": tier, "nvme_path": tempfile.gettempdir()}
    zero: dict[str, Any] = {"offload_optimizer": place | keys}
    return zero | ({"offload_param": place} if stage == 3 else {})


def assert_same_values(run: Any, plain: Plainly, about: str, tolerance: float = 1e-5) -> None:
    found = run.model.state_dict()
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(
            found[name].float(),
            value,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, name=name: f"{about}, {name}: {text}",
        )
