"""Values that `zero.Init` must not change, and modules that it must not shard."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from deepseek_zero.base.errors import UsageError
from deepseek_zero.extensions.gathered_parameters import GatheredParameters
from deepseek_zero.extensions.zero_init import Init
from tests.in_process import Rank, bare, run_ranks


class Table(nn.Module):
    """Has a parameter of integers, as layers with quantized weights have."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.tensor([1, 1_000_001]), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(1))


class Declares(nn.Module):
    """Declares fp32 parameters, so values are cast when the context ends."""

    _keep_in_fp32_modules = ("other",)

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()


@pytest.mark.parametrize("kind", [Table, Declares])
def test_integers_are_not_cast(kind: type[nn.Module]) -> None:
    with Init(dtype=torch.bfloat16):
        model = nn.Sequential(kind())
    found: dict[str, Tensor] = {}
    with GatheredParameters(model):
        for name, param in model.named_parameters():
            found[name.rpartition(".")[2]] = param.detach().clone()
    assert found["codes"].tolist() == [1, 1_000_001]
    assert found["scale"].dtype == torch.bfloat16


class Tied(nn.Module):
    """The head has a bias and the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8)
        self.head.weight = self.embedding.weight
        self.last = nn.Linear(8, 2)


def values_of(model: nn.Module) -> dict[str, Tensor]:
    with GatheredParameters(model):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("stage", [0, 3])
def test_a_tied_weight_on_the_meta_device_gets_the_values_of_a_plain_construction(
    stage: int,
) -> None:
    torch.manual_seed(0)
    plain = Tied()

    def body(rank: Rank) -> dict[str, Tensor]:
        with torch.device("meta"):
            model = Tied()
        torch.manual_seed(0)
        runtime = bare(rank, model, stage=stage)
        assert model.head.weight is model.embedding.weight
        return values_of(runtime.model)

    (found,) = run_ranks(1, body)
    for name, param in plain.named_parameters():
        assert torch.equal(found[name], param), name


def test_a_value_that_exists_stays_next_to_one_on_the_meta_device() -> None:
    def body(rank: Rank) -> dict[str, Tensor]:
        model = nn.Sequential(nn.Linear(2, 2))
        model[0].bias = nn.Parameter(torch.empty(2, device="meta"))
        with torch.no_grad():
            model[0].weight.fill_(7.0)
        runtime = bare(rank, model, stage=3)
        return values_of(runtime.model)

    for found in run_ranks(2, body):
        assert bool((found["0.weight"] == 7.0).all())
        assert bool(found["0.bias"].isfinite().all())


def test_one_object_is_not_entered_twice_at_a_time() -> None:
    session = Init()
    for _ in range(2):
        with session, pytest.raises(UsageError, match="inside its own block"), session:
            pass
    assert type(nn.Sequential(nn.Linear(2, 2))[0].weight) is nn.Parameter
