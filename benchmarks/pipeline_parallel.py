"""Measure pipelines on two ranks: a step over its bubble bound, and the CPU time of an action, next
to torch's `pipelining`.

    deepseek-zero run --nproc 2 benchmarks/pipeline_parallel.py        # three minutes
    deepseek-zero run --nproc 2 benchmarks/pipeline_parallel.py --cells 8x256-fp32 --out /tmp/pp.md

One core per rank, everything interleaved in one run, minima of the rounds. `work` is the
computation of the slower rank: the forwards and backwards of its stages without messages or
waiting. The bound is work x (1 + (P - 1) / (v m)). An action's time is CPU time, which excludes
waiting. Needs matplotlib. Writes a table and a picture.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a file by a launcher

from benchmarks.cells import CONTEXT, VOCABULARY, Cell
from benchmarks.model import GPT, build_model
from benchmarks.plot import Panel, draw_panels, span_of
from benchmarks.systems.common import seconds_of, take_a_core
from deepseek_zero import init_distributed
from deepseek_zero.base.memory import keep_freed_memory
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.comm.collectives import Comm
from deepseek_zero.pipeline import MicroBatch, find_chain
from deepseek_zero.pipeline.executor import PipelineExecutor
from deepseek_zero.pipeline.messages import StageLinks
from deepseek_zero.pipeline.schedule import PipelineSchedule, make_schedule
from deepseek_zero.pipeline.stage import cut_chain, take_stages
from deepseek_zero.pipeline.verify import verify

RESULTS = Path(__file__).parent / "results" / "pipeline_parallel.md"
CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MANY = 8  # micro-batches of one sequence each
WAYS = (("1f1b", 1), ("interleaved", 2))
GOALS = {"1f1b": 1.10, "interleaved": 1.15}  # ratio of a step to its bound
ACTIONS_CELL = Cell("4x8", "fp32")  # stages that compute almost nothing
PLANNED = (("1f1b", 1), ("interleaved", 4), ("breadth_first", 4))


class Part(nn.Module):
    """Consecutive blocks of the GPT, a manually written stage for torch."""

    def __init__(self, model: GPT, first: int, last: int) -> None:
        super().__init__()
        own = copy.deepcopy(model)
        self.tokens, self.positions = (own.tokens, own.positions) if first == 0 else (None, None)
        self.blocks = own.blocks[first:last]
        self.norm, self.head = (own.norm, own.head) if last == len(model.blocks) else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.head is not None and self.norm is not None else x


def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1).float(), targets.flatten())


class Contest:
    """A model with one schedule: our step, torch's step, and this rank's computation only."""

    def __init__(self, model: GPT, name: str, virtual: int, comm: Comm) -> None:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        torch.manual_seed(1)
        self.tokens = torch.randint(VOCABULARY, (MANY, CONTEXT))
        self.targets = torch.randint(VOCABULARY, (MANY, CONTEXT))
        pairs = zip(self.tokens.split(1), self.targets.split(1), strict=True)
        self.micro_batches = [MicroBatch(pair) for pair in pairs]
        self.schedule: PipelineSchedule = make_schedule(name, ranks, virtual, MANY)
        own = copy.deepcopy(model)
        cut = cut_chain(own, find_chain(own, self.micro_batches[0].args), self.schedule.stages)
        self.stages = take_stages(own, cut, self.schedule.stages_of(rank))
        mesh = Mesh(pp=ranks).on_world(ranks, rank)
        self.executor = PipelineExecutor(StageLinks(comm, mesh, self.schedule), self.stages)
        self.model, self.bubble = own, 1 + (ranks - 1) / (virtual * MANY)
        self.carried = torch.randn(1, CONTEXT, model.head.in_features).to(model.head.weight.dtype)
        parts = [
            Part(model, cut.bounds[stage], cut.bounds[stage + 1])
            for stage in self.schedule.stages_of(rank)
        ]
        stages = [
            PipelineStage(part, stage, self.schedule.stages, CPU)
            for part, stage in zip(parts, self.schedule.stages_of(rank), strict=True)
        ]
        self.is_first, self.is_last = rank == 0, rank == ranks - 1
        self.parts = parts
        self.torchs: Any = (
            Schedule1F1B(stages[0], MANY, loss_fn)
            if virtual == 1
            else ScheduleInterleaved1F1B(stages, MANY, loss_fn)
        )

    def ours(self) -> None:
        self.executor.run(self.schedule, self.micro_batches, keys=["as ever"] * MANY)

    def torch(self) -> None:
        given = (self.tokens,) if self.is_first else ()
        self.torchs.step(*given, **({"target": self.targets, "losses": []} if self.is_last else {}))

    def work(self) -> None:
        """Run the computation of this rank's stages one after another."""
        for micro in self.micro_batches:
            for stage in self.stages:
                received = (self.carried.detach().requires_grad_(),) if stage.index else ()
                output = stage.forward(micro, received)
                if stage.index == self.schedule.stages - 1:
                    torch.autograd.backward(stage.loss(output, micro), torch.tensor(1 / MANY))
                else:
                    torch.autograd.backward(output, [self.carried] * len(output))

    def forget_grads(self) -> None:
        for module in (self.model, *self.parts):
            for each in module.parameters():
                each.grad = None


def measure(cell: Cell, rounds: int, comm: Comm) -> tuple[list[str], list[Panel]]:
    """Return rows with the milliseconds of a step on the slower rank, and their picture."""
    model = build_model(cell.shape).to(DTYPES[cell.dtype])
    contests = {way: Contest(model, *way, comm) for way in WAYS}
    best: dict[tuple[Any, str], float] = {}
    for number in range(rounds + 1):  # the first round is not counted
        for way, contest in contests.items():
            for name in ("work", "ours", "torch"):
                contest.forget_grads()
                took = seconds_of(getattr(contest, name))
                if number:
                    best[way, name] = min(best.get((way, name), took), took)
    rows, panels = [], []
    for way, contest in contests.items():
        times = torch.tensor(
            [best[way, name] for name in ("work", "ours", "torch")], dtype=torch.float64
        )
        dist.all_reduce(times, dist.ReduceOp.MAX)
        work, ours, theirs = times.tolist()
        bound = work * contest.bubble
        ms = " | ".join(f"{1e3 * each:.1f}" for each in (work, bound, ours, theirs))
        over = f"**{ours / bound:.2f}** | {theirs / bound:.2f} | {theirs / ours:.2f}"
        rows.append(f"| {cell.name} | {way[0]} | {ms} | {over} |")
        bars = [("ours", ours / bound), ("torch", theirs / bound)]
        panels.append(
            Panel(
                f"{cell.name}, {way[0]}",
                bars,
                GOALS[way[0]],
                "step time; 1.0: the work and the idle time of the schedule",
            )
        )
    return rows, panels


def measure_actions(rounds: int, comm: Comm) -> list[str]:
    """Return rows with the CPU microseconds per action beyond the stages' computation.

    The busier rank counts, including messages.
    """
    model, rows = build_model(ACTIONS_CELL.shape).to(DTYPES[ACTIONS_CELL.dtype]), []
    for way in WAYS:
        contest, least = Contest(model, *way, comm), dict[str, float]()
        for _ in range(rounds):
            for name in ("work", "ours", "torch"):
                contest.forget_grads()
                dist.barrier()
                began = time.process_time()
                getattr(contest, name)()
                took = time.process_time() - began
                least[name] = min(least.get(name, took), took)
        actions = len(contest.schedule.programs[dist.get_rank()])
        found = torch.tensor(
            [1e6 * (least[name] - least["work"]) / actions for name in ("ours", "torch")]
        )
        dist.all_reduce(found, dist.ReduceOp.MAX)
        rows.append(
            f"| {way[0]} | {actions} | {' | '.join(f'{each:.0f}' for each in found.tolist())} |"
        )
    return rows


def measure_plan(stages: int) -> str:
    """Return a row with the CPU milliseconds to build and verify the schedule of `stages` ranks."""
    took = []
    for name, virtual in PLANNED:
        began = time.process_time()
        verify(make_schedule(name, stages, virtual, 64))
        took.append(f"{1e3 * (time.process_time() - began):.0f}")
    return f"| {stages} | {' | '.join(took)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", default="8x64-fp32,8x256-fp32,30m-fp32,30m-bf16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    init_distributed("gloo")
    take_a_core(dist.get_rank(), dist.get_world_size())
    keep_freed_memory()
    comm = Comm(CPU)
    lines = [
        "# Pipelines on two CPU ranks",
        "",
        f"Written by `benchmarks/pipeline_parallel.py` on {date.today()}, load "
        f"{os.getloadavg()[0]:.1f} at its start,",
        f"a core for each rank, {MANY} micro-batches of {CONTEXT} tokens.  Milliseconds of the "
        "forwards and",
        "backwards of a step, minima; the slower rank counts.  Bound: the heavier rank's work with "
        "the bubble.",
        "",
        "| cell | schedule | work | bound | ours | torch | ours / bound | torch / bound | torch / "
        "ours |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    panels: list[Panel] = []
    for name in given.cells.split(","):
        rows, drawn = measure(Cell.parse(name), given.rounds, comm)
        lines, panels = lines + rows, panels + drawn
    lines += [
        "",
        f"CPU microseconds of an action of our programs ({ACTIONS_CELL.name}): the time of a step "
        "without its stages'",
        "work and without waiting, divided by our number of actions; the least of the rounds.",
        "",
        "| schedule | actions | ours | torch |",
        "|---|---|---|---|",
        *measure_actions(4 * given.rounds, comm),
        "",
        "To make and prove the programs of 64 micro-batches (of 16,384 ranks: 8 x 16 x 128), CPU "
        "milliseconds of one",
        "process.",
        "",
        f"| pipeline ranks | {' | '.join(f'{name}, v={virtual}' for name, virtual in PLANNED)} |",
        f"|---{'|---' * len(PLANNED)}|",
        *(measure_plan(stages) for stages in (8, 16, 128)),
    ]
    if dist.get_rank() == 0:
        title = f"A step of two pipeline ranks takes {span_of(panels, 'ours')} of its bound"
        draw_panels(title, panels, given.out.with_suffix(".png"))
        given.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print("\n".join(lines))
    dist.barrier()


if __name__ == "__main__":
    main()
