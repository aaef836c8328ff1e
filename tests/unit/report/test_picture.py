"""The picture of a plan shows its bytes and schedule, for any number of units."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepseek_zero.base.mesh import Mesh
from deepseek_zero.planner.layout import even_layout
from deepseek_zero.planner.make_schedule import plan_schedule
from deepseek_zero.planner.memory import group_bytes
from deepseek_zero.planner.plan import Plan
from deepseek_zero.planner.plan_settings import Machine, PlanSettings
from deepseek_zero.planner.row_of_group import plan_for
from deepseek_zero.planner.schedule import ActionKind
from deepseek_zero.planner.units import GroupPlan, UnitPlan
from deepseek_zero.planner.update import ParamGroupPlan, UpdateSettings, plan_update
from deepseek_zero.report.picture import UnitPlace, draw_plan, places_of, strip_of
from deepseek_zero.tiers.tier import Tier
from tests.unit.report.test_plots import is_png_of


def plan_of(stage: int, tier: Tier = Tier.DEVICE, numel: int = 8192) -> Plan:
    """Return a plan of one unit with a trained tensor, which Adam updates, and a frozen one."""
    settings = PlanSettings(
        stage=stage, weight_tier=tier if stage == 3 else Tier.DEVICE, state_tier=tier
    )
    plan = plan_for(settings, torch.float32, trainable=True, persistent=False, ranks=2)
    frozen = plan_for(settings, torch.float32, trainable=False, persistent=False, ranks=2)
    group = GroupPlan(plan, even_layout(["weight"], [(numel,)], 2))
    unit = UnitPlan("blocks.0", (group, GroupPlan.of_size(frozen, 4096, 2)))
    update = UpdateSettings("Adam", (ParamGroupPlan({}, frozenset({"weight"})),))
    schedule = plan_schedule([unit.gathered_numel], [0], settings)
    return Plan(
        settings, Mesh(dp_shard=2), Machine(), (unit,), schedule, plan_update([unit], update, 0)
    )


@pytest.mark.parametrize("tier", list(Tier))
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_unit_has_the_bytes_that_the_plan_counts(stage: int, tier: Tier) -> None:
    plan = plan_of(stage, tier)
    (place,) = places_of(plan)
    facts = plan.units[0]
    counted = [group_bytes(group, count) for group, count in zip(facts.groups, (2, 0), strict=True)]
    assert place.total == sum(sum(each.values()) for each in counted)
    for away in (Tier.HOST, Tier.NVME):
        shown = sum(nbytes for (_, where), nbytes in place.nbytes.items() if where is away)
        assert shown == sum(each.get(away.value, 0) for each in counted)
    assert place.nbytes["moments", tier] == 2 * 4096 * 4
    assert place.is_gathered is (stage == 3)
    assert ("master", tier) not in place.nbytes, "in fp32 it is the weight"


def test_the_label_of_a_promoted_unit_shows_the_promotion() -> None:
    plan = plan_of(3)
    (unit,) = plan.units
    lifted = replace(
        unit, groups=tuple(group.promoted() if group.plan.grad else group for group in unit.groups)
    )
    assert [place.label for place in places_of(plan)] == ["blocks.0"]
    assert [place.label for place in places_of(replace(plan, units=(lifted,)))] == [
        "blocks.0 (fp32)"
    ]


def test_the_strip_is_the_list_of_actions_in_columns() -> None:
    settings = PlanSettings(window_numel=210, ahead_numel=100, keep_numel=-1)
    schedule = plan_schedule([10, 100, 100, 100], range(4), settings)
    assert str(schedule).startswith("G0 G1 F0 G2 F1 R1 G3 F2 R2 F3 R3 R0 G0 G3 B0 G2 B3 S3 R3")
    strip = strip_of(schedule.actions())
    assert strip.used[:5] == [(unit, unit, ActionKind.FORWARD) for unit in range(4)] + [
        (0, 4, ActionKind.BACKWARD)
    ]
    assert strip.gathered[:5] == [(1, 0, 2), (2, 1, 3), (3, 2, 4), (0, 0, 4), (3, 4, 6)]
    assert strip.reduced == [(3, 6), (2, 7), (1, 8), (0, 8)]


@pytest.mark.parametrize("window", [0, 250, 10**9])
def test_every_use_is_within_an_interval_in_which_the_unit_is_gathered(window: int) -> None:
    schedule = plan_schedule(
        [10] + [100] * 9, range(10), PlanSettings(window_numel=window, ahead_numel=150)
    )
    strip = strip_of(schedule.actions())
    assert len(strip.used) == 20
    for number, column, _ in strip.used:
        assert any(
            each == number and start <= column < stop for each, start, stop in strip.gathered
        )


@pytest.mark.parametrize("units", [1, 4, 96, 300])
@pytest.mark.parametrize("is_gathered", [True, False])
def test_a_plan_of_any_number_of_units_is_drawn(
    units: int, is_gathered: bool, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    places = [
        UnitPlace(
            f"blocks.{number}",
            {("weight", Tier.NVME): 1 << 20, ("grad", Tier.DEVICE): 1 << 18},
            is_gathered,
        )
        for number in range(units)
    ]
    schedule = plan_schedule(
        [100 * is_gathered] * units, range(units), PlanSettings(window_numel=300)
    )
    draw_plan(places, schedule, tmp_path / "plan.png", "a plan")
    assert is_png_of(tmp_path / "plan.png", least_width=1500)


def test_a_model_without_parameters_has_a_picture_too(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    schedule = plan_schedule([0], [0], PlanSettings())
    draw_plan([UnitPlace("root", {}, False)], schedule, tmp_path / "plan.png")
    assert is_png_of(tmp_path / "plan.png", least_width=1500)
