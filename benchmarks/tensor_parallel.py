"""Measure tensor parallelism on two ranks: a step over half of one process's, next to DTensor's,
and a sum over one addition.

    deepseek-zero run --nproc 2 benchmarks/tensor_parallel.py        # five minutes
    deepseek-zero run --nproc 2 benchmarks/tensor_parallel.py --cells 10m-fp32 --out /tmp/tp.md

One core per rank, everything interleaved in one run, minima of the rounds. `half` is half of the
whole model's step. `mute` is the step of ranks that compute their parts and never communicate; it
contains replicated work (norms, residuals) twice. `tokens` is ours with activations sharded over
tokens in those layers (tensor_parallel.sequence), which computes them once. Needs transformers and
matplotlib. Writes a table and a picture.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a file by a launcher

from benchmarks.plot import Panel, draw_panels, span_of
from benchmarks.systems.common import seconds_of, take_a_core
from deepseek_zero import init_distributed
from deepseek_zero.base.memory import keep_freed_memory
from deepseek_zero.comm.collectives import Comm
from deepseek_zero.parallel.apply import parallelize
from deepseek_zero.parallel.group import TensorGroup
from deepseek_zero.parallel.plans import ParallelSettings

RESULTS = Path(__file__).parent / "results" / "tensor_parallel.md"
CPU = torch.device("cpu")
SIZES = {"10m": (256, 8, 4, 688, 1024, 256), "125m": (768, 12, 12, 2048, 32000, 1024)}
GOALS = {"fp32": 1.10, "bf16": 1.20}  # for 125m
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class _Mute:
    """The result of a sum that is only this rank's part."""

    def __init__(self, part: Tensor) -> None:
        self.part = part

    def wait(self) -> Tensor:
        return self.part


class MuteGroup(TensorGroup):
    """A group without communication, to time the computation of a rank."""

    def take(self, shape: object, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)  # type: ignore[call-overload, no-any-return]

    def sum(self, part: Tensor, what: str) -> _Mute:  # type: ignore[override]
        return _Mute(part)

    def all_gather(self, part: Tensor, widths: object, what: str) -> list[Tensor]:
        return [part] * self.size


def build(size: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    """Return a Llama of a size and the tokens of a step."""
    width, layers, heads, hidden, words, tokens = SIZES[size]
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=words,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=2048,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).to(dtype), torch.randint(words, (1, tokens))


def systems(size: str, dtype: torch.dtype) -> tuple[dict[str, nn.Module], Tensor, Comm]:
    """Return the systems by name.

    These are the whole model, ours, ours with sharded tokens, ours without communication, and
    DTensor's.
    """
    whole, ids = build(size, dtype)
    comm = Comm(CPU)
    found = {
        "whole": whole,
        "ours": copy.deepcopy(whole),
        "tokens": copy.deepcopy(whole),
        "mute": copy.deepcopy(whole),
        "dtensor": copy.deepcopy(whole),
    }
    parallelize(found["ours"], comm)
    parallelize(found["tokens"], comm, ParallelSettings(sequence=True))
    parallelize(found["mute"], comm)
    found["mute"].lm_head.axis.group = MuteGroup(comm)  # type: ignore[union-attr, assignment]
    mesh = init_device_mesh("cpu", (2,))
    columns = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
    )
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for block in found["dtensor"].model.layers:  # type: ignore[union-attr]
        parallelize_module(block, mesh, plan)
    return found, ids, comm


def measure_steps(cell: str, rounds: int) -> tuple[str, Panel]:
    """Return a row with the best milliseconds of a forward and backward, and its picture."""
    size, dtype = cell.split("-")
    models, ids, comm = systems(size, DTYPES[dtype])
    best: dict[str, float] = {}
    sent = 0
    for number in range(rounds + 1):  # the first round is not counted
        for name, model in models.items():
            for each in model.parameters():
                each.grad = None
            before = comm.meter.sent_bytes["tp"]
            took = seconds_of(lambda model=model: model(input_ids=ids, labels=ids).loss.backward())  # type: ignore[misc]
            sent = comm.meter.sent_bytes["tp"] - before if name == "ours" else sent
            if number:
                best[name] = min(best.get(name, took), took)
    times = torch.tensor([best[name] for name in ("whole", "mute", "ours", "tokens", "dtensor")])
    dist.all_reduce(times, dist.ReduceOp.MAX)
    milliseconds = [1e3 * each for each in times.tolist()]
    whole, mute, ours, tokens, dtensor = milliseconds
    ratios = (
        f"{2 * ours / whole:.2f} | {2 * tokens / whole:.2f} | {ours / mute:.2f} | "
        f"{dtensor / ours:.2f}"
    )
    row = (
        f"| {cell} | {' | '.join(f'{each:.0f}' for each in milliseconds)} | {ratios} | "
        f"{sent / 1e6:.1f} |"
    )
    over = [
        ("ours", ours),
        ("ours, sharded tokens", tokens),
        ("no communication", mute),
        ("DTensor", dtensor),
    ]
    goal = GOALS[dtype] if size == "125m" else None
    return row, Panel(
        cell.name,
        [(name, 2 * ms / whole) for name, ms in over],
        goal,
        "step time; 1.0: half of one process's",
    )


def measure_sums(repeats: int = 300) -> tuple[list[str], Panel]:
    """Return rows and a picture with the microseconds of a sum over ranks.

    They are next to an addition of two such tensors in this process, and an addition to data that
    the other rank has just written, which is the minimum work of a sum.
    """
    group, rows, bars = TensorGroup(Comm(CPU)), [], []
    for nbytes in (1 << 16, 3 << 20):
        for name, dtype in DTYPES.items():
            numel = nbytes // dtype.itemsize
            source, other, out = (torch.randn(numel).to(dtype) for _ in range(3))
            took = dict[str, list[float]](sum=[], own=[], others=[])

            def add(
                received: Sequence[Tensor], which: str, out: Tensor = out, took: Any = took
            ) -> None:
                began = time.perf_counter()
                torch.add(*received, out=out)
                took[which].append(time.perf_counter() - began)

            for _ in range(repeats):
                part = group.take((numel,), dtype).copy_(source)
                took["sum"].append(seconds_of(lambda part=part: group.sum(part, "a sum").wait()))  # type: ignore[misc]
                add((source, other), "own")
                part = group.take((numel,), dtype).copy_(source)
                dist.barrier()
                group.comm.exchange(
                    [part] * 2, [None] * 2, "reduce", "others", lambda got: add(got, "others")
                ).wait()
                group.give_back(part)
            median = 1e6 * sorted(took["sum"])[repeats // 2]
            least, own, others = (1e6 * min(took[which]) for which in ("sum", "own", "others"))
            ratios = f"{least / (own + 20):.2f} | {least / (others + 20):.2f}"
            size = f"{nbytes >> 10} KiB {name}"
            rows.append(
                f"| {size} | {least:.0f} | {median:.0f} | {own:.0f} | {others:.0f} | {ratios} |"
            )
            bars += [
                (f"{size}, over its own", least / (own + 20)),
                ("over the other's", least / (others + 20)),
            ]
    return rows, Panel(
        "a sum over two ranks", bars, 1.5, "time; 1.0: one addition in a rank + 20 μs"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", default="10m-fp32,10m-bf16,125m-fp32,125m-bf16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    init_distributed("gloo")
    take_a_core(dist.get_rank(), dist.get_world_size())
    keep_freed_memory()
    steps = [measure_steps(cell, given.rounds) for cell in given.cells.split(",")]
    sums, summed = measure_sums()
    lines = [
        "# Tensor parallelism on two CPU ranks",
        "",
        f"Written by `benchmarks/tensor_parallel.py` on {date.today()}, load "
        f"{os.getloadavg()[0]:.1f} at its start,",
        "a core for each rank. Milliseconds of a forward and backward, minima; the slower rank "
        "counts.",
        "",
        "| cell | whole | mute | ours | tokens | DTensor | ours / half | tokens / half | ours / "
        "mute | DTensor / ours | MB sent |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *(row for row, _ in steps),
        "",
        "A sum over both ranks, in microseconds, compared with one addition of two such tensors "
        "within a rank, and with an",
        "addition of a tensor that the other rank has just written.",
        "",
        "| sum | least | median | own | other's | least / (own + 20) | least / (other's + 20) |",
        "|---|---|---|---|---|---|---|",
        *sums,
    ]
    if dist.get_rank() == 0:
        given.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print("\n".join(lines))
        panels = [*(panel for _, panel in steps), summed]
        title = f"A tensor-parallel step takes {span_of(panels[:-1], 'ours')} of half a process's"
        draw_panels(title, panels, given.out.with_suffix(".png"))
    dist.barrier()


if __name__ == "__main__":
    main()
