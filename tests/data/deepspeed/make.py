"""Write the checkpoints in this folder with genuine DeepSpeed, and their expected content.

    DS_ACCELERATOR=cpu python tests/data/deepspeed/make.py [folder] [case ...]

Needs DeepSpeed (0.19.8 wrote the committed files), not this library. Each case has two gloo ranks
and saves after two steps. `expected.pt` contains full main weights and moments as DeepSpeed's
functions return them, and the losses of the two steps after the save on rank 0's data.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn

HERE = Path(__file__).parent
CASES: dict[str, dict[str, Any]] = {
    "stage0": {"stage": 0, "dtype": "fp32"},
    "stage0_bf16": {"stage": 0, "dtype": "bf16"},
    "stage0_fp16": {"stage": 0, "dtype": "fp16"},
    "stage1": {"stage": 1, "dtype": "fp32"},
    "stage1_bf16": {
        "stage": 1,
        "dtype": "bf16",
        "more": {"data_types": {"grad_accum_dtype": "fp32"}},
    },
    "stage2": {"stage": 2, "dtype": "fp32"},
    "stage2_bf16": {"stage": 2, "dtype": "bf16"},
    "stage3": {"stage": 3, "dtype": "fp32"},
    "stage3_bf16": {"stage": 3, "dtype": "bf16"},
    "stage3_fp16": {"stage": 3, "dtype": "fp16"},
}


class Scale(nn.Module):
    """A weight, and a running statistic that differs from rank to rank."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(7))
        self.register_buffer("running", torch.zeros(7))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.running.mul_(0.5).add_(x.detach().float().mean(0))
        return x * self.weight


class Small(nn.Module):
    """A model with odd sizes, a tied and a frozen parameter, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(5, 7)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(2)])
        self.norm = Scale()
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.write = nn.Linear(7, 3, bias=False)
        self.again = nn.Linear(7, 3)
        self.again.weight = self.write.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.read(x.to(self.read.weight.dtype))
        for block in self.blocks:
            x = x + block(x)
        x = self.frozen(self.norm(x))
        return self.write(x) + self.again(x)


def small(seed: int = 5) -> Small:
    torch.manual_seed(seed)
    return Small()


def config(stage: int, dtype: str, more: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a configuration for both DeepSpeed and this library."""
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 5, "warmup_min_lr": 2e-3, "warmup_max_lr": 1e-2},
        },
        "bf16": {"enabled": dtype == "bf16"},
        "fp16": {"enabled": dtype == "fp16", "initial_scale_power": 4},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **(more or {}),
    }


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def train(engine: Any, first: int, last: int, rank: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = engine(batch(step, rank)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def _rank(rank: int, cases: list[str], folder: str) -> None:
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
    }
    # torch's CPU kernels support fp16 although DeepSpeed's check denies it.
    get_accelerator().is_fp16_supported = lambda: True
    dist.init_process_group("gloo", rank=rank, world_size=2)
    deepspeed.init_distributed("gloo")
    for case in cases:
        engine = deepspeed.initialize(model=small(), config=config(**CASES[case]))[0]
        train(engine, 0, 2, rank)
        out = Path(folder) / case
        engine.save_checkpoint(str(out), client_state={"epoch": 7, "note": ["plain", 1.5]})
        expected: dict[str, Tensor] = {}
        for name, param in engine.module.named_parameters():
            if param.requires_grad and CASES[case]["stage"]:
                expected[name] = safe_get_full_fp32_param(param).clone()
                for key in ("exp_avg", "exp_avg_sq"):
                    expected[f"{name} {key}"] = safe_get_full_optimizer_state(param, key).clone()
            elif param.requires_grad:
                expected[name] = param.detach().clone()
        losses = torch.tensor(train(engine, 2, 4, rank))
        if rank == 0:
            for script in ("zero_to_fp32.py", "zero_to_torch.py"):
                (out / script).unlink(missing_ok=True)
            torch.save(expected | {"losses": losses}, out / "expected.pt")
    dist.barrier()


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    chosen = sys.argv[2:] or list(CASES)
    os.environ.setdefault("MASTER_PORT", "29517")
    for each in chosen:
        shutil.rmtree(target / each, ignore_errors=True)
    torch.multiprocessing.spawn(_rank, (chosen, str(target)), nprocs=2)
