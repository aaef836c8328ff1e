"""Time sums over rows and sums of squares per element, with compiled loops and with torch.

    python -m benchmarks.sum_kernels --threads 1

Each figure is the fastest of many repetitions, in nanoseconds per element of the result, or of the
input of a sum of squares.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from deepseek_zero.kernels.choice import VARIABLE
from deepseek_zero.kernels.sums import add_rows, sum_of_squares

REPETITIONS = 40
SCRATCH = 1 << 18
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MAX_NUMBERS = 1 << 27  # of all rows together


@contextmanager
def kernels(which: str) -> Iterator[None]:
    """Compute with "compiled" or "torch" loops in this block."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = which
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def fastest(run: Callable[[], object], repetitions: int = REPETITIONS) -> float:
    """Return the seconds of the fastest of several calls after a warm-up call."""
    run()
    found = []
    for _ in range(repetitions):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return min(found)


def time_sums(numel: int, threads: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each operation and its nanoseconds per element by "compiled" and by "torch"."""
    scratch = torch.empty(SCRATCH)
    torch.set_num_threads(threads)
    for name, dtype in DTYPES.items():
        for count in (2, 4, 8, 16):
            if count * numel > MAX_NUMBERS:
                continue
            rows = [torch.randn(numel).to(dtype) for _ in range(count)]
            out = torch.empty(numel, dtype=dtype)
            found = {}
            for which in ("compiled", "torch"):
                with kernels(which):
                    seconds = fastest(
                        lambda: add_rows(rows, out, scratch, divisor=float(count), threads=threads)  # noqa: B023
                    )
                found[which] = seconds / numel * 1e9
            yield f"sum of {count} rows, {name}", found
        values = torch.randn(numel).to(dtype)
        found = {}
        for which in ("compiled", "torch"):
            with kernels(which):
                seconds = fastest(lambda: sum_of_squares(values, 0, threads))  # noqa: B023
            found[which] = seconds / numel * 1e9
        yield f"sum of squares, {name}", found


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Time sums over rows and sums of squares, per element."
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--numel", type=int, nargs="*", default=[1 << 18, 1 << 22])
    args = parser.parse_args()
    for numel in args.numel:
        for what, found in time_sums(numel, args.threads):
            print(
                f"2^{numel.bit_length() - 1:<3} {what:<22} compiled {found['compiled']:6.3f}  "
                f"torch {found['torch']:6.3f} ns"
            )


if __name__ == "__main__":
    main()
