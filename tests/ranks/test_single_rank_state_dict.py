"""Plain API at stage 3: `state_dict()` on one rank raises there, and then on the other ranks."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepseek_zero
from deepseek_zero.base.errors import PeerError, UsageError


def build() -> Any:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "steps_per_print": None,
    }
    return deepseek_zero.initialize(
        model=nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4)), config=config
    )[0]


@pytest.mark.ranks(2, fresh=True)
def test_a_state_dict_on_one_rank_ends_while_the_other_waits_in_a_barrier_of_torch() -> None:
    engine = build()
    if dist.get_rank() == 0:
        with pytest.raises(
            UsageError,
            match=r"state_dict\(\) was called on rank 0, but rank 1 waits for it in .*barrier",
        ):
            engine.module.state_dict()
    dist.barrier()
    if dist.get_rank() == 1:
        with pytest.raises(PeerError, match=r"rank 0 .*state_dict\(\) was called on rank 0"):
            engine(torch.ones(2, 64))


@pytest.mark.ranks(2, fresh=True)
def test_a_state_dict_with_late_ranks_is_whole() -> None:
    engine = build()
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(2.5)  # longer than the poll interval of the waiting rank
    assert engine.module.state_dict()["0.weight"].shape == (64, 64)
