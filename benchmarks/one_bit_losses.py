"""Attribute the loss of 1-bit Adam to the frozen second moment, to signs, or to our way of
exchanging them.

    python -m benchmarks.one_bit_losses                              # an hour on a core
    python -m benchmarks.one_bit_losses --size tiny                  # some minutes

One process simulates four ranks. It follows the paper (Tang et al., arXiv 2102.02888, algorithm 1)
and uses only the learning rates of the library. Model, text and seeds are those of
benchmarks/codec_losses.py, so the result of its OneBitAdam on four ranks is comparable. The table
compares the mean loss of the last 50 steps:

    v frozen            exact momenta; the second moment is frozen after a quarter of the steps
    signs, one scale    as in the paper: each server's chunk of the whole momentum has one scale
    signs, by unit      as in this library: each block of the model is chunked separately
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.codec_losses import LAST, LR, RANKS, last
from deepseek_zero.optimizers.lr_schedules import WarmupCosineLR
from examples.gpt import GPT, SIZES
from examples.text import Sampler, load_corpus

RESULTS = Path(__file__).parent / "results" / "one_bit_losses.md"
BETA1, EPS, DECAY = 0.9, 1e-8, 0.1
VARIANTS = ("AdamW", "v frozen", "signs, one scale", "signs, by unit")


def signs(values: Tensor) -> Tensor:
    scale = values.norm() / math.sqrt(max(1, values.numel()))
    return torch.where(values >= 0, scale, -scale)


class Exchange:
    """The momentum of some parameters, which workers and servers exchange as signs."""

    def __init__(self, momentum: Tensor) -> None:
        self.momentum = momentum
        self.worker = [torch.zeros_like(momentum) for _ in range(RANKS)]
        self.server = torch.zeros_like(momentum)

    def step(self, grads: Sequence[Tensor]) -> Tensor:
        """Return the new momentum. grads: one per worker."""
        sent = []
        for error, grad in zip(self.worker, grads, strict=True):
            error.add_(BETA1 * self.momentum + (1 - BETA1) * grad)
            sent.append(torch.cat([signs(chunk) for chunk in error.chunk(RANKS)]))
            error.sub_(sent[-1])
        self.server.add_(torch.stack(sent).mean(0))
        self.momentum = torch.cat([signs(chunk) for chunk in self.server.chunk(RANKS)])
        self.server.sub_(self.momentum)
        return self.momentum


def parts_of(model: nn.Module, variant: str) -> list[list[nn.Parameter]]:
    """Return groups of parameters whose momenta are chunked together."""
    if variant != "signs, by unit":
        return [list(model.parameters())]
    names: dict[str, list[nn.Parameter]] = {}
    for name, param in model.named_parameters():
        names.setdefault(
            ".".join(name.split(".")[:2]) if name.startswith("blocks.") else "", []
        ).append(param)
    return list(names.values())


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.reshape(-1) for each in tensors])


def train(variant: str, size: str, seed: int, steps: int, beta2: float) -> list[float]:
    """Return the loss of each step, averaged over ranks."""
    torch.manual_seed(seed)
    model, freeze = GPT(SIZES[size]), max(1, steps // 4)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(BETA1, beta2), eps=EPS, weight_decay=DECAY
    )
    schedule = WarmupCosineLR(
        optimizer,
        total_num_steps=steps,
        warmup_num_steps=max(1, steps // 20),
        warmup_min_ratio=0.01,
    )
    sampler = Sampler(load_corpus().train, 1, SIZES[size].context, seed)
    parts, exchanges, losses = parts_of(model, variant), list[Exchange](), []
    for step in range(steps):
        grads, total = [], 0.0
        for rank in range(RANKS):
            tokens, targets = sampler.draw(step, rank)
            loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            model.zero_grad()
            loss.backward()
            grads.append(
                [flat([param.grad for param in part if param.grad is not None]) for part in parts]
            )
            total += loss.item() / RANKS
        losses.append(total)
        means = [torch.stack(of_part).mean(0) for of_part in zip(*grads, strict=True)]
        with torch.no_grad():
            if variant == "AdamW" or step < freeze:
                for part, mean in zip(parts, means, strict=True):
                    for param, grad in zip(
                        part, mean.split([param.numel() for param in part]), strict=True
                    ):
                        param.grad = grad.view_as(param).clone()
                optimizer.step()
            else:
                states = [[optimizer.state[param] for param in part] for part in parts]
                if not exchanges:
                    exchanges = [
                        Exchange(flat([state["exp_avg"] for state in part])) for part in states
                    ]
                for number, (part, mean, exchange) in enumerate(
                    zip(parts, means, exchanges, strict=True)
                ):
                    if variant == "v frozen":
                        exchange.momentum = exchange.momentum * BETA1 + (1 - BETA1) * mean
                    else:
                        exchange.step([of_rank[number] for of_rank in grads])
                    update(
                        part,
                        states[number],
                        exchange.momentum,
                        optimizer.param_groups[0]["lr"],
                        step,
                        freeze,
                        beta2,
                    )
        schedule.step()
    return losses


def update(
    part: Sequence[nn.Parameter],
    states: Sequence[dict[str, Tensor]],
    momentum: Tensor,
    rate: float,
    step: int,
    freeze: int,
    beta2: float,
) -> None:
    """Update parameters with a momentum and a frozen second moment."""
    pieces = momentum.split([param.numel() for param in part])
    for param, state, piece in zip(part, states, pieces, strict=True):
        scale = (state["exp_avg_sq"] / (1 - beta2**freeze)).sqrt() + EPS
        mean = piece.view_as(param) / (1 - BETA1 ** (step + 1))
        param.mul_(1 - rate * DECAY).sub_(
            torch.where(state["exp_avg_sq"] > 0, mean / scale, 0.0) * rate
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="main")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--betas", type=float, nargs="*", default=[0.999, 0.95], help="second ones")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "# Where the loss of 1-bit Adam comes from",
        "",
        f"Written by `benchmarks/one_bit_losses.py` on {date.today()}: the {given.size} model, one "
        "process that does",
        f"what {RANKS} ranks would, {given.steps} steps, {given.seeds} seeds.  Means of the last",
        f"{min(LAST, given.steps)} steps in nats per byte.",
        "",
        "| second beta | variant | loss | above AdamW, by seed | mean |",
        "|---|---|---|---|---|",
    ]
    for beta2 in given.betas:
        plain: list[float] = []
        for variant in VARIANTS:
            found = [
                last(train(variant, given.size, seed, given.steps, beta2))
                for seed in range(given.seeds)
            ]
            plain = plain or found
            above = [loss - reference for loss, reference in zip(found, plain, strict=True)]
            told = ", ".join(f"{each:+.4f}" for each in above)
            mean = f"{statistics.fmean(found):.4f} | {told} | **{statistics.fmean(above):+.4f}**"
            lines.append(f"| {beta2} | {variant} | {mean} |")
            print(lines[-1], flush=True)
    given.out.write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
