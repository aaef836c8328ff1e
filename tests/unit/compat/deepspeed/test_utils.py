"""Test the helpers of `deepspeed.utils`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepseek_zero.compat.deepspeed import (
    utils,
)
from deepseek_zero.compat.deepspeed.utils import OnDevice, log_dist_once


def test_helpers_return_deepspeeds_results(caplog: pytest.LogCaptureFixture) -> None:
    with OnDevice(dtype=torch.bfloat16):
        layer = nn.Linear(2, 2)
    assert layer.weight.device.type == "meta" and layer.weight.dtype is torch.bfloat16
    assert (
        torch.get_default_dtype() is torch.float32 and nn.Linear(2, 2).weight.device.type == "cpu"
    )
    moved = utils.move_to_device(
        {"a": [torch.ones(1), 3], "b": (torch.ones(1, dtype=torch.int8),)}, "meta"
    )
    assert moved["a"][0].device.type == moved["b"][0].device.type == "meta" and moved["a"][1] == 3
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1)))
    utils.recursive_setattr(model, "0.0.bias", None)
    assert utils.recursive_getattr(model, "0.0") is model[0][0] and model[0][0].bias is None
    assert utils.required_torch_version(2.1) and not utils.required_torch_version(min_version=99.0)
    assert utils.parse_range_list("0,2-4") == [0, 2, 3, 4]
    with pytest.raises(ValueError, match="does not rise"):
        utils.parse_range_list("3,1")
    utils.set_random_seed(3)
    first = torch.rand(2)
    utils.set_random_seed(3)
    assert torch.equal(torch.rand(2), first)
    with pytest.raises(RuntimeError, match="no_device"), OnDevice(torch.bfloat16, "no_device"):
        pass
    assert torch.get_default_dtype() is torch.float32
    log_dist_once("said once")
    log_dist_once("said once")
