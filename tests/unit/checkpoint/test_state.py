"""States of third-party optimizers: torch's class names, tensor subclasses and objects."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from deepseek_zero.base.errors import CheckpointError
from deepseek_zero.checkpoint.state import saved_scalar, scalar_value
from deepseek_zero.compat.deepspeed.engine import DeepSpeedEngine
from tests.compositions import Here, config_of, engines_of_threads
from tests.in_process import Rank, run_ranks

WIDTH, RANKS = 64, 2


class Rounded(Tensor):
    """A tensor of int8 codes and a scale, like the states of torchao."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Rounded:
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=torch.float32, device=codes.device
        )

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default):
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(f"Rounded: {func}")

    def values(self) -> Tensor:
        return self.codes.float() * self.scale

    def store(self, values: Tensor) -> None:
        self.scale.copy_(values.abs().max() / 127 + 1e-12)
        self.codes.copy_((values / self.scale).round())


class Coded(torch.optim.Optimizer):
    """An optimizer with int8 momentum that is created in the first step."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, block: int = 1) -> None:
        super().__init__(params, {"lr": lr, "block": block, "calls": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["calls"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    codes = torch.zeros(param.shape, dtype=torch.int8)
                    state["speed"] = Rounded(
                        codes, torch.ones(()) if group["block"] == 1 else torch.ones(1)
                    )
                speed = state["speed"].values() * 0.9 + param.grad
                state["speed"].store(speed)
                param.sub_(group["lr"] * speed)


class AdamW(torch.optim.Optimizer):
    """An optimizer with the name but not the states of torch's class, like bitsandbytes' AdamW."""

    def __init__(self, params: Iterable[Any], lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state |= {
                        "step": 0,
                        "state1": torch.zeros_like(param),
                        "state2": torch.zeros_like(param),
                    }
                state["step"] += 1
                state["state1"].lerp_(param.grad, 0.1)
                state["state2"].lerp_(param.grad.square(), 0.01)
                param.sub_(group["lr"] * state["state1"] / (state["state2"].sqrt() + 1e-8))


class Projector:
    """An object that cannot be stored in a checkpoint."""


class WithObject(AdamW):
    def step(self, closure: Any = None) -> None:
        super().step()
        for state in self.state.values():
            state["projector"] = Projector()


def build(here: Here, rank: Rank, stage: int, kind: Any, layout: str = "", **options: Any) -> Any:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    config = config_of(stage, "fp32") | {"gradient_accumulation_steps": 1}
    if layout:
        config["checkpoint"] = {"layout": layout}
    return here.start(
        rank, model, config, DeepSpeedEngine, optimizer=kind(model.parameters(), **options)
    )


def steps(engine: Any, numbers: Iterable[int], rank: int) -> list[float]:
    losses = []
    for number in numbers:
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def hypers(engine: Any) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in each.items() if key != "params"}
        for each in engine.optimizer.param_groups
    ]


def on_ranks(body: Any, ranks: int = RANKS) -> list[Any]:
    with engines_of_threads() as here:
        return run_ranks(ranks, lambda rank: body(here, rank), reads_in_place=True)


def goes_on(folder: Path, stage: int, kind: Any, layout: str = "") -> None:
    def body(
        here: Here, rank: Rank
    ) -> tuple[list[float], list[float], list[dict[str, Any]], list[dict[str, Any]]]:
        engine = build(here, rank, stage, kind, layout)
        steps(engine, range(3), rank.index)
        engine.save_checkpoint(folder)
        groups = hypers(engine)
        expected = steps(engine, range(3, 6), rank.index)
        engine.destroy()
        again = build(here, rank, stage, kind, layout)
        again.load_checkpoint(folder)
        found = hypers(again)
        losses = steps(again, range(3, 6), rank.index)
        again.destroy()
        return losses, expected, found, groups

    for losses, expected, found, groups in on_ranks(body):
        assert losses == expected and found == groups


@pytest.mark.parametrize("stage", range(4))
def test_states_that_are_tensor_subclasses_are_restored(tmp_path: Path, stage: int) -> None:
    goes_on(tmp_path, stage, Coded)


@pytest.mark.parametrize(
    ("stage", "layout"), [(0, ""), (2, ""), (3, ""), (1, "deepspeed"), (2, "slices")]
)
def test_a_class_with_the_name_of_torchs_keeps_its_own_states(
    tmp_path: Path, stage: int, layout: str
) -> None:
    goes_on(tmp_path, stage, AdamW, layout)


def test_a_subclass_of_other_blocks_is_refused(tmp_path: Path) -> None:
    def body(here: Here, rank: Rank) -> str:
        engine = build(here, rank, 2, Coded)
        steps(engine, range(2), rank.index)
        engine.save_checkpoint(tmp_path)
        engine.destroy()
        again = build(here, rank, 2, Coded, block=2)
        with pytest.raises(CheckpointError) as found:
            again.load_checkpoint(tmp_path)
        again.destroy()
        return str(found.value)

    for each in on_ranks(body):
        assert "'speed'" in each and "scale" in each


def test_a_checkpoint_of_torchs_adamw_is_not_taken_for_anothers(tmp_path: Path) -> None:
    def body(here: Here, rank: Rank) -> str:
        engine = build(here, rank, 2, torch.optim.AdamW, "slices")
        steps(engine, range(1), rank.index)
        engine.save_checkpoint(tmp_path)
        engine.destroy()
        again = build(here, rank, 2, AdamW, "slices")
        with pytest.raises(CheckpointError) as found:
            again.load_checkpoint(tmp_path)
        again.destroy()
        return str(found.value)

    assert all("torch's AdamW" in each for each in on_ranks(body))


def test_an_object_among_the_states_is_refused_with_what_a_user_can_do(tmp_path: Path) -> None:
    def body(here: Here, rank: Rank) -> str:
        engine = build(here, rank, 2, WithObject)
        steps(engine, range(1), rank.index)
        with pytest.raises(CheckpointError) as found:
            engine.save_checkpoint(tmp_path)
        engine.destroy()
        return str(found.value)

    for each in on_ranks(body):
        assert (
            "'projector'" in each
            and "Projector" in each
            and "another library's" in each
            and "export" in each
        )


def test_states_that_are_tensor_subclasses_are_not_offloaded(tmp_path: Path) -> None:
    def body(here: Here, rank: Rank, *, offloads: bool) -> list[float]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        config = config_of(3, "fp32") | {"gradient_accumulation_steps": 1}
        if offloads:
            config["zero_optimization"] |= {"offload_optimizer": {"device": "cpu"}}
        engine = here.start(
            rank, model, config, DeepSpeedEngine, optimizer=Coded(model.parameters())
        )
        losses = steps(engine, range(3), rank.index)
        engine.destroy()
        return losses

    plain = on_ranks(lambda here, rank: body(here, rank, offloads=False))
    assert on_ranks(lambda here, rank: body(here, rank, offloads=True)) == plain


@pytest.mark.parametrize("value", [math.inf, torch.tensor(-math.inf), np.float64(0.5), None, 3])
def test_a_number_of_an_optimizer_is_restored(value: Any) -> None:
    found = scalar_value(json.loads(json.dumps(saved_scalar(value), allow_nan=False)))
    assert found == value and isinstance(found, Tensor) == isinstance(value, Tensor)
