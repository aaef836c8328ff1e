"""A step with a non-finite gradient is skipped with one warning.

The policy is the same for fp32, bf16 and fp16, at every stage, for the engine and the plain loop.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepseek_zero
from deepseek_zero import DeepSeekZeRO3
from deepseek_zero.base.log import logger
from deepseek_zero.optimizer import ZeroOptimizer
from tests.plain import here, world
from tests.training import offload

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}},
    "fp16 of a fixed scale": {"fp16": {"enabled": True, "loss_scale": 64.0}},
}
ADAM = {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1}}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(6, 10), nn.Linear(10, 6)
        self.blocks = nn.ModuleList(Block(number) for number in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Block(nn.Module):
    """A block that returns infinities if it is the broken one."""

    broken: int | None = None

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.line = number, nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.line(x).tanh() / (0.0 if Block.broken == self.number else 1.0)


def net() -> nn.Module:
    torch.manual_seed(3)
    return Net()


def data(step: int, *, broken: bool = False) -> Tensor:
    """Return this rank's data, with NaN on the last rank only if `broken`."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + here()))
    return x * torch.nan if broken and here() == world() - 1 else x


def config(stage: int, precision: str, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **more.pop("zero", {})}
    top = {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": None,
        "optimizer": ADAM,
        "zero_optimization": zero,
    }
    return top | {"units": ["Block"]} | PRECISIONS[precision] | more


@contextmanager
def said() -> Iterator[list[str]]:
    """Collect the warnings of this rank."""
    found: list[str] = []

    class Catch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                found.append(record.getMessage())

    handler = Catch()
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def run(settings: dict[str, Any], steps: str) -> tuple[Any, list[str]]:
    """Train the steps ("n": a NaN on one rank, ".": finite) and return the engine.

    Finite steps use the same data in every run.
    """
    engine = deepseek_zero.initialize(model=net(), config=settings)[0]
    drawn = itertools.count()
    with said() as warnings:
        for kind in steps:
            x = data(99, broken=True) if kind == "n" else data(next(drawn))
            engine.backward((engine(x).float() - 1.0).square().mean())
            engine.step()
    return engine, warnings


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", range(4))
def test_a_step_with_a_nonfinite_gradient_changes_nothing_and_is_logged(stage: int) -> None:
    for precision, clipping in itertools.product(PRECISIONS, (0.0, 0.5)):
        settings = config(stage, precision, gradient_clipping=clipping)
        engine, warnings = run(settings, "..n.")
        without, _ = run(settings, "...")
        assert_same(engine.module_state_dict(), without.module_state_dict())
        assert (engine.global_steps, engine.skipped_steps) == (4, 1)
        # While fp16 searches for a loss scale, an overflow is expected and gives no warning
        is_fp16 = precision == "fp16"
        assert len(warnings) == (0 if is_fp16 or here() else 1), (precision, warnings)
        assert all("step 3" in text and "not finite" in text for text in warnings)
        if is_fp16:
            assert engine.optimizer.loss_scale == 2.0**7


@pytest.mark.ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "zero",
    [
        offload("cpu", weights=False) | {"stage": 2},
        offload("cpu") | {"stage": 3},
        offload("cpu", super_offload=True) | {"stage": 3},
        offload("cpu", delayed_update_after=1) | {"stage": 3},
    ],
    ids=["states", "all", "speculative", "delayed"],
)
def test_deferred_and_early_updates_are_not_corrupted(precision: str, zero: dict[str, Any]) -> None:
    settings = config(3, precision, zero=zero)
    engine, warnings = run(settings, "...n..")
    without, _ = run(settings, ".....")
    # The delayed update comes one step earlier, so the weights differ
    if "delayed_update_after" in zero["offload_optimizer"]:
        assert all(value.isfinite().all() for value in engine.module_state_dict().values())
    else:
        assert_same(engine.module_state_dict(), without.module_state_dict())
    assert engine.skipped_steps == 1 and len(warnings) == (1 if here() == 0 else 0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_the_plain_api_has_the_same_policy(stage: int, precision: str) -> None:
    settings = config(stage, precision)
    del settings["optimizer"]
    found = []
    for steps in ("..n.", "..."):
        model = net()
        DeepSeekZeRO3(model, **settings)
        optimizer = ZeroOptimizer(model.parameters(), lr=0.05, optimizer_type="adamw")
        drawn = itertools.count()
        with said() as warnings:
            for kind in steps:
                optimizer.zero_grad()
                x = data(99, broken=True) if kind == "n" else data(next(drawn))
                (model(x).float() - 1.0).square().mean().backward()
                optimizer.step()
        found.append((model.state_dict(), warnings))
    assert_same(found[0][0], found[1][0])
    told = [text for text in found[0][1] if "step 3" in text]
    assert len(told) == (0 if precision == "fp16" or here() else 1) and not found[1][1]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_disabling_the_check_is_logged_and_training_continues(precision: str) -> None:
    off = {"check_grad_overflow": False}
    settings = config(3, precision)
    settings |= off if precision == "fp32" else {"bf16": {"enabled": True} | off}
    engine, warnings = run(settings, ".n")
    assert engine.skipped_steps == 0
    assert any(value.isnan().any() for value in engine.module_state_dict().values())
    assert len(warnings) == (0 if here() else 1)
    assert all("step 2" in text and "check_grad_overflow" in text for text in warnings)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_the_second_skipped_step_in_a_row_names_the_unit_and_later_ones_are_logged_rarely(
    stage: int, precision: str
) -> None:
    engine = deepseek_zero.initialize(model=net(), config=config(stage, precision))[0]
    Block.broken = 1 if here() == 1 else None
    try:
        with said() as warnings:
            for step in range(9):
                engine.backward((engine(data(step)).float() - 1.0).square().mean())
                engine.step()
    finally:
        Block.broken = None
    assert [text[:7] for text in warnings] == (
        [] if here() else ["step 1:", "step 2:", "step 4:", "step 8:"]
    )
    assert all("'blocks.1'" in text for text in warnings[1:]) and "'blocks.1'" not in "".join(
        warnings[:1]
    )
    assert engine.skipped_steps == 9
    with said() as warnings:
        for step in range(2):
            engine.backward((engine(data(step)).float() - 1.0).square().mean())
            engine.step()
    assert not warnings and engine.runtime.step.nonfinite is None
