"""Write the pipeline checkpoints in this folder with genuine DeepSpeed, and their expected content.

    DS_ACCELERATOR=cpu python tests/data/deepspeed/make_pipeline.py [folder] [case ...]

Needs DeepSpeed (0.19.6 wrote the committed files), not this library. Each case has two stages on
two gloo ranks each, and saves after two steps. `expected.pt` contains the weights by name and, for
ZeRO, full main weights and moments. DeepSpeed ties only the weight. The copies of the bias differ,
and `expected.pt` has that of the first stage.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn

HERE = Path(__file__).parent
CASES: dict[str, dict[str, Any]] = {
    "pipe_stage0": {"stage": 0, "dtype": "fp32"},
    "pipe_stage1": {"stage": 1, "dtype": "fp32"},
    "pipe_stage1_bf16": {
        "stage": 1,
        "dtype": "bf16",
        "more": {"data_types": {"grad_accum_dtype": "fp32"}},
    },
}


def config(stage: int, dtype: str, more: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a configuration for both DeepSpeed and this library."""
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True},
        },
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {"stage": stage},
        **(more or {}),
    }


def layers(api: Any) -> list[Any]:
    """Return the layers. api: the module with LayerSpec and TiedLayerSpec, DeepSpeed's or ours."""
    return [
        api.LayerSpec(nn.Linear, 5, 7),
        api.TiedLayerSpec("square", nn.Linear, 7, 7),
        torch.tanh,
        api.LayerSpec(nn.LayerNorm, 7),
        api.TiedLayerSpec("square", nn.Linear, 7, 7),
        api.LayerSpec(nn.Linear, 7, 3, bias=False),
    ]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target.float()).square().mean()


def batches(dtype: torch.dtype, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield (
            torch.randn(4, 5, generator=generator).to(dtype),
            torch.randn(4, 3, generator=generator),
        )


def _rank(rank: int, cases: list[str], folder: str) -> None:
    import deepspeed
    from deepspeed import pipe
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "4",
    }
    dist.init_process_group("gloo", rank=rank, world_size=4)
    deepspeed.init_distributed("gloo")
    for case in cases:
        torch.manual_seed(5)
        module = pipe.PipelineModule(
            layers(pipe), num_stages=2, loss_fn=loss, partition_method="uniform"
        )
        engine = deepspeed.initialize(model=module, config=config(**CASES[case]))[0]
        dtype = torch.bfloat16 if CASES[case]["dtype"] == "bf16" else torch.float32
        stream = batches(dtype, engine.grid.get_data_parallel_rank())
        for _ in range(2):
            engine.train_batch(stream)
        out = Path(folder) / case
        engine.save_checkpoint(str(out), client_state={"epoch": 7})
        expected: dict[str, Tensor] = {}
        for name, param in engine.module.named_parameters():
            if CASES[case]["stage"]:
                expected[name] = safe_get_full_fp32_param(param).clone()
                for key in ("exp_avg", "exp_avg_sq"):
                    expected[f"{name} {key}"] = safe_get_full_optimizer_state(param, key).clone()
            else:
                expected[name] = param.detach().clone()
        found: list[Any] = [None] * 4
        dist.all_gather_object(found, expected)
        if rank == 0:
            for script in ("zero_to_fp32.py", "zero_to_torch.py"):
                (out / script).unlink(missing_ok=True)
            torch.save(
                {name: value for each in reversed(found) for name, value in each.items()},
                out / "expected.pt",
            )
        dist.barrier()
    dist.barrier()


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    chosen = sys.argv[2:] or list(CASES)
    os.environ.setdefault("MASTER_PORT", "29519")
    for each in chosen:
        shutil.rmtree(target / each, ignore_errors=True)
    torch.multiprocessing.spawn(_rank, (chosen, str(target)), nprocs=4)
