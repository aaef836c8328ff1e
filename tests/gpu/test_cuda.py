"""Stages 0-3 on a GPU against plain PyTorch; skipped where there is none.  Two ranks share the GPU through the host."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import nn

import deepseek_zero as dz
from deepseek_zero.precision.policy import cast_master
from deepseek_zero.utils import safe_get_full_fp32_param

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = torch.device("cuda")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 96, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 61)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def config(stage: int, dtype: str, **more: object) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": None,
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
        },
        **more,
    }


def batch(step: int, rank: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, 61, (4, 17), generator=generator).to(DEVICE)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, step: int, rank: int = 0) -> torch.Tensor:
    x, y = batch(step, rank)
    return nn.functional.cross_entropy(model(x).float().flatten(0, 1), y.flatten())


def plain_run(dtype: str, ranks: int, steps: int) -> list[torch.Tensor]:
    """Every rank's micro-batches in one process; sums in rank order in fp32, rounded once."""
    torch.manual_seed(0)
    model = Net().to(DEVICE)
    masters = [nn.Parameter(param.detach().clone()) for param in model.parameters()]
    low = torch.bfloat16 if dtype == "bf16" else torch.float32

    def refresh() -> None:
        for param, master in zip(model.parameters(), masters, strict=True):
            weight = torch.empty_like(master, dtype=low)
            cast_master(master.detach().reshape(-1), weight.view(-1))
            param.data = weight

    optimizer = torch.optim.AdamW(masters, lr=1e-2, fused=False, foreach=False)
    refresh()
    for step in range(steps):
        grads = [torch.autograd.grad(loss_of(model, step, rank), list(model.parameters())) for rank in range(ranks)]
        for number, master in enumerate(masters):
            total = grads[0][number].float().clone()
            for rank in range(1, ranks):
                total += grads[rank][number]
            master.grad = (total / ranks).to(low).float()
        optimizer.step()
        refresh()
    return [param.detach().clone() for param in model.parameters()]


def engine_run(stage: int, dtype: str, steps: int, rank: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Net().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=False, foreach=False)
    engine, *_ = dz.initialize(model=model, optimizer=optimizer, config=config(stage, dtype))
    for step in range(steps):
        engine.backward(loss_of(engine, step, rank))
        engine.step()
    return list(model.state_dict().values())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_world_of_one_is_plain_pytorch_bit_for_bit(stage: int, dtype: str) -> None:
    expected = plain_run(dtype, ranks=1, steps=3)
    for ours, plain in zip(engine_run(stage, dtype, steps=3), expected, strict=True):
        assert torch.equal(ours.to(DEVICE), plain)


TWICE = """
import os, torch, deepseek_zero as dz
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(7, 64), torch.nn.Linear(64, 64))
optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}
engine, *_ = dz.initialize(model=model, config={"deterministic": True, "optimizer": optimizer})
assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"]
tokens = torch.randint(0, 7, (64, 256), generator=torch.Generator().manual_seed(1)).cuda()
for _ in range(3):
    engine.backward(engine(tokens).square().mean())
    engine.step()
print("weights", [value.cpu().view(torch.int32).sum().item() for value in engine.module_state_dict().values()])
engine.destroy()
try:
    dz.initialize(model=torch.nn.Linear(2, 2), config={"deterministic": True})[0].destroy()
    del os.environ["CUBLAS_WORKSPACE_CONFIG"]
    dz.initialize(model=torch.nn.Linear(2, 2), config={"deterministic": True})
except dz.base.errors.UsageError as error:
    print("refused", str(error).splitlines()[0])
"""


def test_a_deterministic_run_gives_the_same_bits_again_and_is_refused_where_it_cannot() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    runs = [
        subprocess.run([sys.executable, "-c", TWICE], env=environment, capture_output=True, text=True) for _ in range(2)
    ]
    assert not any(run.returncode for run in runs), [run.stderr for run in runs]
    said = [[line for line in run.stdout.splitlines() if line.startswith(("weights", "refused"))] for run in runs]
    assert said[0] == said[1]
    assert [line.split()[0] for line in said[0]] == ["weights", "refused"]


def test_memory_returns_when_the_engine_goes() -> None:
    loss_of(Net(512).to(DEVICE).bfloat16(), 0).backward()  # cuBLAS keeps workspaces, which count as allocated
    gc.collect()
    before = torch.cuda.memory_allocated()
    engine, *_ = dz.initialize(
        model=Net(512).to(DEVICE),
        config=config(3, "bf16", optimizer={"type": "AdamW", "params": {"lr": 1e-3}}),
    )
    engine.backward(loss_of(engine, 0))
    engine.step()
    assert torch.cuda.memory_allocated() > before + 10_000_000
    del engine
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + 1_000_000


def test_fp16_with_loss_scaling_trains() -> None:
    torch.manual_seed(0)
    engine, *_ = dz.initialize(
        model=Net().to(DEVICE),
        config=config(3, "fp32", fp16={"enabled": True}, optimizer={"type": "AdamW", "params": {"lr": 1e-2}}),
    )
    losses = []
    for _ in range(12):
        loss = loss_of(engine, 0)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 1.0
    assert engine.skipped_steps < 6


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_on_one_gpu_agree_with_plain_pytorch(stage: int, dtype: str, tmp_path: Path) -> None:
    environment = {**os.environ, "GPU_STAGE": str(stage), "GPU_DTYPE": dtype, "GPU_OUT": str(tmp_path)}
    command = [sys.executable, "-m", "deepseek_zero.cli", "run", "--nproc", "2", str(Path(__file__))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = torch.load(tmp_path / "weights.pt", weights_only=True)
    for ours, plain in zip(found, plain_run(dtype, ranks=2, steps=3), strict=True):
        assert torch.equal(ours.to(DEVICE), plain)


if __name__ == "__main__":
    number = int(os.environ["RANK"])
    weights = engine_run(int(os.environ["GPU_STAGE"]), os.environ["GPU_DTYPE"], steps=3, rank=number)
    if number == 0:
        torch.save(weights, Path(os.environ["GPU_OUT"]) / "weights.pt")


HOST: dict[str, object] = {"device": "cpu", "pin_memory": True}


def states_after(place: dict[str, object], dtype: str, folder: Path) -> list[torch.Tensor]:
    """Weights and masters of a run that clips, whose states rest on the host, on a disk or on the GPU."""
    disk = {"device": "nvme", "nvme_path": str(folder)}
    asked = {key: disk if value == "disk" else HOST for key, value in place.items()}
    top = config(3, dtype, gradient_clipping=0.3, optimizer={"type": "AdamW", "params": {"lr": 1e-2}})
    top["zero_optimization"] = {**cast("dict[str, object]", top["zero_optimization"]), **asked}
    torch.manual_seed(0)
    engine, *_ = dz.initialize(model=Net().to(DEVICE), config=top)
    for step in range(3):
        engine.backward(loss_of(engine, step))
        engine.step()
    outside = sum(memory.reserved_bytes for memory in engine.parts.runtime.comm_ctx.tiers.memories.values())
    assert bool(outside) == bool(place)
    masters = [safe_get_full_fp32_param(param) for param in engine.module.parameters()]
    return [value.cpu() for value in [*engine.state_dict().values(), *masters] if value is not None]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_states_on_the_host_and_on_a_disk_have_the_same_bits(dtype: str, tmp_path: Path) -> None:
    """Both are updated by the host; a run on the GPU alone is updated by the GPU, which rounds its own way."""
    host = states_after({"offload_optimizer": "host"}, dtype, tmp_path)
    for place in (
        {"offload_optimizer": "disk"},
        {"offload_optimizer": "host", "offload_param": "host"},
        {"offload_optimizer": "disk", "offload_param": "disk"},
    ):
        for ours, theirs in zip(states_after(dict(place), dtype, tmp_path), host, strict=True):
            assert torch.equal(ours, theirs), place
    for ours, theirs in zip(states_after({}, dtype, tmp_path), host, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), atol=2e-2, rtol=2e-2)
