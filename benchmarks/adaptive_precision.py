"""Measure precision "auto" in fp16 on one thread: the cost of inspecting gradients, and the gain.

    python -m benchmarks.adaptive_precision                        # a minute or two
    python -m benchmarks.adaptive_precision --steps 20 --rounds 2 --out /tmp/adaptive_precision.md

Cost: the CPU time of a step under precision "auto", which inspects every or every 16th step,
divided by that of plain fp16. Steps are interleaved, and ratios are medians over adjacent windows.
Gain: the loss of a small classifier whose first block scales its gradients by 1e-6, with a loss
scale of 1, in fp32, plain fp16 and precision "auto". Writes a table and a picture.
"""

from __future__ import annotations

import argparse
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import deepseek_zero as dz
from benchmarks.plot import Panel, draw_panels
from benchmarks.probes import machine
from benchmarks.tiers import described
from deepseek_zero.extensions.adaptive_precision import AdaptivePrecision

RESULTS = Path(__file__).parent / "results" / "adaptive_precision.md"
FP16 = {"fp16": {"enabled": True, "loss_scale": 1.0}}


def adaptive(window: int) -> dict[str, Any]:
    return {**FP16, "precision": "auto", "precision_window": window}


class Fade(torch.autograd.Function):
    """An identity in forward that multiplies the gradient by a factor in backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


class Block(nn.Module):
    """A residual block. fade: factor of the gradients inside."""

    def __init__(self, width: int, *, is_curved: bool, fade: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.is_curved, self.fade = is_curved, fade

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(Fade.apply(x, 1 / self.fade))  # type: ignore[no-untyped-call]
        out = self.down(torch.tanh(hidden) if self.is_curved else hidden)
        return x + Fade.apply(out, self.fade)  # type: ignore[no-untyped-call,no-any-return]


class Net(nn.Module):
    """A classifier that is nonlinear only in its first block."""

    def __init__(self, width: int, fade: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Linear(8, width), nn.Linear(width, 4)
        self.blocks = nn.ModuleList(
            [Block(width, is_curved=True, fade=fade), Block(width, is_curved=False, fade=1.0)]
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found


class Case:
    """An engine and its samples."""

    def __init__(self, width: int, fade: float, precision: dict[str, Any]) -> None:
        config = {
            "train_micro_batch_size_per_gpu": 256,
            "steps_per_print": None,
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-15}},
            "zero_optimization": {"stage": 2},
            **precision,
        }
        self.engine = dz.initialize(model=Net(width, fade), config=config)[0]
        self.x = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
        self.y = (self.x[:, 0] * self.x[:, 1] > 0).long() + (self.x[:, 2] > self.x[:, 3]).long() * 2
        self.seconds: list[float] = []

    def step(self) -> float:
        """Train one step and return its loss."""
        began = time.process_time()
        loss = functional.cross_entropy(self.engine(self.x).float(), self.y)
        self.engine.backward(loss)
        self.engine.step()
        self.seconds.append(time.process_time() - began)
        return float(loss.detach())


def cost(width: int, rounds: int) -> list[tuple[str, float]]:
    """Return by name the ratio of a step's time to that of plain fp16."""
    kinds = {
        "fp16": FP16,
        "auto, looks at every step": adaptive(1),
        "auto, at every 16th": adaptive(16),
    }
    cases = {name: Case(width, 1.0, kind) for name, kind in kinds.items()}
    for _ in range(16 * rounds + 1):
        for case in cases.values():
            case.step()

    def windows(case: Case) -> list[float]:
        return [sum(case.seconds[first : first + 16]) for first in range(1, len(case.seconds), 16)]

    plain = windows(cases["fp16"])
    return [
        (
            name,
            statistics.median(own / other for own, other in zip(windows(case), plain, strict=True)),
        )
        for name, case in cases.items()
    ]


def gain(steps: int) -> tuple[list[tuple[str, float]], list[str]]:
    """Return the last loss by precision, and the decisions of precision "auto"."""
    cases = {
        name: Case(16, 1e-6, kind)
        for name, kind in (("fp32", {}), ("fp16", FP16), ("auto", adaptive(2)))
    }
    losses = [(name, [case.step() for _ in range(steps)][-1]) for name, case in cases.items()]
    return losses, [
        str(each) for each in cases["auto"].engine.optimizer.policy(AdaptivePrecision).decisions
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=4, help="windows of 16 steps")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    costs, (losses, decisions) = cost(asked.width, asked.rounds), gain(asked.steps)
    lines = [
        "# Precision chosen from gradient statistics",
        "",
        f"`python -m benchmarks.adaptive_precision --rounds {asked.rounds} --steps {asked.steps}`, "
        f"{date.today()}, {described(machine())}, one thread.",
        "",
        f"| width {asked.width} | step over plain fp16 |",
        "|---|---|",
        *(f"| {name} | {ratio:.3f} |" for name, ratio in costs),
        "",
        f"| precision | loss after {asked.steps} steps | over fp32 |",
        "|---|---|---|",
        *(f"| {name} | {loss:.4f} | {loss / losses[0][1]:.3f} |" for name, loss in losses),
        "",
        *(f"- {each}" for each in decisions),
    ]
    print("\n".join(lines), flush=True)
    asked.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    gains = [(name, loss / losses[0][1]) for name, loss in losses]
    panels = [
        Panel("time", costs, axis="step time; 1.0: fp16"),
        Panel("loss", gains, 1.01, "last loss; 1.0: fp32"),
    ]
    last = dict(gains)
    ends = f"{last['auto']:.2f} of the loss of fp32, fp16 at {last['fp16']:.2f}"
    title = f'Precision "auto" ends at {ends}'
    draw_panels(title, panels, asked.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
