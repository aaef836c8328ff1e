"""Compare the loss in tiles of tokens with the loss of all logits on one thread: seconds and peak
bytes.

    python -m benchmarks.tiled_loss                                # some minutes
    python -m benchmarks.tiled_loss --words 4096 --tokens 512 --rounds 1 --out /tmp/tiled.md

A head of width D, T tokens, V words, fp32, forward and backward: torch's cross entropy of whole
logits; the library's loop of tiles; DeepSpeed's TiledFusedLogitsLoss over this library, which
recomputes tiles in backward if it does not get the weights; torch's linear_cross_entropy, if this
version of torch has it. Everything is interleaved. Figures are medians of CPU time; ratios compare
adjacent rounds. Peaks count the storages that operators allocate, without the inputs. Writes a
table and a picture.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.plot import Panel, draw_panels, span_of
from benchmarks.probes import machine
from benchmarks.tiers import described
from deepseek_zero.activations.tiled_loss import LossSettings, tiled_cross_entropy
from deepseek_zero.base.memory import keep_freed_memory
from deepseek_zero.compat.deepspeed.sequence_tiles import TiledFusedLogitsLoss
from deepseek_zero.report.memory_trace import MemoryTrace

RESULTS = Path(__file__).parent / "results" / "tiled_loss.md"
ROWS = 512
BOUND = 1.25  # limit of the peak, relative to one tile of logits and the two gradients
OURS, DENSE = "ours", "all logits"
Way = Callable[[nn.Linear, Tensor, Tensor], Tensor]


def dense(head: nn.Linear, x: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(head(x).float(), targets)


def ours(head: nn.Linear, x: Tensor, targets: Tensor) -> Tensor:
    return tiled_cross_entropy(x, head.weight, None, targets, LossSettings(ROWS)) / len(targets)


def of_deepspeeds_name(named: bool) -> Way:
    def whole(head: nn.Linear, x: Tensor, targets: Tensor) -> Tensor:
        def one(module: Any, part: Tensor, own: Tensor) -> Tensor:
            return F.cross_entropy(module(part).float(), own)

        weights = [head.weight] if named else None
        return TiledFusedLogitsLoss.apply(
            one, head, x[None], targets[None], None, len(x) // ROWS, weights, "mean"
        )

    return whole


def torchs(head: nn.Linear, x: Tensor, targets: Tensor) -> Tensor:
    found: Tensor = F.linear_cross_entropy(
        x, head.weight, targets, options=nn.LinearCrossEntropyOptions()
    )  # type: ignore[attr-defined]
    return found


def ways() -> dict[str, Way]:
    found: dict[str, Way] = {
        DENSE: dense,
        f"{OURS}, {ROWS} rows": ours,
        "TiledFusedLogitsLoss": of_deepspeeds_name(True),
        "TiledFusedLogitsLoss, weights not named": of_deepspeeds_name(False),
    }
    if hasattr(F, "linear_cross_entropy") and hasattr(nn, "LinearCrossEntropyOptions"):
        found["torch's linear_cross_entropy"] = torchs
    return found


class Case:
    """A head and its tokens."""

    def __init__(self, tokens: int, words: int, width: int) -> None:
        torch.manual_seed(0)
        self.head, self.x = (
            nn.Linear(width, words, bias=False),
            torch.randn(tokens, width, requires_grad=True),
        )
        self.targets = torch.randint(words, (tokens,))
        self.bound = BOUND * 4 * (ROWS * words + tokens * width + words * width)

    def run(self, way: Way) -> float:
        """Return the CPU seconds of a forward and a backward."""
        self.head.weight.grad = self.x.grad = None
        began = time.process_time()
        way(self.head, self.x, self.targets).backward()
        return time.process_time() - began

    def peak(self, way: Way) -> int:
        trace = MemoryTrace(dict, lambda: "step")
        with trace.recording():
            self.run(way)
        return trace.peak_bytes

    def difference(self, way: Way) -> float:
        """Return the error of the gradients against all logits, relative to the largest element
        of each.
        """
        found = []
        for each in (way, dense):
            self.run(each)
            found.append(
                [grad.clone() for grad in (self.x.grad, self.head.weight.grad) if grad is not None]
            )
        return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*found, strict=True))


def measure(case: Case, rounds: int) -> list[tuple[str, float, float, int, float]]:
    """Return (name, median seconds, ratio to all logits, peak, gradient error) of each variant."""
    known = ways()
    seconds: dict[str, list[float]] = {name: [] for name in known}
    for number in range(rounds + 1):
        for name, way in known.items():
            spent = case.run(way)
            if number:
                seconds[name].append(spent)
    rows = []
    for name, way in known.items():
        ratio = statistics.median(
            own / other for own, other in zip(seconds[name], seconds[DENSE], strict=True)
        )
        rows.append(
            (name, statistics.median(seconds[name]), ratio, case.peak(way), case.difference(way))
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--words", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    lines = [
        "# The loss in tiles of tokens",
        "",
        f"`python -m benchmarks.tiled_loss --rounds {asked.rounds}`, {date.today()}, "
        f"{described(machine())}, one thread.",
        f"{asked.tokens} tokens, width {asked.width}, fp32, forward and backward.",
        f"The bound of a peak is {BOUND} x (one tile of logits + both gradients).",
        "",
        "| vocabulary | form | seconds | over all logits | peak MiB | over its bound | gradients "
        "differ by |",
        "|---|---|---|---|---|---|---|",
    ]
    panels = []
    for words in asked.words:
        case = Case(asked.tokens, words, asked.width)
        rows = measure(case, asked.rounds)
        whole = next(peak for name, _, _, peak, _ in rows if name == DENSE)
        for name, seconds, ratio, peak, far in rows:
            lines.append(
                f"| {words} | {name} | {seconds:.2f} | {ratio:.2f} | {peak / 2**20:.0f} | "
                f"{peak / case.bound:.2f} | {far:.0e} |"
            )
            print(lines[-1], flush=True)
        panels.append(
            Panel(
                f"{words} words: time",
                [(name, ratio) for name, _, ratio, _, _ in rows],
                axis="time; 1.0: all logits at once",
            )
        )
        peaks = [(name, peak / whole) for name, _, _, peak, _ in rows]
        axis = "peak bytes; 1.0: all logits at once"
        panels.append(Panel(f"{words} words: memory", peaks, case.bound / whole, axis))
    asked.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    time, memory = (span_of(panels[first::2], "ours") for first in (0, 1))
    title = f"A tiled loss takes {memory} of the memory, {time} of the time"
    draw_panels(title, panels, asked.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
