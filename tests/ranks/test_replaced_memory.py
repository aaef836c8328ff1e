"""New memory of a parameter (`.data = `, `set_`, `module.to(dtype)`) is adopted or is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import deepseek_zero as dz
from deepseek_zero.base.errors import AtRestError, PeerError, UsageError
from tests.ranks.test_finite import said

WIDTH = 64


def config(stage: int = 3) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": None,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }


def assign(layer: nn.Linear) -> nn.Module:
    layer.weight.data = torch.arange(WIDTH * WIDTH).view(WIDTH, WIDTH) / WIDTH**2
    return layer


def assign_after_a_look(layer: nn.Linear) -> nn.Module:
    layer.weight.data.zero_()
    layer.weight.data = torch.full_like(layer.weight, 2.0)
    return layer


def set_memory(layer: nn.Linear) -> nn.Module:
    with torch.no_grad():
        layer.weight.set_(torch.eye(WIDTH))
    return layer


def another_shape(layer: nn.Linear) -> nn.Module:
    layer.weight.data = torch.ones(2 * WIDTH, WIDTH)
    layer.bias.data = torch.ones(2 * WIDTH)
    return layer


def another_dtype(layer: nn.Linear) -> nn.Module:
    return layer.to(torch.float64)


def orthogonal(layer: nn.Linear) -> nn.Module:
    layer = parametrizations.orthogonal(layer)
    layer.weight = torch.linalg.qr(torch.arange(WIDTH * WIDTH).view(WIDTH, WIDTH).sin())[0]
    return layer


def gathered(layer: nn.Linear) -> nn.Module:
    with dz.zero.GatheredParameters(layer.weight, modifier_rank=0):
        layer.weight.data = torch.full((WIDTH, WIDTH), 3.0)
    return layer


CHANGES = [
    assign,
    assign_after_a_look,
    set_memory,
    another_shape,
    another_dtype,
    orthogonal,
    gathered,
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_replaces_memory_as_it_is_built_is_that_of_a_plain_construction(
    change: Callable[[nn.Linear], nn.Module],
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer: nn.Module = nn.Linear(WIDTH, WIDTH)
            self.layer = change(self.layer)

    torch.manual_seed(4)
    plain = Net().state_dict()
    torch.manual_seed(4)
    with dz.zero.Init():
        model = Net()
    engine = dz.initialize(model=model, config=config())[0]
    found = engine.module_state_dict()
    for name, value in plain.items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", range(4))
def test_inside_gathered_parameters_new_memory_that_fits_is_taken_over(stage: int) -> None:
    engine = dz.initialize(model=nn.Linear(WIDTH, WIDTH), config=config(stage))[0]
    weight = engine.module.weight

    def replace(value: Tensor, modifier_rank: int | None) -> None:
        with dz.zero.GatheredParameters(weight, modifier_rank=modifier_rank):
            weight.data = value

    replace(torch.full((WIDTH, WIDTH), 5.0 + dist.get_rank()), 1)
    assert engine.module_state_dict()["weight"].eq(6.0).all()
    with pytest.raises(UsageError, match="modifier_rank=None"):
        replace(torch.zeros(WIDTH, WIDTH), None)
    wrong = torch.zeros(2, WIDTH) if stage % 2 else torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    with pytest.raises(
        UsageError if dist.get_rank() == 0 else PeerError, match="memory of 'weight' was replaced"
    ):
        replace(wrong, 0)


@pytest.mark.ranks(2)
def test_new_memory_for_a_sharded_parameter_is_refused() -> None:
    weight = dz.initialize(model=nn.Linear(WIDTH, WIDTH), config=config())[0].module.weight
    with torch.no_grad(), pytest.raises(AtRestError, match="'set_' cannot use it"):
        weight.set_(torch.zeros(WIDTH, WIDTH))
    with pytest.raises(AtRestError, match="'data' cannot use it"):
        weight.data = torch.zeros(WIDTH, WIDTH)


class Replaces(nn.Linear):
    """A layer whose forward assigns to `.data` of its weight."""

    value: Callable[[Tensor], Tensor]

    def forward(self, batch: Tensor) -> Tensor:
        self.weight.data = self.value(self.weight.data)
        return nn.functional.linear(
            batch.to(self.weight.dtype), self.weight, self.bias.to(self.weight.dtype)
        )


@pytest.mark.ranks(2)
def test_new_values_that_a_forward_assigns_are_refused_and_a_cast_of_the_same_values_is_not() -> (
    None
):
    def run(value: Callable[[Tensor], Tensor]) -> None:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Replaces(WIDTH, WIDTH))
        model[1].value = value
        for param in model[1].parameters():
            param.requires_grad_(False)
        engine = dz.initialize(model=model, config=config())[0]
        engine.backward(engine(torch.ones(1, WIDTH)).sum())
        engine.step()

    run(lambda weight: weight.to(torch.bfloat16))
    run(lambda weight: weight.clone())
    with pytest.raises(
        UsageError, match=r"the memory of parameter '1.weight' was replaced by other values"
    ):
        run(lambda weight: weight / 2)


@pytest.mark.ranks(2)
def test_a_change_in_place_during_forward_is_reported_once() -> None:
    model = nn.Sequential(nn.Embedding(WIDTH, WIDTH, max_norm=0.1), nn.Linear(WIDTH, WIDTH))
    engine = dz.initialize(model=model, config=config())[0]
    with said() as warnings:
        for _ in range(3):
            engine.backward(engine(torch.arange(WIDTH)).sum())
            engine.step()
    told = [text for text in warnings if "changed in place" in text]
    assert len(told) == int(dist.get_rank() == 0)
    assert all("parameter '0.weight'" in text for text in told)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_an_embedding_with_max_norm_is_reported_on_several_ranks(stage: int) -> None:
    model = nn.Sequential(nn.Embedding(WIDTH, WIDTH, max_norm=0.1), nn.Linear(WIDTH, WIDTH))
    with said() as warnings:
        dz.initialize(model=model, config=config(stage))
    told = [text for text in warnings if "the forward of embedding '0'" in text]
    assert len(told) == int(dist.get_rank() == 0)


# -- a model built by zero.Init, before an engine exists


@pytest.mark.ranks(2)
def test_a_built_model_is_converted_and_its_conversion_is_not_read() -> None:
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    torch.manual_seed(5)
    with dz.zero.Init():
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    model[0].double().to("cpu")
    model[1].to(torch.ones(1, dtype=torch.bfloat16)).type(torch.float16)
    plain[0].double()
    plain[1].to(torch.bfloat16).to(torch.float16)
    with pytest.raises(AtRestError):
        model[0].weight.half().sum()
    assert model[0].weight.dtype == torch.float64
    with dz.zero.GatheredParameters(model):
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.ranks(2)
def test_padding_by_zero_does_not_change_a_built_parameter() -> None:
    with dz.zero.Init():
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    bias = model[0].bias
    bias.data = nn.functional.pad(bias.data, (0, 0), "constant", 0)
    with pytest.raises(AtRestError):
        nn.functional.pad(bias.data, (0, 1))
    assert type(bias).__name__ == "ShardedParameter"


@pytest.mark.ranks(2)
def test_modules_initialised_by_one_rank_are_not_initialised_by_others() -> None:
    with dz.zero.Init():
        model = nn.Sequential(nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with dz.zero.GatheredParameters(model, modifier_rank=0):
        if dist.get_rank() == 0:
            for param in model.parameters():
                nn.init.constant_(param, 7.0)
    if dist.get_rank() == 1:  # as in transformers, only rank 0 marks parameters as initialised
        nn.init.normal_(model[0].weight)
        nn.init.zeros_(model[0].weight[3])
        nn.init.trunc_normal_(model[1].weight)
        nn.init.zeros_(model[1].bias)
        with pytest.raises(AtRestError):
            model[0].weight.sum()
    else:
        with pytest.raises(AtRestError, match="normal_"):
            nn.init.normal_(model[0].weight)
    with dz.zero.GatheredParameters(model):
        assert all(param.eq(7.0).all() for param in model.parameters())
