"""Compare `engine.step()`, norm and update, with PyTorch's fused AdamW on the same number of fp32
parameters.

    .venv/bin/python -m benchmarks.update_kernels     # 200M parameters: 6 GB, two minutes
    .venv/bin/python -m benchmarks.update_kernels --millions 50 --threads 1

One process and one rank. The two sides take turns. Each side allocates its memory once, so a step
is in its steady state. `--kernels torch` measures the update with PyTorch operations.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import nn

import deepseek_zero as dz

RESULTS = Path(__file__).parent / "results" / "update_kernels.md"
WIDTH = 4096
HYPERS = {"lr": 1e-4, "weight_decay": 0.01}


def build_engine(layers: int, kernels: str, master: str) -> Any:
    """Return an engine over a chain of square layers."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": None,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": HYPERS, "kernels": kernels},
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": master != "fp32", "master": "split" if master == "fp32" else master},
    }
    return dz.initialize(model=model, config=config)[0]


def time_engine(engine: Any) -> float:
    """Return the seconds of one step without forward and backward."""
    engine.backward(engine(torch.randn(1, WIDTH)).float().square().mean())
    began = time.perf_counter()
    engine.step()
    return time.perf_counter() - began


def fused_step(layers: int) -> Callable[[], float]:
    """Return a function that times PyTorch's fused AdamW on the same parameters in fp32."""
    params = [nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(layers)]
    for param in params:
        param.grad = torch.randn(WIDTH, WIDTH) * 1e-3
    optimizer = torch.optim.AdamW(params, **HYPERS, fused=True)

    def step() -> float:
        began = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - began

    return step


def row(label: str, layers: int, kernels: str, master: str, threads: int, rounds: int) -> str:
    torch.set_num_threads(threads)
    os.sched_setaffinity(0, CORES[:threads])
    engine, fused = build_engine(layers, kernels, master), fused_step(layers)
    numel = layers * WIDTH * WIDTH
    ours, theirs = list[float](), list[float]()
    for number in range(rounds + 2):
        pair = time_engine(engine), fused()
        if number >= 2:
            ours.append(pair[0])
            theirs.append(pair[1])
    engine.destroy()
    ratio = statistics.median(mine / its for mine, its in zip(ours, theirs, strict=True))
    columns = [f"{statistics.median(side) / numel * 1e9:.2f}" for side in (ours, theirs)]
    best = [f"{min(side) / numel * 1e9:.2f}" for side in (ours, theirs)]
    return (
        f"| {label} | {threads} | {columns[0]} | {columns[1]} | **{ratio:.2f}** | {best[0]} | "
        f"{best[1]} |"
    )


CORES = sorted(os.sched_getaffinity(0))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--millions", type=int, default=200, help="parameters")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--kernels", default="compiled,torch")
    parser.add_argument(
        "--masters", default="split,fp32", help="split: bf16 with remainders; fp32: fp32 training"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    layers = max(1, round(asked.millions * 1e6 / WIDTH**2))
    rows = [
        "# A step of the engine and PyTorch's fused AdamW",
        "",
        f"{date.today()}, {len(CORES)} cores, {layers * WIDTH**2 / 1e6:.0f}M parameters, medians "
        f"of {asked.rounds}",
        "pairs of steps. `python -m benchmarks.update_kernels`. ns: nanoseconds per parameter. A "
        "step is the norm,",
        "clipping and the update; PyTorch's is only the fused fp32 AdamW. Ratio: ours over "
        "theirs, for each pair.",
        "",
        "| main weights, kernels | threads | ns ours | ns fused | ratio | least ours | least fused "
        "|",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for master in asked.masters.split(","):
        for kernels in asked.kernels.split(","):
            for threads in map(int, asked.threads.split(",")):
                found = row(f"{master}, {kernels}", layers, kernels, master, threads, asked.rounds)
                print(found, flush=True)
                rows.append(found)
                asked.out.write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
