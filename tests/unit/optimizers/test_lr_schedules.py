"""Learning-rate schedules: formulas, names and command-line flags."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepseek_zero.base.errors import ConfigError, UsageError
from deepseek_zero.optimizers.lr_schedules import (
    VALID_LR_SCHEDULES,
    LRRangeTest,
    LRSchedule,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    resolve_schedule,
)


def groups(*rates: float, **settings: Any) -> SimpleNamespace:
    """Return a fake optimizer: schedules read only `param_groups`."""
    return SimpleNamespace(param_groups=[{"lr": rate, **settings} for rate in rates])


def rates(schedule: LRSchedule, steps: int) -> list[float]:
    """Return the first group's learning rate in each optimizer step, including the first."""
    seen = [schedule.optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        schedule.step()
        assert schedule.get_last_lr()[0] == schedule.optimizer.param_groups[0]["lr"]
        seen.append(schedule.optimizer.param_groups[0]["lr"])
    return seen


def test_warmup_rises_with_the_logarithm_and_stays() -> None:
    schedule = WarmupLR(groups(9.0), warmup_min_lr=0.1, warmup_max_lr=1.1, warmup_num_steps=8)
    expected = [0.1] + [0.1 + math.log(i + 1, 8) for i in range(8)] + [1.1] * 3
    assert rates(schedule, 11) == pytest.approx(expected)


def test_warmup_rises_linearly_if_configured() -> None:
    schedule = WarmupLR(groups(9.0), 0.0, 1.0, 4, "linear")
    assert rates(schedule, 6) == pytest.approx([0, 0, 0.25, 0.5, 0.75, 1, 1])


def test_warmup_to_each_groups_own_rate_is_the_default() -> None:
    optimizer = groups(0.5, 0.25)
    schedule = WarmupLR(optimizer, warmup_num_steps=2)
    assert schedule.get_last_lr() == [0.0, 0.0]
    for _ in range(3):
        schedule.step()
    assert schedule.get_last_lr() == schedule.get_lr() == [0.5, 0.25]


def test_warmup_accepts_one_value_per_group() -> None:
    schedule = WarmupLR(
        groups(9, 9), warmup_min_lr=[0.1, 0.2], warmup_max_lr=[1.0, 2.0], warmup_num_steps=2
    )
    assert schedule.get_last_lr() == [0.1, 0.2]
    schedule.step(5)
    assert schedule.get_last_lr() == [1.0, 2.0] and schedule.last_batch_iteration == 5
    with pytest.raises(ConfigError, match="warmup_min_lr lists 3 values for 2"):
        WarmupLR(groups(9, 9), warmup_min_lr=[1, 2, 3])


@pytest.mark.parametrize("shape", ["log", "linear"])
def test_no_warmup_steps_means_the_full_rate_at_once(shape: str) -> None:
    assert rates(WarmupLR(groups(0.5), warmup_num_steps=0, warmup_type=shape), 3) == [0.5] * 4
    decay = WarmupDecayLR(groups(0.5), 4, warmup_max_lr=1.0, warmup_num_steps=0, warmup_type=shape)
    assert rates(decay, 5) == pytest.approx([1.0, 1.0, 0.75, 0.5, 0.25, 0.0])
    cosine = WarmupCosineLR(
        groups(1.0), 4, warmup_num_steps=0, cos_min_ratio=0.0, warmup_type=shape
    )
    half = [(1 + math.cos(math.pi * done / 4)) / 2 for done in (1, 1, 2, 3, 4, 4)]
    assert rates(cosine, 5) == pytest.approx(half)


def test_one_warmup_step_counts_as_two() -> None:
    assert rates(WarmupLR(groups(1.0), warmup_num_steps=1), 3) == [0.0, 0.0, 1.0, 1.0]


def test_warmup_decay_falls_to_zero_at_the_total_and_stays() -> None:
    schedule = WarmupDecayLR(groups(9.0), 10, 0.2, 1.2, 4, "linear")
    up, down = [i / 4 for i in range(4)], [(10 - i) / 6 for i in range(4, 11)]
    expected = [0.2 + gamma for gamma in [0.0, *up, *down, 0.0, 0.0]]
    assert rates(schedule, 13) == pytest.approx(expected)


def test_warmup_decay_has_deepspeeds_own_default_maximum() -> None:
    schedule = WarmupDecayLR(groups(9.0), 10, warmup_num_steps=2)
    schedule.step(2)
    assert schedule.get_last_lr() == [0.001]


def test_warmup_cosine_is_a_ratio_of_each_groups_rate() -> None:
    optimizer = groups(2.0, 4.0)
    schedule = WarmupCosineLR(
        optimizer, 11, warmup_min_ratio=0.2, warmup_num_steps=3, cos_min_ratio=0.1
    )
    up = [0.2 + 0.8 * math.log(i + 1) / math.log(3) for i in range(3)]
    down = [0.1 + 0.9 * (1 + math.cos(math.pi * min(1, (i - 3 + 1) / 8))) / 2 for i in range(3, 14)]
    assert rates(schedule, 14) == pytest.approx([2 * ratio for ratio in [0.0, *up, *down]])
    assert schedule.get_last_lr()[1] == pytest.approx(4 * 0.1)


def test_a_total_within_the_warmup_is_warned_of_and_set_to_the_minimum(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("WARNING"):
        cosine = WarmupCosineLR(groups(1.0), 2, warmup_num_steps=4, cos_min_ratio=0.25)
    assert "total_num_steps 2 is less than warmup_num_steps 4" in caplog.text
    cosine.step(4)
    assert cosine.get_last_lr() == [0.25]


def test_the_range_test_climbs_continuously_or_in_stairs() -> None:
    smooth = LRRangeTest(groups(9.0), 0.1, lr_range_test_step_size=4, lr_range_test_step_rate=2.0)
    assert rates(smooth, 5) == pytest.approx([0.1 * (1 + 2 * i / 4) for i in range(6)])
    stairs = LRRangeTest(groups(9.0), 0.1, 4, 2.0, lr_range_test_staircase=True)
    assert rates(stairs, 8) == pytest.approx([0.1 * (1 + 2 * (i // 4)) for i in range(9)])


def test_one_cycle_rises_falls_and_decays_with_momentum_against_it() -> None:
    optimizer = groups(9.0, betas=(0.9, 0.99))
    schedule = OneCycle(optimizer, 0.1, 0.5, 0.5, 4, 2, decay_step_size=2, decay_mom_rate=0.1)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.99)
    assert schedule.get_mom() == [(0.9, 0.99)]  # the value at the top of the cycle, as in DeepSpeed
    height = [0, 1 / 4, 2 / 4, 3 / 4, 1, 1 / 2, 0]
    seen, moments = [optimizer.param_groups[0]["lr"]], []
    for _ in range(9):
        schedule.step()
        seen.append(optimizer.param_groups[0]["lr"])
        moments.append(optimizer.param_groups[0]["betas"][0])
    assert seen == pytest.approx(
        [0.1 + 0.4 * h for h in height] + [0.1 / (1 + 0.5 * t / 2) for t in (1, 2, 3)]
    )
    assert moments == pytest.approx(
        [0.9 - 0.1 * h for h in height[1:]] + [0.9 * (1 + 0.1 * t / 2) for t in (1, 2, 3)]
    )


def test_one_cycle_without_a_decay_size_stays_at_the_ends() -> None:
    optimizer = groups(9.0, betas=(0.9, 0.99))
    schedule = OneCycle(optimizer, 0.1, 0.5, 0.5, cycle_first_step_size=2, decay_mom_rate=0.1)
    assert rates(schedule, 8) == pytest.approx([0.1, 0.3, 0.5, 0.3] + [0.1] * 5)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.99)


def test_one_cycle_stairs_hold_the_rate_and_reach_the_peak() -> None:
    schedule = OneCycle(
        groups(9.0),
        0.0,
        1.0,
        cycle_first_step_size=6,
        cycle_second_step_size=3,
        cycle_first_stair_count=2,
    )
    assert rates(schedule, 8) == pytest.approx([0, 0, 0, 0.5, 0.5, 0.5, 1, 0.5, 0])


def test_one_cycle_reports_momentum_that_cannot_be_scheduled_and_changes_of_beta2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    OneCycle(groups(9.0, momentum=0.5), 0.1, 0.5)
    assert "cycle_momentum has no effect" in capsys.readouterr().err
    OneCycle(groups(9.0, betas=(0.9, 0.999)), 0.1, 0.5)
    assert "sets beta2 to 0.99" in capsys.readouterr().err
    optimizer = groups(9.0, betas=(0.9, 0.999))
    OneCycle(optimizer, 0.1, 0.5, cycle_momentum=False)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999) and not capsys.readouterr().err


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {"warmup_num_steps": 5}),
    ("WarmupDecayLR", {"total_num_steps": 9, "warmup_num_steps": 5}),
    ("WarmupCosineLR", {"total_num_steps": 9, "warmup_num_steps": 5}),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 3}),
    ("LRRangeTest", {"lr_range_test_step_size": 3}),
]


def test_every_name_of_deepspeed_is_covered() -> None:
    assert sorted(name for name, _ in SETTINGS) == sorted(VALID_LR_SCHEDULES)


@pytest.mark.parametrize(("name", "params"), SETTINGS)
def test_a_loaded_schedule_continues_with_the_saved_state(
    name: str, params: dict[str, Any]
) -> None:
    first, second = (
        resolve_schedule(name, params, groups(0.3, betas=(0.9, 0.99))) for _ in range(2)
    )
    for _ in range(4):
        first.step()
    assert first.state_dict() == {"last_batch_iteration": 3}
    second.load_state_dict(first.state_dict())
    assert second.get_last_lr() == first.get_last_lr() == [second.optimizer.param_groups[0]["lr"]]
    first.step()
    second.step()
    assert second.get_last_lr() == first.get_last_lr()


@pytest.mark.parametrize(("name", "params"), SETTINGS)
def test_a_schedule_drives_a_torch_optimizer_whose_rate_is_a_tensor(
    name: str, params: dict[str, Any]
) -> None:
    rate = torch.tensor(0.3)
    optimizer = torch.optim.Adam([torch.ones(1)], lr=rate)
    schedule = resolve_schedule(name.lower(), params, optimizer)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(schedule.get_last_lr()[0])


@pytest.mark.parametrize("name", ["WarmupLR", "WarmupCosineLR", "LinearLR"])
def test_a_schedule_by_name_gives_a_rate_that_is_a_tensor_the_same_values(name: str) -> None:
    params = {"total_num_steps": 9} if name == "WarmupCosineLR" else {}
    rates = []
    for rate in (0.3, torch.tensor(0.3)):
        optimizer = torch.optim.Adam([torch.ones(1)], lr=rate)
        schedule = resolve_schedule(name, params, optimizer)
        optimizer.step()
        schedule.step()
        schedule.step()
        rates.append(float(optimizer.param_groups[0]["lr"]))
    assert rates[1] == pytest.approx(rates[0])


def test_a_rate_may_be_a_scalar_tensor_and_must_be_a_number() -> None:
    schedule = WarmupLR(groups(0.3), warmup_max_lr=torch.tensor(0.5), warmup_num_steps=0)
    assert schedule.get_last_lr() == [0.5]
    for value in (None, "0.1"):
        with pytest.raises(ConfigError, match="warmup_min_lr is"):
            WarmupLR(groups(0.3), warmup_min_lr=value)


def test_a_wrapped_optimizer_is_found_and_anything_else_is_refused() -> None:
    inner = groups(0.3)
    schedule = WarmupLR(SimpleNamespace(optimizer=inner), warmup_num_steps=0)
    assert schedule.optimizer is inner
    with pytest.raises(UsageError, match="has no param_groups"):
        WarmupLR(object())


@pytest.mark.parametrize("name", ["WarmupLR", "ConstantLR"])
def test_a_schedule_by_name_refuses_an_optimizer_without_groups(name: str) -> None:
    for optimizer in (object(), groups()):
        with pytest.raises(UsageError, match="has no param_groups"):
            resolve_schedule(name, {}, optimizer)


@pytest.mark.parametrize("total", [1, 2, 3])
def test_one_cycle_of_pytorch_may_have_few_steps(total: int) -> None:
    optimizer = torch.optim.SGD([torch.ones(1)], lr=1.0)
    params = {"max_lr": 0.1, "total_steps": total}
    schedule = resolve_schedule("OneCycleLR", params, optimizer)
    assert isinstance(schedule, torch.optim.lr_scheduler.OneCycleLR)


def test_a_schedule_by_name_finds_a_wrapped_optimizer() -> None:
    inner = groups(0.3)
    schedule = resolve_schedule("WarmupLR", {}, SimpleNamespace(optimizer=inner))
    assert schedule.optimizer is inner


def test_a_group_added_later_is_an_error() -> None:
    optimizer = groups(0.3)
    schedule = WarmupLR(optimizer)
    optimizer.param_groups.append({"lr": 1.0})
    with pytest.raises(UsageError, match="has 2 parameter groups; WarmupLR was built for 1"):
        schedule.step()


def test_a_torch_schedule_is_found_by_name() -> None:
    optimizer = torch.optim.SGD([torch.ones(1)], lr=1.0)
    schedule = resolve_schedule("StepLR", {"step_size": 1, "gamma": 0.5}, optimizer)
    optimizer.step()
    schedule.step()
    assert (
        isinstance(schedule, torch.optim.lr_scheduler.StepLR)
        and optimizer.param_groups[0]["lr"] == 0.5
    )


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("WarmUp", {}, r"no learning-rate schedule is called WarmUp \(did you mean 'WarmupLR'\?\)"),
        (
            "WarmupLR",
            {"warmup_steps": 3},
            r"'warmup_steps' is not a parameter \(did you mean 'warmup_num_steps'\?\)",
        ),
        ("WarmupDecayLR", {}, "'total_num_steps' is missing"),
        ("WarmupLR", {"warmup_num_steps": -2.5}, "warmup_num_steps is -2.5"),
        ("WarmupLR", {"warmup_num_steps": -1}, "warmup_num_steps is -1"),
        ("WarmupLR", {"warmup_num_steps": "ten"}, "'warmup_num_steps' must be a number, not 'ten'"),
        ("StepLR", {"step_sise": 3}, "'step_size' is missing"),
    ],
)
def test_invalid_optimizer_parameters_are_named(
    name: str, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_schedule(name, params, torch.optim.SGD([torch.ones(1)], lr=1.0))


def test_floats_count_and_auto_leaves_the_default() -> None:
    params = {"total_num_steps": 1e1, "warmup_num_steps": 2.0, "warmup_max_lr": "auto"}
    schedule = resolve_schedule("WarmupDecayLR", params, groups(0.3))
    schedule.step(6)
    assert schedule.get_last_lr() == [pytest.approx(0.001 * 4 / 8)]


def test_an_unknown_warmup_is_a_warning_and_logarithmic_as_in_deepspeed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for kind, arguments in ((WarmupLR, ()), (WarmupDecayLR, (9,)), (WarmupCosineLR, (9,))):
        strange = kind(groups(1.0), *arguments, warmup_num_steps=4, warmup_type="cubic")
        assert "warmup_type 'cubic' is not known" in caplog.text and strange.warmup_type == "log"
        assert rates(strange, 8) == rates(kind(groups(1.0), *arguments, warmup_num_steps=4), 8)


def test_one_cycle_takes_momenta_and_rates_per_group_and_a_fall_of_no_length() -> None:
    optimizer = torch.optim.Adam([{"params": [torch.zeros(1)], "lr": 1.0} for _ in range(2)])
    cycle = OneCycle(
        optimizer, [0.1, 0.2], [1.0, 2.0], cycle_first_step_size=2, cycle_min_mom=[0.5, 0.6]
    )
    assert [group["betas"][0] for group in optimizer.param_groups] == [0.5, 0.6]
    cycle.step(1)
    assert cycle.get_lr() == [1.0, 2.0] and [mom for mom, _ in cycle.get_mom() or []] == [0.5, 0.6]
    with pytest.raises(ConfigError, match="cycle_max_mom lists 3 values for 2 parameter groups"):
        OneCycle(optimizer, 0.1, 1.0, cycle_max_mom=[0.9, 0.9, 0.9])
    sudden = OneCycle(groups(1.0), 0.0, 1.0, cycle_first_step_size=4, cycle_second_step_size=0)
    assert sudden.step_ratio == 1.0 and rates(sudden, 3) == [0.0, 0.25, 0.5, 0.75]


def test_numbers_of_iterations_may_be_fractions() -> None:
    warm = WarmupLR(groups(0.5), warmup_num_steps=2.5, warmup_type="linear", warmup_max_lr=1.0)
    assert rates(warm, 4) == pytest.approx([0.0, 0.0, 0.4, 0.8, 1.0])
    decay = WarmupDecayLR(
        groups(0.5), 4.5, warmup_num_steps=2.5, warmup_type="linear", warmup_max_lr=1.0
    )
    assert rates(decay, 5) == pytest.approx([0.0, 0.0, 0.4, 0.8, 0.75, 0.25])


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("WarmupLR", "warmup_max_lr", math.nan),
        ("WarmupLR", "warmup_min_lr", [math.inf]),
        ("WarmupCosineLR", "cos_min_ratio", math.nan),
        ("WarmupCosineLR", "warmup_min_ratio", None),
        ("LRRangeTest", "lr_range_test_step_rate", math.inf),
        ("OneCycle", "decay_lr_rate", -math.inf),
        ("OneCycle", "decay_mom_rate", math.nan),
    ],
)
def test_rates_that_would_not_be_finite_are_refused(name: str, setting: str, value: Any) -> None:
    required = {"WarmupCosineLR": {"total_num_steps": 9}, "OneCycle": {"cycle_max_lr": 1.0}}
    more = {"cycle_min_lr": 0.1} if name == "OneCycle" else {}
    with pytest.raises(ConfigError, match=f"{setting} is "):
        resolve_schedule(name, required.get(name, {}) | more | {setting: value}, groups(1.0))


def test_a_rate_that_grows_after_the_cycle_ends_before_it_is_infinite() -> None:
    chosen = {"decay_lr_rate": -0.5, "decay_step_size": 2, "cycle_first_step_size": 1}
    cycle = OneCycle(groups(1.0), cycle_min_lr=1.0, cycle_max_lr=2.0, **chosen)
    assert rates(cycle, 5)[-3:] == pytest.approx([4 / 3, 2.0, 4.0])
    with pytest.raises(ConfigError, match=r"no rate at iteration 5(.|\n)*set decay_lr_rate"):
        cycle.step()


def test_a_schedule_of_torch_whose_rates_are_not_finite_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    with pytest.raises(ConfigError, match=r"its rates are \[nan\]"):
        resolve_schedule("ExponentialLR", {"gamma": math.nan}, optimizer)
