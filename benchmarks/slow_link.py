"""A step over the rate of the link between two hosts: plain, codes, sums host by host, beside DDP and FSDP2.

    python -m benchmarks.slow_link                                        # as root, ten minutes
    python -m benchmarks.slow_link --rates 100mbit --ranks 4 --out slow_link_2x2.md
    python -m benchmarks.slow_link --also deepspeed-3     # genuine DeepSpeed, once deepspeed_env has installed it

The hosts are namespaces of this machine (`tests/hosts.py`); `tc tbf` limits their links.  All systems live in the same
processes and take turns, a step each; a figure is the median of the rounds, of the slower rank.  What needs an
environment of its own (`--also`, names of benchmarks/systems) comes afterwards, in processes of its own.  Bytes are
those that leave a host in a step, by its interface's counter, headers and all; nobody counts them for what comes
afterwards.  The floor is the computation of a step that never talks, or the bytes of the plain step of stage 3 over the
rate, whichever is longer.  With two ranks a host these are a machine's two cores shared by four, so that computation
counts twice.  Leaves a table and a picture.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import deepseek_zero as dz
from benchmarks.cells import ADAMW, SEQUENCES_PER_RANK, Cell
from benchmarks.launch import THREADS, deepspeed_environment
from benchmarks.model import Batch, Batches, build_model
from benchmarks.systems import SYSTEMS
from benchmarks.worker import Task
from deepseek_zero.report.plots import INK, save_figure, style_axes
from tests.hosts import DEVICE, Host, bits_per_second, hosts, run_ranks, sent_from_here

RESULTS = Path(__file__).parent / "results" / "slow_link.md"
CELL = Cell("8x256", "fp32")
RATES = ("100mbit", "300mbit", "1gbit")
HOSTS, PORT, ROUNDS = 2, 29420, 3
WEIGHTS, GRADIENTS = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
DIFFERENCES = {"compression": {"weights": {"bits": 4}, "gradients": {"bits": 4}}}
ALL = {"compression": {"weights": {"bits": 8}, "gradients": {"bits": 4}}}
TWICE = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}  # gathered again for backward

Step = Callable[[list[Batch]], None]


def ours(stage: int, zero: dict[str, Any], **others: Any) -> Step:
    config = {
        "train_micro_batch_size_per_gpu": SEQUENCES_PER_RANK,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "steps_per_print": None,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        **others,
    }
    engine = dz.initialize(model=build_model(CELL.shape), config=config)[0]

    def step(batches: list[Batch]) -> None:
        for tokens, targets in batches:
            engine.backward(engine(tokens, targets))
            engine.step()

    return step


def torchs(wrap: Callable[[nn.Module], nn.Module]) -> Step:
    model = wrap(build_model(CELL.shape))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(batches: list[Batch]) -> None:
        for tokens, targets in batches:
            model(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def fsdp2(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def systems(each: int) -> dict[str, Step]:
    """By name; each: ranks on a host."""
    found = {
        "never talking": torchs(lambda model: model),
        "ours, stage 3": ours(3, {}, ranks_per_host=1) if each > 1 else ours(3, {}),
        **(by_host(each) if each > 1 else {}),
        "ours, stage 3, own sockets": ours(3, {}, transport="tcp"),
        "ours, stage 3, int8 weights": ours(3, WEIGHTS),
        "ours, stage 3, int8 and int4": ours(3, ALL),
        "ours, stage 2": ours(2, {}),
        "ours, stage 2, int4 and differences": ours(2, DIFFERENCES),
        "DDP": torchs(DistributedDataParallel),
        "FSDP2": torchs(fsdp2),
    }
    return found


def by_host(each: int) -> dict[str, Step]:
    """What several ranks on a host have: sums by host, and a second copy of the weights among them (hpZ)."""
    second_copy = {**TWICE, "zero_hpz_partition_size": each}
    return {
        "ours, stage 3 by host": ours(3, {}),
        "ours, stage 3 by host, gathered twice": ours(3, TWICE),
        "ours, stage 3 by host, hpZ": ours(3, second_copy),
        "ours, stage 3 by host, hpZ, int8 and int4": ours(3, {**second_copy, **ALL}),
    }


def measure(rounds: int, each: int) -> None:
    """Print, on rank 0, by system the milliseconds of its steps, and the bytes that left this host in one."""
    torch.set_num_threads(1)
    dz.init_distributed()
    rank, size = dist.get_rank(), dist.get_world_size()
    if size <= (cores := len(os.sched_getaffinity(0))):
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % cores]})
    batches, running = Batches(CELL, size, rank, size), systems(each)
    seconds: dict[str, list[float]] = {name: [] for name in running}
    sent: dict[str, int] = {}
    for number in range(rounds + 1):  # the first opens connections and agrees on orders
        micro_batches = batches.of_step(number)
        for name, step in running.items():
            dist.barrier()
            before, began = sent_from_here(), time.perf_counter()
            step(micro_batches)
            took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            sent[name] = sent_from_here() - before
            if number:
                seconds[name].append(float(took))
    if rank == 0:
        print(json.dumps([{name: statistics.median(each) for name, each in seconds.items()}, sent]), flush=True)
    dist.barrier()


@dataclass
class Found:
    """Of one rate: by system, the median seconds of a step, and the bytes that left the first host in one, where they
    were counted.
    """

    rate: str
    seconds: dict[str, float]
    sent: dict[str, int]


def run(rate: str, ranks: int, rounds: int, also: Sequence[str]) -> Found:
    with hosts(HOSTS, rate) as pair:
        arguments = ["--rounds", rounds, "--ranks", ranks]
        said = run_ranks("benchmarks.slow_link", pair, PORT, arguments, each=ranks // HOSTS)
        line = next(line for line in said.splitlines() if line.startswith("[{"))
        found = Found(rate, *json.loads(line))
        for system in also:
            found.seconds[system] = seconds_of_its_own(system, pair, ranks, rounds)
    return found


def seconds_of_its_own(system: str, pair: Sequence[Host], ranks: int, rounds: int) -> float:
    """Run a system of benchmarks/systems in its own environment; return the median seconds of a step, of the slowest
    rank.  SystemExit with what a rank said that failed.
    """
    entry, each, started = SYSTEMS[system], ranks // HOSTS, []
    world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(each), "GLOO_SOCKET_IFNAME": DEVICE}
    world |= {"MASTER_ADDR": pair[0].address, "MASTER_PORT": str(PORT + 1)}
    world |= THREADS | (deepspeed_environment() if entry.module == "deepspeed" else {})
    with tempfile.TemporaryDirectory(prefix="slow-link-") as folder:
        outs = [Path(folder, f"{rank}.json") for rank in range(ranks)]
        for rank, out in enumerate(outs):
            task = Task(CELL.name, system, "time", rounds, rank, ranks, None, str(out))
            here = {**world, "RANK": str(rank), "LOCAL_RANK": str(rank % each)}
            started.append(pair[rank // each].run([entry.python, "-m", "benchmarks.worker", task.as_json()], here))
        said = [process.communicate()[0] for process in started]
        if any(process.returncode for process in started):
            raise SystemExit("\n".join(said))
        steps = [json.loads(out.read_text())["steps"] for out in outs]
    return statistics.median(map(max, zip(*steps, strict=True)))


def table(found: list[Found], ranks: int) -> str:
    """The page."""
    lines = [
        "# A step over the rate of the link",
        "",
        f"Written by `benchmarks/slow_link.py` on {date.today()}: {CELL.name} ({CELL.shape.numel / 1e6:.1f}M",
        f"parameters), {ranks} ranks on {HOSTS} hosts.  Milliseconds of a step, medians; megabytes that left a host in",
        "one; times faster than FSDP2.  The floor: computation alone, or stage 3's plain bytes over the rate.",
    ]
    for each in found:
        floor = max(each.seconds["never talking"], each.sent["ours, stage 3"] * 8 / bits_per_second(each.rate))
        lines += [
            "",
            f"## {each.rate}",
            "",
            "| system | step | sent | over the floor | over FSDP2 |",
            "|---|---|---|---|---|",
        ]
        for name, seconds in each.seconds.items():
            faster = each.seconds["FSDP2"] / seconds
            sent = f"{each.sent[name] / 1e6:.1f}" if name in each.sent else "-"
            lines.append(f"| {name} | {1e3 * seconds:.0f} | {sent} | {seconds / floor:.2f} | {faster:.2f} |")
    return "\n".join([*lines, ""])


def draw(found: list[Found], path: Path) -> None:
    """Seconds of a step over the rate, both in powers."""
    figure = Figure(figsize=(7.2, 4.4), dpi=160, layout="constrained")
    axes = figure.subplots()
    rates = [bits_per_second(each.rate) / 1e6 for each in found]
    for name in found[0].seconds:
        is_peer, is_floor = not name.startswith("ours"), name == "never talking"
        style = ":" if is_floor else "--" if is_peer else "-"
        axes.plot(rates, [each.seconds[name] for each in found], style, marker="o", markersize=3, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("Mbit/s of the link")
    axes.set_title(
        "Seconds of a step over the rate of the link", loc="left", color=INK, fontsize=10.5, fontweight="bold"
    )
    axes.legend(fontsize=7.5, frameon=False)
    style_axes(axes, along="x")
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default=",".join(RATES), help="in tc's words")
    parser.add_argument("--ranks", type=int, default=HOSTS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--also", nargs="*", choices=SYSTEMS, default=[], help="in processes of their own")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--as-rank", action="store_true", help="be one of the ranks")
    given = parser.parse_args()
    if given.as_rank:
        measure(given.rounds, given.ranks // HOSTS)
        return
    if missing := [system for system in given.also if not SYSTEMS[system].is_installed]:
        parser.error(f"not installed (benchmarks/deepspeed_env installs it): {', '.join(missing)}")
    found = [run(rate, given.ranks, given.rounds, given.also) for rate in given.rates.split(",")]
    given.out.write_text(table(found, given.ranks), encoding="utf-8")
    draw(found, given.out.with_suffix(".png"))
    print(given.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
