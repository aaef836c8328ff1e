"""Compiled update kernels give the bits of PyTorch's operations and of a plain PyTorch loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepseek_zero as dz

pytest.importorskip("llvmlite")

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1},
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
}


def model(width: int = 13) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(width, 37), nn.Tanh(), nn.Linear(37, 7), nn.Tanh(), nn.Linear(7, 1)
    )


def batches(width: int = 13) -> list[Tensor]:
    """Return the batches of 20 steps of the odd model, and of 4 steps of a wide one."""
    steps = 20 if width == 13 else 4
    return list(torch.randn(steps, 5, width, generator=torch.Generator().manual_seed(4)))


def config(kernels: str, optimizer: str, zero: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 5,
        "steps_per_print": None,
        "optimizer": {"type": optimizer, "params": OPTIMIZERS[optimizer], "kernels": kernels},
        "zero_optimization": {"stage3_param_persistence_threshold": 0, **zero},
    }


def trained(
    settings: dict[str, Any], width: int = 13, expects: bool | None = None
) -> dict[str, Tensor]:
    """Train a few steps; return full weights and states.

    expects: Whether all shards are updated by kernels.
    """
    engine, optimizer, *_ = dz.initialize(model=model(width), config=settings)
    if expects is not None:
        assert {shard.has_kernel for shard in optimizer.shards()} <= {expects}
        line = "by compiled kernels" if expects else "by PyTorch"
        assert line in engine.explain() or not optimizer.shards()
    for batch in batches(width):
        engine.backward(engine(batch).float().square().mean())
        engine.step()
    if expects:
        buffers = {name for name, _ in optimizer.scratch.kept}
        assert buffers <= {"nothing"}, "a kernel reads and writes states where they rest"
    found = {name: value.clone() for name, value in engine.module_state_dict().items()}
    for name, param in engine.module.named_parameters():
        for state in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
            value = dz.utils.safe_get_full_optimizer_state(param, state)
            found |= {f"{name}.{state}": value} if value is not None else {}
        found[f"{name}.main"] = dz.utils.safe_get_full_fp32_param(param)
    engine.destroy()
    return found


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kernels", ["compiled", "torch"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_odd_lengths_have_the_bits_of_a_plain_loop_at_every_stage(
    optimizer: str, kernels: str
) -> None:
    plain = model()
    stepper = getattr(torch.optim, optimizer)(
        plain.parameters(), **OPTIMIZERS[optimizer], fused=True
    )
    for batch in batches():
        plain(batch).square().mean().backward()
        stepper.step()
        stepper.zero_grad()
    for stage in range(4):
        found = trained(config(kernels, optimizer, {"stage": stage}), expects=kernels == "compiled")
        for name, value in plain.state_dict().items():
            assert torch.equal(found[name], value), (stage, name)


PLACES = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "host": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    },
    "disk": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme"},
        "offload_param": {"device": "nvme"},
    },
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "dtype",
    [
        "fp32",
        "bf16",
        "fp16",
        "bf16 with fp32 main weights",
        "accumulated bf16",
        "bf16 moments",
        "rounded bf16",
    ],
)
def test_kernels_change_no_bit_in_any_stage_or_memory(dtype: str, tmp_path: Path) -> None:
    width = 131
    wanted: dict[str, Tensor] = {}
    for place, zero in PLACES.items():
        for key in ("offload_optimizer", "offload_param") if place == "disk" else ():
            zero = zero | {key: {"device": "nvme", "nvme_path": str(tmp_path)}}
        settings = config("torch", "AdamW", zero) | {"gradient_clipping": 0.1}
        if "bf16" in dtype:
            master = "fp32" if "main" in dtype else "none" if "rounded" in dtype else "split"
            settings["bf16"] = {"enabled": True, "master": master}
        if dtype == "fp16":
            settings["fp16"] = {"enabled": True, "initial_scale_power": 8}
        if "accumulated" in dtype:
            settings["gradient_accumulation_steps"] = 2
        if "moments" in dtype or "rounded" in dtype:
            settings["optimizer"]["moments"] = "bf16"
        by_torch = trained(settings, width, expects=False)
        wanted = wanted or by_torch
        settings["optimizer"]["kernels"] = "compiled"
        assert same(by_torch, wanted), place
        assert same(trained(settings, width, expects=True), wanted), place


@pytest.mark.ranks(1)
@pytest.mark.parametrize("options", [{}, {"fused": False}, {"foreach": True}, {"amsgrad": True}])
def test_a_plan_without_ranks_reports_options_without_a_kernel(options: dict[str, Any]) -> None:
    settings = config("compiled", "AdamW", {"stage": 1}) | {"gradient_clipping": 0.1}
    settings["bf16"] = {"enabled": True}
    settings["optimizer"] = settings["optimizer"] | {"params": {"lr": 1e-2, **options}}
    planned = dz.plan(model(131), settings, ranks=1).bytes_by_state()
    engine, *_ = dz.initialize(model=model(131), config=settings)
    for batch in batches(131):
        engine.backward(engine(batch.bfloat16()).float().square().mean())
        engine.step()
    assert ("by compiled kernels" in engine.explain()) == (not options)
    report = engine.memory_report()
    assert report.predicted == planned
    assert {state: report.measured[state] for state in planned} == planned
    engine.destroy()
