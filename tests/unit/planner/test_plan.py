"""A plan is computed without running the model, for any rank, and is the same on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from deepseek_zero.base.errors import OutOfMemoryError
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.planner.auto_wrap_policy import read_model
from deepseek_zero.planner.plan import plan_model
from deepseek_zero.planner.plan_settings import Machine, PlanSettings
from deepseek_zero.planner.unit_tiers import PlacementSettings
from deepseek_zero.planner.units import plan_units
from deepseek_zero.planner.update import ParamGroupPlan, UpdateSettings
from deepseek_zero.precision.policy import Policy
from deepseek_zero.tiers.tier import Tier
from tests.models import Gpt

MOST_SECONDS = 1.0


def on_meta(blocks: int = 3, **sizes: int) -> Gpt:
    with torch.device("meta"):
        return Gpt(blocks, **sizes)


def adam_of(model: torch.nn.Module) -> UpdateSettings:
    return UpdateSettings(
        "AdamW", (ParamGroupPlan({}, frozenset(name for name, _ in model.named_parameters())),)
    )


def test_units_of_a_model_without_storage_are_its_blocks_and_the_root() -> None:
    model, settings = on_meta(blocks=4), PlanSettings(stage=3, persistence_numel=0)
    units = plan_units(read_model(model, settings), settings, Mesh(dp_shard=2))
    assert [unit.name for unit in units] == ["root", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]
    held = sum(group.layout.numel for unit in units for group in unit.groups)
    assert held == sum(parameter.numel() for parameter in model.parameters())


def test_a_model_without_storage_has_the_plan_of_one_with_values() -> None:
    settings, mesh = PlanSettings(stage=3), Mesh(dp_shard=4, rank=1)
    assert plan_model(on_meta(), settings, mesh) == plan_model(Gpt(), settings, mesh)


def test_ranks_differ_in_what_they_update_and_in_nothing_else() -> None:
    model, settings = on_meta(), PlanSettings(stage=3, persistence_numel=0)
    plans = [
        plan_model(model, settings, Mesh(dp_shard=3, rank=rank), update=adam_of(model))
        for rank in range(3)
    ]
    assert len({str(plan.schedule) for plan in plans}) == 1
    assert all(
        plan.units == plans[0].units and plan.volume() == plans[0].volume() for plan in plans
    )
    updated = [
        sum(shard.numel for shard in plan.update.shards[0])
        for plan in plans
        if plan.update is not None
    ]
    assert sum(updated) == plans[0].numel


def test_a_rank_of_1024_is_planned_in_under_a_second(
    record_property: Callable[[str, object], None],
) -> None:
    model = on_meta(blocks=24, width=1024, heads=16, hidden=4096, vocabulary=50_000)
    settings = PlanSettings(stage=3, policy=Policy(compute=torch.bfloat16))
    seconds = []
    for rank in (0, 511, 1023):
        start = time.perf_counter()
        plan = plan_model(model, settings, Mesh(dp_shard=1024, rank=rank), update=adam_of(model))
        text = str(plan)
        seconds.append(time.perf_counter() - start)
        assert len(plan.units) == 25 and "as rank" in text
    record_property("seconds", seconds)
    assert min(seconds) < MOST_SECONDS, seconds


def test_states_are_placed_within_memory_budgets_or_refused() -> None:
    model = on_meta()
    settings = PlanSettings(stage=3, persistence_numel=0)
    placement = PlacementSettings(chooses_weights=True, chooses_states=True, host=1 << 40)

    def tiers(device_bytes: int, host_bytes: int) -> set[Tier]:
        machine = Machine(budgets={Tier.DEVICE: device_bytes, Tier.HOST: host_bytes, Tier.NVME: 0})
        plan = plan_model(model, settings, Mesh(dp_shard=2), machine, adam_of(model), placement)
        return {each.states for each in plan.settings.unit_tiers}

    assert tiers(1 << 40, 0) == {Tier.DEVICE}
    assert tiers(0, 1 << 40) == {Tier.HOST}
    with pytest.raises(OutOfMemoryError, match="fit nowhere"):
        tiers(0, 0)


def test_bytes_by_memory_are_the_bytes_by_state() -> None:
    model = on_meta()
    settings = PlanSettings(stage=3, persistence_numel=0, state_tier=Tier.HOST)
    plan = plan_model(model, settings, Mesh(dp_shard=2), update=adam_of(model))
    assert sum(plan.bytes_by_tier().values()) == sum(plan.bytes_by_state().values())
    assert plan.bytes_by_tier()[Tier.HOST] == plan.bytes_by_state()["host"] > 0


def test_the_printed_plan_lists_equal_units_once() -> None:
    text = str(
        plan_model(on_meta(blocks=24), PlanSettings(stage=3, persistence_numel=0), Mesh(dp_shard=8))
    )
    assert "blocks.0 to blocks.23 (24)" in text and "stage 3 over 8 ranks" in text
