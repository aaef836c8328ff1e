"""With a secondary copy of weights (hpZ), results equal stage 3 bitwise and gathers stay local."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepseek_zero.base.errors import UsageError
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.extensions.gathered_parameters import GatheredParameters
from deepseek_zero.extensions.param_states import safe_set_full_fp32_param
from deepseek_zero.precision.policy import Policy
from deepseek_zero.sharding.regroup import promote_unit
from deepseek_zero.sharding.runtime import Runtime
from tests.in_process import Rank, optimizer_over, run_ranks, sharded
from tests.models import Gpt, batch_of, seeded
from tests.reference import OPTIMIZERS

WORLD, NEAR = 4, 2
POLICIES = {torch.float32: Policy(), torch.bfloat16: Policy(torch.bfloat16, auto_cast=True)}
ALL, INSIDE = "engine 0/gather", "engine 0 inner/gather"


def small(recomputes: bool = False) -> nn.Module:
    model = seeded(Gpt, blocks=2)
    for block in model.blocks if recomputes else ():
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    return model


@dataclass
class Trained:
    """The results of one rank.

    sent, predicted: bytes of the last step.
    """

    losses: list[Tensor] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    predicted: dict[str, int] = field(default_factory=dict)


def micro_step(runtime: Runtime, step: int, micro: int, rank: int) -> Tensor:
    batch = batch_of(step, micro, rank)
    loss = runtime.model(batch.tokens, batch.targets)
    loss.backward()
    return loss.detach()


def train(
    rank: Rank,
    dtype: torch.dtype = torch.float32,
    accumulation: int = 1,
    near: int = NEAR,
    mesh: Mesh | None = None,
    recomputes: bool = False,
    prepare: Callable[[nn.Module], None] = lambda model: None,
    **settings: Any,
) -> Trained:
    model = small(recomputes)
    prepare(model)
    settings = {
        "policy": POLICIES[dtype],
        "accumulation": accumulation,
        "secondary_ranks": near,
        **settings,
    }
    runtime = sharded(rank, model, mesh, stage=3, **settings)
    optimizer = optimizer_over(runtime, OPTIMIZERS["adamw"], max_norm=0.5)
    found = Trained()
    for step in range(3):
        rank.comm.meter.reset()
        for micro in range(accumulation):
            runtime.step.is_boundary = micro == accumulation - 1
            found.losses.append(micro_step(runtime, step, micro, rank.index))
        optimizer.step()
    found.sent = dict(rank.comm.meter.sent_bytes)
    volume = runtime.plan.volume()
    outer = volume.gathers - volume.inner_gathers
    found.predicted = {
        "all_gather": outer,
        "inner_gather": volume.inner_gathers,
        "rows": volume.rows,
    }
    found.weights = {name: value.clone() for name, value in model.state_dict().items()}
    return found


def assert_alike(found: list[Trained], expected: list[Trained]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert all(map(torch.equal, one.losses, other.losses))
        assert all(torch.equal(value, other.weights[name]) for name, value in one.weights.items())


@pytest.mark.parametrize(
    ("dtype", "accumulation", "recomputes", "settings"),
    [
        (torch.float32, 1, False, {"window_numel": 0}),
        (torch.bfloat16, 1, False, {"window_numel": 0}),
        (torch.float32, 2, False, {"window_numel": 0}),
        (torch.bfloat16, 2, False, {"window_numel": 0, "overlap": False}),
        (torch.bfloat16, 2, True, {"window_numel": 0}),
        (torch.float32, 2, True, {"keep_numel": 0}),
        (torch.bfloat16, 2, False, {}),
    ],
)
def test_it_has_the_bits_of_plain_stage_3_and_sends_what_is_predicted(
    dtype: torch.dtype, accumulation: int, recomputes: bool, settings: dict[str, Any]
) -> None:
    given = (dtype, accumulation), {"recomputes": recomputes, **settings}
    found = run_ranks(WORLD, lambda rank: train(rank, *given[0], **given[1]), seed=accumulation)
    plain = run_ranks(WORLD, lambda rank: train(rank, *given[0], near=1, **given[1]))
    assert_alike(found, plain)
    for one, other in zip(found, plain, strict=True):
        assert {kind: one.sent.get(kind, 0) for kind in one.predicted} == one.predicted
        assert {kind: other.sent.get(kind, 0) for kind in other.predicted} == other.predicted
        if "window_numel" in settings:  # each unit is gathered twice in a micro-batch
            gathers, times = other.sent["all_gather"], 2 * accumulation
            assert one.sent["all_gather"] * times == gathers
            # A slice is twice as long and is sent to one rank instead of three.
            assert one.sent["inner_gather"] * 3 * times == gathers * 2 * (times - 1)
        assert one.sent["reduce_scatter"] == other.sent["reduce_scatter"]


@pytest.mark.parametrize("near", [4, 5, 1])
def test_a_group_of_all_ranks_is_no_smaller_one(near: int) -> None:
    found = run_ranks(WORLD, lambda rank: train(rank, near=near))
    assert not any("inner_gather" in one.sent for one in found)


def test_with_replicas_it_applies_within_each_replica() -> None:
    mesh = Mesh(dp_replicate=2, dp_shard=4)
    found, plain = (
        run_ranks(
            8, lambda rank, near=near: train(rank, torch.bfloat16, 2, near, mesh, window_numel=0)
        )
        for near in (NEAR, 1)
    )
    assert_alike(found, plain)
    for one, other in zip(found, plain, strict=True):
        assert one.sent["inner_gather"] == one.predicted["inner_gather"] > 0
        # An all-reduce over the replicas sends half of its bytes as an all-gather.
        among_replicas = other.sent["all_gather"] - other.predicted["all_gather"]
        assert one.sent["all_gather"] == one.predicted["all_gather"] + among_replicas


def freeze_the_first_block(model: nn.Module) -> None:
    model.blocks[0].requires_grad_(False)


def test_weights_that_are_never_updated_are_gathered_over_all_ranks_once() -> None:
    found, plain = (
        run_ranks(
            WORLD,
            lambda rank, near=near: train(
                rank, near=near, prepare=freeze_the_first_block, window_numel=0
            ),
        )
        for near in (NEAR, 1)
    )
    assert_alike(found, plain)
    for one, other in zip(found, plain, strict=True):
        assert {kind: one.sent.get(kind, 0) for kind in one.predicted} == one.predicted
        assert one.sent["all_gather"] < other.sent["all_gather"] // 2


def evaluate(runtime: Runtime) -> Tensor:
    with torch.no_grad():
        return runtime.model(batch_of(9, 0, 0).tokens)


def test_every_change_of_the_weights_is_in_the_next_gather() -> None:
    """Each change is made while the secondary copy is current, after a forward."""

    def body(rank: Rank, near: int) -> list[Tensor]:
        model = small()
        runtime = sharded(rank, model, stage=3, secondary_ranks=near, window_numel=0)
        optimizer = optimizer_over(runtime, OPTIMIZERS["adamw"])
        found = [evaluate(runtime), evaluate(runtime)]
        micro_step(runtime, 0, 0, rank.index)
        found.append(evaluate(runtime))  # between backward and step
        optimizer.step()
        found.append(evaluate(runtime))
        with GatheredParameters([model.blocks[0].up.weight], modifier_rank=3):
            if rank.index == 3:
                model.blocks[0].up.weight.data.mul_(2.0)
        found.append(evaluate(runtime))
        with torch.no_grad():
            model.blocks[1].proj.weight.copy_(torch.full((15, 15), 0.25))
        found.append(evaluate(runtime))
        safe_set_full_fp32_param(model.head.weight, torch.full((37, 15), -0.5))
        found.append(evaluate(runtime))
        return found

    found, plain = (
        run_ranks(WORLD, lambda rank, near=near: body(rank, near), seed=3) for near in (NEAR, 1)
    )
    for one, other in zip(found, plain, strict=True):
        assert all(map(torch.equal, one, other))
    kinds = found[0][2:]
    assert not any(torch.equal(before, after) for before, after in pairwise(kinds))


def test_it_follows_groups_that_are_divided_and_units_that_are_promoted() -> None:
    def body(rank: Rank, near: int) -> list[Tensor]:
        model = small()
        freeze_the_first_block(model)
        policy = POLICIES[torch.bfloat16]
        runtime = sharded(rank, model, stage=3, secondary_ranks=near, window_numel=0, policy=policy)
        optimizer, found = optimizer_over(runtime, OPTIMIZERS["adamw"]), []
        for step in range(3):
            if step == 1:
                model.blocks[0].up.requires_grad_(True)
            if step == 2:
                promote_unit(runtime, runtime.units[2], to_fp32=True)
            found.append(micro_step(runtime, step, 0, rank.index))
            optimizer.step()
            found.append(evaluate(runtime))
        assert len(runtime.units[1].groups) == 2
        copies = [buffer for group in runtime.groups for buffer in group.weight_gather.buffers()]
        assert [copy.spec.dtype for copy in copies].count(torch.float32) == (near > 1)
        return [*found, *model.state_dict().values()]

    found, plain = (
        run_ranks(WORLD, lambda rank, near=near: body(rank, near)) for near in (NEAR, 1)
    )
    for one, other in zip(found, plain, strict=True):
        assert all(map(torch.equal, one, other))


def test_the_first_gather_after_an_update_uses_all_ranks_and_later_ones_the_host() -> None:
    def body(rank: Rank) -> list[tuple[int, int]]:
        runtime = sharded(rank, small(), stage=3, secondary_ranks=NEAR, window_numel=0)
        optimizer, counts = optimizer_over(runtime, OPTIMIZERS["sgd"]), []

        def count(action: Callable[[], Any]) -> None:
            before = len(rank.issued(ALL)), len(rank.issued(INSIDE))
            action()
            counts.append((len(rank.issued(ALL)) - before[0], len(rank.issued(INSIDE)) - before[1]))

        count(lambda: evaluate(runtime))
        count(lambda: evaluate(runtime))
        count(lambda: micro_step(runtime, 0, 0, rank.index))
        count(optimizer.step)
        count(lambda: micro_step(runtime, 1, 0, rank.index))
        count(runtime.backward.discard_step)
        return counts

    for counts in run_ranks(WORLD, body):
        assert counts == [(3, 0), (0, 3), (0, 6), (0, 0), (3, 3), (0, 0)]


def test_a_size_that_does_not_divide_is_refused_before_any_rank_waits() -> None:
    with pytest.raises(UsageError, match="4 is not divisible by 3"):
        run_ranks(WORLD, lambda rank: sharded(rank, small(), stage=3, secondary_ranks=3))


def test_inner_groups_are_runs_of_neighbours_among_ranks_that_share_slices() -> None:
    mesh = Mesh(dp_replicate=2, dp_shard=2, sp=2).on_world(8)
    assert mesh.inner_groups(2) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert Mesh(dp_shard=4, tp=2).on_world(8).inner_groups(2) == ((0, 2), (4, 6), (1, 3), (5, 7))
