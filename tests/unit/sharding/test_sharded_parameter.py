"""Invalid operations on a sharded parameter raise errors with advice for that operation."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import deepseek_zero
from deepseek_zero.base.errors import AtRestError
from deepseek_zero.sharding.sharded_parameter import ShardedParameter

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "steps_per_print": None,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


@pytest.fixture
def engine() -> Any:
    return deepseek_zero.initialize(model=nn.Linear(64, 64), config=CONFIG)[0]


CAST, MOVE, READ, CHANGE = (
    "state the dtype in the configuration",
    "leave the move out",
    "read it inside",
    "change it",
)
CASES: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "half": (lambda model: model.half(), CAST),
    "to(dtype)": (lambda model: model.to(torch.bfloat16), CAST),
    "to(dtype=)": (lambda model: model.to(dtype=torch.float64), CAST),
    "type": (lambda model: model.type(torch.float16), CAST),
    "to(device)": (lambda model: model.to("meta"), MOVE),
    "to(device, dtype)": (lambda model: model.to("meta", torch.float16), MOVE),
    "sum": (lambda model: model.weight.sum(), READ),
    "data": (lambda model: model.weight.data, READ),
    "numpy": (lambda model: model.weight.numpy(), READ),
    "mul_": (lambda model: model.weight.mul_(2), CHANGE),
    "nn.init": (lambda model: nn.init.normal_(model.weight), CHANGE),
    "clone": (lambda model: model.weight.clone(), "for a copy of one parameter"),
    "deepcopy": (lambda model: copy.deepcopy(model.weight), "build a second model"),
    "pickle": (lambda model: pickle.dumps(model.weight), "build a second model"),
}


@pytest.mark.parametrize("case", CASES)
def test_each_operation_is_refused_with_advice_of_its_own(engine: Any, case: str) -> None:
    operation, advice = CASES[case]
    with torch.no_grad(), pytest.raises(AtRestError) as caught:
        operation(engine.module)
    assert advice in str(caught.value), str(caught.value)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_torch_optimizer_on_sharded_parameters_raises_an_error_with_advice(
    stage: int, kind: Any
) -> None:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    engine = deepseek_zero.initialize(
        model=nn.Linear(64, 64), config=CONFIG | {"zero_optimization": zero}
    )[0]
    with pytest.raises(
        AtRestError, match=rf"do not step torch's {kind.__name__} .*initialize\(model="
    ):
        optimizer = kind(engine.module.parameters(), lr=0.1)
        engine.backward(engine(torch.ones(1, 64)).sum())
        optimizer.step()


def test_tensors_like_a_sharded_parameter_have_its_shape_and_own_memory(engine: Any) -> None:
    weight = engine.module.weight
    for like in (torch.zeros_like, torch.ones_like, torch.rand_like, torch.empty_like):
        found = like(weight)
        found.fill_(3.0)
        assert torch.equal(found, torch.full((64, 64), 3.0))
    assert torch.equal(torch.full_like(weight, 2.0), torch.full((64, 64), 2.0))


@pytest.mark.parametrize("way", ["backward", "autograd.backward", "autograd.grad"])
def test_sharded_parameters_may_be_inputs_of_a_differentiation(way: str) -> None:
    zero = {**CONFIG["zero_optimization"], "stage3_max_live_parameters": 0}
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    engine = deepseek_zero.initialize(model=model, config=CONFIG | {"zero_optimization": zero})[0]
    weight, bias = model[0].parameters()
    with deepseek_zero.zero.GatheredParameters(list(model.parameters())):
        hidden = weight.detach().sum(dim=1) + bias.detach()
        out = model[1].weight.detach() @ hidden + model[1].bias.detach()
        expected = 2 * model[1].weight.detach().t() @ out
    loss = engine(torch.ones(1, 4)).square().sum()
    assert type(bias) is ShardedParameter
    if way == "autograd.grad":
        (found,) = torch.autograd.grad(loss, [bias])
    else:
        if way == "backward":
            loss.backward(inputs=[bias])
        else:
            torch.autograd.backward([loss], inputs=bias)
        found = bias.grad.full_tensor()
        assert weight.grad is None or weight.grad.norm() == 0
    torch.testing.assert_close(found, expected)
