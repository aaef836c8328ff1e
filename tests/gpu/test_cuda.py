"""Stages 0-3 on a GPU against plain PyTorch; skipped without a GPU.

Two ranks share the GPU and communicate through the host.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
import torch

import deepseek_zero as dz
from deepseek_zero.utils import safe_get_full_fp32_param
from tests.gpu import plain_runs
from tests.gpu.plain_runs import DEVICE, Net, config, engine_run, loss_of, plain_run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


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
print("weights", [
    value.cpu().view(torch.int32).sum().item() for value in engine.module_state_dict().values()
])
engine.destroy()
try:
    dz.initialize(model=torch.nn.Linear(2, 2), config={"deterministic": True})[0].destroy()
    del os.environ["CUBLAS_WORKSPACE_CONFIG"]
    dz.initialize(model=torch.nn.Linear(2, 2), config={"deterministic": True})
except dz.base.errors.UsageError as error:
    print("refused", str(error).splitlines()[0])
"""


def test_a_deterministic_run_repeats_bit_for_bit_or_is_refused() -> None:
    environment = {
        name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"
    }
    runs = [
        subprocess.run(
            [sys.executable, "-c", TWICE], env=environment, capture_output=True, text=True
        )
        for _ in range(2)
    ]
    assert not any(run.returncode for run in runs), [run.stderr for run in runs]
    said = [
        [line for line in run.stdout.splitlines() if line.startswith(("weights", "refused"))]
        for run in runs
    ]
    assert said[0] == said[1]
    assert [line.split()[0] for line in said[0]] == ["weights", "refused"]


def test_memory_is_freed_with_the_engine() -> None:
    loss_of(
        Net(512).to(DEVICE).bfloat16(), 0
    ).backward()  # cuBLAS keeps workspaces, which count as allocated
    gc.collect()
    before = torch.cuda.memory_allocated()
    # Indexed without naming the optimizer, because it also holds the memory.
    engine = dz.initialize(
        model=Net(512).to(DEVICE),
        config=config(3, "bf16", optimizer={"type": "AdamW", "params": {"lr": 1e-3}}),
    )[0]
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
        config=config(
            3, "fp32", fp16={"enabled": True}, optimizer={"type": "AdamW", "params": {"lr": 1e-2}}
        ),
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
def test_two_ranks_on_one_gpu_agree_with_plain_pytorch(
    stage: int, dtype: str, tmp_path: Path
) -> None:
    environment = {
        **os.environ,
        "GPU_STAGE": str(stage),
        "GPU_DTYPE": dtype,
        "GPU_OUT": str(tmp_path),
    }
    command = [
        sys.executable,
        "-m",
        "deepseek_zero.cli",
        "run",
        "--nproc",
        "2",
        str(Path(plain_runs.__file__)),
    ]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = torch.load(tmp_path / "weights.pt", weights_only=True)
    for ours, plain in zip(found, plain_run(dtype, ranks=2, steps=3), strict=True):
        assert torch.equal(ours.to(DEVICE), plain)


HOST: dict[str, object] = {"device": "cpu", "pin_memory": True}


def states_after(place: dict[str, object], dtype: str, folder: Path) -> list[torch.Tensor]:
    """Return weights and main weights of a run with clipping and with states at the given
    places.
    """
    disk = {"device": "nvme", "nvme_path": str(folder)}
    asked = {key: disk if value == "disk" else HOST for key, value in place.items()}
    top = config(
        3, dtype, gradient_clipping=0.3, optimizer={"type": "AdamW", "params": {"lr": 1e-2}}
    )
    top["zero_optimization"] = {**cast("dict[str, object]", top["zero_optimization"]), **asked}
    torch.manual_seed(0)
    engine, *_ = dz.initialize(model=Net().to(DEVICE), config=top)
    for step in range(3):
        engine.backward(loss_of(engine, step))
        engine.step()
    outside = sum(
        memory.reserved_bytes for memory in engine.parts.runtime.comm_ctx.tiers.memories.values()
    )
    assert bool(outside) == bool(place)
    masters = [safe_get_full_fp32_param(param) for param in engine.module.parameters()]
    return [value.cpu() for value in [*engine.state_dict().values(), *masters] if value is not None]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_states_on_the_host_and_on_a_disk_have_the_same_bits(dtype: str, tmp_path: Path) -> None:
    """States on the host and on disk have the same bits.

    A run without offload may have a different norm and clipping factor, so it is compared with a
    tolerance.
    """
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


@pytest.mark.parametrize("name", ["AdamW", "Adagrad", "Lamb", "Muon"])
def test_an_optimizer_continues_from_a_checkpoint(name: str, tmp_path: Path) -> None:
    """Counters are loaded on the CPU, and fused kernels read them on the GPU."""
    top = config(3, "bf16", optimizer={"type": name, "params": {"lr": 1e-2}})
    found = []
    for run in range(2):
        torch.manual_seed(0)
        engine, *_ = dz.initialize(model=Net().to(DEVICE), config=top)
        if run == 0:
            engine.backward(loss_of(engine, 0))
            engine.step()
            engine.save_checkpoint(str(tmp_path), tag="a")
        else:
            engine.load_checkpoint(str(tmp_path), tag="a")
        engine.backward(loss_of(engine, 1))
        engine.step()
        found.append([value.cpu() for value in engine.state_dict().values()])
        engine.destroy()
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_skipped_step_undoes_updates_in_backward(dtype: str) -> None:
    top = config(3, "fp32", optimizer={"type": "AdamW", "params": {"lr": 1e-2}})
    top |= {dtype: {"enabled": True, **({"master": "fp32"} if dtype == "bf16" else {})}}
    offload = {**HOST, "super_offload": True}
    top["zero_optimization"] = {
        **cast("dict[str, object]", top["zero_optimization"]),
        "offload_optimizer": offload,
    }
    torch.manual_seed(0)
    engine, *_ = dz.initialize(model=Net().to(DEVICE), config=top)
    for step in range(12):  # the loss scale becomes small enough
        engine.backward(loss_of(engine, step))
        engine.step()
    before = [value.cpu() for value in engine.state_dict().values()]
    handle = engine.module.embed.weight.register_hook(lambda grad: grad * torch.inf)
    engine.backward(loss_of(engine, 12))
    engine.step()
    handle.remove()
    assert all(map(torch.equal, before, [each.cpu() for each in engine.state_dict().values()]))
    engine.destroy()
