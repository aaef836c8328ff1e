"""Test DeepSpeed's linear layer for stage 3."""

from __future__ import annotations

import torch
from torch import nn

from deepseek_zero.compat.deepspeed import (
    linear,
)


def test_the_linear_has_the_gradients_of_torchs() -> None:
    x, layer = torch.randn(3, 2, 4), linear.LinearModuleForZeroStage3(4, 5)
    layer(x).square().sum().backward()
    found, layer.weight.grad = layer.weight.grad, None
    nn.functional.linear(x, layer.weight, layer.bias).square().sum().backward()
    assert found is not None and layer.weight.grad is not None
    torch.testing.assert_close(found, layer.weight.grad)
