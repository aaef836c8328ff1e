"""Test the helpers of `deepspeed.runtime.utils`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepseek_zero.compat.deepspeed import runtime_utils as arithmetic


def test_norms_and_overflow_of_gradients() -> None:
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))]
    for param, value in zip(params, (3.0, 4.0), strict=True):
        param.grad = torch.tensor([value, 0.0])
    assert arithmetic.get_flattened_grad_norm(params) == arithmetic.get_global_norm([3, 4]) == 5.0
    assert float(arithmetic.clip_grad_norm_(params, 1.0)) == 5.0
    assert torch.allclose(
        torch.stack([param.grad[0] for param in params if param.grad is not None]).norm(),
        torch.ones(()),
    )
    checker = arithmetic.CheckOverflow([params])
    assert not checker.check()
    params[0].grad = torch.tensor([float("inf"), 0.0])
    assert checker.check() and arithmetic.get_flattened_grad_norm(params) == -1.0
    assert arithmetic.call_to_str("f", 1, a="b") == "f(1, a='b')" and arithmetic.prefix_sum_inc(
        [3, 4]
    ) == [3, 7]


def test_tensors_of_a_generator_are_clipped() -> None:
    tensors = [torch.tensor([3.0, 4.0])]
    norm = arithmetic.clip_tensors_by_global_norm((each for each in tensors), 1.0)
    assert float(norm) == 5.0
    torch.testing.assert_close(tensors[0], torch.tensor([0.6, 0.8]))


def test_the_largest_element_is_the_norm_of_experts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    operations = []
    monkeypatch.setattr(dist, "all_reduce", lambda value, op, group: operations.append(op))
    norm = arithmetic.get_global_norm_of_tensors(
        [torch.tensor([3.0, -4.0])], float("inf"), moe_ep_group="experts"
    )
    assert float(norm) == 4.0 and operations == [dist.ReduceOp.MAX]
