"""Page-locked memory of the host: unlocked when it is freed, whatever frees it, so that a next engine can lock its own.

CUDA's runtime is a stand-in (tests/cudart.py) that refuses what CUDA refuses.
"""

from __future__ import annotations

import gc
import os
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepseek_zero
from deepseek_zero import checkpointing
from deepseek_zero.base import memory
from deepseek_zero.base.errors import OutOfMemoryError
from deepseek_zero.base.memory import HUGE_PAGE, PAGE, private_pages
from tests import cudart
from tests.cudart import LockedHost


class Tower(nn.Module):
    """Blocks with inputs that are offloaded until backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpointing.checkpoint(block, x)
        return x.square().mean()


def engine_of(**zero: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": None,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "activation_checkpointing": {"device": "cpu"},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
            **zero,
        },
    }
    return deepseek_zero.initialize(model=Tower(), config=config)[0]


def train(engine: Any, rows: int = 64) -> None:
    engine.backward(engine(torch.randn(rows, 64)))
    engine.step()


def test_engines_one_after_the_other_lock_their_memory_and_leave_none_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = cudart.install(monkeypatch)
    for ends_by in ("destroy", "del", "destroy"):
        engine = engine_of()
        for rows in (64, 512, 2048):  # the arena of activations grows
            train(engine, rows)
        assert len(runtime.ranges) > 4
        if ends_by == "destroy":
            engine.destroy()
        del engine
        gc.collect()
        assert not runtime.ranges and not runtime.last_error


def test_two_engines_side_by_side_lock_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = cudart.install(monkeypatch)
    first, second = engine_of(), engine_of()
    train(first)
    first.destroy()
    del first
    gc.collect()
    assert runtime.ranges
    train(second)
    second.destroy()
    del second
    gc.collect()
    assert not runtime.ranges


@pytest.mark.parametrize("limit", [0, 100_000, 400_000])
def test_a_start_that_fails_leaves_nothing_locked_and_no_error_to_others(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = cudart.install(monkeypatch)
    runtime.limit = limit
    with pytest.raises(OutOfMemoryError, match=re.escape("CUDA error 2, out of memory")) as raised:
        engine_of()
    assert "ulimit -l" in str(raised.value)
    del raised
    gc.collect()
    assert not runtime.ranges and not runtime.last_error
    runtime.limit = 1 << 60
    engine = engine_of()
    train(engine)
    engine.destroy()


def test_a_step_that_fails_leaves_nothing_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = cudart.install(monkeypatch)
    engine = engine_of()
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        engine(torch.randn(2, 63))
    loss = engine(torch.randn(512, 64))
    monkeypatch.setattr(runtime, "limit", 0)  # the next arena cannot be locked
    with pytest.raises(OutOfMemoryError) as raised:
        engine(torch.randn(1 << 16, 64))
    assert runtime.ranges
    del loss, raised
    engine.destroy()
    del engine
    gc.collect()
    assert not runtime.ranges and not runtime.last_error


def test_an_extent_is_locked_until_the_last_view_of_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = cudart.install(monkeypatch)
    host = LockedHost()
    for nbytes in (4, PAGE, HUGE_PAGE + 4, 3 * HUGE_PAGE):
        extent = host.reserve(nbytes // 4, torch.float32, 1 << 20, "a state")
        view = extent.memory[1:]
        (size,) = runtime.ranges.values()
        assert size % PAGE == 0 and nbytes <= size < nbytes + PAGE, "whole pages, which no other range touches"
        del extent
        assert runtime.ranges
        del view
        assert not runtime.ranges


def test_the_true_cause_of_a_refusal_is_told_and_the_error_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = cudart.install(monkeypatch)
    monkeypatch.setattr(runtime, "cudaHostRegister", lambda *given: runtime._failed(cudart.ALREADY))
    with pytest.raises(OutOfMemoryError, match="CUDA error 712, part or all of the requested memory range") as raised:
        private_pages(PAGE, torch.uint8, locked=True)
    assert "ulimit" not in str(raised.value) and '"pin_memory": false' in str(raised.value)
    assert not runtime.last_error


def test_an_error_is_cleared_by_a_launch_if_the_runtime_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch shows no cudaGetLastError, but reads it after each launch of a kernel."""
    launches = []

    def launch(*size: int, device: str) -> Tensor:
        launches.append(device)
        raise RuntimeError("CUDA error: part or all of the requested memory range is already mapped")

    monkeypatch.setattr(torch, "ones", launch)
    memory._clear_cuda_error(object())
    assert launches == ["cuda"]


def test_a_forked_child_unlocks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = cudart.install(monkeypatch)
    pages = private_pages(PAGE, torch.uint8, locked=True)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    del pages
    assert len(runtime.ranges) == 1
