"""Estimates: the seeds' figures by arithmetic, and the same figures from the plan."""

from __future__ import annotations

from math import inf

import pytest
import torch

from deepseek_zero.planner.layout import even_layout
from deepseek_zero.planner.memory import (
    GroupFacts,
    StepFacts,
    UnitFacts,
    mixed_precision_adam_bytes,
    moments_for,
    resident_bytes,
    step_of_units,
    total_bytes,
    units_of_model,
)
from deepseek_zero.planner.spec import PlanSettings, plan_for
from deepseek_zero.precision.policy import Policy
from tests.models import Gpt

GB = 10**9
BF16 = Policy(compute=torch.bfloat16)
WHOLE = Policy(compute=torch.bfloat16, master="fp32")  # the masters of the seeds' arithmetic


def planned(params: int, ranks: int, stage: int, policy: Policy, accumulation: int = 1) -> dict[str, int]:
    """Bytes of so many parameters by the plan."""
    settings = PlanSettings(stage=stage, policy=policy, accumulation=accumulation)
    plan = plan_for(settings, torch.float32, trainable=True, persistent=False, ranks=ranks)
    return total_bytes([GroupFacts(plan, params, ranks)])


# -- the seeds' figures


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
    assert [mixed_precision_adam_bytes(10 * GB, 4, stage) // GB for stage in range(4)] == [160, 70, 55, 40]
    assert sum(planned(10 * GB, 4, 3, WHOLE).values()) == 40 * GB


def test_64_ranks_save_3_82_7_21_and_64_times_because_4_and_8_are_limits() -> None:
    params = 64 * 10**8
    saved = [mixed_precision_adam_bytes(params) / mixed_precision_adam_bytes(params, 64, stage) for stage in range(4)]
    assert [round(each, 2) for each in saved] == [1.0, 3.82, 7.21, 64.0]
    # What stays whole, 4 and 2 of 16 bytes, is all that is left when the rest is spread over ever more ranks.
    many = [mixed_precision_adam_bytes(params) / mixed_precision_adam_bytes(params, 10**8, stage) for stage in (1, 2)]
    assert many == pytest.approx([4.0, 8.0], rel=1e-6)
    assert max(many) < 8 < inf


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_the_plan_says_what_the_arithmetic_says(stage: int, ranks: int) -> None:
    params = 64 * 10**6
    assert sum(planned(params, ranks, stage, WHOLE).values()) == mixed_precision_adam_bytes(params, ranks, stage)
    assert sum(planned(64 * 10**6, ranks, stage, Policy()).values()) == {
        0: 16, 1: 8 + 8 / ranks, 2: 4 + 12 / ranks, 3: 16 / ranks,
    }[stage] * params  # fp32: the master is the weight, gradients are 4 bytes  # fmt: skip


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


# -- to the byte


def unit_of(numel: int, ranks: int, stage: int, policy: Policy | None = None) -> UnitFacts:
    settings = PlanSettings(stage=stage, policy=policy or Policy())
    plan = plan_for(settings, torch.float32, trainable=True, persistent=False, ranks=ranks)
    return UnitFacts("unit", (GroupFacts.of(plan, even_layout(["weight"], [(numel,)], ranks)),))


def test_padding_is_held_of_weights_and_gradients_and_not_of_moments() -> None:
    units = [unit_of(1500, ranks=2, stage=3)]  # padded to 2 x 1,024: rank 0 owns 1,024 elements, rank 1 the other 476
    found = [resident_bytes(units, step_of_units(units, rank, "AdamW", 1 << 22)) for rank in range(2)]
    assert found[0] == {"weight": 4 * 1024 + 4, "grad": 4 * 1024, "master": 0, "moments": 8 * 1024 + 4}
    assert found[1] == {"weight": 4 * 1024 + 4, "grad": 4 * 1024, "master": 0, "moments": 8 * 476 + 4}


def test_a_rank_that_owns_nothing_of_a_unit_keeps_no_moments_of_it() -> None:
    units = [unit_of(10, ranks=3, stage=1)]
    assert [step_of_units(units, rank, "Adam", 1 << 22).moments_bytes for rank in range(3)] == [84, 0, 0]


def test_a_replicated_master_is_cut_where_slices_end_and_each_piece_has_a_counter() -> None:
    assert unit_of(2500, ranks=3, stage=0).groups[0].piece_sizes(0, 1 << 22) == [1024, 1024, 452]
    assert unit_of(2500, ranks=3, stage=1).groups[0].piece_sizes(2, 1 << 22) == [452]
    assert unit_of(2500, ranks=1, stage=0).groups[0].piece_sizes(0, 1000) == [1000, 1000, 500]


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
def test_moments_follow_the_optimizer_and_its_options(name: str, options: dict[str, object], expected: int) -> None:
    assert moments_for(name, options).bytes_of(100, options) == expected


def test_scratch_is_the_fullest_tile_and_only_where_gradients_are_cast_or_masters_joined() -> None:
    groups, sizes = [({}, [700, 200, 400]), ({}, [500])], [[700, 200, 400, 500]]
    assert StepFacts("AdamW", groups, sizes, 1000, casts_grads=True).scratch_bytes == 4 * 900
    assert StepFacts("AdamW", groups, sizes, 500, casts_grads=True).scratch_bytes == 4 * 700
    assert StepFacts("AdamW", groups, sizes, 1000, casts_grads=False).scratch_bytes == 0
    joined = StepFacts("AdamW", groups, sizes, 1000, casts_grads=True, joins_masters=True)
    assert joined.scratch_bytes == 4 * (900 + 900 + 900 + 1)  # gradients, masters, what joining needs, one NaN
    half = step_of_units([unit_of(100, 1, 0, BF16)], 0, "AdamW", 1000)
    assert half.casts_grads and half.joins_masters
    full = step_of_units([unit_of(100, 1, 0)], 0, "AdamW", 1000)
    assert not full.casts_grads and not full.joins_masters


def test_units_of_a_model_without_storage_are_its_blocks_and_the_root() -> None:
    with torch.device("meta"):
        model = Gpt(blocks=4)
    units = units_of_model(model, PlanSettings(stage=3, persistence_numel=0), ranks=2)
    assert [unit.name for unit in units] == ["root", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]
    held = sum(group.layout.numel for unit in units for group in unit.groups)
    assert held == sum(parameter.numel() for parameter in model.parameters())
