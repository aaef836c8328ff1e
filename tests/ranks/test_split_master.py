"""Main weights split into bf16 weight and int16 remainder act like fp32 main weights.

They are trained, read, written and saved as full fp32 values.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepseek_zero as dz
from deepseek_zero.comm.collectives import Comm
from deepseek_zero.sharding.regroup import promote_unit
from deepseek_zero.sharding.whole_values import restore_params
from deepseek_zero.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
)
from tests.models import Gpt, seeded
from tests.reference import MakeOptimizer
from tests.training import Run, start_engine, train_step

FUSED: MakeOptimizer = lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)  # noqa: E731
STEPS = 4


def bits(values: dict[str, Tensor]) -> dict[str, list[int]]:
    """Return the values by name as integers, so that -0 differs from 0 and NaN equals NaN."""
    kinds = {2: torch.int16, 4: torch.int32}
    return {
        name: value.reshape(-1).view(kinds[value.itemsize]).tolist()
        for name, value in values.items()
    }


def everything(engine: Any) -> dict[str, dict[str, list[int]]]:
    """Return the full weights, main weights and moments of an engine. Collective."""
    found: dict[str, dict[str, Tensor]] = {
        "weight": dict(engine.module.state_dict()),
        "master": {},
        "moment": {},
    }
    for name, param in engine.module.named_parameters():
        master, moment = (
            safe_get_full_fp32_param(param),
            safe_get_full_optimizer_state(param, "exp_avg"),
        )
        assert master is not None and master.dtype == torch.float32
        found["master"][name] = master
        if moment is not None:
            found["moment"][name] = moment
    return {kind: bits(values) for kind, values in found.items()}


def trained(
    run: Run, make: MakeOptimizer | None = FUSED, steps: int = STEPS
) -> tuple[Any, list[Tensor]]:
    engine = start_engine(run, seeded(), make)
    return engine, [loss for step in range(steps) for loss in train_step(engine, run, step)]


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_stage_trains_to_the_same_bits_with_either_kind_of_master(
    ranks: int, accumulation: int
) -> None:
    # Micro-batches and ranks are summed in a different order by the two pairs of stages
    for stages in ((0, 1), (2, 3)):
        runs = [
            Run(stage, "bf16", accumulation, master=master)
            for stage in stages
            for master in ("split", "fp32")
        ]
        engines, losses = zip(*map(trained, runs), strict=True)
        kinds = [engine.runtime.groups[0].plan.master_is_split for engine in engines]
        assert kinds == [True, False, True, False]
        states = [everything(engine) for engine in engines]
        assert all(state == states[0] for state in states[1:])
        assert all(all(map(torch.equal, each, losses[0])) for each in losses[1:])


OPTIMIZERS: dict[str, Callable[[nn.Module], MakeOptimizer]] = {
    "momentum": lambda model: lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adam, foreach": lambda model: (
        lambda params: torch.optim.Adam(params, lr=0.01, foreach=True, amsgrad=True)
    ),
    "adagrad": lambda model: lambda params: torch.optim.Adagrad(params, lr=0.01),
    "two groups": lambda model: (
        lambda params: torch.optim.AdamW(
            [{"params": params[:5], "lr": 0.1}, {"params": params[5:], "weight_decay": 0.0}],
            lr=0.01,
        )
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_clients_own_optimizer_is_not_affected(name: str, stage: int) -> None:
    make = OPTIMIZERS[name](seeded())
    one, two = (
        trained(Run(stage, "bf16", clipping=0.3, master=kind), make)[0]
        for kind in ("split", "fp32")
    )
    assert everything(one) == everything(two)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", ["Lion", "Lamb", "Muon"])
def test_optimizers_of_this_library_are_not_affected_either(name: str, stage: int) -> None:
    found = []
    for kind in ("split", "fp32"):
        run = Run(stage, "bf16", master=kind)
        config = {**run.config(), "optimizer": {"type": name, "params": {"lr": 1e-2}}}
        engine = dz.initialize(model=seeded(), config=config)[0]
        for step in range(STEPS):
            train_step(engine, run, step)
        found.append(everything(engine))
    assert found[0] == found[1]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_between_steps_the_inner_optimizer_holds_no_values_and_the_same_parameters(
    stage: int,
) -> None:
    engine, _ = trained(Run(stage, "bf16"), steps=1)
    params = [param for group in engine.optimizer.inner.param_groups for param in group["params"]]
    assert params and all(param.isnan().all() and not any(param.stride()) for param in params)
    assert len({param.untyped_storage().data_ptr() for param in params}) == 1
    train_step(engine, Run(stage, "bf16"), 1)
    again = [param for group in engine.optimizer.inner.param_groups for param in group["params"]]
    assert all(map(lambda one, two: one is two, params, again))
    for piece in engine.optimizer.shards():
        state = engine.optimizer.state[piece.param]
        assert state["exp_avg"].shape == piece.param.shape and state["exp_avg"].is_contiguous()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_failed_step_does_not_change_the_main_weights(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(stage, "bf16")
    engine, _ = trained(run, steps=1)
    before = everything(engine)["master"]

    def fail(self: Any) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.zero_()
        raise ArithmeticError("no step today")

    monkeypatch.setattr(type(engine.optimizer.inner), "step", fail)
    with pytest.raises(ArithmeticError):
        train_step(engine, run, 1)
    monkeypatch.undo()
    assert everything(engine)["master"] == before
    assert all(piece.param.isnan().all() for piece in engine.optimizer.shards())


# -- access from outside


def change(engine: Any, how: str) -> None:
    """Give a parameter new values by the API `how`, equal on every rank."""
    name, param = next(
        (name, param) for name, param in engine.module.named_parameters() if param.dim() == 2
    )
    values = torch.linspace(-1, 1, param.numel()).view(param.shape)
    match how:
        case "gathered":
            with dz.zero.GatheredParameters(param, modifier_rank=1), torch.no_grad():
                param[::2] = 0.37
        case "full":
            safe_set_full_fp32_param(param, values)
        case "local":
            part = safe_get_local_fp32_param(param)
            safe_set_local_fp32_param(param, part.mul(1.001).add(1e-5))
        case "state dict":
            engine.module.load_state_dict({name: values}, strict=False)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["gathered", "full", "local", "state dict"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_changes_from_outside_mean_the_same_for_both_kinds(stage: int, how: str) -> None:
    if how == "local" and stage == 0:
        pytest.skip("a replicated master has no local part")
    found = []
    for kind in ("split", "fp32"):
        run = Run(stage, "bf16", master=kind)
        engine, _ = trained(run, steps=2)
        change(engine, how)
        found.append(everything(engine))
        train_step(engine, run, 2)
        found.append(everything(engine))
    assert found[:2] == found[2:]
    assert found[0] != found[1]


@pytest.mark.ranks(2)
def test_a_value_written_is_the_value_read() -> None:
    engine, _ = trained(Run(3, "bf16"), steps=1)
    param = next(iter(engine.module.parameters()))
    values = torch.randn(param.shape, generator=torch.Generator().manual_seed(1))
    safe_set_full_fp32_param(param, values)
    assert torch.equal(safe_get_full_fp32_param(param), values)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_mask_on_gathered_weights_produces_no_nan(stage: int) -> None:
    run = Run(stage, "bf16")
    engine, _ = trained(run, steps=1)
    for step in range(1, 4):
        with torch.no_grad():
            for param in engine.module.parameters():
                param.view(-1)[::2].zero_()
        assert all(bool(loss.isfinite()) for loss in train_step(engine, run, step))
    assert all(bool(value.isfinite().all()) for value in engine.module.state_dict().values())


# -- checkpoints


def run_of(stage: int, kind: str) -> Run:
    """Return a run with bf16 weights and a "split" or "whole" main weight, or "fp32" weights."""
    return Run(
        stage, "fp32" if kind == "fp32" else "bf16", master="fp32" if kind == "whole" else "split"
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stages", [(3, 3), (1, 3), (3, 0), (2, 1)])
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("split", "split"), ("split", "whole"), ("whole", "split"), ("split", "fp32")],
)
def test_a_checkpoint_contains_fp32_main_weights_for_every_kind(
    tmp_path: Path, saved: str, loaded: str, stages: tuple[int, int]
) -> None:
    one, _ = trained(run_of(stages[0], saved), steps=2)
    one.save_checkpoint(tmp_path)
    two = start_engine(run_of(stages[1], loaded), seeded(), FUSED)
    two.load_checkpoint(tmp_path)
    before, after = everything(one), everything(two)
    assert (before["master"], before["moment"]) == (after["master"], after["moment"])
    if loaded != "fp32":
        assert before["weight"] == after["weight"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_run_resumes_bit_for_bit_with_another_kind_of_main_weight(
    tmp_path: Path, stage: int
) -> None:
    straight, _ = trained(Run(stage, "bf16"), steps=4)
    half, _ = trained(Run(stage, "bf16"), steps=2)
    half.save_checkpoint(tmp_path)
    for kind in ("split", "fp32"):
        run = Run(stage, "bf16", master=kind)
        resumed = start_engine(run, seeded(), FUSED)
        resumed.load_checkpoint(tmp_path)
        for step in (2, 3):
            train_step(resumed, run, step)
        assert everything(resumed) == everything(straight)


# -- promotion and demotion


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_promoted_unit_has_the_main_weights_values_and_continues_training(stage: int) -> None:
    run = Run(stage, "bf16")
    engine, _ = trained(run, steps=2)
    before = everything(engine)
    for unit in engine.runtime.units:
        promote_unit(engine.runtime, unit, to_fp32=True)
    after = everything(engine)
    assert (after["master"], after["moment"]) == (before["master"], before["moment"])
    assert after["weight"] == before["master"]
    train_step(engine, run, 2)
    later = everything(engine)
    assert later["master"] != after["master"] and later["weight"] == later["master"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_released_model_has_the_main_weights_values(stage: int) -> None:
    engine, _ = trained(Run(stage, "bf16"), steps=2)
    masters = everything(engine)["master"]
    module = engine.module
    engine.destroy()
    for group in engine.runtime.groups:
        restore_params(group)
    assert bits({name: param.detach() for name, param in module.named_parameters()}) == masters


@pytest.mark.ranks(2)
@pytest.mark.parametrize("master", ["split", "fp32"])
def test_units_are_packed_in_one_buffer_before_they_are_sliced(
    master: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second buffer per unit would cost more time than the rest of the initialisation."""
    taken: list[torch.dtype] = []
    empty = Comm.empty
    monkeypatch.setattr(
        Comm, "empty", lambda comm, numel, dtype: taken.append(dtype) or empty(comm, numel, dtype)
    )

    def whole_buffers(blocks: int) -> int:
        taken.clear()
        start_engine(Run(3, "bf16", master=master), seeded(Gpt, blocks=blocks)).destroy()
        return taken.count(torch.float32)

    assert 0 < whole_buffers(2) == whole_buffers(6)
