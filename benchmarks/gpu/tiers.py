"""One GPU: the largest models and their speed with states on the device, on the host and on a disk.

    # 7B to 32B; writes benchmarks/results/gpu_tiers.json
    python benchmarks/gpu/tiers.py --folder /mnt/nvme
    # the largest model under a cap, ours and plain PyTorch's
    python benchmarks/gpu/tiers.py --cap-gib 32
    # both with tiny models, on any device
    python benchmarks/gpu/tiers.py --dry-run

Every model is built on the meta device and is never whole in one memory. `"device": "auto"` fills
the GPU, then the host, then the disk. All runs clip by the exact norm of the whole gradient, which
is known before the first weight changes (docs/design/update-timing.md). TFLOP/s are the model's, as
in throughput.py: recomputation is not counted, and there is no padding.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file

import deepseek_zero as dz
from benchmarks.cells import ADAMW, Shape
from benchmarks.gpu.throughput import Model, Size, batch_for, plain
from deepseek_zero.base.device import synchronize
from deepseek_zero.base.errors import OutOfMemoryError
from deepseek_zero.planner.unit_tiers import describe_tiers

RESULTS = Path(__file__).resolve().parent.parent / "results" / "gpu_tiers.json"
GIB = 1 << 30
WARM = 2  # warm-up steps
OUT_OF_MEMORY = (OutOfMemoryError, torch.cuda.OutOfMemoryError)


@dataclass(frozen=True)
class Memories:
    """Limits of one run in bytes. device: for states and buffers; activations need the rest."""

    device: int
    host: int
    disk: int
    folder: str


@dataclass(frozen=True)
class Kind:
    """A model and the format of its moments."""

    size: Size
    moments: str = "fp32"

    @property
    def params(self) -> int:
        with torch.device("meta"):
            return sum(param.numel() for param in Model(self.size).parameters())


def checkpointed_gpt(
    layers: int, width: int, context: int = 2048, batch: int = 8, moments: str = "fp32"
) -> Kind:
    return Kind(Size(Shape(layers, width), context, batch, (), checkpointed=True), moments)


KINDS = {
    "7b": checkpointed_gpt(32, 4096),
    "14b": checkpointed_gpt(44, 5120),
    "18b": checkpointed_gpt(46, 5760),
    "32b-bf16-moments": checkpointed_gpt(52, 7168, moments="bf16"),
}
TINY = {
    "tiny": checkpointed_gpt(3, 128, 64, 2),
    "tiny-bf16-moments": checkpointed_gpt(3, 128, 64, 2, moments="bf16"),
}
# Under a cap: one width with an increasing number of layers.
LADDERS = {
    "plain": [checkpointed_gpt(layers, 4096, batch=4) for layers in (3, 4, 5, 6, 7, 8, 10)],
    "ours": [checkpointed_gpt(layers, 4096, batch=4) for layers in (40, 60, 70, 75, 80, 90)],
}
TINY_LADDERS = {
    "plain": [checkpointed_gpt(layers, 64, 64, 2) for layers in (1, 2)],
    "ours": [checkpointed_gpt(3, 64, 64, 2)],
}


@dataclass
class Found:
    """The results of one model. placement: numbers of units by place of their weights and
    states.
    """

    name: str
    params: int
    tokens: int
    clipping: str = "exact global norm, before any weight changes"
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    model_tflops: float = 0.0
    peak_device_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    placement: str = ""
    failed: str = ""


def engine_for(kind: Kind, memories: Memories) -> Any:
    with torch.device("meta"):
        model = Model(kind.size)
    place = {"device": "auto", "nvme_path": memories.folder}
    config = {
        "train_micro_batch_size_per_gpu": kind.size.batch,
        "steps_per_print": None,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": ADAMW, "moments": kind.moments},
        "memory_budget": {"device": memories.device, "host": memories.host, "disk": memories.disk},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_optimizer": place,
            "offload_param": place,
        },
    }
    return dz.initialize(model=model, config=config)[0]


def train(
    name: str,
    kind: Kind,
    memories: Memories,
    steps: int,
    on_step: Callable[[int, float], None] = lambda *_: None,
) -> Found:
    """Train a few steps, or report that the model does not fit.

    on_step: receives the number and the seconds of each step.
    """
    found = Found(name, kind.params, kind.size.tokens)
    try:
        engine = engine_for(kind, memories)
        _train(engine, kind, found, steps, on_step)
    except OUT_OF_MEMORY as error:
        found.failed = str(error).splitlines()[0]
    return found


def _train(
    engine: Any, kind: Kind, found: Found, steps: int, on_step: Callable[[int, float], None]
) -> None:
    device = engine.device
    tokens, targets = batch_for(kind.size, device)
    for number in range(WARM + steps):
        synchronize(device)
        began = time.perf_counter()
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        synchronize(device)
        seconds = time.perf_counter() - began
        on_step(number, seconds)
        if number >= WARM:
            found.seconds.append(seconds)
        found.losses.append(float(loss.detach()))
    found.model_tflops = kind.size.flops / statistics.median(found.seconds) / 1e12
    found.peak_device_bytes = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    measured = engine.memory_report().measured
    found.host_bytes, found.disk_bytes = measured.get("host", 0), measured.get("nvme", 0)
    found.placement = describe_tiers(engine.runtime.settings.unit_tiers)
    engine.destroy()


def plainly(kind: Kind, device: torch.device) -> bool:
    """Return whether plain PyTorch can train two steps on the device without offload.

    It uses bf16 weights, fp32 main weights and fused AdamW.
    """
    try:
        with device:
            model = Model(kind.size)
        tokens, targets = batch_for(kind.size, device)
        trained = plain(model, device)
        for _ in range(2):
            trained.step(tokens, targets)
        synchronize(device)
    except OUT_OF_MEMORY:
        return False
    return True


def largest(kinds: Sequence[Kind], fits: Callable[[Kind], bool]) -> Kind | None:
    """Return the last model before the first one that does not fit."""
    found = None
    for kind in kinds:
        if not fits(kind):
            break
        found = kind
        free()
    free()
    return found


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def under_a_cap(
    ladders: dict[str, list[Kind]], cap: int, memories: Memories, device: torch.device
) -> dict[str, Any]:
    """Return the largest models that train if the GPU memory is limited to `cap` bytes."""
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(
            cap / torch.cuda.get_device_properties(device).total_memory, device
        )
    theirs = largest(ladders["plain"], lambda kind: plainly(kind, device))
    ours = largest(ladders["ours"], lambda kind: not train("under a cap", kind, memories, 1).failed)
    found = {
        "cap_bytes": cap,
        "plain": theirs.params if theirs else 0,
        "ours": ours.params if ours else 0,
    }
    times = found["ours"] / found["plain"] if found["plain"] else float("nan")
    print(
        f"under {cap / GIB:.0f} GiB: plain {found['plain']:,} parameters, ours {found['ours']:,}: "
        f"{times:.1f} times"
    )
    return found


def show(found: Found) -> None:
    if found.failed:
        print(f"{found.name}: {found.failed}")
        return
    print(
        f"{found.name}: {found.params / 1e9:.2f}B parameters, {found.tokens:,} tokens a step, "
        f"clipping by the {found.clipping}\n  {statistics.median(found.seconds):.2f} s a step, "
        f"{found.model_tflops:.1f} TFLOP/s, {found.peak_device_bytes / GIB:.1f} GiB of the device, "
        f"{found.host_bytes / GIB:.1f} of the host, {found.disk_bytes / GIB:.1f} of the disk, "
        f"losses {found.losses[0]:.3f} to {found.losses[-1]:.3f}\n  {found.placement}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--steps", type=int, default=3, help="timed steps; two more warm up")
    parser.add_argument(
        "--device-gib", type=float, default=100.0, help="of the GPU, for states and buffers"
    )
    parser.add_argument("--host-gib", type=float, default=108.0)
    parser.add_argument("--disk-gib", type=float, default=58.0)
    parser.add_argument(
        "--folder", default=tempfile.gettempdir(), help="a directory on a fast disk"
    )
    parser.add_argument(
        "--cap-gib", type=float, default=0.0, help="instead: the largest model under this cap"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--dry-run", action="store_true")
    asked = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    hardware = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    report: dict[str, Any] = {
        "date": str(date.today()),
        "hardware": hardware,
        "torch": torch.__version__,
    }
    memories = Memories(
        *(int(each * GIB) for each in (asked.device_gib, asked.host_gib, asked.disk_gib)),
        asked.folder,
    )
    if asked.dry_run:
        memories = Memories(90_000_000, 90_000_000, 1_000_000_000, asked.folder)
    if asked.cap_gib or asked.dry_run:
        tight = (
            memories if asked.dry_run else replace(memories, device=int(0.6 * asked.cap_gib * GIB))
        )
        ladders = TINY_LADDERS if asked.dry_run else LADDERS
        report["cap"] = under_a_cap(ladders, int((asked.cap_gib or 1) * GIB), tight, device)
    if not asked.cap_gib:
        report["models"] = []
        for name in TINY if asked.dry_run else asked.kinds.split(","):
            found = train(name, (TINY | KINDS)[name], memories, asked.steps)
            show(found)
            report["models"].append(asdict(found))
            free()
    if not asked.dry_run:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
