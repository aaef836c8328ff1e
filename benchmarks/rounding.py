"""Measure how rounding changes the losses of a bf16 run: one process, plain PyTorch, one change at
a time.

    python -m benchmarks.rounding            # GPT-125M, six steps, some minutes

The reference is the benchmark's `single`. A change of the losses without several ranks and without
this library is a lower bound for the difference between systems. Writes rounding.md in results/.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from datetime import date

import torch
from torch import Tensor, nn

from deepseek_zero.precision.policy import cast_master

from .cells import ADAMW, Cell
from .model import Batch, Batches, build_model
from .systems import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "rounding.md"
RANKS = 2


@dataclass(frozen=True)
class Way:
    """A variant of the training.

    Attributes:
        flipped: Reverse the order of the sequences in a batch.
        parts: Split the batch into micro-batches whose gradients are added in fp32.
        rounded: Then round the sum to bf16.
        half_up: Cast weights as this library does, with exact ties away from zero.
        late: Initialize main weights from the rounded weights.
    """

    what: str
    flipped: bool = False
    parts: int = 1
    rounded: bool = True
    half_up: bool = False
    late: bool = False


SINGLE = Way("one process, the whole batch, ties to even (`single`)")
WAYS = [
    Way("sequences in the opposite order", flipped=True),
    Way("exact ties away from zero", half_up=True),
    Way("gradients of two halves, added and rounded", parts=RANKS),
    Way("gradients of two halves, added in fp32", parts=RANKS, rounded=False),
    Way("both: the bits of stages 0 to 3", parts=RANKS, half_up=True),
    Way("masters cut from bf16 weights", late=True),
]


def losses_of(way: Way, cell: Cell, steps: int) -> list[float]:
    """Return the loss of each step."""
    model = build_model(cell.shape)
    weights = list(model.parameters())
    masters = [nn.Parameter(weight.detach().clone()) for weight in weights]
    for weight, master in zip(weights, masters, strict=True):
        weight.data = _cast(master.detach(), way)
        if way.late:
            master.data = weight.data.float()
    optimizer = torch.optim.AdamW(masters, fused=True, **ADAMW)
    shares = [Batches(cell, RANKS, share, way.parts) for share in range(way.parts)]
    losses = []
    for step in range(steps):
        found = [_gradients(model, weights, share.of_step(step)[0], way) for share in shares]
        losses.append(sum(loss for loss, _ in found) / way.parts)
        for master, *grads in zip(masters, *(grads for _, grads in found), strict=True):
            total = grads[0].float()
            for grad in grads[1:]:
                total = total + grad.float()
            total /= way.parts
            master.grad = total.bfloat16().float() if way.rounded else total
        optimizer.step()
        for weight, master in zip(weights, masters, strict=True):
            weight.data = _cast(master.detach(), way)
    return losses


def _gradients(
    model: nn.Module, weights: list[nn.Parameter], batch: Batch, way: Way
) -> tuple[float, list[Tensor]]:
    tokens, targets = (each.flip(0) for each in batch) if way.flipped else batch
    loss = model(tokens, targets)
    return loss.item(), list(torch.autograd.grad(loss, weights))


def _cast(master: Tensor, way: Way) -> Tensor:
    weight = master.to(torch.bfloat16)
    if way.half_up:
        cast_master(master.reshape(-1), weight.view(-1))
    return weight


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cell", default="125m-bf16")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cell = Cell.parse(options.cell)
    reference = losses_of(SINGLE, cell, options.steps)
    lines = [
        "# Effect of rounding on bf16 losses",
        "",
        f"{date.today()}, torch {torch.__version__}, {cell.name}, {options.steps} steps in one "
        "process on the CPU.",
        "Written by `benchmarks/rounding.py`; without ranks or transports.",
        f"Each row changes one property of: {SINGLE.what}; losses "
        f"{', '.join(f'{each:.4f}' for each in reference)}.",
        "",
        "| difference | largest difference | of each step |",
        "|---|--:|---|",
    ]
    for way in WAYS:
        gaps = [
            ours - theirs
            for ours, theirs in zip(losses_of(way, cell, options.steps), reference, strict=True)
        ]
        lines.append(
            f"| {way.what} | {max(map(abs, gaps)):.1e} | "
            f"{', '.join(f'{gap:+.0e}' for gap in gaps)} |"
        )
        print(lines[-1], flush=True)
    RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
