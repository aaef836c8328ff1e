"""The gradient norm and clipping cover the parameters of the optimizer, in both APIs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepseek_zero as dz
from deepseek_zero.api.wrap import ZeroOptimizer
from deepseek_zero.compat.deepspeed.engine import DeepSpeedEngine
from deepseek_zero.optim.verdict import StepFlags
from tests.compositions import Here, config_of, engines_of_threads
from tests.in_process import Rank, run_ranks

WIDTH, STEPS, CLIP, RANKS = 64, 4, 0.05, 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def net() -> Net:
    torch.manual_seed(4)
    return Net()


def data(step: int, rank: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def part(model: nn.Module) -> list[nn.Parameter]:
    """Return parts of units, so that other parameters share their groups and slices."""
    return [model.get_parameter(name) for name in ("first.bias", "last.weight")]


def plainly(ranks: int) -> tuple[dict[str, Tensor], list[float]]:
    model = net()
    optimizer, norms = torch.optim.SGD(part(model), lr=1.0), []
    for step in range(STEPS):
        for rank in range(ranks):
            (model(data(step, rank)).square().mean() / ranks).backward()
        norms.append(float(nn.utils.clip_grad_norm_(part(model), CLIP)))
        optimizer.step()
        model.zero_grad()
    return model.state_dict(), norms


def on_ranks(body: Any) -> list[Any]:
    with engines_of_threads() as here:
        return run_ranks(RANKS, lambda rank: body(here, rank), reads_in_place=True)


def assert_alike(found: tuple[dict[str, Tensor], list[float]], ranks: int) -> None:
    weights, norms = plainly(ranks)
    assert found[1] == pytest.approx(norms, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(found[0][name], value, msg=name)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("way", ["instance", "model_parameters"])
def test_an_engine_clips_by_the_norm_of_what_it_updates(stage: int, way: str) -> None:
    def body(here: Here, rank: Rank) -> tuple[dict[str, Tensor], list[float]]:
        model, config = net(), config_of(stage, "fp32", CLIP) | {"gradient_accumulation_steps": 1}
        request: dict[str, Any] = {"optimizer": torch.optim.SGD(part(model), lr=1.0)}
        if way == "model_parameters":
            config["optimizer"] = {"type": "SGD", "params": {"lr": 1.0}}
            request = {"parameters": part(model)}
        engine, norms = here.start(rank, model, config, **request), []
        for step in range(STEPS):
            engine.backward(engine(data(step, rank.index)).square().mean())
            engine.step()
            norms.append(engine.optimizer.last.norm)
        weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
        engine.destroy()
        return weights, norms

    found = on_ranks(body)
    for each in found:
        assert_alike(each, RANKS)
    assert found[0][1] == found[1][1]


def test_parameters_that_join_are_counted_from_then_on() -> None:
    def body(here: Here, rank: Rank) -> tuple[float, float, float]:
        model, config = net(), config_of(3, "fp32") | {"gradient_accumulation_steps": 1}
        engine = here.start(rank, model, config, optimizer=torch.optim.SGD(part(model), lr=0.0))
        norms = []
        for number in range(2):
            if number:
                rest = [
                    each
                    for each in model.parameters()
                    if all(each is not one for one in part(model))
                ]
                engine.optimizer.add_param_group({"params": rest, "lr": 0.0})
            engine.backward(engine(data(0, rank.index)).square().mean())
            engine.step()
            norms.append(engine.optimizer.last.norm)
        engine.destroy()
        return norms[0], norms[1], 0.0

    model = net()
    for rank in range(RANKS):
        (model(data(0, rank)).square().mean() / RANKS).backward()
    expected = [
        float(nn.utils.get_total_norm([each.grad for each in which]))
        for which in (part(model), [*model.parameters()])
    ]
    for first, second, _ in on_ranks(body):
        assert [first, second] == pytest.approx(expected, rel=1e-5)


def test_nonfinite_gradients_of_other_parameters_skip_no_step() -> None:
    def body(here: Here, rank: Rank) -> bool:
        model, config = net(), config_of(2, "fp32") | {"gradient_accumulation_steps": 1}
        engine = here.start(
            rank, model, config, optimizer=torch.optim.SGD([model.last.bias], lr=1.0)
        )
        with torch.no_grad():
            model.first.weight.register_hook(lambda grad: grad * float("nan"))
        engine.backward(engine(data(0, rank.index)).square().mean())
        engine.step()
        is_finite = (
            bool(torch.isfinite(model.last.bias).all()) and engine.optimizer.last.verdict.is_finite
        )
        engine.destroy()
        return is_finite

    assert all(on_ranks(body))


@pytest.mark.parametrize("stage", [0, 3])
def test_the_norm_is_unchanged_when_a_step_is_skipped(stage: int) -> None:
    def body(here: Here, rank: Rank) -> list[float | None]:
        model, config = net(), config_of(stage, "fp16") | {"gradient_accumulation_steps": 1}
        engine = here.start(
            rank,
            model,
            config,
            DeepSpeedEngine,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        )
        norms = [engine.get_global_grad_norm()]
        for factor in (float("inf"), 1.0, float("inf")):
            engine.backward(engine(data(0, rank.index).half()).float().square().mean() * factor)
            engine.step()
            norms.append(engine.get_global_grad_norm())
        assert engine.skipped_steps == 2
        engine.destroy()
        return norms

    for before, skipped, first, last in on_ranks(body):
        assert before is None and skipped == 0.0, "DeepSpeed's value while no step has been taken"
        assert first == last > 0.0


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_zero_optimizer_clips_by_the_norm_of_what_it_updates(stage: int) -> None:
    model = net()
    wrapped: Any = dz.DeepSeekZeRO3(
        model, stage=stage, gradient_clipping=CLIP, train_micro_batch_size_per_gpu=2
    )
    optimizer, norms = ZeroOptimizer(part(model), lr=1.0, optimizer_type="SGD"), []
    for step in range(STEPS):
        wrapped(data(step, 0)).square().mean().backward()
        optimizer.step()
        assert optimizer.sharded is not None and optimizer.sharded.last is not None
        norms.append(optimizer.sharded.last.norm)
        optimizer.zero_grad()
    assert_alike(({name: value.clone() for name, value in model.state_dict().items()}, norms), 1)


def test_flags_are_set_if_any_rank_sets_them_but_a_step_is_idle_only_if_every_rank_is() -> None:
    found = StepFlags.of_ranks([[0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    assert found == StepFlags(any_late=True, any_edited=True, is_idle=False, any_graphless=False)
    assert StepFlags.of_ranks([[0.0, 0.0, 1.0, 0.0]] * 2).is_idle
