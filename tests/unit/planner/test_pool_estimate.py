"""The size of the buffer pool is simulated from the schedule and does not grow with the depth."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from deepseek_zero.base.mesh import Mesh
from deepseek_zero.planner.auto_wrap_policy import read_model
from deepseek_zero.planner.layout import even_layout
from deepseek_zero.planner.messages import SUM_TILE_NUMEL
from deepseek_zero.planner.plan_settings import Machine, PlanSettings
from deepseek_zero.planner.pool_estimate import buffer_bytes, pool_buffers
from deepseek_zero.planner.row_of_group import plan_for
from deepseek_zero.planner.units import GroupPlan, UnitPlan, plan_units
from deepseek_zero.precision.policy import Policy
from tests.models import Gpt

FP32 = torch.float32
SCRATCH = (FP32, SUM_TILE_NUMEL.cpu)


def units_of(
    stage: int, ranks: int, blocks: int = 3, **changes: object
) -> tuple[list[UnitPlan], PlanSettings]:
    """Return a root unit with one block of elements per rank, and units with two."""
    settings = PlanSettings(stage=stage, **({"window_numel": 0} | changes))  # type: ignore[arg-type]
    plan = plan_for(settings, FP32, trainable=True, persistent=False, ranks=ranks)
    layouts = [
        even_layout(["w"], [(ranks * 1024 * (1 if k == 0 else 2),)], ranks)
        for k in range(blocks + 1)
    ]
    return [
        UnitPlan(str(k), (GroupPlan(plan, layout),)) for k, layout in enumerate(layouts)
    ], settings


def test_a_world_of_one_uses_no_pooled_buffer() -> None:
    for stage in range(4):
        assert pool_buffers(*units_of(stage, ranks=1)) == Counter()


def test_whole_gradients_need_an_inbox_per_size_and_a_scratch() -> None:
    for stage in (0, 1):
        assert pool_buffers(*units_of(stage, ranks=3)) == {
            SCRATCH: 1,
            (FP32, 2 * 1024): 1,
            (FP32, 2 * 2048): 1,
        }


def test_sharded_gradients_need_two_partial_ones_while_one_is_in_flight() -> None:
    inboxes = {(FP32, 2 * 1024): 1, (FP32, 2 * 2048): 1}
    partials = {(FP32, 3 * 1024): 1, (FP32, 3 * 2048): 2}
    assert pool_buffers(*units_of(2, ranks=3)) == {SCRATCH: 1, **inboxes, **partials}
    partials[FP32, 3 * 2048] = 1
    assert pool_buffers(*units_of(2, ranks=3, overlap=False)) == {SCRATCH: 1, **inboxes, **partials}


def test_between_hosts_two_units_are_in_flight() -> None:
    units, settings = units_of(2, ranks=3, blocks=4)
    inboxes = {(FP32, 2 * 1024): 1, (FP32, 2 * 2048): 2}
    partials = {(FP32, 3 * 1024): 1, (FP32, 3 * 2048): 3}
    hosts = Machine(spans_hosts=True)
    found = pool_buffers(units, settings, machine=hosts)
    assert found == {SCRATCH: 1, **inboxes, **partials}
    settings = replace(settings, overlap=False)
    found = pool_buffers(units, settings, machine=hosts)
    assert found == pool_buffers(units, settings), "none is"


def test_stage_3_gathers_into_buffers_of_the_same_sizes() -> None:
    found = pool_buffers(*units_of(3, ranks=3))
    assert found[FP32, 3 * 1024] == 2, (
        "the root's weight and its partial gradient, open throughout backward"
    )
    assert found[FP32, 3 * 2048] == 3, (
        "a block's weight, its partial gradient, and the one on its way"
    )


def test_a_bucket_limits_the_receive_buffer_of_each_of_the_two_messages_in_flight() -> None:
    found = pool_buffers(*units_of(1, ranks=3, bucket_numel=3 * 1024))
    assert found == {SCRATCH: 1, (FP32, 2 * 1024): 2}


def test_a_reduce_dtype_other_than_the_gradients_needs_a_copy_for_sending() -> None:
    units, settings = units_of(1, ranks=2, policy=Policy(reduce=torch.bfloat16))
    assert pool_buffers(units, settings)[torch.bfloat16, 2 * 2048] == 1


def test_a_wide_window_holds_every_unit() -> None:
    found = pool_buffers(*units_of(3, ranks=2, blocks=5, window_numel=10**9))
    assert found[FP32, 2 * 2048] == 5 + 1, (
        "five weights; a partial gradient more while the first block is still in use"
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("window", [0, 4_000_000, 8_000_000])
def test_buffers_stay_constant_from_10_to_200_million_parameters(stage: int, window: int) -> None:
    settings = PlanSettings(
        stage=stage, persistence_numel=0, window_numel=window, policy=Policy(compute=torch.bfloat16)
    )
    found = {}
    for blocks in (3, 12, 63):
        with torch.device("meta"):
            model = Gpt(blocks, width=512, heads=8, hidden=2048, vocabulary=256)
        found[sum(parameter.numel() for parameter in model.parameters())] = buffer_bytes(
            pool_buffers(
                plan_units(read_model(model, settings), settings, Mesh(dp_shard=4)), settings
            )
        )
    assert min(found) < 10_500_000 and max(found) > 195_000_000
    assert len(set(found.values())) == 1, found


def test_the_default_window_of_a_billion_elements_holds_such_models_whole() -> None:
    def buffers(blocks: int) -> int:
        settings = PlanSettings(stage=3, persistence_numel=0)
        with torch.device("meta"):
            model = Gpt(blocks, width=512, heads=8, hidden=2048, vocabulary=256)
        return buffer_bytes(
            pool_buffers(
                plan_units(read_model(model, settings), settings, Mesh(dp_shard=4)), settings
            )
        )

    assert buffers(63) > 10 * buffers(3), "constant buffers need a window below the model's size"
