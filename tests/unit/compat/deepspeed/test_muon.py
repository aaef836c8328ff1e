"""Test the Muon update function and parameter marks of DeepSpeed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepseek_zero.compat.deepspeed.muon import mark_parameters, muon_update
from deepseek_zero.optimizers.muon import Muon


@pytest.mark.parametrize("shape", [(4, 8), (8, 4), (6, 2, 3, 3), (3, 4, 4)])
def test_muon_update_is_the_step_of_the_optimizer(shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    weight, grad = nn.Parameter(torch.zeros(shape)), torch.randn(shape)
    weight.grad = grad.clone()
    Muon([weight], lr=1.0).step()
    direction = muon_update(grad.clone(), torch.zeros(shape))
    torch.testing.assert_close(-weight.detach(), direction.reshape(shape))


def test_muon_update_by_heads_and_with_gradients_that_are_not_finite() -> None:
    torch.manual_seed(1)
    grad = torch.randn(8, 4)
    by_head = torch.cat([muon_update(part.clone(), torch.zeros(4, 4)) for part in grad.split(4)])
    torch.testing.assert_close(muon_update(grad.clone(), torch.zeros(8, 4), num_heads=2), by_head)
    kept, broken = torch.ones(8, 4), torch.full((8, 4), float("inf"))
    assert muon_update(broken, kept).isinf().all() and (kept == 1).all()
    momentum, before = torch.zeros(8, 4), grad.clone()
    with pytest.raises(ValueError, match="3 heads"):
        muon_update(grad, momentum, num_heads=3)
    assert torch.equal(grad, before) and not momentum.any()


def test_muon_update_warns_about_an_unknown_method(caplog: pytest.LogCaptureFixture) -> None:
    grad = torch.randn(8, 4)
    standard = muon_update(grad.clone(), torch.zeros(8, 4), ns_method="standard")
    assert "ns_method" not in caplog.text
    unknown = muon_update(grad.clone(), torch.zeros(8, 4), ns_method="grm")
    assert torch.equal(unknown, standard) and "ns_method 'grm' means 'standard'" in caplog.text


def test_marks_select_the_parameters_of_muon() -> None:
    model = nn.ModuleDict(
        {"embed": nn.Embedding(8, 4), "inner": nn.Linear(4, 4), "head": nn.Linear(4, 8)}
    )
    assert [len(group["params"]) for group in Muon.parameter_groups(model)] == [1, 4]
    mark_parameters(model)  # DeepSpeed excludes only embeddings and lm_head
    matrices, rest = Muon.parameter_groups(model)
    assert [id(each) for each in matrices["params"]] == [
        id(model["inner"].weight),
        id(model["head"].weight),
    ]
    assert len(rest["params"]) == 3
