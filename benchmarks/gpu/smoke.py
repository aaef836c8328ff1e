"""Part 1 of scripts/gpu: compare each stage and dtype with plain PyTorch, and offload in two
engines.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch

import deepseek_zero as dz
from benchmarks.gpu.results import attempt, begin
from tests.gpu.plain_runs import DEVICE, Net, config, engine_run, loss_of, plain_run


def same_bits(stage: int, dtype: str) -> None:
    expected = plain_run(dtype, ranks=1, steps=1)
    for ours, plain in zip(engine_run(stage, dtype, steps=1), expected, strict=True):
        assert torch.equal(ours.to(DEVICE), plain), f"{(ours.to(DEVICE) - plain).abs().max()} apart"


def trained(**top: Any) -> list[float]:
    torch.manual_seed(0)
    engine, *_ = dz.initialize(model=Net().to(DEVICE), config=top)
    losses = []
    for _ in range(4):
        loss = loss_of(engine, 0)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    engine.destroy()
    return losses


ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}


def fp16(stage: int) -> dict[str, Any]:
    """Train in fp16, for which plain PyTorch has no bitwise reference: the loss is close and
    decreases.
    """
    exact = trained(**config(stage, "fp32", optimizer=ADAMW))
    low = trained(
        **config(stage, "fp32", optimizer=ADAMW, fp16={"enabled": True, "initial_scale_power": 8})
    )
    assert abs(low[0] - exact[0]) < 0.02 and low[-1] < low[0] - 0.1, (low, exact)
    return {"loss": low[-1]}


def two_engines() -> dict[str, Any]:
    """Lock memory with a second engine at addresses that the first one has released."""
    found = []
    for place in ("cpu", "cpu", "nvme"):
        entry = {"device": place, "pin_memory": True, "nvme_path": tempfile.mkdtemp()}
        zero = {"stage": 3, "offload_optimizer": entry, "offload_param": entry}
        zero["stage3_param_persistence_threshold"] = 0
        found.append(trained(**config(3, "bf16", optimizer=ADAMW, zero_optimization=zero)))
    assert found[0] == found[1] == found[2], found
    return {"loss": found[0][-1]}


def main() -> None:
    begin()
    for dtype in ("fp32", "bf16"):
        for stage in range(4):
            attempt(
                f"stage {stage}, {dtype}: the bits of plain PyTorch",
                lambda s=stage, d=dtype: same_bits(s, d),
            )
    for stage in range(4):
        attempt(f"stage {stage}, fp16", lambda s=stage: fp16(s))
    attempt("three engines with offload, one after the other", two_engines)


if __name__ == "__main__":
    main()
