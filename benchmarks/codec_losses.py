"""Measure how each codec affects a real training: the model and text of the main example on four
ranks of two hosts.

    python -m benchmarks.codec_losses                          # as root, half an hour on two cores
    python -m benchmarks.codec_losses --steps 60 --seeds 1     # a look
    python -m benchmarks.codec_losses --only OneBitAdam --only "AdamW without clipping"
    python -m benchmarks.codec_losses --size tiny --seeds 12   # least noise: resolves 0.01
    python -m benchmarks.codec_losses --size 10m --seeds 1 --only plain --only "int4 gradients"

The hosts are namespaces of this machine (`tests/hosts.py`). Every codec trains from the same
weights on the same batches as plain communication, once for each seed. The table compares the mean
loss of the last 50 steps. It also shows two kinds of noise: that of the seeds (other weights and
batches), and that of rounding (the plain run with sums in another order). Losses depend neither on
the load of the machine nor on the link. Writes a table and a picture; `--draw FILE.md` only draws
the picture of an existing table.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.figure import Figure

import deepseek_zero as dz
from benchmarks.plot import PICTURE_WIDTH, titled
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.report.plots import BLUE, INK, ORANGE, save_figure, style_axes
from examples.gpt import GPT, SIZES, GPTConfig
from examples.text import Sampler, load_corpus
from tests.hosts import hosts, run_ranks

RESULTS = Path(__file__).parent / "results" / "codec_losses.md"
RANKS, HOSTS, PORT, LAST, LR = 4, 2, 29410, 50, 3e-3
# By size: its name, its shape, its learning rate, and the sequences in a rank's batch.
MODELS = {
    "tiny": ("the tiny model", SIZES["tiny"], 1e-3, 16),
    "main": ("the main job's model", SIZES["main"], LR, 1),
    "10m": (
        "a larger model",
        GPTConfig(num_layers=6, width=384, num_heads=6, context=128),
        1e-3,
        1,
    ),
}
GRADIENTS, WEIGHTS = {"zero_quantized_gradients": True}, {"zero_quantized_weights": True}
DIFFERENCES = {"weights": {"bits": 4, "difference": True}, "gradients": {"bits": 4}}
# Only rounding differs from the plain run.
FLAT = "plain, in another order of sums"
CODECS: dict[str, dict[str, Any]] = {
    "plain": {},
    FLAT: {},
    "int8 weights": WEIGHTS,
    "int4 gradients": GRADIENTS,
    "int8 gradients": {"compression": {"gradients": {"bits": 8}}},
    "int8 weights, int4 gradients": {**WEIGHTS, **GRADIENTS},
    "int4 gradients and differences, stage 2": {"stage": 2, "compression": DIFFERENCES},
    "int4 gradients, errors kept": {
        **GRADIENTS,
        "compression": {"gradients": {"error_feedback": "bf16"}},
    },
    "int4 gradients, LoCo": {**GRADIENTS, "zeropp_loco_param": {}},
    "AdamW without clipping": {"stage": 1},
    "OneBitAdam": {"stage": 1},
}
UNCLIPPED = ("AdamW without clipping", "OneBitAdam")  # the baseline of OneBitAdam, and OneBitAdam
LABELS = {
    "AdamW without clipping": "AdamW at stage 1, without clipping",
    "OneBitAdam": "OneBitAdam (above AdamW without clipping)",
}
BOUND = 0.01  # nats per byte, mean of the seeds
ONE_BIT_BOUND = 0.02


def train(codec: str, seed: int, steps: int, size: str) -> list[float]:
    """Return the loss of each step, averaged over ranks."""
    torch.manual_seed(seed)
    _, shape, rate, batch = MODELS[size]
    zero = CODECS[codec]
    if zero:  # every matrix uses the codec, even in a small model
        zero = zero | {"compression": zero.get("compression", {}) | {"min_numel": 0}}
    model = GPT(shape)
    # A frozen second moment should average over many steps.
    beta2 = 0.999 if codec in UNCLIPPED else 0.95
    hypers: dict[str, Any] = {"lr": rate, "betas": [0.9, beta2], "weight_decay": 0.1}
    if codec == "OneBitAdam":
        hypers["freeze_step"] = max(1, steps // 4)
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "steps_per_print": None,
        "gradient_clipping": 0.0 if codec in UNCLIPPED else 1.0,
        "optimizer": {"type": "OneBitAdam" if codec == "OneBitAdam" else "AdamW", "params": hypers},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {
                "total_num_steps": steps,
                "warmup_num_steps": max(1, steps // 20),
                "warmup_min_ratio": 0.01,
            },
        },
        "ranks_per_host": 1
        if codec in (FLAT, UNCLIPPED[0])
        else None,  # OneBitAdam uses 1 by default
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
    }
    engine = dz.initialize(model=model, config=config)[0]
    mesh: Mesh = engine.mesh
    sampler = Sampler(load_corpus().train, batch, shape.context, seed)
    losses = []
    for step in range(steps):
        tokens, targets = sampler.draw(step, mesh.rank)
        logits = engine(tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    mean = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(mean)
    return [value / mesh.world_size for value in mean.tolist()]


def be_a_rank(given: argparse.Namespace) -> None:
    """Train with every codec and seed; rank 0 prints a line of JSON for each."""
    torch.set_num_threads(1)
    dz.init_distributed()
    for seed in range(given.seeds):
        for codec in given.only or CODECS:
            losses = train(codec, seed, given.steps, given.size)
            if dist.get_rank() == 0:
                print(json.dumps([codec, seed, losses]), flush=True)


def run(given: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Return the losses of the steps by codec and seed."""
    with hosts(HOSTS) as pair:
        arguments = ["--steps", given.steps, "--seeds", given.seeds, "--size", given.size]
        arguments += [word for codec in given.only for word in ("--only", codec)]
        said = run_ranks("benchmarks.codec_losses", pair, PORT, arguments, each=RANKS // HOSTS)
    found: dict[str, list[list[float]]] = {}
    for line in said.splitlines():
        if line.startswith('["'):
            codec, _, losses = json.loads(line)
            found.setdefault(codec, []).append(losses)
    return found


def last(losses: list[float]) -> float:
    return statistics.fmean(losses[-LAST:])


def table(found: dict[str, list[list[float]]], steps: int, size: str) -> str:
    """Return the page."""
    name, shape, *_ = MODELS[size]
    numel = sum(param.numel() for param in GPT(shape).parameters())
    plain = [last(losses) for losses in found.get("plain", found[next(iter(found))])]
    unclipped = [last(losses) for losses in found.get(UNCLIPPED[0], ())]
    noise = f"{statistics.stdev(plain):.3f}" if len(plain) > 1 else "what one seed does not tell"
    lines = [
        "# Effect of codes on losses",
        "",
        f"Written by `benchmarks/codec_losses.py` on {date.today()}: {name} ({numel / 1e6:.2f}M "
        "parameters), the main",
        f"job's text, ZeRO-3, {RANKS} ranks on {HOSTS} hosts, {steps} steps, {len(plain)} seeds.  "
        "Losses are means of",
        f"the last {min(LAST, steps)} steps in nats per byte; between seeds the plain one varies "
        f"by {noise} (standard",
        f"deviation).  Bound: {BOUND} above plain, mean of the seeds; OneBitAdam, frozen after a "
        "quarter of the steps,",
        "is compared with AdamW at stage 1, without clipping and with its second beta, 0.999; "
        f"bound {ONE_BIT_BOUND}.",
        "Behind a mean: its standard error.",
        "",
        "| codec | loss | above plain, by seed | mean | within the bound |",
        "|---|---|---|---|---|",
    ]
    for codec, runs in found.items():
        is_one_bit = codec == "OneBitAdam"
        references = unclipped if is_one_bit else plain
        above = [
            last(losses) - reference for losses, reference in zip(runs, references, strict=True)
        ]
        mean = statistics.fmean(above)
        told = ", ".join(f"{each:+.4f}" for each in above)
        error = (
            f" ± {statistics.stdev(above) / math.sqrt(len(above)):.4f}"
            if len(above) > 1 and any(above)
            else ""
        )
        lines.append(
            f"| {codec} | {statistics.fmean(map(last, runs)):.4f} | {told} | "
            f"**{mean:+.4f}**{error} | "
            f"{'yes' if mean <= (ONE_BIT_BOUND if is_one_bit else BOUND) else 'no'} |"
        )
    return "\n".join([*lines, ""])


def draw(page: Path) -> None:
    """Draw the table of a page: for each codec, a dot per seed and a bar at their mean."""
    rows = re.findall(r"^\| (.+?) \| [\d.]+ \| (.+?) \|", page.read_text("utf-8"), re.MULTILINE)
    above = {codec: list(map(float, told.split(", "))) for codec, told in rows}
    above.pop("plain", None)
    figure = Figure(figsize=(PICTURE_WIDTH, 1.3 + 0.32 * len(above)), dpi=160, layout="constrained")
    axes = figure.subplots()
    for place, values in enumerate(above.values()):
        axes.plot(values, [place] * len(values), "o", color=BLUE, alpha=0.5, markersize=4)
        axes.plot([statistics.fmean(values)], [place], "|", color=ORANGE, markersize=14, mew=2.5)
    axes.axvline(0, color=INK, linewidth=0.8)
    labels = [LABELS.get(codec, codec) for codec in above]
    axes.set_yticks(range(len(labels)), labels, fontsize=8.5)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlabel(
        "final loss above that of plain messages, nats per byte\n"
        "(a dot: one seed; a bar: the mean)",
        fontsize=8.5,
    )
    titled(figure, "What coded messages change in the final loss")
    style_axes(axes, along="x")
    save_figure(figure, page.with_suffix(".png"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--size", choices=MODELS, default="main", help="of the model; default %(default)s"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        choices=[*CODECS],
        help="a codec; all if none is named",
    )
    parser.add_argument("--as-rank", action="store_true", help="be one of the ranks")
    parser.add_argument("--draw", type=Path, help="only draw the table of this page again")
    given = parser.parse_args()
    if given.draw is not None:
        draw(given.draw)
        return
    if given.as_rank:
        be_a_rank(given)
        return
    found = run(given)
    page = table(found, given.steps, given.size)
    page += f"\n![loss above that of plain messages]({given.out.with_suffix('.png').name})\n"
    given.out.write_text(page, encoding="utf-8")
    draw(given.out)
    print(given.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
