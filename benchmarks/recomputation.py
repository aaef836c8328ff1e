"""Measure the cost and the savings of recomputation on one thread: checkpoint policies, and tiled
feed-forward layers.

    python -m benchmarks.recomputation                             # ten minutes
    python -m benchmarks.recomputation --tokens 512 --rounds 1 --out /tmp/recomputation.md

A small Llama without the head's logits, so that its layers dominate: CPU time of forward and
backward, interleaved, as medians of ratios to the run without recomputation. Peaks count the
storages that operators allocate. Savings are relative to those of `full`. Then one feed-forward
layer in 1, 4 and 16 tiles. Its internal memory is the peak of activations and backward in
`engine.memory_trace`, minus the same for a layer without intermediate tensors (a product with one
number). Writes a table and a picture.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import deepseek_zero
from benchmarks.plot import Panel, draw_panels
from benchmarks.probes import machine
from benchmarks.tiers import described
from deepseek_zero.activations import recompute, route_checkpoints
from deepseek_zero.activations.recompute import RecomputeSettings
from deepseek_zero.activations.tiles import tile_mlps
from deepseek_zero.base.memory import keep_freed_memory
from deepseek_zero.report.memory_trace import MemoryTrace

RESULTS = Path(__file__).parent / "results" / "recomputation.md"
POLICIES: dict[str, tuple[str, ...] | None] = {
    "nothing": None,
    "ours, full": ("full",),
    "ours, attention": ("attention",),
    "ours, matmul": ("matmul",),
}
TILES = (1, 4, 16)


class Case:
    """A module with one policy, and its input."""

    def __init__(
        self, compute: Callable[[Tensor], Tensor], x: Tensor, policy: tuple[str, ...] | None = None
    ) -> None:
        self.compute, self.x, self.policy = compute, x, policy

    def run(self) -> float:
        """Return the CPU seconds of a forward and a backward."""
        recompute.configure(RecomputeSettings(policy=self.policy))
        began = time.process_time()
        self.compute(self.x.clone().requires_grad_()).square().mean().backward()
        spent = time.process_time() - began
        recompute.release(recompute.current())
        return spent

    def peak(self) -> int:
        trace = MemoryTrace(dict, lambda: "step")
        with trace.recording():
            self.run()
        return trace.peak_bytes


def measured(cases: dict[str, Case], rounds: int) -> dict[str, tuple[float, int]]:
    """Return by name the peak and the median time relative to the first case.

    The gradients of weights already exist.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, case in cases.items():
            spent = case.run()
            if number:
                seconds[name].append(spent)
    first = next(iter(seconds.values()))
    return {
        name: (
            statistics.median(own / base for own, base in zip(seconds[name], first, strict=True)),
            case.peak(),
        )
        for name, case in cases.items()
    }


def layers_of(tokens: int, width: int, layers: int) -> dict[str, Case]:
    from transformers import LlamaConfig, LlamaModel  # noqa: PLC0415  optional

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    plain: Any = LlamaModel(config).train()
    again: Any = copy.deepcopy(plain)
    again.activation_checkpointing_enable()
    route_checkpoints(again)

    def of(model: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: model(inputs_embeds=x).last_hidden_state

    x = torch.randn(1, tokens, width)
    return {
        name: Case(of(plain if policy is None else again), x, policy)
        for name, policy in POLICIES.items()
    }


class PlainMLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.gate = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))
        return found


def tiles_of(tokens: int, width: int) -> dict[str, Case]:
    found, x = {}, torch.randn(1, tokens, width)
    for tiles in TILES:
        module = PlainMLP(width)
        if tiles > 1:
            tile_mlps(module, tokens // tiles)
        found[f"{'ours, ' if tiles > 1 else ''}{tiles} tile{'s' if tiles > 1 else ''}"] = Case(
            module, x
        )
    return found


class ThroughMLP(nn.Module):
    """A feed-forward layer without intermediate tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def held(model: nn.Module, x: Tensor, tiles: int) -> int:
    """Return the peak bytes of activations and backward of one layer in an engine."""
    tokens = x.shape[1]
    config = {
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "steps_per_print": None,
        "activation_checkpointing": {"tiled_mlp": tokens // tiles} if tiles > 1 else {},
    }
    engine, *_ = deepseek_zero.initialize(model=model, config=config)
    with engine.memory_trace() as trace:
        engine.backward(engine(x.clone().requires_grad_()).square().mean())
    engine.destroy()
    return max(each.get("activations", 0) + each.get("backward", 0) for each in trace.samples)


def inside(tokens: int, width: int) -> list[float]:
    """Return for each number of tiles the layer's internal bytes relative to one tile."""
    x = torch.randn(1, tokens, width)
    found = [held(PlainMLP(width), x, tiles) - held(ThroughMLP(), x, tiles) for tiles in TILES]
    return [each / found[0] for each in found]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    layers = measured(layers_of(asked.tokens, asked.width, asked.layers), asked.rounds)
    (_, most), (_, least) = layers["nothing"], layers["ours, full"]
    tiles = measured(tiles_of(asked.tokens, 2 * asked.width), asked.rounds)
    inner = inside(asked.tokens, 2 * asked.width)
    lines = [
        "# Cost and savings of recomputation",
        "",
        f"`python -m benchmarks.recomputation`, {date.today()}, {described(machine())}, one "
        f"thread, fp32, load {os.getloadavg()[0]:.0f}.",
        "",
        f"A Llama of {asked.layers} layers of width {asked.width}, {asked.tokens} tokens, dense "
        "attention:",
        "",
        "| recomputed | time over no recomputation | peak MiB | saved, of full's savings |",
        "|---|---|---|---|",
        *(
            f"| {name} | {ratio:.2f} | {peak / 2**20:.0f} | {(most - peak) / (most - least):.0%} |"
            for name, (ratio, peak) in layers.items()
        ),
        "",
        f"A feed-forward layer of width {2 * asked.width}, {asked.tokens} tokens:",
        "",
        "| | time over one tile's | peak MiB | inside, over one tile's | times tiles |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {ratio:.2f} | {peak / 2**20:.0f} | {share:.3f} | {share * count:.2f} |"
            for (name, (ratio, peak)), share, count in zip(tiles.items(), inner, TILES, strict=True)
        ),
    ]
    asked.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    panels = [
        Panel(
            "time of layers",
            [(name, ratio) for name, (ratio, _) in layers.items()],
            1.1,
            "time; 1.0: nothing is recomputed",
        ),
        Panel(
            "memory of layers",
            [(name, peak / most) for name, (_, peak) in layers.items()],
            axis="peak bytes; 1.0: nothing is recomputed",
        ),
        Panel(
            "time of a feed-forward layer",
            [(name, ratio) for name, (ratio, _) in tiles.items()],
            1.35,
            "time; 1.0: one tile",
        ),
        Panel(
            "memory inside a feed-forward layer",
            [(name, share * count) for name, share, count in zip(tiles, inner, TILES, strict=True)],
            1.15,
            "bytes times the number of tiles; 1.0: one tile",
        ),
    ]
    ratio, peak = layers["ours, attention"]
    title = f"Recomputing attention: {peak / most:.2f} of the memory, {ratio:.2f} of the time"
    draw_panels(title, panels, asked.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
