"""Test the parameter groups for experts of `deepspeed.moe`."""

from __future__ import annotations

import torch
from torch import nn

from deepseek_zero.compat.deepspeed import (
    moe,
)


def test_experts_parameters_go_into_groups_of_their_own() -> None:
    shared, expert, large = (nn.Parameter(torch.zeros(size)) for size in (1, 2, 3))
    for param in (expert, large):
        param.allreduce, param.group_name = False, "ep"  # type: ignore[attr-defined]
    group = {"params": [shared, expert, large], "name": "all"}
    found = moe.split_params_into_different_moe_groups_for_optimizer(group, max_group_size=3)
    assert [[param.numel() for param in each["params"]] for each in found] == [[1], [2], [3]]
    assert [moe.is_moe_param_group(each) for each in found] == [False, True, True]
