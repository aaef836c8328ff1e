"""Test DeepSpeed's op builders and optimizer classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deepseek_zero.base.errors import NotBuiltError
from deepseek_zero.compat.deepspeed import (
    ops,
)


def test_builders_report_compatibility_and_compile_nothing() -> None:
    builder = ops.AsyncIOBuilder
    assert (
        builder.NAME == "async_io"
        and builder().is_compatible()
        and ops.__compatible_ops__[builder.NAME]
    )
    assert (
        ops.__compatible_ops__["sparse_attn"]
        and not ops.__compatible_ops__["random_ltd"]
        and ops.ALL_OPS["cpu_adam"] is ops.CPUAdamBuilder
    )
    with pytest.raises(NotBuiltError, match=r"CPUAdamBuilder.load\(\)"):
        ops.CPUAdamBuilder().load()


def test_optimizer_classes_create_torchs_and_recognise_them_with_isinstance() -> None:
    made: Any = ops.FusedAdam([nn.Parameter(torch.zeros(1))], lr=0.5)
    assert (
        isinstance(made, torch.optim.AdamW)
        and isinstance(made, ops.FusedAdam)
        and made.defaults["lr"] == 0.5
    )
    assert not isinstance(made, ops.FusedLamb) and not isinstance(
        torch.optim.SGD([torch.zeros(1)]), ops.FusedAdam
    )


def test_a_class_that_is_derived_from_an_optimizer_of_deepspeed_is_refused() -> None:
    class Own(ops.DeepSpeedCPUAdam):
        def step(self, closure: Any = None) -> None:
            raise AssertionError("a method that would never be called")

    class Mixin:
        def step(self, closure: Any = None) -> None:
            raise AssertionError("a method that would never be called")

    class Mixed(Mixin, ops.DeepSpeedCPUAdam):
        pass

    class Renamed(ops.DeepSpeedCPUAdam):
        pass

    for kind in (Own, Mixed):
        with pytest.raises(NotBuiltError, match=f"{kind.__name__} adds methods to DeepSpeed's"):
            kind([nn.Parameter(torch.zeros(1))])
    assert isinstance(Renamed([nn.Parameter(torch.zeros(1))]), ops.DeepSpeedCPUAdam)


def test_a_lamb_that_clips_nothing_has_deepspeeds_positional_arguments() -> None:
    made = ops.FusedLamb([nn.Parameter(torch.zeros(1))], 0.5, True, (0.9, 0.99), 1e-8, False, 0, 0)
    assert made.defaults["lr"] == 0.5 and isinstance(made, ops.FusedLamb)
    with pytest.raises(ValueError, match="max_grad_norm"):
        ops.FusedLamb([nn.Parameter(torch.zeros(1))], max_grad_norm=1.0)
