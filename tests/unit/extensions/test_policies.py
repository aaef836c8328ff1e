"""A new update policy needs one class and no change of the core."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from deepseek_zero.optim.inner_step import Decision
from deepseek_zero.optim.shard_set import ShardSet
from deepseek_zero.optim.sharded import ShardedOptimizer
from deepseek_zero.optim.step_settings import StepSettings
from deepseek_zero.optim.update_policy import UpdatePolicy
from tests.in_process import Rank, run_ranks, sharded
from tests.models import Gpt, batch_of, seeded
from tests.reference import OPTIMIZERS

STEPS = 4


class EverySecondStep(UpdatePolicy):
    """Updates in every second step, with the gradients of that step."""

    def __init__(self) -> None:
        self.steps = 0

    def due(self, made: Decision | None) -> Decision | None:
        return made if self.steps % 2 == 0 else None

    def keep(self, made: Decision | None) -> None:
        self.steps += 1


def train(rank: Rank, stage: int, policies: Sequence[UpdatePolicy], *, skips: bool) -> list[Tensor]:
    """Train and return the weights after each step.

    skips: the program drops the gradients of every second step.
    """
    model = seeded(Gpt, blocks=2)
    runtime = sharded(rank, model, stage=stage)
    groups = [{"params": list(model.parameters())}]
    shards = ShardSet(
        runtime, groups, OPTIMIZERS["adamw"], StepSettings(max_norm=0.5), policies=policies
    )
    optimizer = ShardedOptimizer(shards)
    found = []
    for step in range(STEPS):
        batch = batch_of(step, 0, rank.index)
        model(batch.tokens, batch.targets).backward()
        if skips and step % 2 == 1:
            optimizer.zero_grad()
        else:
            optimizer.step()
        found += [value.clone() for value in model.state_dict().values()]
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_policy_of_one_class_changes_when_units_are_updated(stage: int) -> None:
    found = run_ranks(2, lambda rank: train(rank, stage, [EverySecondStep()], skips=False))
    expected = run_ranks(2, lambda rank: train(rank, stage, [], skips=True))
    plain = run_ranks(2, lambda rank: train(rank, stage, [], skips=False))
    for one, other in zip(found, expected, strict=True):
        assert all(map(torch.equal, one, other))
    assert not all(map(torch.equal, found[0], plain[0])), "every step updates without the policy"
