"""The unsharded reference: one plain copy of the model per rank, all in this process, updated with
their mean gradient.

Each copy gets the data of one rank, so its buffers (running statistics) match that rank's. Tests in
tests/ranks compare an engine with it, parameter by parameter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepseek_zero

LEARNING_RATE = 0.1
LATE_SECONDS = 0.02  # longer than a backward of these models
BACKWARD = Callable[..., Any]
# body(model, rank, step, backward) runs the forward and backward passes of one step on the data of
# one rank and returns tensors to compare.
Body = Callable[[nn.Module, int, int, BACKWARD], Any]


@dataclass(frozen=True)
class Setting:
    """A stage and, at stage 3, whether units are resharded after forward (window 0) or kept
    (default).
    """

    stage: int
    window: int | None = None
    more: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"stage{self.stage}" + ("" if self.window is None else f"-window{self.window}")

    def config(self, **top: Any) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage}
        if self.stage == 3:
            zero["stage3_param_persistence_threshold"] = 0
            if self.window is not None:
                zero["stage3_max_live_parameters"] = self.window
        return {
            "train_micro_batch_size_per_gpu": 2,
            "steps_per_print": None,
            "optimizer": {"type": "SGD", "params": {"lr": LEARNING_RATE}},
            "zero_optimization": zero | self.more,
            **top,
        }


STAGE_0, STAGE_1, STAGE_2, STAGE_3, STAGE_3_BARE = (
    Setting(0),
    Setting(1),
    Setting(2),
    Setting(3),
    Setting(3, 0),
)
on_stages_1_and_3 = pytest.mark.parametrize("setting", [STAGE_1, STAGE_3, STAGE_3_BARE], ids=str)
on_stages_0_to_3 = pytest.mark.parametrize(
    "setting", [STAGE_0, STAGE_1, STAGE_2, STAGE_3, STAGE_3_BARE], ids=str
)
on_stages_1_to_3 = pytest.mark.parametrize(
    "setting", [STAGE_1, STAGE_2, STAGE_3, STAGE_3_BARE], ids=str
)
on_stage_3 = pytest.mark.parametrize("setting", [STAGE_3, STAGE_3_BARE], ids=str)


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def here() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def seeded(build: Callable[[], nn.Module], seed: int = 7) -> nn.Module:
    """Return the same model on every rank."""
    torch.manual_seed(seed)
    return build()


def draw(rank: int, step: int, *shape: int) -> Tensor:
    """Return the data of one step of a rank, which is the same on every rank that computes it."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * step + rank))


def engine_for(model: nn.Module, setting: Setting, **top: Any) -> Any:
    return deepseek_zero.initialize(model=model, config=setting.config(**top))[0]


class Plain:
    """One plain copy per rank.

    `step` runs a body on each copy and updates all with SGD on the mean gradient.
    """

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self.copies = [seeded(build) for _ in range(world())]
        self.optimizers = [
            torch.optim.SGD(copy.parameters(), lr=LEARNING_RATE) for copy in self.copies
        ]

    @property
    def mine(self) -> nn.Module:
        """The copy that got this rank's data."""
        return self.copies[here()]

    def run(self, body: Body, step: int) -> Any:
        """Run a body on every copy and return its result for this rank."""
        given = [body(copy, rank, step, _plain_backward) for rank, copy in enumerate(self.copies)]
        return given[here()]

    def update(self) -> None:
        for params in zip(*(copy.parameters() for copy in self.copies), strict=True):
            grads = [
                torch.zeros_like(param) if param.grad is None else _dense(param.grad)
                for param in params
            ]
            if params[0].requires_grad:
                mean = torch.stack(grads).sum(dim=0) / len(grads)
                for param in params:
                    param.grad = mean.clone()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _plain_backward(loss: Tensor, **options: Any) -> None:
    if loss.requires_grad:
        loss.backward(**options)


def _late(backward: BACKWARD) -> BACKWARD:
    def later(*args: Any, **options: Any) -> None:
        time.sleep(LATE_SECONDS)
        backward(*args, **options)

    return later


def _dense(grad: Tensor) -> Tensor:
    return grad.to_dense() if grad.is_sparse else grad


def assert_same_state(model: nn.Module, plain: nn.Module) -> None:
    """Compare the full tensors of a wrapped model with those of the plain copy. Collective."""
    found, expected = model.state_dict(), plain.state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
        torch.testing.assert_close(
            found[name], value, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_same_outputs(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-5, atol=1e-6)
    elif isinstance(expected, (list, tuple)):
        for one, other in zip(found, expected, strict=True):
            assert_same_outputs(one, other)
    else:
        assert found == expected


def assert_trains_like_plain(
    build: Callable[[], nn.Module], body: Body, setting: Setting, steps: int = 3, **top: Any
) -> Any:
    """Train an engine and the plain copies, compare everything and return the engine.

    Losses, outputs, parameters and buffers must agree. Odd steps call engine.backward, even steps
    only loss.backward. A different rank is late in each step, so that the other ranks wait for
    collectives that are still in progress while its backward runs.
    """
    plain = Plain(build)
    model = seeded(build)
    engine = engine_for(model, setting, **top)
    for step in range(steps):
        expected = plain.run(body, step)
        plain.update()
        backward = engine.backward if step % 2 else _plain_backward
        if step % world() == here():
            backward = _late(backward)
        found = body(engine, here(), step, backward)
        engine.step()
        assert_same_outputs(found, expected)
    assert_same_state(model, plain.mine)
    return engine
