"""Part 4 of scripts/gpu: 3B parameters with the optimizer on the host; the build, the first step
and a steady step.

The host updates a unit in the next forward, before the unit's weight is used. So `step() s` is the
time of the norm and the decision, and the update is in the rest of the step.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

import deepseek_zero as dz
from benchmarks.cells import ADAMW, Shape
from benchmarks.gpu.results import Result, begin, device, tell
from benchmarks.gpu.throughput import Model, Size, batch_for
from deepseek_zero.base.device import synchronize

SIZE = Size(Shape(26, 3072), 2048, 8, (), checkpointed=True)
TINY = Size(Shape(2, 64), 64, 2, (), checkpointed=True)
GIB = 1 << 30


def main() -> None:
    is_dry = begin()
    size, here = TINY if is_dry else SIZE, device()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": size.batch,
        "steps_per_print": None,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
    }
    began = time.perf_counter()
    with torch.device("meta"):
        model = Model(size)
    params = sum(param.numel() for param in model.parameters())
    engine, *_ = dz.initialize(model=model, config=config)
    tell(Result("build", figures={"s": time.perf_counter() - began, "B parameters": params / 1e9}))
    tokens, targets = batch_for(size, here)
    seconds, ends = [], []
    for number in range(2 if is_dry else 5):
        synchronize(here)
        began = time.perf_counter()
        engine.backward(engine(tokens, targets))
        synchronize(here)
        middle = time.perf_counter()
        engine.step()
        synchronize(here)
        seconds.append(time.perf_counter() - began)
        ends.append(time.perf_counter() - middle)
        tell(Result(f"step {number}", figures={"s": seconds[-1], "step() s": ends[-1]}))
    steady = statistics.median(seconds[1:])
    figures = {
        "s": steady,
        "step() s": statistics.median(ends[1:]),
        "TFLOP/s": size.flops / steady / 1e12,
    }
    if here.type == "cuda":
        figures["peak GiB"] = torch.cuda.max_memory_allocated() / GIB
    figures["host GiB"] = engine.memory_report().measured.get("host", 0) / GIB
    tell(Result("steady step", figures=figures))


if __name__ == "__main__":
    main()
