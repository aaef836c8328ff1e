"""Part 3 of scripts/gpu: time a step of a 1.3B model on one rank.

Compares plain PyTorch, FSDP2, this library and DeepSpeed.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import torch.distributed as dist

from benchmarks.gpu.results import Result, begin, device, write_result
from benchmarks.gpu.throughput import SIZES, Row, compare, figures, join

GIB = 1 << 30


def main() -> None:
    is_dry, here = begin(), device()
    size = SIZES["tiny" if is_dry else "1.3b"]
    if find_spec("deepspeed") is not None and not is_dry:
        size = replace(size, systems=(*size.systems, "deepspeed-1", "deepspeed-3"))
    join(here)
    told: dict[str, int] = {}

    def on_rows(rows: dict[str, Row]) -> None:
        """Report the system that has just run, after its first round and again after all rounds."""
        ran = {name: row for name, row in rows.items() if row.failed or row.seconds}
        for name, found in figures(size, ran).items():
            count = len(rows[name].seconds)
            if told.get(name) == count:
                continue
            told[name] = count
            if "failed" in found:
                write_result(Result(name, "FAILED", why=found["failed"]))
                continue
            shown = {
                "ms": found["median_seconds"] * 1e3,
                "update ms": found["update_seconds"] * 1e3,
                "TFLOP/s": found["model_tflops"],
                "device events": found["device_events"],
                "peak GiB": found["peak_bytes"] / GIB,
                "loss gap": found["loss_gap"],
                "over plain": found["over_plain"],
                "over fsdp2": found["over_fsdp2"],
            }
            write_result(Result(f"{name}, {count} steps", figures=shown))

    compare(size, here, 1 if is_dry else 6, on_rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
