"""Values that `zero.Init` must not change."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from deepseek_zero.extensions.gathered_parameters import GatheredParameters
from deepseek_zero.extensions.zero_init import Init


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
