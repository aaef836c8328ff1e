"""Part 7 of scripts/gpu: compare codecs with a memory copy, and sparse with dense attention."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.results import attempt, begin, device
from deepseek_zero.attention.attend import attend
from deepseek_zero.attention.layouts import BSLongformer
from deepseek_zero.attention.plan import Pattern
from deepseek_zero.base.device import synchronize
from deepseek_zero.precision.codecs import Blocks, codec_scratch


def seconds_of(work: Callable[[], object], rounds: int) -> float:
    """Return the median time of several rounds after a warm-up."""
    taken = []
    for _ in range(rounds + 1):
        synchronize(device())
        began = time.perf_counter()
        work()
        synchronize(device())
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def codec(bits: int, block: int, numel: int, rounds: int) -> dict[str, Any]:
    """Return billions of elements per second."""
    here, made = device(), Blocks(bits, block)
    values, out = torch.randn(numel, device=here), torch.empty(numel, device=here)
    message = torch.empty(made.length(numel), dtype=made.dtype, device=here)
    room = codec_scratch(made, numel, here)
    ways: dict[str, Callable[[], object]] = {
        "copy": lambda: out.copy_(values),
        "encode": lambda: made.encode(values, message, room),
        "decode": lambda: made.decode(message, 0, numel, out, room),
    }
    return {f"{name} G/s": numel / seconds_of(way, rounds) / 1e9 for name, way in ways.items()}


def attention(length: int, rounds: int) -> dict[str, Any]:
    """Return the milliseconds of forward and backward."""
    here = device()
    dtype = torch.bfloat16 if here.type == "cuda" else torch.float32
    given = [
        torch.randn(1, 8, length, 64, device=here, dtype=dtype, requires_grad=True)
        for _ in range(3)
    ]
    pattern = Pattern.of(
        BSLongformer(block=128, num_sliding_window_blocks=3, attention="unidirectional")
    )
    ways: dict[str, Callable[[], Any]] = {
        "dense": lambda: F.scaled_dot_product_attention(*given, is_causal=True).sum().backward(),
        "pattern": lambda: attend(*given, pattern).sum().backward(),
    }
    return {f"{name} ms": 1e3 * seconds_of(way, rounds) for name, way in ways.items()}


def main() -> None:
    is_dry = begin()
    numel, rounds = (1 << 16, 1) if is_dry else (1 << 28, 9)
    for bits, block in ((8, 256), (4, 128)):
        attempt(f"codes of {bits} bits", lambda b=bits, n=block: codec(b, n, numel, rounds))
    for length in (512,) if is_dry else (8192, 32768):
        attempt(f"attention over {length} tokens", lambda n=length: attention(n, rounds))


if __name__ == "__main__":
    main()
