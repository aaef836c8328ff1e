"""Part 5 of scripts/gpu: train 8B parameters on a 24 GiB GPU.

States fill the GPU first, then the host, then the disk.
"""

from __future__ import annotations

import tempfile

import psutil
import torch

from benchmarks.gpu.results import Result, begin, device, write_result
from benchmarks.gpu.tiers import GIB, TINY, Memories, checkpointed_gpt, train

CAP = 24 * GIB


def main() -> None:
    is_dry, here = begin(), device()
    kind = TINY["tiny"] if is_dry else checkpointed_gpt(40, 4096, batch=4)
    free = int(0.75 * psutil.virtual_memory().available)
    memories = Memories(int(0.5 * CAP), free, 60 * GIB, tempfile.mkdtemp())
    if is_dry:
        memories = Memories(90_000_000, 90_000_000, 1_000_000_000, tempfile.mkdtemp())
    if here.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(
            CAP / torch.cuda.get_device_properties(here).total_memory, here
        )
    write_result(
        Result("plan", figures={"B parameters": kind.params / 1e9, "host GiB": memories.host / GIB})
    )

    def on_step(number: int, seconds: float) -> None:
        write_result(Result(f"step {number}", figures={"s": seconds}))

    found = train("8B", kind, memories, 1, on_step)
    figures = {
        "s": found.seconds[-1] if found.seconds else None,
        "TFLOP/s": found.model_tflops,
        "peak GiB": found.peak_device_bytes / GIB,
        "host GiB": found.host_bytes / GIB,
        "disk GiB": found.disk_bytes / GIB,
    }
    write_result(
        Result(
            "states in several memories", "FAILED" if found.failed else "ok", figures, found.failed
        )
    )


if __name__ == "__main__":
    main()
