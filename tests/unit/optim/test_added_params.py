"""Parameter groups that `add_param_group` refuses leave the optimizer as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deepseek_zero.base.errors import UsageError
from deepseek_zero.optim.shard_set import ShardSet
from deepseek_zero.optim.sharded import ShardedOptimizer
from deepseek_zero.optim.step_settings import StepSettings
from tests.in_process import Rank, optimizer_over, run_ranks, sharded


@pytest.mark.parametrize(
    "given",
    [
        [nn.Parameter(torch.ones(2))],
        {"lr": 0.1},
        {"params": None},
        {"params": [("name", nn.Parameter(torch.ones(2)))]},
        {"params": [nn.Parameter(torch.ones(2))]},
    ],
    ids=["no dict", "no params", "None", "named", "another model's"],
)
def test_a_group_without_parameters_of_the_model_changes_nothing(given: Any) -> None:
    def body(rank: Rank) -> None:
        runtime = sharded(rank, nn.Sequential(nn.Linear(2, 2)), stage=3)
        optimizer = optimizer_over(runtime, lambda groups: torch.optim.SGD(groups, lr=0.1))
        with pytest.raises(UsageError):
            optimizer.add_param_group(given)
        shards = optimizer.shard_set
        lists = [shards.uncut, shards.params_by_group, shards.names_by_group]
        assert [len(each) for each in (*lists, shards.shards_by_group)] == [1] * 4
        assert len(optimizer.param_groups) == 1

    run_ranks(1, body)


def test_a_group_that_torch_refuses_changes_nothing() -> None:
    def body(rank: Rank) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        runtime = sharded(rank, model, stage=3)
        shards = ShardSet(
            runtime,
            [{"params": list(model[0].parameters())}],
            lambda groups: torch.optim.SGD(groups, lr=0.1),
            StepSettings(),
        )
        optimizer = ShardedOptimizer(shards)
        for group in optimizer.param_groups:
            group["param_names"] = ["0.weight", "0.bias"]  # as of named parameters
        with pytest.raises(ValueError, match="names"):
            optimizer.add_param_group({"params": list(model[1].parameters())})
        lists = [shards.uncut, shards.params_by_group, shards.names_by_group]
        assert [len(each) for each in (*lists, shards.shards_by_group)] == [1] * 4

    run_ranks(1, body)
