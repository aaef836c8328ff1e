"""Test `deepspeed.accelerator`."""

from __future__ import annotations

import pytest
import torch

from deepseek_zero.base.errors import NotBuiltError
from deepseek_zero.compat.deepspeed.accelerator import get_accelerator, set_accelerator


def test_the_accelerator_reports_its_device() -> None:
    found = get_accelerator()
    assert found.device(0).type == found.device_name() == torch.empty(0).device.type
    assert found.device_count() >= 1 and found.total_memory() > found.available_memory() > 0
    assert found.on_accelerator(torch.ones(1)) and found.random() is torch.random
    with found.stream(found.Stream()):
        found.synchronize()
    assert torch.equal(found.get_rng_state(), torch.get_rng_state())
    assert not hasattr(found, "capture_to_graph") and "synchronize" in dir(found)
    set_accelerator(found)
    with pytest.raises(NotBuiltError, match="CUDA_VISIBLE_DEVICES"):
        set_accelerator(object())


def test_the_accelerator_makes_tensors_and_builders() -> None:
    found = get_accelerator()
    counts = found.LongTensor([2, 3])
    assert (
        counts.tolist() == [2, 3] and counts.dtype is torch.int64 and found.on_accelerator(counts)
    )
    assert found.FloatTensor([1.5]).dtype is torch.float32 and hasattr(found.amp(), "autocast")
    assert found.create_op_builder("CPUAdamBuilder").is_compatible()
    assert isinstance(found.memory_cached(), int) and "ByteTensor" in dir(found)
