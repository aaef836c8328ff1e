"""Layerwise accumulation runs each unit's micro-batches in the order of the schedule."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from deepseek_zero.activations.layerwise_accumulation import LayerwiseAccumulation
from deepseek_zero.base.errors import UsageError
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.planner.plan import plan_model
from deepseek_zero.planner.plan_settings import PlanSettings
from deepseek_zero.planner.schedule import ActionKind, Pass
from deepseek_zero.sharding.runtime import Runtime
from tests.in_process import Rank, run_ranks, sharded

WIDTH, SAMPLES, PARTS, STEPS = 7, 12, 3, 3
GATHERS, REDUCES = "engine 0/gather", "engine 0/reduce"


class Block(nn.Module):
    """Record in `seen` the micro-batch number of the first sample of each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.seen: list[float] = []

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        self.seen.append(float(number[0]))
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.blocks = nn.ModuleList(Block() for _ in range(3))
            self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        # Micro-batch number of each sample.
        numbers = torch.arange(len(x)).div(len(x) // PARTS, rounding_mode="floor")
        for block in self.blocks:
            x = block(x, numbers)
        return self.head(x)


def start(rank: Rank, window: int) -> tuple[Net, Runtime]:
    model = Net()
    settings = {"window_numel": window, "ahead_numel": 100, "layerwise_micro_batches": PARTS}
    runtime = sharded(rank, model, unit_names=("Block",), **settings)
    LayerwiseAccumulation(runtime)
    return model, runtime


def parts_of(walk: Pass, unit: int) -> list[int | None]:
    return [action.micro_batch for action in walk.computes[unit]]


@pytest.mark.parametrize("window", [0, 10**9])
def test_the_executed_actions_equal_the_schedule(window: int) -> None:
    def body(rank: Rank) -> None:
        model, runtime = start(rank, window)
        for step in range(STEPS):
            before = len(rank.issued(GATHERS)), len(rank.issued(REDUCES))
            schedule = runtime.schedule
            loss = model(torch.randn(SAMPLES, WIDTH)).square().mean()
            assert [block.seen for block in model.blocks] == [[0, 1, 2]] * 3
            assert all(parts_of(schedule.forward, unit) == [0, 1, 2] for unit in (1, 2, 3))
            loss.backward()
            assert [block.seen[PARTS:] for block in model.blocks] == [[2, 1, 0]] * 3, (
                "recomputed, last one first"
            )
            assert all(parts_of(schedule.backward, unit) == [2, 1, 0] for unit in (1, 2, 3))
            assert parts_of(schedule.forward, 0) == parts_of(schedule.backward, 0) == [None]
            actions, names = schedule.actions(), [unit.name for unit in runtime.units]
            for kind, verb, lane, first in zip(
                (ActionKind.GATHER, ActionKind.REDUCE),
                ("gather", "reduce"),
                (GATHERS, REDUCES),
                before,
                strict=True,
            ):
                program = [f"{verb} {names[each.unit]}" for each in actions if each.kind is kind]
                assert rank.issued(lane)[first:] == program, (
                    f"step {step}: once each, whatever the micro-batches"
                )
            for block in model.blocks:
                block.seen.clear()
            with torch.no_grad():
                model(torch.randn(SAMPLES, WIDTH))
            assert [block.seen for block in model.blocks] == [[0]] * 3, (
                "the whole batch, where nothing is kept"
            )
            for block in model.blocks:
                block.seen.clear()

    run_ranks(2, body, seed=1)


def test_another_order_in_the_program_is_another_order_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The schedule decides the order, and the outputs are joined in micro-batch order."""

    def body(rank: Rank) -> Tensor:
        model, runtime = start(rank, 0)
        x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(rank.index))
        found = model(x)
        found.square().mean().backward()
        assert model.blocks[0].seen == expected
        assert not runtime.is_destroyed
        return found.detach()

    expected = [0, 1, 2, 2, 1, 0]
    plain = run_ranks(2, body)
    listed = LayerwiseAccumulation.turns

    def backwards(self: LayerwiseAccumulation, number: int) -> list[int]:
        return listed(self, number)[::-1]

    monkeypatch.setattr(LayerwiseAccumulation, "turns", backwards)
    expected = [2, 1, 0, 0, 1, 2]
    assert all(map(torch.equal, plain, run_ranks(2, body)))


def test_units_that_contain_each_other_and_models_without_units_are_refused_by_the_plan() -> None:
    settings = PlanSettings(layerwise_micro_batches=2, unit_names=("Block", "blocks.0.linear"))
    with pytest.raises(UsageError, match=r"unit 'blocks\.0\.linear' is inside unit 'blocks\.0'"):
        plan_model(Net(), settings, Mesh(dp_shard=2))
    with pytest.raises(UsageError, match="has no units that could process micro-batches"):
        plan_model(nn.Linear(4, 4), PlanSettings(layerwise_micro_batches=2), Mesh(dp_shard=2))
