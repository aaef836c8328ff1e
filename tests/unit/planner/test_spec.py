"""Test ZeRO's placements for each stage and dtype, and the transitions between placements."""

from __future__ import annotations

import pytest
import torch

from deepseek_zero.planner.describe import describe_states
from deepseek_zero.planner.plan_settings import PlanSettings
from deepseek_zero.planner.row_of_group import plan_for
from deepseek_zero.planner.spec import TRANSITIONS, Movement, P, Placement, R, S, ShardPlan, Spec
from deepseek_zero.planner.units import promoted_plan
from deepseek_zero.precision.policy import Policy

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def plan_of(
    stage: int, policy: Policy | None = None, dtype: torch.dtype = FP32, **changes: object
) -> ShardPlan:
    asked = {"trainable": True, "persistent": False, "ranks": 4} | changes
    accumulation = asked.pop("accumulation", 1)
    settings = PlanSettings(stage=stage, policy=policy or Policy(), accumulation=accumulation)  # type: ignore[arg-type]
    return plan_for(settings, dtype, **asked)  # type: ignore[arg-type]


def letters(plan: ShardPlan) -> str:
    rows = (plan.weight, plan.grad, plan.master, plan.moments)
    return "".join(row.placement.value if row is not None else "-" for row in rows)


def test_the_stages_are_the_columns_of_the_table() -> None:
    assert [letters(plan_of(stage)) for stage in range(4)] == ["RPRR", "RPSS", "RSSS", "SSSS"]


def test_persistent_parameters_of_stage_3_follow_stage_2_and_nothing_changes_below() -> None:
    assert [letters(plan_of(stage, persistent=True)) for stage in range(4)] == [
        "RPRR",
        "RPSS",
        "RSSS",
        "RSSS",
    ]


def test_frozen_parameters_have_a_weight_and_nothing_else() -> None:
    assert [letters(plan_of(stage, trainable=False)) for stage in range(4)] == [
        "R---",
        "R---",
        "R---",
        "S---",
    ]


def test_in_a_world_of_one_gradients_stay_where_they_are_collected() -> None:
    assert [letters(plan_of(stage, ranks=1)) for stage in range(4)] == [
        "RPRR",
        "RPSS",
        "RPSS",
        "SPSS",
    ]


@pytest.mark.parametrize(
    ("policy", "accumulation", "weight", "grad", "master"),
    [
        (Policy(), 1, FP32, FP32, FP32),
        (Policy(), 4, FP32, FP32, FP32),
        (Policy(compute=BF16), 1, BF16, BF16, torch.int16),
        (Policy(compute=BF16), 4, BF16, FP32, torch.int16),
        (Policy(compute=BF16, master="fp32"), 1, BF16, BF16, FP32),
        (Policy(compute=FP16), 1, FP16, FP16, FP32),
        (Policy(compute=FP16, accumulate=FP16), 4, FP16, FP16, FP32),
    ],
)
def test_dtypes_follow_the_policy_and_the_accumulation(
    policy: Policy, accumulation: int, weight: torch.dtype, grad: torch.dtype, master: torch.dtype
) -> None:
    plan = plan_of(3, policy, accumulation=accumulation)
    assert plan.grad is not None and plan.master is not None
    assert (plan.weight.dtype, plan.grad.dtype, plan.master.dtype) == (weight, grad, master)
    assert plan.moments == Spec(plan.master.placement, FP32)
    assert plan.master_is_weight == (weight == master)
    assert plan.master_is_split == (master == torch.int16)


def test_a_promoted_plan_computes_in_fp32_and_has_a_whole_main_weight() -> None:
    plan = plan_of(3, Policy(compute=BF16))
    lifted = promoted_plan(plan)
    assert lifted.grad is not None
    assert (lifted.weight.dtype, lifted.grad.dtype) == (FP32, FP32)
    assert (lifted.master, lifted.moments) == (plan.moments, plan.moments)
    assert not lifted.master_is_weight and not lifted.master_is_split
    assert letters(lifted) == letters(plan)


def test_a_split_main_weight_is_printed_as_such() -> None:
    assert describe_states(plan_of(3, Policy(compute=BF16)))["master"] == "S weight+int16 device"
    assert (
        describe_states(plan_of(3, Policy(compute=BF16, master="fp32")))["master"]
        == "S float32 device"
    )
    frozen = describe_states(ShardPlan(Spec(R, FP32)))
    assert (frozen["weight"], frozen["master"]) == ("R float32 device", "-")


def test_a_rank_holds_a_slice_of_what_is_sharded_and_all_of_the_rest() -> None:
    assert [Spec(placement, FP32).numel(12, 4) for placement in (R, S, P)] == [12, 3, 12]


def test_placements_are_one_letter_each_in_tables() -> None:
    assert [(placement.name, placement.value) for placement in Placement] == [
        ("REPLICATE", "R"),
        ("SHARD", "S"),
        ("PARTIAL", "P"),
    ]


def test_the_table_equals_the_one_in_the_module_docstring() -> None:
    assert TRANSITIONS == {
        (S, R): Movement.ALL_GATHER,
        (S, S): Movement.NOTHING,
        (P, R): Movement.ALL_REDUCE,
        (P, S): Movement.REDUCE_SCATTER,
        (R, R): Movement.NOTHING,
        (R, S): Movement.LOCAL_SLICE,
    }


def test_every_placement_reaches_replicate_and_shard_and_nothing_becomes_partial() -> None:
    assert {source for source, target in TRANSITIONS} == set(Placement)
    assert {target for source, target in TRANSITIONS} == {R, S}
    assert all((source, target) in TRANSITIONS for source in Placement for target in (R, S))
