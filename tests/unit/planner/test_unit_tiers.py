"""Units are placed in the fastest memory first: weights before states, in order of units."""

from __future__ import annotations

import pytest
import torch

from deepseek_zero.base.errors import OutOfMemoryError
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.planner.auto_wrap_policy import read_model
from deepseek_zero.planner.plan_settings import PlanSettings, UnitTiers
from deepseek_zero.planner.unit_tiers import (
    TierChoices,
    assign_tiers,
    describe_tiers,
    split_by_ratio,
)
from deepseek_zero.planner.units import UnitPlan, plan_units
from deepseek_zero.precision.policy import Policy
from deepseek_zero.tiers.tier import Tier
from tests.models import Gpt

DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME
ALL = (DEVICE, HOST, NVME)
PLENTY = 1 << 40


def units(stage: int = 3) -> dict[Tier, tuple[UnitPlan, ...]]:
    policy = Policy(compute=torch.bfloat16)
    settings = {
        tier: PlanSettings(stage, policy, 1, 0, weight_tier=tier, state_tier=tier) for tier in ALL
    }
    return {
        tier: plan_units(read_model(Gpt(), each), each, Mesh(dp_shard=2))
        for tier, each in settings.items()
    }


def weight_bytes(number: int) -> int:
    return sum(group.padded_numel for group in units()[DEVICE][number].groups) // 2 * 2


def test_with_enough_memory_everything_is_on_the_device() -> None:
    rests = assign_tiers(units(), TierChoices(ALL, ALL), dict.fromkeys(ALL, PLENTY), 2)
    assert {(rest.weights, rest.states) for rest in rests} == {(DEVICE, DEVICE)}
    assert [rest.unit for rest in rests] == [unit.name for unit in units()[DEVICE]]


def test_weights_precede_the_states_of_the_first_units() -> None:
    weights = sum(weight_bytes(number) for number in range(len(units()[DEVICE])))
    first = weight_bytes(0) // 2 * (2 + 2 + 8)  # gradient, lower half of the main weight, moments
    rests = assign_tiers(
        units(), TierChoices(ALL, ALL), {DEVICE: weights + first, HOST: 0, NVME: PLENTY}, 2
    )
    assert {rest.weights for rest in rests} == {DEVICE}
    assert [rest.states for rest in rests] == [DEVICE, *[NVME] * (len(rests) - 1)]


def test_states_that_exceed_one_memory_are_placed_in_the_next() -> None:
    rests = assign_tiers(
        units(),
        TierChoices(ALL, ALL),
        {DEVICE: weight_bytes(0), HOST: weight_bytes(1), NVME: PLENTY},
        2,
    )
    assert [rest.weights for rest in rests][:3] == [DEVICE, HOST, NVME]


def test_fixed_values_are_not_chosen_automatically() -> None:
    rests = assign_tiers(units(), TierChoices((HOST,), ALL), dict.fromkeys(ALL, PLENTY), 2)
    assert {(rest.weights, rest.states) for rest in rests} == {(HOST, DEVICE)}


def test_states_that_fit_no_memory_are_named() -> None:
    with pytest.raises(
        OutOfMemoryError, match=r"weight of unit 'root' need .* fit nowhere: 8 B are left on device"
    ):
        assign_tiers(units(), TierChoices((DEVICE,), (DEVICE,)), {DEVICE: 8}, 2)


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.5, 1.0])
def test_a_ratio_keeps_whole_units_and_offloads_at_least_the_share(ratio: float) -> None:
    facts = units()[HOST]
    kept = [rest.unit for rest in split_by_ratio(facts, DEVICE, ratio)]
    assert kept == [unit.name for unit in facts][: len(kept)]
    sizes = [sum(group.padded_numel for group in unit.trained) for unit in facts]
    assert sum(sizes[len(kept) :]) >= ratio * sum(sizes)
    if len(kept) < len(sizes):
        assert sum(sizes[len(kept) + 1 :]) < ratio * sum(sizes)


def test_it_is_logged_in_one_line() -> None:
    rests = [
        UnitTiers("a", DEVICE, NVME),
        UnitTiers("b", DEVICE, DEVICE),
        UnitTiers("c", NVME, NVME),
    ]
    assert (
        describe_tiers(rests)
        == "device: weights of 2 units, states of 1; nvme: weights of 1 units, states of 2"
    )
