"""Compare layers that are tiled by rows with whole ones on one thread: seconds of a step, and
gathered weights.

    python -m benchmarks.tile_above                                # a minute or two
    python -m benchmarks.tile_above --words 2048 --tokens 128 --rounds 1 --out /tmp/tile_above.md

An embedding and a head of V words and width D that share one weight, and two layers of 4 D between
them, in fp32 at stage 3 with one unit at a time (`stage3_max_live_parameters` 0): whole, and with
`tile_above` set to 1/4, 1/16 and 1/64 of the weight. Steps are interleaved. Figures are medians of
CPU time; ratios compare adjacent rounds. Writes a table and a picture.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

import deepseek_zero as dz
from benchmarks.plot import Panel, draw_panels
from benchmarks.probes import machine
from benchmarks.tiers import described
from deepseek_zero.sharding.unit import Unit, UnitState

RESULTS = Path(__file__).parent / "results" / "tile_above.md"
PARTS = (1, 4, 16, 64)


class Model(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        logits: Tensor = self.head(x + self.down(functional.gelu(self.up(x))))
        return functional.cross_entropy(logits.flatten(0, -2), tokens.roll(-1).flatten())


class Case:
    """An engine. parts: `tile_above` is the weight's size divided by this; 1: whole layers."""

    def __init__(self, words: int, width: int, parts: int) -> None:
        zero: dict[str, Any] = {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
        }
        if parts > 1:
            zero["tile_above"] = 4 * words * width // parts
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "steps_per_print": None,
            "transport": "gloo",
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": zero,
        }
        self.engine = dz.initialize(model=Model(words, width), config=config)[0]
        self.seconds: list[float] = []
        self.most = 0

    def step(self, tokens: Tensor) -> float:
        """Train one step and return its loss."""
        began = time.process_time()
        loss = self.engine(tokens)
        self.engine.backward(loss)
        self.engine.step()
        self.seconds.append(time.process_time() - began)
        return float(loss.detach())

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record the largest number of weight bytes that are gathered at once."""
        start = Unit.unshard

        def gather(unit: Unit) -> None:
            start(unit)
            units = self.engine.runtime.units
            self.most = max(
                self.most,
                4 * sum(u.gathered_numel for u in units if u.state is not UnitState.SHARDED),
            )

        with mock.patch.object(Unit, "unshard", gather):
            yield


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--words", type=int, default=16384)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    cases = {parts: Case(asked.words, asked.width, parts) for parts in PARTS}
    losses: dict[int, float] = {}
    for number in range(asked.rounds + 1):
        tokens = torch.randint(
            asked.words, (1, asked.tokens), generator=torch.Generator().manual_seed(number)
        )
        for parts, case in cases.items():
            losses[parts] = case.step(tokens)
    for case in cases.values():
        case.seconds = case.seconds[1:]  # the first step creates the moments
        with case.watched():
            case.step(tokens)
        case.seconds.pop()
    whole = 4 * asked.words * asked.width
    lines = [
        "# Layers above a limit in tiles of rows",
        "",
        f"`python -m benchmarks.tile_above --words {asked.words} --rounds {asked.rounds}`, "
        f"{date.today()}, {described(machine())}, one thread.",
        f"A tied weight of {asked.words} x {asked.width} in fp32 ({whole / 2**20:.1f} MiB), "
        f"{asked.tokens} tokens a step.  On a busy machine only the ratios are meaningful.",
        "",
        "| tile_above, of the weight | units | seconds | over whole layers | most gathered at "
        "once, MiB | loss |",
        "|---|---|---|---|---|---|",
    ]
    ratios, peaks = [], []
    for parts, case in cases.items():
        ratio = statistics.median(
            a / b for a, b in zip(case.seconds, cases[1].seconds, strict=True)
        )
        name = "whole" if parts == 1 else f"1/{parts}"
        lines.append(
            f"| {name} | {len(case.engine.runtime.units)} | {statistics.median(case.seconds):.3f} "
            f"| {ratio:.2f} | {case.most / 2**20:.2f} | {losses[parts]:.6f} |"
        )
        print(lines[-1], flush=True)
        label = "whole layers" if parts == 1 else f"ours, tiles of {name} of a layer"
        ratios.append((label, ratio))
        peaks.append((label, case.most / cases[1].most))
    asked.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    panels = [
        Panel("time", ratios, axis="step time; 1.0: whole layers"),
        Panel("memory", peaks, axis="most bytes gathered at once; 1.0: whole layers"),
    ]
    least, longest = peaks[-1][1], ratios[-1][1]
    title = f"Tiles of {name} of a layer: {least:.2f} of the bytes, {longest:.2f} of the time"
    draw_panels(title, panels, asked.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
