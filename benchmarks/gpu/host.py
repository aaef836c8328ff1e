"""Part 4 of scripts/gpu: build 3B parameters with the optimizer on the host, and time the first
step and a later one.

The host updates a unit in the next forward, before the unit's weight is used. `step() s` is
therefore the time of the norm and the decision, and the update is in the rest of the step. With
super_offload the host updates units in backward.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

import deepseek_zero as dz
from benchmarks.cells import ADAMW, Shape
from benchmarks.gpu.results import Result, begin, device, write_result
from benchmarks.gpu.throughput import Model, Size, batch_for
from deepseek_zero.base.device import synchronize

SIZE = Size(Shape(26, 3072), 2048, 8, (), checkpointed=True)
TINY = Size(Shape(2, 64), 64, 2, (), checkpointed=True)
GIB = 1 << 30


def main() -> None:
    is_dry = begin()
    size = TINY if is_dry else SIZE
    measure("", size, {}, 2 if is_dry else 5)
    ahead = {"super_offload": True, "undo_bytes": 1 << 20 if is_dry else 45_000_000_000}
    measure("super_offload: ", size, ahead, 2 if is_dry else 4)


def measure(name: str, size: Size, offload: dict[str, Any], steps: int) -> None:
    """Report the build and the steps of one engine with additional keys of offload_optimizer."""
    here = device()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": size.batch,
        "steps_per_print": None,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True, **offload},
        },
    }
    began = time.perf_counter()
    with torch.device("meta"):
        model = Model(size)
    params = sum(param.numel() for param in model.parameters())
    engine, *_ = dz.initialize(model=model, config=config)
    built = {"s": time.perf_counter() - began, "B parameters": params / 1e9}
    write_result(Result(f"{name}build", figures=built))
    tokens, targets = batch_for(size, here)
    seconds, ends = [], []
    for number in range(steps):
        synchronize(here)
        began = time.perf_counter()
        engine.backward(engine(tokens, targets))
        synchronize(here)
        middle = time.perf_counter()
        engine.step()
        synchronize(here)
        seconds.append(time.perf_counter() - began)
        ends.append(time.perf_counter() - middle)
        found = {"s": seconds[-1], "step() s": ends[-1]}
        write_result(Result(f"{name}step {number}", figures=found))
    steady = statistics.median(seconds[1:])
    figures = {
        "s": steady,
        "step() s": statistics.median(ends[1:]),
        "TFLOP/s": size.flops / steady / 1e12,
    }
    if here.type == "cuda":
        figures["peak GiB"] = torch.cuda.max_memory_allocated() / GIB
    figures["host GiB"] = engine.memory_report().measured.get("host", 0) / GIB
    write_result(Result(f"{name}steady step", figures=figures))
    engine.destroy()


if __name__ == "__main__":
    main()
