"""Compare block-sparse with dense attention on one thread: seconds, speedup over density, and peak
bytes.

    python -m benchmarks.sparse_attention                                         # some minutes
    python -m benchmarks.sparse_attention --lengths 2048 --rounds 1 --longest 0 --out /tmp/sparse.md

One head of 64, forward and backward: torch's attention, causal if the layout is, and the library's
kernel, in turns. CPU time, medians of the rounds; a speedup is the median ratio of two adjacent
runs. The density is the number of pairs that the kernel's tiles compute, including edges, relative
to dense attention; its inverse bounds the speedup. Then a layer (width 256, 4 heads, an MLP) with
dense or sparse attention; then the longest sequence, with a window of 512 tokens. Peaks count the
storages that operators allocate, without the inputs. Writes a table and a picture.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.plot import Panel, draw_panels, span_of
from benchmarks.probes import machine
from benchmarks.tiers import described
from deepseek_zero.attention.attend import attend, tiles_for
from deepseek_zero.attention.layouts import BSLongformer, Listed, LocalSlidingWindow
from deepseek_zero.attention.plan import AttentionShape, Pattern, best_plan
from deepseek_zero.base.memory import keep_freed_memory
from deepseek_zero.report.memory_trace import MemoryTrace

RESULTS = Path(__file__).parent / "results" / "sparse_attention.md"
WIDTH, WINDOW = 64, 512
# With the goal for each dtype, as a part of the bound.
AXIS = "gain over dense; 1.0: 1 / density"
FORMATS = ((torch.float32, "fp32", 0.65), (torch.bfloat16, "bf16", 0.5))
Way = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass
class Case:
    """A pattern with its goals.

    Attributes:
        goal: Part of its bound that it should reach.
        faster: Speedup over dense attention that it should reach.
    """

    name: str
    pattern: Pattern
    goal: float
    is_causal: bool = True
    dtype: torch.dtype = torch.float32
    faster: float | None = None

    @property
    def goals(self) -> str:
        return f"{self.goal}" + (f", {self.faster:g} times" if self.faster is not None else "")

    def dense(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)

    def sparse(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query, key, value, self.pattern)

    def density(self, length: int) -> float:
        """Return the pairs that tiles compute relative to dense attention."""
        query = torch.empty(1, 1, length, WIDTH, dtype=self.dtype)
        sizes = tiles_for(self.pattern, query, ())
        groups = best_plan(self.pattern, AttentionShape.of(query, query), sizes)
        tiles = [tile for group in groups for tile in group.tiles]
        pairs = sum(tile.count * tile.queries * tile.keys for tile in tiles)
        return pairs / length**2 * (2 if self.is_causal else 1)


def scattered(length: int, block: int, others: int) -> Pattern:
    """Return a pattern in which each block attends to itself and `others` random blocks."""
    blocks = length // block
    drawn = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(0)).fill_diagonal_(
        2.0
    )
    seen = torch.zeros(1, blocks, blocks, dtype=torch.bool)
    seen[0].scatter_(1, drawn.topk(others + 1).indices, True)
    return Pattern(Listed(block=block, seen=seen))


def cases(length: int) -> list[Case]:
    """Return the cases. At 16384 tokens their densities are those of the goals: .077 and .062."""
    sliding = Pattern.of(LocalSlidingWindow(block=64, num_sliding_window_blocks=9))
    spread = BSLongformer(block=128, num_sliding_window_blocks=5, attention="unidirectional")
    both, few = Pattern.of(spread), scattered(length, 256, 3)
    eight, twelve = (8.0, 12.0) if length == 16384 else (None, None)
    return [
        Case("window of 64-blocks, causal", sliding, 0.7),
        Case("window and global of 128-blocks, causal", both, 0.65, faster=eight),
        Case("scattered 256-blocks", few, 0.65, is_causal=False, faster=twelve),
        Case("window and global of 128-blocks, causal, bf16", both, 0.5, dtype=torch.bfloat16),
        Case("scattered 256-blocks, bf16", few, 0.5, is_causal=False, dtype=torch.bfloat16),
    ]


def masked_window(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return windowed attention as models implement it: dense, with a mask of all pairs."""
    place = torch.arange(query.shape[2])
    away = place[:, None] - place[None]
    return scaled_dot_product_attention(query, key, value, (away >= 0) & (away < WINDOW))


def tensors(length: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    found = [torch.randn(1, 1, length, WIDTH, dtype=dtype) for _ in range(4)]
    return [*(each.requires_grad_() for each in found[:3]), found[3]]


def run(way: Way, given: Sequence[Tensor]) -> float:
    """Return the CPU seconds of a forward and a backward."""
    began = time.process_time()
    torch.autograd.grad(way(*given[:3]), given[:3], given[3])
    return time.process_time() - began


def in_turns(ways: Sequence[Callable[[], float]], rounds: int) -> tuple[list[float], list[float]]:
    """Return the median seconds of each function and its speedup over the first."""
    seconds = [[way() for way in ways] for _ in range(rounds + 1)][1:]
    medians = [statistics.median(each) for each in zip(*seconds, strict=True)]
    return medians, [
        statistics.median(row[0] / row[place] for row in seconds) for place in range(len(ways))
    ]


class Layer(nn.Module):
    """A layer of a GPT: attention with 4 heads and an MLP."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.LayerNorm(256), nn.LayerNorm(256)
        self.inward, self.outward = nn.Linear(256, 768), nn.Linear(256, 256)
        self.mlp = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inward(self.first(x)).unflatten(-1, (3, 4, WIDTH)).permute(2, 0, 3, 1, 4)
        x = x + self.outward(self.way(*parts).transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.second(x))
        return out

    def step(self, x: Tensor) -> float:
        began = time.process_time()
        self(x).square().mean().backward()
        return time.process_time() - began


def peak(way: Way, given: Sequence[Tensor]) -> float:
    """Return the peak MiB without the inputs."""
    trace = MemoryTrace(dict, lambda: "step")
    with trace.recording():
        run(way, given)
    return trace.peak_bytes / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--longest", type=int, default=65536, help="0: leave it out")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    lines = [
        "# Sparse and dense attention",
        "",
        f"`python -m benchmarks.sparse_attention --rounds {asked.rounds}`, {date.today()}, torch "
        f"{torch.__version__}, {described(machine())}, one thread, load {os.getloadavg()[0]:.0f} "
        "at the start.",
        f"One head of {WIDTH}, forward and backward; the script's docstring defines density and "
        "peak.",
        "",
        "| tokens | pattern | density | dense s | sparse s | times faster | of 1 / density | goal "
        "| peak MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    panels = []
    for length in asked.lengths:
        bars: dict[torch.dtype, list[tuple[str, float]]] = {}
        for case in cases(length):
            given = tensors(length, case.dtype)
            ways = [
                lambda c=case, g=given: run(c.dense, g),
                lambda c=case, g=given: run(c.sparse, g),
            ]
            (slow, fast), (_, gain) = in_turns(ways, asked.rounds)
            density = case.density(length)
            lines.append(
                f"| {length} | {case.name} | {density:.3f} | {slow:.2f} | {fast:.3f} | {gain:.1f} "
                f"| {gain * density:.2f} | {case.goals} | {peak(case.sparse, given):.0f} |"
            )
            print(lines[-1], flush=True)
            bars.setdefault(case.dtype, []).append((f"ours: {case.name}", gain * density))
        panels += [
            Panel(f"{length} tokens, {name}", bars[dtype], goal, AXIS)
            for dtype, name, goal in FORMATS
        ]
    lines += [
        "",
        "| tokens | a layer's step | dense s | sparse s | times faster |",
        "|---|---|---|---|---|",
    ]
    for length in asked.lengths:
        case = Case(
            "",
            Pattern.of(BSLongformer(128, num_sliding_window_blocks=9, attention="unidirectional")),
            0,
        )
        x, layers = torch.randn(1, length, 256), [Layer(case.dense), Layer(case.sparse)]
        (slow, fast), (_, gain) = in_turns(
            [lambda m=each, x=x: m.step(x) for each in layers], asked.rounds
        )
        lines.append(
            f"| {length} | window of 4 x 128 and global | {slow:.2f} | {fast:.2f} | {gain:.2f} |"
        )
        print(lines[-1], flush=True)
    window = Pattern.of(None, is_causal=True, window=WINDOW)
    lines += [
        "",
        f"| tokens | a window of {WINDOW} | seconds | peak MiB beyond the inputs |",
        "|---|---|---|---|",
    ]
    ours = ("by tiles", Case("", window, 0).sparse)
    for length, ways_of in (
        (
            min(asked.lengths),
            [
                ("dense, causal", Case("", window, 0).dense),
                ("dense, with a mask", masked_window),
                ours,
            ],
        ),
        (asked.longest, [ours, ("dense, causal, once", Case("", window, 0).dense)]),
    ):
        if length:
            given = tensors(length, torch.float32)
            for name, way in ways_of:
                times = 1 if name.endswith("once") else asked.rounds
                seconds = statistics.median(run(way, given) for _ in range(times))
                held = "" if name.endswith("once") else f"{peak(way, given):.0f}"
                lines.append(f"| {length} | {name} | {seconds:.2f} | {held} |")
                print(lines[-1], flush=True)
    asked.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    title = f"Sparse attention gains {span_of(panels, 'ours')} of what its density allows"
    draw_panels(title, panels, asked.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
