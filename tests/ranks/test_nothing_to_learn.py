"""A loss without a graph, or a step without backward, gives an error or a warning on all ranks.

It never hangs and changes no weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import deepseek_zero
from deepseek_zero import DeepSeekZeRO3
from deepseek_zero.base.errors import UsageError
from deepseek_zero.optimizer import ZeroOptimizer
from tests.plain import here, world
from tests.ranks.test_finite import assert_same, config, data, net, said
from tests.training import offload

on_stages = pytest.mark.parametrize("stage", range(4))
PLACES: list[dict[str, Any]] = [
    {},
    offload("cpu", super_offload=True) | {"stage": 3},
    offload("cpu", delayed_update_after=1) | {"stage": 3},
]


def start(stage: int, precision: str = "fp32", **more: Any) -> Any:
    return deepseek_zero.initialize(model=net(), config=config(stage, precision, **more))[0]


def loss_of(engine: Any, step: int) -> Tensor:
    return (engine(data(step)).float() - 1.0).square().mean()


def train(engine: Any, step: int) -> None:
    engine.backward(loss_of(engine, step))
    engine.step()


def test_a_loss_without_gradient_is_an_error_in_one_process() -> None:
    engine = start(3)
    with pytest.raises(UsageError, match="does not require a gradient"):
        engine.backward(loss_of(engine, 0).detach())
    with torch.no_grad():
        loss = loss_of(engine, 0)
    with pytest.raises(UsageError, match="does not require a gradient"):
        engine.backward(loss)
    with pytest.raises(UsageError, match="a float where a tensor"):
        engine.backward(loss.item())
    with pytest.raises(RuntimeError, match="does not require grad"):
        engine.scale(loss).backward()
    train(engine, 0)
    assert engine.was_step_applied()


@pytest.mark.ranks(2)
@on_stages
def test_a_loss_that_requires_no_gradient_on_any_rank_is_an_error_on_all(stage: int) -> None:
    def detached(engine: Any) -> Tensor:
        return loss_of(engine, 5).detach()

    def under_no_grad(engine: Any) -> Tensor:
        with torch.no_grad():
            return loss_of(engine, 5)

    makers: list[Callable[[Any], Tensor]] = [
        detached,
        under_no_grad,
        lambda engine: torch.zeros(()),
    ]
    for precision, accumulation in (("fp32", 1), ("fp16", 2)):
        engine = start(stage, precision, gradient_accumulation_steps=accumulation)
        for _ in range(accumulation):
            train(engine, 0)
        before = engine.module_state_dict()
        for make in makers:
            with said() as warnings, pytest.raises(UsageError, match="no rank's loss"):
                for _ in range(accumulation):
                    engine.backward(make(engine))
                    engine.step()
            assert len(warnings) == (1 if make is makers[0] else 0)  # once on each rank
            engine.set_gradient_accumulation_boundary(True)
        assert_same(before, engine.module_state_dict())
        train(engine, 1)
        assert engine.was_step_applied()


@pytest.mark.ranks(2)
@on_stages
def test_a_rank_whose_loss_is_a_constant_counts_as_zeros(stage: int) -> None:
    engine, plain = start(stage, optimizer={"type": "SGD", "params": {"lr": 0.1}}), net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(4):
        idle = step % world()
        with said() as warnings:
            engine.backward(loss_of(engine, step) if here() != idle else torch.zeros(()))
            engine.step()
        assert len(warnings) == (1 if here() == idle and step < 2 else 0)
        optimizer.zero_grad()
        for rank in range(world()):
            if rank != idle:
                x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))
                ((plain(x) - 1.0).square().mean() / world()).backward()
        optimizer.step()
    for name, value in engine.module_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(2)
@on_stages
def test_a_step_without_a_backward_changes_nothing_and_is_logged(stage: int) -> None:
    for precision, accumulation, zero in itertools.product(
        ("fp32", "fp16"), (1, 2), PLACES if stage == 3 else [{}]
    ):
        more = {"gradient_accumulation_steps": accumulation, "zero": zero}
        engine, without = start(stage, precision, **more), start(stage, precision, **more)
        for each in (engine, without):
            for step in range(3 * accumulation):
                train(each, step)
        with said() as warnings:
            for _ in range(accumulation):
                engine.step()
        assert [text[:7] for text in warnings] == ([] if here() else ["step 4:"]), (
            precision,
            accumulation,
        )
        assert all("no gradient" in text for text in warnings)
        assert not engine.was_step_applied() and not engine.optimizer.overflow
        assert (engine.global_steps, engine.skipped_steps) == (4, 1)
        # A forward without backward, or torch.autograd.grad, does not create gradients for a step
        with torch.no_grad():
            engine(data(0))
        x = data(0).requires_grad_()
        torch.autograd.grad(engine(x).sum(), x)
        with said() as warnings:
            for _ in range(accumulation):
                engine.step()
        assert [text[:7] for text in warnings] == ([] if here() else ["step 5:"])
        for each in (engine, without):
            for step in range(3 * accumulation):
                train(each, step + 10)
        # A step without gradients applies a delayed update
        if not zero or "delayed_update_after" not in zero["offload_optimizer"]:
            assert_same(engine.module_state_dict(), without.module_state_dict())
        engine.destroy()
        without.destroy()


@pytest.mark.ranks(2)
@on_stages
def test_one_micro_batch_of_several_is_enough(stage: int) -> None:
    engine = start(stage, gradient_accumulation_steps=3)
    with said() as warnings:
        engine.step()
        train(engine, 0)
        engine.step()
    assert engine.was_step_applied() and not warnings


@pytest.mark.ranks(2)
@on_stages
def test_a_plain_step_without_gradients_does_nothing_like_torch_and_is_logged(stage: int) -> None:
    settings = config(stage, "fp32")
    del settings["optimizer"]
    model, plain = net(), net()
    DeepSeekZeRO3(model, **settings)
    optimizer = ZeroOptimizer(model.parameters(), lr=0.05, optimizer_type="adamw", weight_decay=0.1)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.05, weight_decay=0.1)
    with said() as warnings:
        for step in range(5):
            for each, net_ in ((optimizer, model), (reference, plain)):
                each.zero_grad()
                if step != 2:
                    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
                    (net_(x) - 1.0).square().mean().backward()
                each.step()
                if step == 3:
                    each.step()  # uses the same gradients, which are kept until zero_grad
    told = [text for text in warnings if "no gradient" in text]
    assert [text[:7] for text in told] == ([] if here() else ["step 3:"])
    found = model.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.ranks(2)
def test_a_gradient_that_was_assigned_is_one() -> None:
    engine = start(3)
    train(engine, 0)
    before = engine.module_state_dict()
    for param in engine.module.parameters():
        param.grad = torch.ones(param.shape)
    with said() as warnings:
        engine.step()
    after = engine.module_state_dict()
    assert engine.was_step_applied() and not warnings
    assert all(not torch.equal(before[name], after[name]) for name in before)
