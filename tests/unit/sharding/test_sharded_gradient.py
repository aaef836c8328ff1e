"""Norms of a sharded gradient equal torch's, or are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from deepseek_zero.base.errors import AtRestError
from tests.in_process import Rank, run_ranks, sharded


@pytest.mark.parametrize("order", [1, 2, -2, math.inf])
def test_linalg_norm_is_that_of_a_matrix_only_without_an_order(order: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 3))
    batch = torch.randn(5, 4)
    plain(batch).square().sum().backward()
    weight = plain[0].weight.grad
    bias = plain[0].bias.grad

    def body(rank: Rank) -> None:
        model = nn.Sequential(nn.Linear(4, 3))
        model.load_state_dict(plain.state_dict())
        runtime = sharded(rank, model, stage=3)
        runtime.model(batch).square().sum().backward()
        layer = model[0]
        with pytest.raises(AtRestError, match="linalg_norm of a matrix"):
            torch.linalg.norm(layer.weight.grad, order)
        for norm in (torch.linalg.norm, torch.linalg.vector_norm):
            torch.testing.assert_close(norm(layer.bias.grad, order), norm(bias, order))
        torch.testing.assert_close(torch.linalg.norm(layer.weight.grad), torch.linalg.norm(weight))

    run_ranks(2, body)
