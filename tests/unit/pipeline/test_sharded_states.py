"""Pipelines with ZeRO stages 0 to 3 are bitwise equal to one process.

Each unit is gathered and reduced once per step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepseek_zero.base.mesh import Mesh
from deepseek_zero.extensions.loss_factor import loss_factor_of
from deepseek_zero.pipeline.chain import find_chain
from deepseek_zero.pipeline.executor import PipelineExecutor
from deepseek_zero.pipeline.messages import StageLinks
from deepseek_zero.pipeline.schedule import make_schedule
from deepseek_zero.pipeline.sharded_states import ShardedStates
from deepseek_zero.pipeline.stage import Cut, MicroBatch, cut_chain, take_stages, tied_stages
from deepseek_zero.pipeline.ties import Ties
from deepseek_zero.precision.loss_scale import LossScaler, LossScaleSettings
from deepseek_zero.precision.policy import Policy
from deepseek_zero.sharding.unit import UnitState
from tests.in_process import Rank, optimizer_over, run_ranks, sharded
from tests.models import Gpt, batch_of, seeded
from tests.reference import OPTIMIZERS, Reference

STEPS, MANY = 2, 3
POLICIES = {torch.float32: Policy(), torch.bfloat16: Policy(torch.bfloat16, auto_cast=True)}


def gpt() -> nn.Module:
    return seeded(Gpt, blocks=4)


@cache
def cut_of(stages: int) -> Cut:
    model, batch = gpt(), batch_of(0, 0, 0)
    return cut_chain(model, find_chain(model, (batch.tokens, batch.targets)), stages, "uniform")


Found = tuple[list[list[Tensor]], list[float], dict[str, Tensor], list[str]]


def watch_gathered(states: ShardedStates) -> list[int]:
    """Record the number of gathered blocks after each forward and backward."""
    found, units = [0], states.runtime.units[1:]
    inner = states.forward

    @contextmanager
    def forward(stage: int) -> Iterator[None]:
        with inner(stage):
            yield
        found.append(sum(unit.state is not UnitState.SHARDED for unit in units if unit.sharded))

    states.forward = forward  # type: ignore[method-assign]
    return found


def train(
    rank: Rank,
    ranks: int,
    stage: int,
    dtype: torch.dtype,
    name: str,
    virtual: int,
    secondary_ranks: int = 1,
) -> Found:
    mesh = Mesh(pp=ranks).on_world(rank.size, rank.index)
    model = gpt()
    cut, schedule = cut_of(ranks * virtual), make_schedule(name, ranks, virtual, MANY)
    stages = take_stages(model, cut, schedule.stages_of(mesh.coordinates["pp"]))
    settings: dict[str, Any] = {
        "policy": POLICIES[dtype],
        "accumulation": MANY,
        "reduces_once": True,
    }
    settings["secondary_ranks"] = secondary_ranks
    runtime = sharded(rank, model, Mesh(pp=ranks), stage=stage, **settings)
    optimizer = optimizer_over(runtime, OPTIMIZERS["adamw"], max_norm=0.5)
    blocks = {each.index: cut.blocks_of(each.index) for each in stages}
    states = ShardedStates(runtime, None, blocks)
    most = watch_gathered(states)
    executor = PipelineExecutor(StageLinks(rank.comm, mesh, schedule), stages, states)
    losses, norms = [], []
    for step in range(STEPS):
        batches = [batch_of(step, micro, mesh.data_index) for micro in range(MANY)]
        given = [MicroBatch((batch.tokens, batch.targets)) for batch in batches]
        outcome = executor.run(schedule, given, keys=["alike"] * MANY, scale=1.0)
        losses.append(outcome.losses or [])
        optimizer.step()
        norms.append(optimizer.last.norm)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    issued = [each for _, each in rank.world.issued[rank.index]]
    return losses, norms, weights, [*issued, f"at most {max(most)}"]


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(
    ("name", "virtual"), [("1f1b", 1), ("interleaved", 2), ("breadth_first", 2)]
)
@pytest.mark.parametrize("dtype", POLICIES, ids=["fp32", "bf16"])
def test_every_stage_of_zero_under_a_pipeline_has_the_bits_of_one_process(
    stage: int, name: str, virtual: int, dtype: torch.dtype
) -> None:
    found = run_ranks(
        4, lambda rank: train(rank, 2, stage, dtype, name, virtual), reads_in_place=True
    )
    reference = Reference(gpt(), 2, MANY, True, dtype, OPTIMIZERS["adamw"], 0.5)
    for step in range(STEPS):
        batches = [[batch_of(step, micro, rank) for micro in range(MANY)] for rank in range(2)]
        norm = found[0][1][step]
        expected, exact = reference.step(batches, norm)
        assert norm == pytest.approx(exact, rel=1e-5)
        assert all(norms[step] == norm for _, norms, _, _ in found), "one norm over the world"
        for rank in range(2):
            assert all(map(torch.equal, found[2 + rank][0][step], expected[rank]))
    values = reference.values()
    for _, _, weights, _ in found:
        for key, weight in weights.items():
            assert torch.equal(weight, values[key]), key
    assert {key for _, _, weights, _ in found for key in weights} == values.keys()


def test_a_second_copy_of_weights_serves_the_later_gathers_of_each_stage() -> None:
    def body(rank: Rank, near: int) -> tuple[Found, int]:
        found = train(rank, 2, 3, torch.bfloat16, "breadth_first", 2, secondary_ranks=near)
        return found, rank.comm.meter.calls["inner_gather"]

    copied, plain = (
        run_ranks(8, lambda rank, near=near: body(rank, near), seed=near) for near in (2, 1)
    )
    for (one, inside), (other, _) in zip(copied, plain, strict=True):
        for mine, theirs in zip(one[0], other[0], strict=True):
            assert all(map(torch.equal, mine, theirs))
        assert one[1] == other[1], "norms"
        assert all(torch.equal(weight, other[2][key]) for key, weight in one[2].items())
        assert inside >= STEPS, "of blocks that are gathered again for backward"


class Tied(Gpt):
    def __init__(self) -> None:
        super().__init__(blocks=4)
        self.head.weight = self.tokens.weight


class Apart(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(self.tokens.weight.detach().clone())


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("name", "virtual"), [("1f1b", 1), ("breadth_first", 2)])
def test_tied_weights_under_every_stage(stage: int, name: str, virtual: int) -> None:
    cut = cut_chain(
        seeded(Tied), find_chain(seeded(Tied), (batch_of(0, 0, 0).tokens,)), 2 * virtual, "uniform"
    )
    schedule = make_schedule(name, 2, virtual, MANY, tied=tied_stages(cut.ties))

    def body(rank: Rank) -> tuple[dict[str, Tensor], list[str], list[float]]:
        mesh = Mesh(pp=2).on_world(rank.size, rank.index)
        model = seeded(Tied)
        stages = take_stages(model, cut, schedule.stages_of(mesh.coordinates["pp"]))
        ties = Ties(rank.comm, mesh, schedule.placement, cut.ties)
        runtime = sharded(
            rank, model, Mesh(pp=2), stage=stage, accumulation=MANY, reduces_once=True
        )
        optimizer = optimizer_over(runtime, OPTIMIZERS["adamw"])
        executor = PipelineExecutor(
            StageLinks(rank.comm, mesh, schedule), stages, ShardedStates(runtime, ties)
        )
        norms = []
        for step in range(STEPS):
            batches = [batch_of(step, micro, mesh.data_index) for micro in range(MANY)]
            executor.run(
                schedule,
                [MicroBatch((batch.tokens, batch.targets)) for batch in batches],
                scale=1.0,
            )
            optimizer.step()
            norms.append(optimizer.last.norm)
        weights = {key: value.clone() for key, value in model.state_dict().items()}
        return weights, [each for _, each in rank.world.issued[rank.index]], norms

    found = run_ranks(4, body, reads_in_place=True)
    expected = seeded(Tied)
    optimizer = OPTIMIZERS["adamw"](list(expected.parameters()))
    for step in range(STEPS):
        of_rank = []
        for rank in range(2):
            apart = seeded(Apart)
            apart.load_state_dict({**expected.state_dict(), "head.weight": expected.tokens.weight})
            for micro in range(MANY):
                batch = batch_of(step, micro, rank)
                (apart(batch.tokens, batch.targets) * (1 / MANY)).backward()
            assert apart.head.weight.grad is not None
            grads = {
                key: param.grad for key, param in apart.named_parameters() if param.grad is not None
            }
            grads["tokens.weight"] = grads["tokens.weight"] + grads.pop("head.weight")
            of_rank.append(grads)
        for key, param in expected.named_parameters():
            param.grad = (of_rank[0][key] + of_rank[1][key]) / 2
        norm = torch.cat([param.grad.double().flatten() for param in expected.parameters()]).norm()
        for _, _, norms in found:
            assert (
                norms[step] == found[0][2][step] == pytest.approx(float(norm), rel=1e-5)
            )  # a tied weight counts once in the norm
        optimizer.step()
    values = expected.state_dict()
    for rank, (weights, issued, _) in enumerate(found):
        for key, weight in weights.items():
            assert torch.equal(weight, values[key]), (rank, key)
        block = f"blocks.{rank // 2 * 2}" if virtual == 1 else f"blocks.{rank // 2}"
        assert len([each for each in issued if each.startswith(f"reduce {block}")]) == STEPS


@pytest.mark.parametrize("stage", [2, 3])
def test_a_unit_is_gathered_and_reduced_once_whatever_the_micro_batches(stage: int) -> None:
    found = run_ranks(4, lambda rank: train(rank, 2, stage, torch.float32, "1f1b", 1))
    for rank, (_, _, _, issued) in enumerate(found):
        block = f"blocks.{rank // 2 * 2}"
        gathers = [each for each in issued if each.startswith(f"gather {block}")]
        reduces = [each for each in issued if each.startswith(f"reduce {block}")]
        assert len(reduces) == STEPS, reduces
        assert len(gathers) == STEPS + (stage == 3), gathers  # one more by state_dict


def test_breadth_first_gathers_twice_and_releases_the_other_stages() -> None:
    found = run_ranks(4, lambda rank: train(rank, 2, 3, torch.float32, "breadth_first", 2))
    for rank, (_, _, _, issued) in enumerate(found):
        # The backward of the last stage directly follows its forward.
        for block, times in ((rank // 2, 2), (2 + rank // 2, 1)):
            gathers = [each for each in issued if each.startswith(f"gather blocks.{block}")]
            assert len(gathers) == STEPS * times + 1, gathers
            assert (
                len([each for each in issued if each.startswith(f"reduce blocks.{block}")]) == STEPS
            )
        assert issued[-1] == "at most 1"  # of the rank's two blocks


def test_the_loss_scale_and_the_accumulation_are_applied_once_over_all_stages() -> None:
    def body(rank: Rank, scale: float) -> list[Tensor]:
        mesh = Mesh(pp=3).on_world(rank.size, rank.index)
        model, schedule = seeded(Gpt, blocks=3), make_schedule("1f1b", 3, 1, MANY)
        batch = batch_of(0, 0, 0)
        cut = cut_chain(model, find_chain(model, (batch.tokens, batch.targets)), 3)
        stages = take_stages(model, cut, [rank.index])
        runtime = sharded(rank, model, Mesh(pp=3), stage=1, accumulation=MANY, reduces_once=True)
        loss_factor_of(runtime).scaler = (
            LossScaler(LossScaleSettings(loss_scale=scale)) if scale != 1.0 else None
        )
        executor = PipelineExecutor(
            StageLinks(rank.comm, mesh, schedule), stages, ShardedStates(runtime)
        )
        given = [batch_of(0, micro, 0) for micro in range(MANY)]
        executor.run(
            schedule, [MicroBatch((each.tokens, each.targets)) for each in given], scale=1.0
        )
        found = [group.gradient.sum.reduced() for group in runtime.trained_groups]
        loss_factor_of(runtime).scaler = None
        return [each.clone() for each in found if each is not None]

    plain, scaled = (
        run_ranks(3, lambda rank: body(rank, 1.0)),
        run_ranks(3, lambda rank: body(rank, 8.0)),
    )
    for one, other in zip(plain, scaled, strict=True):
        assert len(one) == len(other) > 0
        assert all(torch.equal(grad * 8, more) for grad, more in zip(one, other, strict=True))
