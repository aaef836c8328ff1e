"""What our engine costs at world 1 on a GPU, against a plain PyTorch loop with the same states, interleaved in one run.

    python benchmarks/gpu/overhead.py --out benchmarks/gpu/overhead.json      # about two minutes on one H200

Both train the same GPT in bf16 with fp32 masters and fused AdamW; plain PyTorch keeps bf16 weights, fp32 masters and
casts after each step.  Prints medians, the ratio and peak memory; `--dry-run` does one small step of each on any
device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from torch import nn

import deepseek_zero as dz

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt import GPT, GPTConfig

SIZES = {
    "tiny": {"width": 64, "num_layers": 2, "num_heads": 4, "context": 64},
    "350m": {"width": 1024, "num_layers": 24, "num_heads": 16, "context": 1024},
    "1.3b": {"width": 2048, "num_layers": 24, "num_heads": 16, "context": 1024},
}


def plain(model: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """bf16 weights, fp32 masters, fused AdamW."""
    masters = [nn.Parameter(param.detach().float().clone()) for param in model.parameters()]
    model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)
    weights = list(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = model(x, y)
        loss.backward()
        for master, weight in zip(masters, weights, strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        optimizer.step()
        torch._foreach_copy_([weight.data for weight in weights], [master.data for master in masters])
        for master in masters:
            master.grad = None
        return loss

    return step


def ours(model: nn.Module, stage: int, batch: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    engine, *_ = dz.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": batch,
            "steps_per_print": None,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
            "zero_optimization": {"stage": stage},
        },
    )

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def measure(step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], data: torch.Tensor, steps: int) -> list[float]:
    seconds = []
    for number in range(steps + 3):
        sync(data)
        began = time.perf_counter()
        step(data[:, :-1], data[:, 1:])
        sync(data)
        if number >= 3:
            seconds.append(time.perf_counter() - began)
    return seconds


def sync(data: torch.Tensor) -> None:
    if data.is_cuda:
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="350m", choices=SIZES)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    if options.dry_run:
        options.size, options.batch, options.rounds, options.steps = "tiny", 2, 1, 1
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = SIZES[options.size]
    data = torch.randint(0, 256, (options.batch, shape["context"] + 1), device=device)
    systems = {"plain": None, **{f"stage {stage}": stage for stage in (0, 3)}}
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    peaks: dict[str, int] = {}
    for _ in range(options.rounds):
        for name, stage in systems.items():
            torch.manual_seed(0)
            model = GPT(GPTConfig(**shape)).to(device)
            step = plain(model) if stage is None else ours(model, stage, options.batch)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            seconds[name] += measure(step, data, options.steps)
            peaks[name] = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
            del model, step
            if device.type == "cuda":
                torch.cuda.empty_cache()
    base = statistics.median(seconds["plain"])
    tokens = options.batch * shape["context"]
    rows = {
        name: {
            "median_seconds": statistics.median(values),
            "over_plain": statistics.median(values) / base,
            "tokens_per_second": tokens / statistics.median(values),
            "peak_bytes": peaks[name],
        }
        for name, values in seconds.items()
    }
    hardware = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    report = {
        "date": str(date.today()),
        "hardware": hardware,
        "torch": torch.__version__,
        "size": options.size,
        "rows": rows,
    }
    for name, row in rows.items():
        shown = f"{row['median_seconds'] * 1e3:9.2f} ms  {row['over_plain']:.3f} x plain"
        print(f"{name:8} {shown}  {row['peak_bytes'] / 2**30:.2f} GiB peak")
    if options.out is not None and not options.dry_run:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
