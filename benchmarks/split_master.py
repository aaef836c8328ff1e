"""Measure the cost of split main weights in an optimizer step on one thread: join, update by fused
AdamW, split.

    # about a minute; 64M elements, 2.5 GB
    python benchmarks/split_master.py --out split_master.json

Interleaved in one run: torch's fused AdamW on fp32 parameters with fp32 gradients (the lower
bound); the same with a cast to bf16 weights; our step with whole fp32 main weights; our step with
split ones, by elements per optimizer call. Our steps also cast the bf16 gradient. Times are CPU
times, so that other programs have less influence; figures are medians per element.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import deepseek_zero as dz
from deepseek_zero.optim.inner_step import Decision
from deepseek_zero.optim.step_settings import TILE_NUMEL
from deepseek_zero.precision.policy import cast_master


def ours(side: int, kind: str, tile_numel: int) -> Callable[[], Any]:
    """Return the update of one square weight by an engine at stage 1 with one rank."""
    model = nn.Linear(side, side, bias=False)
    engine, *_ = dz.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "steps_per_print": None,
            "bf16": {"enabled": True, "master": kind},
            "zero_optimization": {"stage": 1, "sub_group_size": tile_numel},
        },
    )
    engine.backward(engine(torch.randn(1, side)).float().square().mean())
    work, updater = engine.optimizer.tiles, engine.optimizer.updater
    return lambda: updater.step_now(work.now, Decision(1.0, 1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--side", type=int, default=8192, help="the weight has side x side elements"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--tiles", type=int, nargs="+", default=[1 << 18, 1 << 19, 1 << 20, 1 << 22]
    )
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    numel, default = asked.side**2, TILE_NUMEL.cpu
    param, weight = nn.Parameter(torch.randn(numel)), torch.empty(numel, dtype=torch.bfloat16)
    param.grad = torch.randn(numel) * 1e-3
    plain = torch.optim.AdamW([param], lr=1e-4, fused=True)

    def with_cast() -> None:
        plain.step()
        cast_master(param.data, weight)

    runs: dict[str, Callable[[], Any]] = {"AdamW": plain.step, "AdamW and cast": with_cast}
    runs[f"ours, whole masters, {default >> 10}K"] = ours(asked.side, "fp32", default)
    for tile in asked.tiles:
        runs[f"ours, split masters, {tile >> 10}K"] = ours(asked.side, "split", tile)
    times: dict[str, list[float]] = {name: [] for name in runs}
    with torch.no_grad():
        for number in range(asked.rounds + 1):
            for name, run in runs.items():
                start = time.process_time()
                run()
                if number:  # the first step creates the optimizer state
                    times[name].append((time.process_time() - start) / numel * 1e9)
    medians = {name: statistics.median(found) for name, found in times.items()}
    for name, found in medians.items():
        print(
            f"{name:<30} {found:5.2f} ns per element   {found / medians['AdamW and cast']:.2f} x "
            "AdamW and cast"
        )
    if asked.out is not None:
        facts = {"numel": numel, "torch": torch.__version__, "ns_per_element": medians}
        asked.out.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
