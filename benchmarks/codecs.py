"""Measure the cost and the gain of codecs: kernels against a memory copy, and a reduction over a
limited link.

    python -m benchmarks.codecs                          # as root, a minute
    python -m benchmarks.codecs --rates 100mbit --rounds 3

Kernels run on one thread over a buffer larger than the caches, alternating with the copy. Their
times are medians of the thread's CPU time. The reduction is the library's own (`move` from partial
to sharded) on one flat gradient. It runs over gloo between two ranks on two hosts made of this
machine (`tests/hosts.py`), alternating with bf16. The slower rank counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist

from deepseek_zero.base.mesh import Mesh
from deepseek_zero.comm.collectives import Comm
from deepseek_zero.planner.layout import FlatLayout
from deepseek_zero.planner.spec import P, S, Spec
from deepseek_zero.precision.codecs import WORK_NUMEL, Blocks, Codec
from deepseek_zero.sharding.buffer import FlatBuffer, Pool
from deepseek_zero.sharding.comm_context import CommContext
from deepseek_zero.sharding.move import move
from tests.hosts import hosts, run_ranks

RESULTS = Path(__file__).parent / "results" / "codecs.md"
KERNEL_NUMEL, SUM_NUMEL, SCRATCH = 1 << 24, 1 << 23, WORK_NUMEL.cpu
CODECS: dict[str, Blocks] = {"int8": Blocks(8, 256), "int4": Blocks(4, 128)}
WIRES: dict[str, Codec | None] = {"bf16": None, **CODECS}
RATES, ROUNDS, PORT = ("100mbit", "1gbit"), 5, 29420
GOALS = {"int8 encode": "1.0", "int8 decode": "2.2", "int4 encode": "0.9", "int4 decode": "0.9"}
OF_A_COPY = {"int8 encode": "0.42", "int8 decode": "0.9"}


def kernels(rounds: int) -> dict[str, float]:
    """Return Gelem/s by kernel."""
    torch.set_num_threads(1)
    values, out, scratch = (
        torch.randn(KERNEL_NUMEL),
        torch.empty(KERNEL_NUMEL),
        torch.empty(SCRATCH),
    )
    ways: dict[str, Callable[[], object]] = {"copy of memory": lambda: out.copy_(values)}
    for name, codec in CODECS.items():
        message = torch.empty(codec.length(KERNEL_NUMEL), dtype=torch.uint8)
        codec.encode(values, message, scratch)
        for dtype in (torch.float32, torch.bfloat16):
            given, landed = (
                values.to(dtype),
                out if dtype == torch.float32 else torch.empty(KERNEL_NUMEL, dtype=dtype),
            )
            words = "" if dtype == torch.float32 else ", bf16"
            ways[f"{name} encode{words}"] = lambda c=codec, v=given, m=message: c.encode(
                v, m, scratch
            )
            ways[f"{name} decode{words}"] = lambda c=codec, o=landed, m=message: c.decode(
                m, 0, o.numel(), o, scratch
            )
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            began = time.thread_time()
            way()
            taken[name].append(time.thread_time() - began)
    return {
        name: KERNEL_NUMEL / statistics.median(seconds[1:]) / 1e9 for name, seconds in taken.items()
    }


def be_a_rank(rounds: int) -> None:
    """Reduce with every wire format in turn; rank 0 prints seconds and bytes."""
    dist.init_process_group("gloo", init_method="env://")
    torch.set_num_threads(1)
    comm = Comm(torch.device("cpu"), transport="gloo").lay_out(
        Mesh(dp_shard=2, rank=dist.get_rank())
    )
    pool = Pool(torch.device("cpu"), comm, scratch_numel=SCRATCH)
    context = CommContext(comm.shard, pool, divisor=2.0)
    layout = FlatLayout((), SUM_NUMEL // 2, 2)
    target = FlatBuffer.empty(layout, Spec(S, torch.bfloat16), pool.device)
    partial = torch.randn(SUM_NUMEL).bfloat16()
    taken: dict[str, list[float]] = {name: [] for name in WIRES}
    sent: dict[str, int] = {}
    for _ in range(rounds + 1):
        for name, wire in WIRES.items():
            source = FlatBuffer(layout, Spec(P, torch.bfloat16, wire=wire), partial)
            comm.meter.reset()
            comm.barrier("the start")
            began = time.perf_counter()
            move(source, target, context, name).wait()
            seconds = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
            sent[name] = comm.meter.sent_bytes["reduce_scatter"]
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            taken[name].append(float(seconds))
    if dist.get_rank() == 0:
        print(
            json.dumps({name: [statistics.median(taken[name][1:]), sent[name]] for name in WIRES}),
            flush=True,
        )
    dist.barrier()
    dist.destroy_process_group()


def over_a_link(rate: str, rounds: int) -> dict[str, list[float]]:
    """Return a rank's seconds and bytes by wire format, between two hosts."""
    with hosts(2, rate) as pair:
        said = run_ranks("benchmarks.codecs", pair, PORT, ["--rounds", rounds], timeout=600)
    found: dict[str, list[float]] = json.loads(said.splitlines()[-1])
    return found


def table(speeds: dict[str, float], sums: dict[str, dict[str, list[float]]]) -> str:
    """Return the page."""
    copied = speeds["copy of memory"]
    lines = [
        "# Codecs",
        "",
        f"Written by `benchmarks/codecs.py` on {date.today()}.  Load at the end: "
        f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.",
        "",
        f"Kernels on one thread, {KERNEL_NUMEL >> 20} Mi elements of fp32 if not stated "
        "otherwise, the median round:",
        "",
        "| kernel | Gelem/s | goal | of a copy | goal |",
        "|---|---|---|---|---|",
    ]
    for name, speed in speeds.items():
        goal, of_a_copy = GOALS.get(name, ""), OF_A_COPY.get(name, "")
        lines.append(f"| {name} | {speed:.2f} | {goal} | {speed / copied:.2f} | {of_a_copy} |")
    lines += [
        "",
        f"The sum of one bf16 gradient of {SUM_NUMEL >> 20} Mi elements between two ranks on two "
        "hosts, codec and sum included:",
        "",
        "| rate | wire | ms | bytes sent | bytes less | faster |",
        "|---|---|---|---|---|---|",
    ]
    for rate, found in sums.items():
        seconds, nbytes = found["bf16"]
        for name, (taken, sent) in found.items():
            shown = (
                f"{taken * 1e3:.0f} | {sent:,} | {nbytes / sent:.2f} x | **{seconds / taken:.2f} "
                "x**"
            )
            lines.append(f"| {rate} | {name} | {shown} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", default=",".join(RATES), help="in tc's words")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--as-rank", action="store_true", help="be one of the two ranks")
    given = parser.parse_args()
    if given.as_rank:
        be_a_rank(given.rounds)
        return
    speeds = kernels(given.rounds)
    found = {rate: over_a_link(rate, given.rounds) for rate in given.rates.split(",") if rate}
    given.out.write_text(table(speeds, found), encoding="utf-8")
    print(given.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
