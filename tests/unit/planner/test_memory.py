"""Memory estimates agree with known formulas and with the plan."""

from __future__ import annotations

from math import inf

import pytest
import torch

from deepseek_zero.planner.memory import mixed_precision_adam_bytes, moments_for, total_bytes
from deepseek_zero.planner.plan_settings import PlanSettings
from deepseek_zero.planner.row_of_group import plan_for
from deepseek_zero.planner.units import GroupPlan
from deepseek_zero.precision.policy import Policy

GB = 10**9
BF16 = Policy(compute=torch.bfloat16)
WHOLE = Policy(compute=torch.bfloat16, master="fp32")  # with fp32 main weights


def planned(
    params: int, ranks: int, stage: int, policy: Policy, accumulation: int = 1
) -> dict[str, int]:
    """Return the planned bytes by state for a number of parameters."""
    settings = PlanSettings(stage=stage, policy=policy, accumulation=accumulation)
    plan = plan_for(settings, torch.float32, trainable=True, persistent=False, ranks=ranks)
    return total_bytes([GroupPlan.of_size(plan, params, ranks)])


# -- known figures


def test_seven_billion_parameters_take_112_gb() -> None:
    assert mixed_precision_adam_bytes(7 * GB) == 112 * GB == 7 * GB * (2 + 2 + 12)
    assert sum(planned(7 * GB, 1, 0, WHOLE).values()) == 112 * GB


def test_seed_004s_17_gb_become_5_on_four_ranks() -> None:
    activations = 1 * GB
    one, four = planned(1 * GB, 1, 0, Policy()), planned(1 * GB, 4, 3, Policy())
    assert one == {"weight": 4 * GB, "grad": 4 * GB, "master": 0, "moments": 8 * GB}
    assert four == {"weight": 1 * GB, "grad": 1 * GB, "master": 0, "moments": 2 * GB}
    assert (sum(one.values()) + activations, sum(four.values()) + activations) == (17 * GB, 5 * GB)


def test_ten_billion_parameters_on_four_ranks_take_40_gb_each_instead_of_160() -> None:
    assert [mixed_precision_adam_bytes(10 * GB, 4, stage) // GB for stage in range(4)] == [
        160,
        70,
        55,
        40,
    ]
    assert sum(planned(10 * GB, 4, 3, WHOLE).values()) == 40 * GB


def test_64_ranks_save_3_82_7_21_and_64_times_because_4_and_8_are_limits() -> None:
    params = 64 * 10**8
    saved = [
        mixed_precision_adam_bytes(params) / mixed_precision_adam_bytes(params, 64, stage)
        for stage in range(4)
    ]
    assert [round(each, 2) for each in saved] == [1.0, 3.82, 7.21, 64.0]
    # With very many ranks, only the replicated part remains: 4 or 2 of 16 bytes.
    many = [
        mixed_precision_adam_bytes(params) / mixed_precision_adam_bytes(params, 10**8, stage)
        for stage in (1, 2)
    ]
    assert many == pytest.approx([4.0, 8.0], rel=1e-6)
    assert max(many) < 8 < inf


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_the_plan_equals_the_arithmetic(stage: int, ranks: int) -> None:
    params = 64 * 10**6
    assert sum(planned(params, ranks, stage, WHOLE).values()) == mixed_precision_adam_bytes(
        params, ranks, stage
    )
    assert sum(planned(64 * 10**6, ranks, stage, Policy()).values()) == {
        0: 16, 1: 8 + 8 / ranks, 2: 4 + 12 / ranks, 3: 16 / ranks,
    }[stage] * params  # in fp32 weight and main weight are the same  # fmt: skip


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 64])
def test_a_split_master_saves_2_bytes_wherever_the_master_is_kept(stage: int, ranks: int) -> None:
    params = 64 * 10**6
    split, whole = planned(params, ranks, stage, BF16), planned(params, ranks, stage, WHOLE)
    assert sum(planned(params, 1, stage, BF16).values()) == params * (12 + 2)
    assert split["master"] * 2 == whole["master"]
    assert split == whole | {"master": split["master"]}


def test_above_accumulation_1_the_gradient_of_16_bit_weights_is_kept_in_fp32() -> None:
    assert planned(10**6, 1, 0, BF16)["grad"] == 2 * 10**6
    assert planned(10**6, 1, 0, BF16, accumulation=2)["grad"] == 4 * 10**6


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("SGD", {}, 0),
        ("SGD", {"momentum": 0.9}, 400),
        ("AdamW", {}, 804),
        ("Adam", {"amsgrad": True}, 1204),
        ("RMSprop", {"momentum": 0.9, "centered": True}, 1204),
        ("Lion", {}, 400),
        ("Muon", {"use_muon": True}, 400),
        ("Muon", {"use_muon": False}, 804),
        ("SomebodysOwn", {}, 804),
    ],
)
def test_moments_follow_the_optimizer_and_its_options(
    name: str, options: dict[str, object], expected: int
) -> None:
    assert moments_for(name, options).bytes_of(100, options) == expected
