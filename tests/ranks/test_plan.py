"""`deepseek_zero.plan` on the meta device predicts the structure, memory and bytes of real ranks.

Memory is counted as in test_memory.py: all live storages except those from before. Sent bytes are
counted as in test_bytes.py: by the meter and by a dispatch mode that sees every c10d.send.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepseek_zero
from deepseek_zero.engine.parts import plan_of
from deepseek_zero.planner.plan import Plan
from deepseek_zero.report.measure import live_storages
from tests.models import Gpt, seeded
from tests.pairwise import cases
from tests.ranks.test_bytes import count_step
from tests.ranks.test_memory import added_bytes
from tests.training import Run, train_step

STEPS = 3
STAGES = (0, 1, 2, 3)


def config_of(run: Run, optimizer: str = "AdamW", **params: Any) -> dict[str, Any]:
    config = run.config()
    config["optimizer"] |= {"type": optimizer, "params": params}
    return config


def planned(config: dict[str, Any], ranks: int) -> Plan:
    """Return this rank's plan of a model on the meta device."""
    with torch.device("meta"):
        model = Gpt()
    return deepseek_zero.plan(model, config, ranks=ranks, rank=dist.get_rank())


def start(config: dict[str, Any]) -> Any:
    return deepseek_zero.initialize(model=seeded(), config=config)[0]


def assert_is_what_was_built(plan: Plan, engine: Any) -> None:
    built = plan_of(engine.runtime, engine.optimizer)
    assert built.units == plan.units and built.mesh == plan.mesh and built.settings == plan.settings
    assert str(built.schedule) == str(plan.schedule)
    assert plan.update is not None and built.update is not None
    assert built.update.shards == plan.update.shards and built.update.order == plan.update.order
    assert built.bytes_by_state() == plan.bytes_by_state() and built.volume() == plan.volume()


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize(*cases({"ranks": (1, 2, 4), "stage": STAGES, "dtype": ("fp32", "bf16")}))
def test_a_plans_bytes_are_what_real_ranks_hold(ranks: int, stage: int, dtype: str) -> None:
    config = config_of(Run(stage, dtype, clipping=0.3))
    plan, before = planned(config, ranks), live_storages()
    engine = start(config)
    assert_is_what_was_built(plan, engine)
    for step in range(STEPS):
        train_step(engine, Run(stage, dtype), step)
    assert sum(plan.bytes_by_state().values()) == added_bytes(before)


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize(*cases({"ranks": (2, 4), "stage": STAGES, "accumulation": (1, 2)}))
def test_a_plans_volume_is_what_real_ranks_send(ranks: int, stage: int, accumulation: int) -> None:
    run = Run(stage, "bf16", accumulation, transport="gloo")
    config = config_of(run)
    volume = planned(config, ranks).volume()
    engine = start(config)
    assert count_step(engine, run, 0) == (volume.state_bytes, volume.rows + volume.first_step_rows)
    assert count_step(engine, run, 1) == (volume.state_bytes, volume.rows)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("optimizer", "params"),
    [
        ("SGD", {"momentum": 0.9}),
        ("Adam", {"amsgrad": True}),
        ("Lamb", {}),
        ("Muon", {"lr": 0.01}),
        ("Lion", {}),
    ],
)
def test_a_plan_uses_the_optimizer_of_the_configuration(
    optimizer: str, params: dict[str, Any]
) -> None:
    config = config_of(Run(3), optimizer, **params)
    plan, engine = planned(config, 2), start(config)
    assert_is_what_was_built(plan, engine)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    *cases(
        {
            "tier": ("cpu", "nvme"),
            "updates": ((), (("super_offload", True), ("undo_bytes", 60_000))),
            "moments": ("fp32", "8bit"),
        }
    )
)
def test_a_plan_includes_states_in_other_memories(
    tier: str, updates: tuple[tuple[str, Any], ...], moments: str
) -> None:
    run = Run(3, "bf16", tier=tier, updates=updates, moments=moments)
    config = config_of(run)
    plan = planned(config, 2)
    engine = start(config)
    assert_is_what_was_built(plan, engine)
    for step in range(STEPS):
        train_step(engine, run, step)
    measured = engine.memory_report().measured
    assert {state: measured[state] for state in plan.bytes_by_state()} == plan.bytes_by_state()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_plan_over_two_axes_equals_the_bytes_of_replicated_shards(
    stage: int, accumulation: int
) -> None:
    run = Run(stage, "bf16", accumulation, transport="gloo")
    config = config_of(run) | {"mesh": {"dp_replicate": 2, "dp_shard": 2}}
    plan, before = planned(config, 4), live_storages()
    engine = start(config)
    assert (plan.mesh.shard_size, plan.mesh.reduce_size) == (2, 4)
    assert_is_what_was_built(plan, engine)
    volume = plan.volume()
    assert count_step(engine, run, 0) == (volume.state_bytes, volume.rows + volume.first_step_rows)
    for step in range(1, STEPS):
        train_step(engine, run, step)
    assert sum(plan.bytes_by_state().values()) == added_bytes(before)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("replicate", "shard"), [(2, 2), (4, 1)])
@pytest.mark.parametrize("stage", [1, 3])
def test_replicas_that_read_each_others_memory_hold_what_is_planned(
    replicate: int, shard: int, stage: int
) -> None:
    run = Run(stage, "bf16")
    config = config_of(run) | {"mesh": {"dp_replicate": replicate, "dp_shard": shard}}
    plan, before = planned(config, 4), live_storages()
    engine = start(config)
    assert_is_what_was_built(plan, engine)
    for step in range(STEPS):
        train_step(engine, run, step)
    assert sum(plan.bytes_by_state().values()) == added_bytes(before)
