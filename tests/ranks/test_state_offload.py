"""`engine.offload_states` frees the memory of states; `reload_states` restores their bits."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepseek_zero
from deepseek_zero.base.errors import AtRestError, StorageError, UsageError
from deepseek_zero.compat.deepspeed.config_classes import OffloadStateTypeEnum
from deepseek_zero.engine import state_offload
from deepseek_zero.tiers.parked import ParkedStorages
from deepseek_zero.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

WIDTH = 1024
KINDS = tuple(kind.value for kind in OffloadStateTypeEnum)
BF16 = {"bf16": {"enabled": True}}


def build(stage: int, zero: dict[str, Any] | None = None, **top: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(
        *[layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            **(zero or {}),
        },
        "steps_per_print": None,
        **top,
    }
    return deepseek_zero.initialize(model=net, config=config)[0]


def step(engine: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(
        2 * number + (dist.get_rank() if dist.is_initialized() else 0)
    )
    batch = torch.randn(2, WIDTH, generator=generator).to(next(engine.module.parameters()).dtype)
    engine.backward(engine(batch).float().square().mean())
    engine.step()


def states(engine: Any) -> dict[str, Tensor]:
    found = {f"weight {name}": value for name, value in engine.module_state_dict().items()}
    for name, param in engine.module.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{key} {name}"] = safe_get_full_optimizer_state(param, key)
        found[f"main {name}"] = safe_get_full_fp32_param(param)
    return found


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert not [name for name in left if not torch.equal(left[name], right[name])]


def resident() -> int:
    return psutil.Process().memory_info().rss


def bytes_expected(engine: Any, kinds: tuple[str, ...], dtype: torch.dtype) -> int:
    """Return the bytes of this rank's states in a model of 3 layers."""
    numel, ranks, stage = (
        3 * (WIDTH + 1) * WIDTH,
        dist.get_world_size(),
        engine.zero_optimization_stage(),
    )
    part = numel // ranks if stage else numel
    weights = (numel // ranks if stage == 3 else numel) * dtype.itemsize
    found = 0
    if "optim_states" in kinds:
        found += 2 * 4 * part
    if "hp_params" in kinds and dtype != torch.float32:
        found += (2 if engine.runtime.groups[0].plan.master_is_split else 4) * part
    if "lp_params" in kinds:
        found += weights
    return found


@pytest.mark.parametrize("top", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), 2, 3])
@pytest.mark.ranks(2)
def test_the_memory_of_states_is_returned_and_their_bits_are_restored(
    stage: int, top: dict[str, Any]
) -> None:
    plain = build(stage, **top)
    for number in range(4):
        step(plain, number)
    expected = states(plain)
    plain.destroy()
    del plain
    engine = build(stage, **top)
    step(engine, 0)
    step(engine, 1)
    before = states(engine)
    dtype = torch.bfloat16 if top else torch.float32
    for include in (None, ["optim_states"], [OffloadStateTypeEnum.hp_params, "lp_params"]):
        kinds = (
            KINDS
            if include is None
            else tuple(str(getattr(kind, "value", kind)) for kind in include)
        )
        # This first round fills the heap's cache, which would disturb the measurement
        engine.offload_states()
        engine.reload_states()
        dist.barrier()
        full = resident()
        engine.offload_states(include=include)
        engine.offload_states(include=include)  # has no effect
        dist.barrier()
        low, expected_bytes = resident(), bytes_expected(engine, kinds, dtype)
        assert full - low > 0.98 * expected_bytes, (include, full - low, expected_bytes)
        assert engine.offloaded_states == {OffloadStateTypeEnum(kind) for kind in kinds}
        dist.barrier()
        engine.reload_states()
        engine.reload_states()
        assert resident() - low > 0.98 * expected_bytes, (include, resident() - low, expected_bytes)
        assert engine.offloaded_states == set()
        assert_equal(states(engine), before)
    step(engine, 2)
    engine.offload_states(["optim_states", "hp_params", "contiguous_grad_buffer"])
    engine.zero_grad()
    engine.reload_states()
    step(engine, 3)
    assert_equal(states(engine), expected)


def refused(action: Callable[[], Any]) -> None:
    with pytest.raises(UsageError, match="reload_states"):
        action()


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.ranks(2)
def test_offloaded_states_cannot_be_used(stage: int, tmp_path: Path) -> None:
    engine = build(stage, **BF16)
    step(engine, 0)
    before = states(engine)
    engine.offload_states()
    param = next(engine.module.parameters())
    refused(engine.step)
    refused(lambda: engine.save_checkpoint(tmp_path))
    refused(lambda: engine.load_checkpoint(tmp_path))
    refused(lambda: safe_get_full_optimizer_state(param, "exp_avg"))
    refused(lambda: safe_get_full_fp32_param(param))
    refused(lambda: engine.optimizer.state_dict())
    refused(engine.module_state_dict)
    refused(lambda: engine(torch.ones(1, WIDTH, dtype=torch.bfloat16)))
    engine.reload_states()
    assert_equal(states(engine), before)
    step(engine, 1)


@pytest.mark.ranks(2)
def test_weights_can_be_read_while_main_weights_and_moments_are_offloaded() -> None:
    for stage, top in itertools.product((1, 3), ({}, BF16)):
        engine = build(stage, **top)
        step(engine, 0)
        before = states(engine)
        engine.offload_states(include=["optim_states", "hp_params"])
        whole = engine.module_state_dict()
        assert all(torch.equal(value, before[f"weight {name}"]) for name, value in whole.items())
        with torch.no_grad():
            engine(torch.ones(1, WIDTH, dtype=torch.bfloat16 if top else torch.float32))
        with deepseek_zero.zero.GatheredParameters(list(engine.module.parameters())):
            assert all(
                torch.equal(param, whole[name]) for name, param in engine.module.named_parameters()
            )
        engine.reload_states()
        assert_equal(states(engine), before)
        engine.destroy()


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.ranks(2)
def test_states_of_other_tiers_are_saved_and_restored(device: str, tmp_path: Path) -> None:
    there = {"device": device, "nvme_path": str(tmp_path)}
    engine = build(3, {"offload_optimizer": there, "offload_param": there}, **BF16)
    step(engine, 0)
    before = states(engine)
    engine.offload_states()
    engine.reload_states()
    assert_equal(states(engine), before)
    step(engine, 1)
    engine.offload_states(device="nvme")
    engine.reload_states()
    step(engine, 2)


@pytest.mark.parametrize(("stage", "device"), [(0, "cpu"), (3, "nvme")])
@pytest.mark.ranks(2)
def test_an_engine_with_offloaded_states_can_be_destroyed(
    stage: int, device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    engine = build(stage, **BF16)
    step(engine, 0)
    before = states(engine)
    model = engine.module
    engine.offload_states(device=device)
    assert open_files(tmp_path)
    if dist.get_rank():
        dist.barrier()  # the ranks do not wait for each other in destroy()
    engine.destroy()
    if not dist.get_rank():
        dist.barrier()
    engine.destroy()
    assert not open_files(tmp_path) and not list(tmp_path.iterdir())
    if stage == 0:
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[f"weight {name}"]), name
    else:
        with pytest.raises(AtRestError, match="its engine was destroyed"):
            model.state_dict()
    dist.barrier()
    del engine, model
    again = build(stage, **BF16)
    step(again, 0)
    assert_equal(states(again), before)


@pytest.mark.ranks(1)
def test_destroy_drops_states_that_cannot_be_restored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    warnings = list[str]()
    monkeypatch.setattr(state_offload.logger, "warning", warnings.append)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    engine = build(1)
    step(engine, 0)
    engine.offload_states()

    def read(self: ParkedStorages, values: Tensor) -> None:
        raise OSError("unreadable")

    monkeypatch.setattr(ParkedStorages, "_read", read)
    engine.destroy()
    assert "Call reload_states() before destroy()" in warnings[-1]
    assert not open_files(tmp_path) and not list(tmp_path.iterdir())
    refused(lambda: next(engine.module.parameters()).sum())


def open_files(folder: Path) -> list[str]:
    """Return this process's open files in a folder, including unlinked ones."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:  # closed since the listing
            continue
        if target.startswith(str(folder)):
            found.append(target)
    return found


@pytest.mark.ranks(1)
def test_invalid_arguments_and_a_full_disk_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(3)
    step(engine, 0)
    before = states(engine)
    with pytest.raises(UsageError, match="kinds of state"):
        engine.offload_states(include=["moments"])
    with pytest.raises(UsageError, match=r'"cpu", "nvme" or "none"'):
        engine.offload_states(device="disk")
    engine.offload_states(device="none")
    assert engine.offloaded_states == set()
    monkeypatch.setenv("TMPDIR", "/nowhere/at/all")
    monkeypatch.setattr("tempfile.tempdir", "/nowhere/at/all")
    with pytest.raises(StorageError, match="set nvme_path"):
        engine.offload_states()
    engine.reload_states()
    assert_equal(states(engine), before)
