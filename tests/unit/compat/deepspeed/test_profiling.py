"""Test DeepSpeed's FLOPs profiler and timers."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import deepseek_zero as dz
from deepseek_zero.base.errors import UsageError
from deepseek_zero.compat.deepspeed import (
    profiling,
)
from deepseek_zero.compat.deepspeed.profiling import FlopsProfiler
from deepseek_zero.report.flops import ForwardCost


def test_modules_have_their_modes_after_a_profile() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    model[1].eval()
    profiling.get_model_profile(model, (3, 4), print_profile=False)
    assert [each.training for each in model.modules()] == [True, True, False]
    with pytest.raises(RuntimeError, match="shapes"):
        profiling.get_model_profile(model, (3, 5), print_profile=False)
    assert [each.training for each in model.modules()] == [True, True, False]


def test_the_profiler_counts_a_forward_by_module(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    found = profiling.get_model_profile(model, (3, 4), as_string=False)
    assert found == (2 * 3 * (4 * 8 + 8 * 2), 3 * (4 * 8 + 8 * 2), 58)
    text = capsys.readouterr().out
    assert (
        "0: Linear, 40 parameters, 192FLOPS (66.7%)" in text and "2: Linear, 18 parameters" in text
    )
    profiler = profiling.FlopsProfiler(model)
    with pytest.raises(UsageError, match="has not watched"):
        profiler.get_total_flops()
    profiler.start_profile()
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()  # the backward pass is not counted
    profiler.stop_profile()
    model(torch.ones(3, 4))
    assert profiler.get_total_flops() == 2 * found[0] and profiler.get_total_duration() > 0
    profiler.end_profile()
    assert not model._forward_hooks and not model[0]._forward_hooks


def test_a_profile_after_an_interrupted_forward_counts_again() -> None:
    class Interrupted(nn.Linear):
        def forward(self, x: torch.Tensor, is_last: bool = False) -> torch.Tensor:
            if not is_last:
                raise KeyboardInterrupt
            return super().forward(x)

    cost = ForwardCost(Interrupted(4, 4))
    for is_last in (False, True):
        cost.start()
        with nullcontext() if is_last else pytest.raises(KeyboardInterrupt):
            cost.model(torch.ones(3, 4), is_last)
        cost.stop()
        assert not _get_current_dispatch_mode_stack()
    assert cost.rows[""].flops == 2 * 3 * 4 * 4


def test_a_module_that_calls_itself_is_counted_once() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, calls: int = 2) -> torch.Tensor:
            x = self.layer(x)
            return self(x, calls - 1) if calls else x

    for model in (Chain(), nn.Sequential(Chain())):
        found = profiling.get_model_profile(model, (3, 4), print_profile=False, as_string=False)
        assert found[0] == 3 * 2 * 3 * 4 * 4
        assert not _get_current_dispatch_mode_stack()


def test_timers_return_milliseconds(caplog: pytest.LogCaptureFixture) -> None:
    wall = profiling.SynchronizedWallClockTimer()
    wall("step").start()
    wall("step").stop()
    assert wall.has_timer("step") and not wall.has_timer("other")
    assert (
        0 <= wall("step").elapsed(reset=False) == wall("step").mean()
        and wall.get_mean(["step"])["step"] >= 0
    )
    assert wall("step").elapsed() == 0
    pace = profiling.ThroughputTimer(None, batch_size=4, start_step=1)
    for _ in range(3):
        assert pace.avg_samples_per_sec() < 0 or pace.global_step_count > 1
        pace.start()
        pace.stop(global_step=True)
    assert pace.avg_samples_per_sec() > 0
    profiling.NoopTimer()("anything").start()


def make(config: dict[str, Any], model: nn.Module | None = None, **more: Any) -> Any:
    model = model if model is not None else nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    return dz.initialize(model=model, config={"train_batch_size": 1, **config}, **more)[0]


def test_the_profiled_forward_is_the_engines_flops_profiler() -> None:
    asked = {"flops_profiler": {"enabled": True, "profile_step": 0}, "optimizer": {"type": "Adam"}}
    engine = make(asked, nn.Linear(10, 10))
    assert engine.flops_profiler.flops == 0
    engine(torch.ones(1, 10))
    assert isinstance(engine.flops_profiler, FlopsProfiler)
    assert (engine.flops_profiler.flops, engine.flops_profiler.params) == (200, 110)
    assert make({}).flops_profiler is None


def test_a_profile_names_its_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = {"world_size": 8, "dp_world_size": None, "seq_dp_world_size": 4, "mp_world_size": 1}
    engine = SimpleNamespace(**ranks, train_micro_batch_size_per_gpu=lambda: 2)
    model = nn.Linear(4, 4)
    profiler = FlopsProfiler(model, engine)
    profiler.start_profile()
    model(torch.ones(1, 4))
    profiler.print_model_profile(detailed=False)
    profiler.end_profile()
    assert capsys.readouterr().out.splitlines()[1].split() == ["data", "parallel", "size:", "4"]


@pytest.mark.parametrize("is_measured", [True, False])
def test_an_engines_timers_have_deepspeeds_names(is_measured: bool) -> None:
    config = {"optimizer": {"type": "Adam"}, "wall_clock_breakdown": is_measured}
    engine = make({**config, "steps_per_print": 100})
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
    assert engine.timers.has_timer("fwd") is is_measured
    for name in ("fwd", "bwd", "step", "fwd_microstep"):
        assert (engine.timers(name).elapsed(reset=False) > 0) is is_measured
    engine.timers("mine").start()
    engine.timers("mine").stop()
    assert engine.timers("mine").elapsed() > 0


def test_numbers_are_shown_in_the_units_that_a_program_names() -> None:
    assert profiling.flops_to_string(1.5e12, units="GFLOPS") == "1500 GFLOPS"
    assert profiling.macs_to_string(1_234_567, "M", 1) == "1.2 MMACs"
    assert profiling.params_to_string(2e9, units="B") == "2 B"
    assert profiling.duration_to_string(0.0123, units="ms", precision=0) == "12 ms"
    assert profiling.flops_to_string(1, units="X") == "1 XFLOPS"
