"""Device "auto" places states within budgets, as predicted, without changing a bit.

The training device is the CPU. Memory that an engine takes for "the device" is therefore counted
(tiers/budget.py), and exceeding the budget is an error. A run that fits into 100 kB has really
offloaded the rest.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepseek_zero
from deepseek_zero.base.errors import DeepSeekZeroError, OutOfMemoryError, PeerError
from deepseek_zero.engine.memory import offloaded_of
from deepseek_zero.sharding.sharded_parameter import ShardedParameter
from deepseek_zero.tiers.tier import Tier
from tests.models import seeded
from tests.pairwise import cases
from tests.training import Run, start_engine, train_step

STEPS = 3
DEVICE = ("weight", "grad", "master", "moments", "buffers")


def engine_of(run: Run, zero: dict[str, Any], **top: Any) -> Any:
    """Start an engine with the smallest tiles and messages.

    zero, top: Additional keys of zero_optimization and of the configuration.
    """
    config = run.config()
    config["zero_optimization"] |= {"sub_group_size": 4096, **zero}
    model = seeded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return deepseek_zero.initialize(model=model, optimizer=optimizer, config=config | top)[0]


def trained(engine: Any, run: Run) -> list[Tensor]:
    losses = [torch.stack(train_step(engine, run, step)) for step in range(STEPS)]
    return losses + [value.clone() for value in engine.state_dict().values()]


AUTO = {
    name: {"device": "auto", "nvme_path": tempfile.gettempdir()}
    for name in ("offload_optimizer", "offload_param")
}


def device_bytes(engine: Any) -> int:
    """Return the predicted bytes of states and buffers on the device, as the maximum over ranks.

    Placeholders of a few bytes do not count.
    """
    predicted = engine.memory_report().predicted
    placeholders = sum(group.placeholder.nbytes for group in engine.runtime.groups)
    return most(sum(predicted[state] for state in DEVICE) - placeholders)


def most(nbytes: int) -> int:
    """Return the maximum over all ranks."""
    found = torch.tensor([nbytes])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize(
    ("ranks", "dtype", "share"), [(1, "bf16", 0.5), (2, "fp32", 0.3), (2, "bf16", 0.9)]
)
def test_auto_places_states_on_the_device_first_and_changes_no_bit(
    dtype: str, share: float, ranks: int
) -> None:
    run = Run(3, dtype, clipping=0.3)
    plain = engine_of(run, {})
    expected = trained(plain, run)
    everywhere = engine_of(run, {name: place | {"device": "nvme"} for name, place in AUTO.items()})
    least, all_of_it = device_bytes(everywhere), device_bytes(plain)
    budget = int(least + share * max(all_of_it - least, 400_000))
    engine = engine_of(run, AUTO, memory_budget={"device": budget})
    assert all(map(torch.equal, trained(engine, run), expected))
    rests = engine.runtime.settings.unit_tiers
    kept = [[place is Tier.DEVICE for place in (rest.weights, rest.states)] for rest in rests]
    weights, states = ([row[k] for row in kept] for k in (0, 1))
    assert weights == sorted(weights, reverse=True) and states == sorted(
        states, reverse=True
    )  # the first units have priority
    assert any(weights) and not any(state and not weight for weight, state in kept)
    assert engine.runtime.comm_ctx.tiers.budget.most_bytes <= budget
    report = engine.memory_report()
    wrong = {state: (size, report.measured[state]) for state, size in report.predicted.items()}
    assert all(size == measured for size, measured in wrong.values()), wrong


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("ratio", "tier"), [(0.0, "nvme"), (0.4, "cpu"), (0.7, "nvme"), (1.0, "cpu")]
)
def test_ratio_leaves_the_first_units_states_on_the_device(ratio: float, tier: str) -> None:
    run = Run(3, "bf16", clipping=0.3)
    place = {"device": tier, "nvme_path": tempfile.gettempdir(), "ratio": ratio}
    engine = engine_of(run, {"offload_optimizer": place})
    assert all(map(torch.equal, trained(engine, run), trained(engine_of(run, {}), run)))
    groups = [group for unit in engine.runtime.units for group in unit.trained]
    away = [group.plan.moments.tier is not Tier.DEVICE for group in groups]
    share = sum(g.layout.padded_numel for g, is_away in zip(groups, away, strict=True) if is_away)
    total = sum(group.layout.padded_numel for group in groups)
    assert away == sorted(away) and share >= ratio * total
    largest = max(
        sum(group.layout.padded_numel for group in unit.trained) for unit in engine.runtime.units
    )
    assert share < ratio * total + largest
    report = engine.memory_report()
    assert {state: report.measured[state] for state in report.predicted} == dict(report.predicted)


AXES = {
    "stage": (0, 1, 2, 3),
    "tier": ("none", "cpu", "nvme"),
    "dtype": ("fp32", "bf16"),
    "ranks": (1, 2),
}


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize(*cases(AXES))
def test_the_device_never_holds_more_than_planned(
    stage: int, tier: str, dtype: str, ranks: int
) -> None:
    run = Run(stage, dtype, clipping=0.3, optimizer="adamw", tier=tier)
    measure = start_engine(run, seeded())
    trained(measure, run)
    planned = device_bytes(measure)
    room = most(measure.runtime.comm_ctx.tiers.budget.most_bytes)
    assert room == planned
    measure.destroy()

    def within(budget: int) -> None:
        config = run.config() | {"memory_budget": {"device": budget}}
        model = seeded()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        engine = deepseek_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
        trained(engine, run)

    within(room)
    with pytest.raises((OutOfMemoryError, PeerError), match=r"memory_budget\.device"):
        within(room - 1)


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_of_a_disk_are_gathered_into_other_memory(ranks: int) -> None:
    run = Run(3, "bf16", tier="nvme")
    engine = start_engine(run, seeded())
    looked = 0

    def look(module: nn.Module, *_: object) -> None:
        nonlocal looked
        resting = [storage.memory for storage in offloaded_of(engine.runtime, engine.optimizer)]
        spans = [(memory.data_ptr(), memory.data_ptr() + memory.nbytes) for memory in resting]
        for param in module.parameters(recurse=False):
            for tensor in (param, param.grad):
                if (
                    tensor is not None
                    and type(tensor) is not ShardedParameter
                    and not tensor.is_meta
                ):
                    looked += 1
                    assert not any(low <= tensor.data_ptr() < high for low, high in spans)

    for module in engine.module.modules():
        module.register_forward_hook(look)
    trained(engine, run)
    assert looked > 10


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_on_the_host_of_a_cpu_are_used_without_a_copy(ranks: int) -> None:
    run = Run(3, "bf16", tier="cpu")
    engine = start_engine(run, seeded())
    looked = 0

    def look(module: nn.Module, *_: object) -> None:
        nonlocal looked
        for unit in engine.runtime.units:
            for group in unit.sharded:
                if unit.module is module:
                    looked += 1
                    assert not group.weight_gather.makes_copies

    for module in engine.module.modules():
        module.register_forward_pre_hook(look)
    trained(engine, run)
    assert looked > 10
    report = engine.memory_report()
    assert report.measured["host"] == report.predicted["host"] > 0
    assert report.measured_total == report.predicted_total


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("zero", "top", "said"),
    [
        (AUTO, {"memory_budget": {"device": 0, "disk": 4096}}, "fit nowhere"),
        ({}, {"memory_budget": {"host": 1 << 30}}, "has no effect: no device is auto"),
        ({"offload_optimizer": {"ratio": 0.5}}, {}, "has no effect: nothing is offloaded"),
    ],
)
def test_states_that_do_not_fit_are_reported_before_anything_is_allocated(
    zero: dict[str, Any], top: dict[str, Any], said: str
) -> None:
    refused: Callable[[], Any] = lambda: engine_of(Run(3), zero, **top)  # noqa: E731 - what is refused is named
    with pytest.raises(DeepSeekZeroError, match=said):
        refused()
