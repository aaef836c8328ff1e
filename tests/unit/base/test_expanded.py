"""Writing into tensors in which several indices refer to one element."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepseek_zero.base.expanded import copy_into

TENSORS = {
    "plain": torch.zeros(2, 3),
    "scalar": torch.zeros(()),
    "empty": torch.zeros(0, 3),
    "transposed": torch.zeros(3, 2).t(),
    "one expanded dimension": torch.zeros(3).expand(2, 3),
    "inner dimension": torch.zeros(2, 1).expand(2, 3),
    "all": torch.zeros(()).expand(2, 3),
    "of size 1": torch.zeros(3).expand(1, 3),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS.keys())
def test_an_expanded_tensor_takes_the_values_of_its_elements(tensor: Tensor) -> None:
    values = torch.full(tensor.shape, 5.0)
    copy_into(tensor, values)
    assert torch.equal(tensor, values)
