"""Arguments that the `safe_` functions refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from deepseek_zero.base.errors import UsageError
from deepseek_zero.extensions import param_states
from tests.in_process import Rank, run_ranks, sharded

STATE = "exp_avg"
GETTERS: list[Callable[[Any], Any]] = [
    param_states.safe_get_full_fp32_param,
    param_states.safe_get_full_grad,
    param_states.safe_get_local_fp32_param,
    param_states.safe_get_local_grad,
    lambda param: param_states.safe_get_full_optimizer_state(param, STATE),
    lambda param: param_states.safe_get_local_optimizer_state(param, STATE),
    lambda param: param_states.safe_set_full_grad(param, torch.ones(1)),
    lambda param: param_states.safe_update_full_grad_vectorized([param], lambda grad, _: grad),
]


@pytest.mark.parametrize("call", GETTERS)
def test_the_bias_of_a_layer_without_one_is_refused(call: Callable[[Any], Any]) -> None:
    with pytest.raises(UsageError, match="one parameter"):
        call(nn.Linear(2, 2, bias=False).bias)


@pytest.mark.parametrize("value", [3.0, [3.0], None])
def test_a_value_that_is_no_tensor_is_refused(value: Any) -> None:
    def body(rank: Rank) -> None:
        runtime = sharded(rank, nn.Sequential(nn.Linear(1, 1)), stage=3)
        for param in runtime.model.parameters():
            with pytest.raises(UsageError, match="pass a tensor"):
                param_states.safe_set_full_fp32_param(param, value)
            with pytest.raises(UsageError, match="pass a tensor"):
                param_states.safe_set_local_fp32_param(param, value)

    run_ranks(1, body)


@pytest.mark.parametrize("params", [nn.Parameter(torch.ones(2)), None])
def test_gradients_are_updated_of_a_list_of_parameters_only(params: Any) -> None:
    with pytest.raises(UsageError, match="an iterable of parameters"):
        param_states.safe_update_full_grad_vectorized(params, lambda grad, _: grad)
