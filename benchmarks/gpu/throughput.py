"""One GPU: compare our engine on one rank with plain PyTorch and FSDP2, on GPTs of 350M, 1.3B and
7B.

    # under 8 minutes on one H200; writes benchmarks/results/gpu.json
    python benchmarks/gpu/throughput.py
    # a few steps of each with a tiny model, on any device
    python benchmarks/gpu/throughput.py --dry-run

All train in bf16 with fp32 main weights and fused AdamW, interleaved round by round. Plain PyTorch
keeps bf16 weights and fp32 main weights and casts after each step. TFLOP/s are the model's:
products of weights and of causal attention, times three for forward and backward. Recomputation is
not counted. There is no padding.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file

import deepseek_zero as dz
from benchmarks.cells import ADAMW, Shape
from benchmarks.model import Block
from benchmarks.systems.common import MasterAdamW
from deepseek_zero.base.errors import brief

RESULTS = Path(__file__).resolve().parent.parent / "results" / "gpu.json"
VOCABULARY = 32_000
WARM = 3  # warm-up steps


@dataclass(frozen=True)
class Trained:
    """A model ready to train.

    Attributes:
        compute: Forward and backward of a batch; returns the loss.
        engine: The engine of this library, if any.
    """

    compute: Callable[[Tensor, Tensor], Tensor]
    update: Callable[[], None]
    engine: Any = None

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = self.compute(tokens, targets)
        self.update()
        return loss


def plainly_computed(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    def compute(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = model(tokens, targets)
        loss.backward()
        return loss

    return compute


def computed_by(engine: Any) -> Callable[[Tensor, Tensor], Tensor]:
    def compute(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = engine(tokens, targets)
        engine.backward(loss)
        return loss

    return compute


@dataclass(frozen=True)
class Size:
    """A model and its batch. checkpointed: recompute each block in backward."""

    shape: Shape
    context: int
    batch: int
    systems: tuple[str, ...]
    rounds: int = 2
    checkpointed: bool = False

    @property
    def tokens(self) -> int:
        return self.batch * self.context

    @property
    def flops(self) -> float:
        """FLOPs of one step.

        Forward: 2 per weight and token, and 2 x context x width per layer and token for causal
        attention.
        """
        shape = self.shape
        products = 12 * shape.layers * shape.width**2 + VOCABULARY * shape.width
        attention = shape.layers * self.context * shape.width
        return 3.0 * 2 * (products + attention) * self.tokens


ALL = ("plain", "fsdp2", "ours-0", "ours-3")
SIZES = {
    "tiny": Size(Shape(2, 64), 64, 2, ALL, rounds=1),
    "350m": Size(Shape(24, 1024), 1024, 8, ALL),
    "1.3b": Size(Shape(24, 2048), 2048, 8, ALL),
    # Plain PyTorch takes 20 bytes per parameter: 134 GB and the activations exceed the GPU's
    # memory.
    "7b": Size(Shape(32, 4096), 2048, 8, ("fsdp2", "ours-3"), rounds=1, checkpointed=True),
}


class Model(nn.Module):
    """The GPT of the CPU benchmarks with a common size of vocabulary and context."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.shape.width
        self.is_checkpointed = size.checkpointed
        self.tokens, self.positions = (
            nn.Embedding(VOCABULARY, width),
            nn.Embedding(size.context, width),
        )
        self.blocks = nn.ModuleList(Block(size.shape) for _ in range(size.shape.layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def plain(model: Model, device: torch.device) -> Trained:
    return Trained(plainly_computed(model), MasterAdamW(model, bf16=True).step)


def fsdp2(model: Model, device: torch.device) -> Trained:
    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Trained(plainly_computed(model), update)


def settings_of(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,  # no loader is made, so this value has no effect
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {"stage": stage},
    }


def ours(stage: int) -> Callable[[Model, torch.device], Trained]:
    def build(model: Model, device: torch.device) -> Trained:
        engine, *_ = dz.initialize(model=model, config=settings_of(stage))
        return Trained(computed_by(engine), engine.step, engine)

    return build


def theirs(stage: int) -> Callable[[Model, torch.device], Trained]:
    """Return the builder for genuine DeepSpeed, if it is installed."""

    def build(model: Model, device: torch.device) -> Trained:
        import deepspeed  # noqa: PLC0415

        engine, *_ = deepspeed.initialize(
            model=model, config={**settings_of(stage), "gradient_clipping": 0.0}
        )
        return Trained(computed_by(engine), engine.step)

    return build


SYSTEMS: dict[str, Callable[[Model, torch.device], Trained]] = {
    "plain": plain,
    "fsdp2": fsdp2,
    "ours-0": ours(0),
    "ours-3": ours(3),
    "deepspeed-1": theirs(1),
    "deepspeed-3": theirs(3),
}


@dataclass
class Row:
    """The results of one system at one size.

    Attributes:
        states: Predicted and measured bytes of its memory report.
        device_events: Kernels and copies of one step.
    """

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    states: tuple[int, int] | None = None
    failed: str = ""
    update_seconds: list[float] = field(default_factory=list)
    device_events: int = 0


def batch_for(size: Size, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tokens and targets, which are the same in every step."""
    data = torch.randint(0, VOCABULARY, (size.batch, size.context + 1), device=device)
    return data[:, :-1].contiguous(), data[:, 1:].contiguous()


def measure(row: Row, name: str, size: Size, device: torch.device, steps: int) -> None:
    """Run one round of one system and add it to its row."""
    torch.manual_seed(0)
    tokens, targets = batch_for(size, device)
    with device:
        model = Model(size)
    trained = SYSTEMS[name](model, device)
    losses = []
    for number in range(WARM + steps):
        if number == WARM and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        _wait(device)
        began = time.perf_counter()
        losses.append(trained.step(tokens, targets).detach())
        _wait(device)
        if number >= WARM:
            row.seconds.append(time.perf_counter() - began)
    row.losses = [float(loss) for loss in losses]
    row.peak_bytes = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    if trained.engine is not None:
        report = trained.engine.memory_report()
        row.states = report.predicted_total, report.measured_total
    for _ in range(2):  # separately, because a wait between backward and update may cost time
        trained.compute(tokens, targets)
        _wait(device)
        began = time.perf_counter()
        trained.update()
        _wait(device)
        row.update_seconds.append(time.perf_counter() - began)
    row.device_events = events_of(trained, tokens, targets) if device.type == "cuda" else 0


def events_of(trained: Trained, tokens: Tensor, targets: Tensor) -> int:
    """Return the number of kernels and copies that the device runs in one step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        trained.step(tokens, targets)
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in seen.events() or ())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def compare(
    size: Size,
    device: torch.device,
    steps: int,
    on_rows: Callable[[dict[str, Row]], None] = lambda rows: None,
) -> dict[str, Row]:
    """Run all systems of one size, interleaved.

    A system that does not fit is reported and not run again. on_rows: receives all rows after each
    run of a system.
    """
    rows = {name: Row() for name in size.systems}
    for _ in range(size.rounds):
        for name, row in rows.items():
            if not row.failed:
                try:
                    measure(row, name, size, device, steps)
                except torch.cuda.OutOfMemoryError:
                    row.failed = "out of memory"
                except Exception as error:  # continue with the other systems
                    traceback.print_exc()
                    row.failed = brief(error)
                on_rows(rows)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return rows


def figures(size: Size, rows: dict[str, Row]) -> dict[str, dict[str, Any]]:
    """Return the figures of each system by name.

    `over_plain` and `over_fsdp2` are ratios of medians. `loss_gap` is relative to the first system
    that ran.
    """
    ran = {name: row for name, row in rows.items() if not row.failed}
    median = {name: statistics.median(row.seconds) for name, row in ran.items()}
    truth = next(iter(ran.values())).losses if ran else []
    found: dict[str, dict[str, Any]] = {
        name: {"failed": row.failed} for name, row in rows.items() if row.failed
    }
    for name, row in ran.items():
        seconds = median[name]
        found[name] = {
            "median_seconds": seconds,
            "over_plain": seconds / median["plain"] if "plain" in ran else None,
            "over_fsdp2": seconds / median["fsdp2"] if "fsdp2" in ran else None,
            "tokens_per_second": size.tokens / seconds,
            "model_tflops": size.flops / seconds / 1e12,
            "update_seconds": statistics.median(row.update_seconds) if row.update_seconds else None,
            "device_events": row.device_events,
            "peak_bytes": row.peak_bytes,
            "states_predicted_and_measured": row.states,
            "loss_gap": max(abs(one - other) for one, other in zip(row.losses, truth, strict=True)),
        }
    return found


def show(name: str, size: Size, found: dict[str, dict[str, Any]]) -> None:
    """Print one line per system."""
    remark = ", blocks checkpointed" if size.checkpointed else ""
    print(
        f"{name}: {size.shape.layers} x {size.shape.width}, {size.batch} x {size.context} "
        f"tokens{remark}"
    )
    for system, row in found.items():
        if "failed" in row:
            print(f"  {system:8} {row['failed']}")
            continue
        over = f"{row['over_plain']:.3f} x plain" if row["over_plain"] else ""
        print(
            f"  {system:8} {row['median_seconds'] * 1e3:9.1f} ms  "
            f"{row['tokens_per_second']:10,.0f} tokens/s  {row['model_tflops']:6.1f} TFLOP/s  "
            f"{row['peak_bytes'] / 2**30:6.1f} GiB peak  loss gap {row['loss_gap']:.1e}  {over}"
        )


def join(device: torch.device) -> None:
    """Initialize a process group of one rank."""
    is_gpu = device.type == "cuda"
    dist.init_process_group("nccl" if is_gpu else "gloo", device_id=device if is_gpu else None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="350m,1.3b,7b")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a round")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--dry-run", action="store_true")
    asked = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    world = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    for name, value in world.items():
        os.environ.setdefault(name, value)
    join(device)
    report: dict[str, Any] = {
        "date": str(date.today()),
        "hardware": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "sizes": {},
    }
    for name in ["tiny"] if asked.dry_run else asked.sizes.split(","):
        size = SIZES[name]
        found = figures(size, compare(size, device, 1 if asked.dry_run else asked.steps))
        show(name, size, found)
        report["sizes"][name] = found
        if not asked.dry_run:  # after every size, so that an interrupted run keeps its results
            asked.out.parent.mkdir(parents=True, exist_ok=True)
            asked.out.write_text(json.dumps(report, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
