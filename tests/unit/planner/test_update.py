"""Test the tiles of an update on each rank, and the exact bytes of moments and scratch."""

from __future__ import annotations

import pytest
import torch

from deepseek_zero.base.device import CPU
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.planner.auto_wrap_policy import read_model
from deepseek_zero.planner.layout import FlatLayout, Slot, even_layout
from deepseek_zero.planner.plan import Plan, plan_model
from deepseek_zero.planner.plan_settings import PlanSettings
from deepseek_zero.planner.row_of_group import plan_for
from deepseek_zero.planner.units import GroupPlan, UnitPlan, plan_units
from deepseek_zero.planner.update import ParamGroupPlan, UpdatePlan, UpdateSettings, plan_update
from deepseek_zero.precision.policy import Policy
from deepseek_zero.tiers.tier import Tier
from tests.models import Gpt

BF16 = Policy(compute=torch.bfloat16)


def unit_of(numel: int, ranks: int, stage: int, policy: Policy | None = None) -> UnitPlan:
    settings = PlanSettings(stage=stage, policy=policy or Policy())
    plan = plan_for(settings, torch.float32, trainable=True, persistent=False, ranks=ranks)
    return UnitPlan("unit", (GroupPlan(plan, even_layout(["weight"], [(numel,)], ranks)),))


def update_of(
    unit: UnitPlan, rank: int, optimizer: str = "AdamW", tile_numel: int = 1 << 22
) -> UpdatePlan:
    settings = UpdateSettings(optimizer, (ParamGroupPlan({}, frozenset({"weight"})),), tile_numel)
    return plan_update([unit], settings, rank)


class Tensors(torch.nn.Module):
    """A module with one tensor of `numel` elements."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(numel, device="meta"))


def bytes_of(numel: int, ranks: int, rank: int, stage: int) -> dict[str, int]:
    settings = PlanSettings(stage=stage, persistence_numel=0)
    update = UpdateSettings("AdamW", (ParamGroupPlan({}, frozenset({"weight"})),))
    plan: Plan = plan_model(
        Tensors(numel), settings, Mesh(dp_shard=ranks, rank=rank), update=update
    )
    return plan.bytes_by_state()


def test_padding_is_held_of_weights_and_gradients_and_not_of_moments() -> None:
    # 1,500 elements are padded to 2 x 1,024; rank 0 owns 1,024 and rank 1 owns 476.
    found = [bytes_of(1500, 2, rank, 3) for rank in range(2)]
    buffers = found[0].pop("buffers")
    assert found[0] == {
        "weight": 4 * 1024 + 4,
        "grad": 4 * 1024,
        "master": 0,
        "moments": 8 * 1024 + 4,
    }
    assert found[1] == found[0] | {"moments": 8 * 476 + 4, "buffers": buffers}


def test_a_rank_that_owns_nothing_of_a_unit_keeps_no_moments_of_it() -> None:
    unit = unit_of(10, ranks=3, stage=1)
    assert [update_of(unit, rank, "Adam").moments_bytes for rank in range(3)] == [84, 0, 0]


def test_a_replicated_main_weight_is_cut_at_slice_boundaries_and_each_shard_has_a_counter() -> None:
    def sizes(
        numel: int, ranks: int, stage: int, rank: int, tile_numel: int = 1 << 22
    ) -> list[int]:
        return [
            shard.numel
            for shard in update_of(
                unit_of(numel, ranks, stage), rank, tile_numel=tile_numel
            ).shards[0]
        ]

    assert sizes(2500, ranks=3, stage=0, rank=0) == [1024, 1024, 452]
    assert sizes(2500, ranks=3, stage=1, rank=2) == [452]
    assert sizes(2500, ranks=1, stage=0, rank=0, tile_numel=1000) == [1000, 1000, 500]


def layout_of(name: str, numel: int) -> FlatLayout:
    """Return the layout of one parameter on one rank, without padding."""
    return FlatLayout((Slot(name, (numel,), 0),), numel, 1)


def units_of(sizes: list[int], policy: Policy) -> list[UnitPlan]:
    """Return units of one tensor each on one rank."""
    plan = plan_for(
        PlanSettings(stage=0, policy=policy),
        torch.float32,
        trainable=True,
        persistent=False,
        ranks=1,
    )
    return [
        UnitPlan(str(k), (GroupPlan(plan, layout_of(f"w{k}", size)),))
        for k, size in enumerate(sizes)
    ]


def scratch_of(
    sizes: list[int], tile_numel: int, policy: Policy | None = None, *, scales: bool = False
) -> int:
    names = frozenset(f"w{k}" for k in range(len(sizes)))
    settings = UpdateSettings(
        "AdamW", (ParamGroupPlan({}, names),), tile_numel, scales_grads=scales
    )
    return plan_update(units_of(sizes, policy or Policy()), settings, 0).scratch_bytes


def test_scratch_has_the_size_of_the_largest_tile_and_exists_only_for_casts_and_joins() -> None:
    sizes = [700, 200, 400, 500]
    assert scratch_of(sizes, 1000, scales=True) == 4 * 900
    assert scratch_of(sizes, 700, scales=True) == 4 * 700
    assert scratch_of(sizes, 1000) == 0
    joined = scratch_of(sizes, 1000, BF16, scales=True)
    assert joined == 4 * (900 + 900 + 900 + 1)  # gradients, main weights, scratch, one NaN
    assert scratch_of(sizes, 1000, BF16) == joined, "bf16 gradients are cast in any case"


def tiles_beside(device: torch.device, tiers: tuple[Tier, ...], policy: Policy) -> UpdatePlan:
    """Return the update plan of one tensor of 10,000 elements per tier.

    Tiles have 8,192 elements on the device and 1,024 on the host.

    tiers: the tier of each tensor's states.
    """
    units = []
    for number, tier in enumerate(tiers):
        settings = PlanSettings(stage=3, policy=policy, state_tier=tier)
        plan = plan_for(settings, torch.float32, trainable=True, persistent=False, ranks=1)
        units.append(UnitPlan(str(number), (GroupPlan(plan, layout_of(f"w{number}", 10_000)),)))
    names = frozenset(f"w{number}" for number in range(len(tiers)))
    update = UpdateSettings("AdamW", (ParamGroupPlan({}, names),), 8192, host_tile_numel=1024)
    return plan_update(units, update, 0, device)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
def test_a_tile_has_the_size_of_the_device_that_updates_it(tier: Tier) -> None:
    gpu = torch.device("cuda", 0)
    on_device = tiles_beside(gpu, (Tier.DEVICE,), BF16)
    assert on_device.fullest_tiles == {gpu: 8192}
    on_host = tiles_beside(gpu, (tier,), BF16)
    assert on_host.fullest_tiles == {CPU: 1024}
    mixed = tiles_beside(gpu, (Tier.DEVICE, tier, Tier.DEVICE), BF16)
    assert mixed.fullest_tiles == {gpu: 8192, CPU: 1024}
    assert mixed.scratch_bytes == on_device.scratch_bytes + on_host.scratch_bytes
    for tile in mixed.order.tiles:
        assert len({shard.group.plan.is_updated_on_host for _, shard in tile}) == 1


def test_tensors_that_an_optimizer_needs_whole_are_shards_of_their_own() -> None:
    model = Gpt()
    names = frozenset(name for name, _ in model.named_parameters())
    update = UpdateSettings("Lamb", (ParamGroupPlan({}, names, is_uncut=True),))
    plans = [
        plan_model(
            model, PlanSettings(persistence_numel=0), Mesh(dp_shard=3, rank=rank), update=update
        )
        for rank in range(3)
    ]
    shards = [shard for plan in plans if plan.update is not None for shard in plan.update.shards[0]]
    assert sorted(shard.names for shard in shards) == sorted((name,) for name in names)
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    assert all(shard.shape == shapes[shard.names[0]] for shard in shards)


@pytest.mark.parametrize("by_unit", [True, False])
def test_deferred_updates_have_separate_tiles(by_unit: bool) -> None:
    model = Gpt()
    settings = PlanSettings(persistence_numel=0, weight_tier=Tier.HOST, state_tier=Tier.HOST)
    names = frozenset(name for name, _ in model.named_parameters())
    groups = (ParamGroupPlan({}, names),)
    units = plan_units(read_model(model, settings), settings, Mesh(dp_shard=2))
    update = UpdateSettings("AdamW", groups, by_unit=by_unit, on_accelerator=True)
    waits = plan_update(units, update, 0).order
    assert not waits.now and list(waits.later) == (list(range(len(units))) if by_unit else [-1])
    for update in (
        UpdateSettings("AdamW", groups, can_defer=False, on_accelerator=True),
        UpdateSettings("AdamW", groups),  # a CPU transfers nothing
    ):
        at_once = plan_update(units, update, 0).order
        assert at_once.now and not at_once.later


@pytest.mark.parametrize(
    ("tier", "options", "kernels", "most"),
    [
        (Tier.DEVICE, {}, "compiled", 8192),
        (Tier.HOST, {}, "compiled", 8192),
        (Tier.HOST, {}, "torch", 1024),
        (Tier.HOST, {"amsgrad": True}, "compiled", 1024),
        (Tier.NVME, {}, "compiled", 1024),
    ],
)
def test_a_kernel_gets_larger_tiles_of_states_in_memory(
    tier: Tier, options: dict[str, bool], kernels: str, most: int
) -> None:
    settings = PlanSettings(stage=3, policy=BF16, state_tier=tier)
    plan = plan_for(settings, torch.float32, trainable=True, persistent=False, ranks=1)
    small = [
        UnitPlan(str(number), (GroupPlan(plan, even_layout([f"w{number}"], [(numel,)], 1)),))
        for number, numel in enumerate((10_000, 600, 600))
    ]
    update = UpdateSettings(
        "AdamW",
        (ParamGroupPlan(options, frozenset({"w0", "w1", "w2"})),),
        tile_numel=1024,
        host_tile_numel=1024,
        kernel_tile_numel=8192,
        kernels=kernels,
    )
    tiles = plan_update(small, update, 0).order.tiles
    assert max(shard.numel for tile in tiles for _, shard in tile) == most
    # Small shards are joined only up to tile_numel, as without a kernel: a tile waits for its
    # copies.
    assert [len(tile) for tile in tiles[-2:]] == [1, 1]
