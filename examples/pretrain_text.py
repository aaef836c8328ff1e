"""The main example: train a byte-level GPT on the source code of the Python library with ZeRO-3.

    deepseek-zero run --nproc 2 examples/pretrain_text.py
    python examples/pretrain_text.py --size tiny --steps 40          # one process, a few seconds

Writes to --out: metrics.jsonl, metrics.csv, loss.png, memory.png, memory.json, sample.txt and
model.safetensors. Ends with an error if the loss did not fall by the margin of its size (see JOBS).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, SIZES, generate
from progress import Progress
from rich.console import Console
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from run_report import LossCurveLabels, MemoryRow, loss_curve, memory_bars, memory_table
from safetensors.torch import save_file
from text import Corpus, Sampler, load_corpus

import deepseek_zero as dz
from deepseek_zero.base.quantities import format_bytes, format_count, format_seconds
from deepseek_zero.report.plots import require_matplotlib
from deepseek_zero.report.records import CSV_NAME, JSONL_NAME, RecordWriter, StepRecord

PROMPT = b"def "


@dataclass(frozen=True)
class Job:
    """The training of one size.

    Attributes:
        steps: Number of steps; a machine that needs more than `seconds` for them makes fewer.
        seconds: Limit for the steps. Work between steps (held-out loss, records) took up to half of
            that again on two busy cores, and the whole run should end within five minutes.
        batch: Sequences per step over all ranks.
        least_fall: Required decrease of the loss in nats per byte for `steps` steps, reduced in
            proportion for fewer.
    """

    steps: int
    seconds: float
    batch: int
    lr: float
    least_fall: float
    every: int
    held_out_every: int
    sample_bytes: int


JOBS = {
    "tiny": Job(
        steps=60,
        seconds=60,
        batch=8,
        lr=5e-3,
        least_fall=2.2,
        every=10,
        held_out_every=30,
        sample_bytes=80,
    ),
    "main": Job(
        steps=1500,
        seconds=130,
        batch=4,
        lr=3e-3,
        least_fall=3.3,
        every=50,
        held_out_every=100,
        sample_bytes=320,
    ),
}


@dataclass
class Run:
    """One run of the script: its options, its output folder, its console, and the time of each
    part.
    """

    options: argparse.Namespace
    job: Job
    out: Path
    console: Console
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        return self.options.steps or self.job.steps

    @property
    def least_fall(self) -> float:
        return self.job.least_fall * min(1.0, self.steps / self.job.steps)

    def say(self, text: str) -> None:
        """Print one line on rank 0."""
        self.console.print(text, highlight=False, soft_wrap=True)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - started


def config_for(run: Run, stage: int) -> dict[str, Any]:
    """Return the configuration.

    The zeros at stage 3 shard every parameter and reshard each block immediately after use.
    """
    return {
        "train_micro_batch_size_per_gpu": max(1, run.job.batch // num_ranks()),
        "gradient_clipping": 1.0,
        "steps_per_print": None,  # the progress lines have the same information
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": run.job.lr, "betas": [0.9, 0.95], "weight_decay": 0.1},
        },
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {
                "total_num_steps": run.steps,
                "warmup_num_steps": max(2, min(40, run.steps // 10)),
                "warmup_type": "linear",
                "cos_min_ratio": 0.02,
            },
        },
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
        },
    }


def start(run: Run, stage: int) -> tuple[Any, dict[str, Any]]:
    """Return a new model's engine and its configuration.

    Every rank builds the same model, although only the values of rank 0 are used.
    """
    torch.manual_seed(run.options.seed)
    config = config_for(run, stage)
    engine, *_ = dz.initialize(model=GPT(SIZES[run.options.size]), config=config)
    return engine, config


def train(run: Run, engine: Any, corpus: Corpus, micro_batch: int) -> list[StepRecord]:
    """Train and return one record per step, which differs between ranks only in its bytes."""
    length = SIZES[run.options.size].context
    sampler = Sampler(corpus.train, micro_batch, length, run.options.seed)
    held_out = Sampler(corpus.held_out, micro_batch, length, run.options.seed)
    records: list[StepRecord] = []
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(run.steps, run.job.every, run.console))
        writer = stack.enter_context(closing(RecordWriter(run.out))) if rank() == 0 else None
        for step in range(1, run.steps + 1):
            started = time.monotonic()
            x, y = (tensor.to(engine.device) for tensor in sampler.draw(step, rank()))
            lr = engine.get_lr()[0]
            loss = engine(x, y)
            engine.backward(loss)
            engine.step()
            mean_loss = mean_over_ranks(loss)
            seconds = time.monotonic() - started
            due = step % run.job.held_out_every == 0 or step == run.steps
            held_out_loss = evaluate(engine, held_out) if due else None
            speed = x.numel() * num_ranks() / seconds
            # The engine's record has the gradient norm and this rank's bytes; the loop adds the
            # rest.
            known = {
                "loss": mean_loss,
                "lr": lr,
                "tokens_per_second": speed,
                "step_seconds": seconds,
            }
            records.append(replace(engine.observer.record, **known, held_out_loss=held_out_loss))
            if writer is not None:
                writer.write(records[-1])
            progress.step(records[-1])
    return records


@torch.no_grad()
def evaluate(engine: Any, sampler: Sampler, batches: int = 12) -> float:
    """Return the mean loss over fixed held-out windows.

    Collective: every rank reads different windows.
    """
    engine.eval()
    losses = [
        engine(*(t.to(engine.device) for t in sampler.draw(index, rank())))
        for index in range(batches)
    ]
    engine.train()
    return mean_over_ranks(torch.stack(losses).mean())


def fit_steps(run: Run, corpus: Corpus) -> None:
    """Take fewer steps on a slow machine, unless --steps is given.

    Collective: all ranks get the same number.
    """
    if run.options.steps is not None:
        return
    engine, config = start(run, run.options.stage)
    sampler = Sampler(
        corpus.train, config["train_micro_batch_size_per_gpu"], SIZES[run.options.size].context
    )
    for step in range(10):
        if step == 2:  # the first two steps record the schedule and allocate buffers
            started = time.monotonic()
        engine.backward(
            engine(*(tensor.to(engine.device) for tensor in sampler.draw(step, rank())))
        )
        engine.step()
    took = mean_over_ranks(torch.tensor((time.monotonic() - started) / 8))
    engine.destroy()
    run.options.steps = max(20, min(run.job.steps, int(run.job.seconds / took)))
    if run.options.steps < run.job.steps:
        run.say(
            f"A step takes {format_seconds(took)} here: {run.options.steps} steps instead of "
            f"{run.job.steps}, {format_seconds(run.job.seconds)} of them (--steps sets a number)."
        )


def memory_rows(run: Run, corpus: Corpus) -> list[MemoryRow]:
    """Train a new model for two steps at each stage; return its measured and predicted memory."""
    rows = []
    for stage in range(4):
        engine, config = start(run, stage)
        micro_batch = config["train_micro_batch_size_per_gpu"]
        sampler = Sampler(
            corpus.train, micro_batch, SIZES[run.options.size].context, run.options.seed
        )
        for step in (1, 2):  # the second step has the moments that the first one created
            engine.backward(
                engine(*(tensor.to(engine.device) for tensor in sampler.draw(step, rank())))
            )
            engine.step()
        report = engine.memory_report()
        # "other" is the text and a batch
        ours = {state: size for state, size in report.measured.items() if state != "other"}
        rows.append(MemoryRow(stage, dict(report.predicted), ours, report.measured_total))
        engine.destroy()
        del engine, report
    return rows


def save_model(run: Run, engine: Any) -> None:
    """Save full weights as safetensors.

    Collective: all ranks gather, and rank 0 writes.
    """
    state = engine.module.state_dict()
    if rank() == 0:
        unfinished = run.out / ".model.safetensors.unfinished"
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, unfinished
        )
        # atomic, so that readers never see an incomplete file
        os.replace(unfinished, run.out / "model.safetensors")


def draw_results(
    run: Run, records: list[StepRecord], rows: list[MemoryRow], num_parameters: int
) -> None:
    """Draw the two pictures and write the memory table. Only rank 0 calls this."""
    subtitle = (
        f"{format_count(num_parameters)} parameters, ZeRO stage {run.options.stage} on {ranks()}"
    )
    labels = LossCurveLabels(
        "A byte-level GPT reads Python's library", subtitle, "nats per byte", chance=math.log(256)
    )
    loss_curve(records, run.out / "loss.png", labels)
    memory_bars(rows, run.out / "memory.png", f"Memory per rank by ZeRO stage, {ranks()}")
    (run.out / "memory.json").write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


def summarise(run: Run, records: list[StepRecord], rows: list[MemoryRow], sample: str) -> None:
    """Print the summary of the run. Only rank 0 calls this."""
    (run.out / "sample.txt").write_text(sample, encoding="utf-8")
    print_ = run.console.print
    print_()
    print_(
        Panel(
            Syntax(sample, "python", theme="ansi_dark", word_wrap=True),
            title="a sample",
            title_align="left",
        )
    )
    print_(memory_table(rows, f"Memory per rank, {ranks()}"))
    print_(
        "[dim]Buffers hold a unit on its way, and scratch: as much for a hundred blocks as for "
        "these few.\n"
    )
    facts = Table.grid(padding=(0, 2))
    facts.add_row(
        "loss",
        f"{records[0].loss:.3f} nats per byte at the first step, {final_loss(records):.3f} at the "
        "end",
    )
    facts.add_row(
        "held-out",
        f"{records[-1].held_out_loss:.3f} nats per byte; a uniform guess has {math.log(256):.3f}",
    )
    facts.add_row("sent", f"{format_bytes(records[-1].comm_bytes)} per rank and step")
    parts = ", ".join(f"{name} {format_seconds(took)}" for name, took in run.seconds.items())
    facts.add_row("time", f"{format_seconds(sum(run.seconds.values()))}: {parts}")
    for name in (
        "loss.png",
        "memory.png",
        JSONL_NAME,
        CSV_NAME,
        "memory.json",
        "sample.txt",
        "model.safetensors",
    ):
        path = run.out / name
        facts.add_row("file", f"{path}  ({format_bytes(path.stat().st_size)})")
    print_(Panel(facts, title="done", title_align="left", expand=False))


def final_loss(records: list[StepRecord]) -> float:
    """Return the mean training loss of the last twentieth of the steps, at least three."""
    last = records[-max(3, len(records) // 20) :]
    return sum(record.loss for record in last) / len(last)


def check_fall(run: Run, records: list[StepRecord]) -> None:
    """End with an error unless the loss fell by the margin; all ranks get the same result."""
    fall = records[0].loss - final_loss(records)
    verdict = (
        f"the loss fell by {fall:.2f} nats per byte; the margin for {run.steps} steps is "
        f"{run.least_fall:.2f}"
    )
    if not fall >= run.least_fall:  # NaN fails, too
        sys.exit(f"FAILED: {verdict}" if rank() == 0 else 1)
    run.say(verdict)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def ranks() -> str:
    return "1 rank" if num_ranks() == 1 else f"{num_ranks()} ranks"


def mean_over_ranks(value: torch.Tensor) -> float:
    """Return the mean of a scalar over the ranks. Collective."""
    total = value.detach().double().cpu()
    if num_ranks() > 1:
        dist.all_reduce(total)
    return total.item() / num_ranks()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="main")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: what the size needs)")
    parser.add_argument(
        "--stage", type=int, choices=range(4), default=3, help="ZeRO stage (default: 3)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/pretrain_text"),
        help="folder for what the run leaves",
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.steps is not None and options.steps < 1:
        parser.error("--steps must be at least 1")
    return options


def main() -> None:
    options = parse()
    require_matplotlib()
    dz.init_distributed()
    run = Run(options, JOBS[options.size], options.out, Console(quiet=rank() != 0))
    # This program never resumes a run, so it removes the records of an earlier one.
    for name in (JSONL_NAME, CSV_NAME):
        (run.out / name).unlink(missing_ok=True)
    with run.timed("setup"):
        corpus = load_corpus()
        fit_steps(run, corpus)
        engine, config = start(run, options.stage)
        num_parameters = sum(parameter.numel() for parameter in engine.module.parameters())
    run.say(
        f"GPT of {format_count(num_parameters)} parameters, {ranks()}, ZeRO stage {options.stage}; "
        f"{format_bytes(len(corpus.train))} of text from {corpus.num_files} files, "
        f"{format_bytes(len(corpus.held_out))} of it held out"
    )
    with run.timed("training"):
        records = train(run, engine, corpus, config["train_micro_batch_size_per_gpu"])
    with run.timed("sample"):
        context = SIZES[options.size].context
        sample = generate(
            engine.module, PROMPT, run.job.sample_bytes, context=context, temperature=0.7
        )
    save_model(run, engine)
    engine.destroy()
    del engine
    with run.timed("memory of four stages"):
        rows = memory_rows(run, corpus)
    if rank() == 0:
        draw_results(run, records, rows, num_parameters)
        summarise(run, records, rows, sample.decode("utf-8", errors="replace"))
    dist.destroy_process_group()
    check_fall(run, records)


if __name__ == "__main__":
    main()
