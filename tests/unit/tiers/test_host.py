"""Page-locked host memory is unlocked when it is freed, so the next engine can lock memory.

The CUDA runtime is a fake (tests/cudart.py) that refuses the calls that CUDA refuses.
"""

from __future__ import annotations

import gc
import mmap
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
from deepseek_zero.base.memory import HUGE_PAGE, PAGE, Slab, parts_in_lock_ranges, private_pages
from deepseek_zero.engine.parts import plan_of
from deepseek_zero.tiers.tier import Tier
from tests import cudart
from tests.cudart import LockedHost


class Tower(nn.Module):
    """Blocks with saved inputs that are offloaded until backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpointing.checkpoint(block, x)
        return x.square().mean()


def engine_of(*, activations: str = "cpu", **zero: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": None,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "activation_checkpointing": {"device": activations},
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


def test_engines_one_after_the_other_lock_their_memory_and_leave_none_locked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = cudart.install(monkeypatch)
    for ends_by in ("destroy", "del", "destroy"):
        engine = engine_of()
        for rows in (64, 512, 2048):  # the activation arena grows
            train(engine, rows)
        assert len(runtime.ranges) == 4, (
            "one slab of states, and an arena of activations for each number of rows"
        )
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


@pytest.mark.parametrize("limit", [0, 100_000, 400_000])  # the states need 401,408
def test_a_failed_start_leaves_no_lock_and_no_error_for_others(
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


def test_only_what_copies_touch_is_locked_and_only_while_the_engine_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps neither reserve nor lock memory.

    Locked ranges have at most `LOCK_BYTES` and are all unlocked at the end.
    """
    runtime = cudart.install(monkeypatch)
    monkeypatch.setattr(memory, "LOCK_BYTES", 16 * PAGE)
    mapped = list[int]()
    map_private = memory._map_private
    monkeypatch.setattr(
        memory, "_map_private", lambda nbytes: mapped.append(nbytes) or map_private(nbytes)
    )
    for stage, zero in (
        (1, {}),
        (2, {}),
        (3, {}),
        (3, {"offload_param": {"device": "cpu", "pin_memory": True}}),
    ):
        mapped.clear()
        engine = engine_of(
            stage=stage, **{"offload_param": {"device": "none"}, **zero}, activations="none"
        )
        plan = plan_of(engine.parts.runtime, engine.parts.optimizer)
        pieces = plan.host_pieces()
        copied = [piece.nbytes for piece in pieces if piece.is_copied]
        assert sum(runtime.ranges.values()) == sum(copied) < plan.bytes_by_tier()[Tier.HOST]
        assert not copied or max(runtime.ranges.values()) <= memory.LOCK_BYTES
        assert sum(piece.nbytes for piece in pieces) == plan.bytes_by_tier()[Tier.HOST]
        locked, slabs = dict(runtime.ranges), list(mapped)
        for _ in range(3):
            train(engine)
        assert runtime.ranges == locked and mapped == slabs, "a step reserves nothing"
        engine.destroy()
        del engine
        gc.collect()
        assert not runtime.ranges and not runtime.last_error


def test_a_slab_returns_zeroed_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LOCK_BYTES", 4 * PAGE)
    runtime = cudart.install(monkeypatch)
    slab = Slab([PAGE, 2 * PAGE, 9 * PAGE, PAGE])
    first, second = slab.take(PAGE, torch.float32), slab.take(PAGE, torch.bfloat16)
    assert first is not None and second is not None and slab.take(PAGE, torch.uint8) is None
    first.fill_(1.0)
    touched, locked = list[int](), list[int]()
    slab.touch(4, touched.append)
    slab.lock(locked.append)
    assert sum(touched) == sum(locked) == slab.nbytes and bool((first == 1.0).all())
    assert locked == [3 * PAGE, 4 * PAGE, 4 * PAGE, 2 * PAGE], "a range ends where a piece does"
    address, view = first.data_ptr(), first[3:]
    del first
    assert slab.take(PAGE, torch.uint8) is None, "a view is left"
    del view
    again = slab.take(PAGE, torch.int16)
    assert again is not None and again.data_ptr() == address and not again.any()
    large = slab.take(9 * PAGE, torch.float32)
    assert large is not None
    for part in parts_in_lock_ranges(large[5 : 8 * PAGE // 4]):
        low, high = large[5:][part].data_ptr(), large[5:][part].data_ptr() + large[5:][part].nbytes
        assert any(
            start <= low and high <= start + nbytes for start, nbytes in runtime.ranges.items()
        )
    assert len(list(parts_in_lock_ranges(large))) == 3
    del slab, again, second, large
    assert not runtime.ranges


def test_huge_pages_are_disabled_if_their_allocation_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[int, int]] = []

    def madvise(address: int, nbytes: int, advice: int) -> int:
        calls.append((nbytes, advice))
        return 0

    monkeypatch.setattr(memory, "_madvise", lambda: madvise)
    monkeypatch.setattr(memory, "_TRIAL_BYTES", 64 << 20)
    for is_slow in (True, False):
        calls.clear()
        monkeypatch.setattr(memory, "SLOW_TOUCH", 1e18 if is_slow else 0.0)
        Slab([160 << 20]).touch(1, lambda nbytes: None)
        advice = [each for each in calls if each[1] == mmap.MADV_NOHUGEPAGE]
        assert advice == ([(96 << 20, mmap.MADV_NOHUGEPAGE)] if is_slow else [])
        assert sum(nbytes for nbytes, what in calls if what == memory._POPULATE_WRITE) == 160 << 20


def test_a_storage_is_locked_until_the_last_view_of_it_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = cudart.install(monkeypatch)
    host = LockedHost()
    for nbytes in (4, PAGE, HUGE_PAGE + 4, 3 * HUGE_PAGE):
        storage = host.reserve(nbytes // 4, torch.float32, 1 << 20, "a state")
        view = storage.memory[1:]
        (size,) = runtime.ranges.values()
        assert size % PAGE == 0 and nbytes <= size < nbytes + PAGE, (
            "whole pages, which no other range touches"
        )
        del storage
        assert runtime.ranges
        del view
        assert not runtime.ranges


def test_the_cause_of_a_refusal_is_reported_and_the_error_is_cleared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = cudart.install(monkeypatch)
    monkeypatch.setattr(runtime, "cudaHostRegister", lambda *given: runtime._failed(cudart.ALREADY))
    with pytest.raises(
        OutOfMemoryError, match="CUDA error 712, part or all of the requested memory range"
    ) as raised:
        private_pages(PAGE, torch.uint8, locked=True)
    assert "ulimit" not in str(raised.value) and '"pin_memory": false' in str(raised.value)
    assert not runtime.last_error


def test_an_error_is_cleared_by_a_launch_without_the_runtime(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch does not expose cudaGetLastError but calls it after each kernel launch."""
    launches = []

    def launch(*size: int, device: str) -> Tensor:
        launches.append(device)
        raise RuntimeError(
            "CUDA error: part or all of the requested memory range is already mapped"
        )

    monkeypatch.setattr(torch, "ones", launch)
    memory._clear_cuda_error(object())
    assert launches == ["cuda"]


def test_a_forked_child_unlocks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = cudart.install(monkeypatch)
    pages = private_pages(PAGE, torch.uint8, locked=True)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    del pages
    assert len(runtime.ranges) == 1
