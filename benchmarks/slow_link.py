"""Measure a step by the rate of the link between two hosts: plain, with codecs and hierarchical,
next to DDP and FSDP2.

    python -m benchmarks.slow_link                                        # as root, ten minutes
    python -m benchmarks.slow_link --rates 100mbit --ranks 4 --out slow_link_2x2.md
    python -m benchmarks.slow_link --systems "ours, stage 3" "ours, stage 3, int8 and int4"
    # genuine DeepSpeed, once deepspeed_env has installed it
    python -m benchmarks.slow_link --also deepspeed-3

The hosts are namespaces of this machine (`tests/hosts.py`); `tc tbf` limits their links. Each
system has separate processes, as in real training, and all take turns, one step each. A figure is
the median of the rounds for the slower rank. After the turns of all others a step starts with cold
caches, unlike in real training; `--in-a-row 2` avoids this. Systems with a separate environment
(`--also`, names of benchmarks/systems) run afterwards. Bytes are those that a host's interface
sends in a step, including headers; neither bytes nor CPU time are measured for `--also`. The floor
of a system is the larger of two times: a step without communication (with encoding, for int8 and
int4 codecs), and its bytes divided by the rate. Two reference steps without communication measure
the cost of the virtual link itself: meanwhile two threads send the bytes of our plain step, or of
our codecs, between the hosts from buffer to buffer. With two ranks per host four ranks share the
machine's two cores, so computation takes twice as long. Writes a table and a picture.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor

import deepseek_zero as dz
from benchmarks.cells import CONTEXT, SEQUENCES_PER_RANK, Cell
from benchmarks.launch import THREADS, deepspeed_environment
from benchmarks.model import Batch, Batches, build_model
from benchmarks.plot import PICTURE_WIDTH, colour_of, titled
from benchmarks.systems import SYSTEMS, ddp, floor, fsdp2
from benchmarks.systems.common import (
    Job,
    MakeModel,
    System,
    engine_settings,
    engine_step,
    seconds_of,
    take_a_core,
)
from benchmarks.worker import Task
from deepseek_zero.precision.codecs import Blocks, codec_scratch
from deepseek_zero.report.plots import INK, save_figure, style_axes
from tests.hosts import DEVICE, Host, Process, bits_per_second, hosts, sent_from_here

RESULTS = Path(__file__).parent / "results" / "slow_link.md"
CELL = Cell("30m", "bf16")
RATES = ("100mbit", "300mbit", "1gbit")
HOSTS, PORT, ROUNDS = 2, 29420, 3  # port of the systems in `--also`, below those of all teams
# ticks of the axis
SECONDS = [scale * step for scale in (0.1, 1, 10, 100) for step in (1, 2, 3, 5)]
WEIGHTS, GRADIENTS = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
DIFFERENCES = {"compression": {"weights": {"bits": 4}, "gradients": {"bits": 4}}}
ALL = {"compression": {"weights": {"bits": 8}, "gradients": {"bits": 4}}}
# gather again for backward
TWICE = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}

Build = Callable[[MakeModel, Job], System]
FLOOR, PLAIN, BOTH, PEER = "never talking", "ours, stage 3", "ours, stage 3, int8 and int4", "FSDP2"
# The lines of a picture over several rates, with their styles.
SHOWN = {
    FLOOR: ":",
    PLAIN: "-",
    "ours, stage 3 by host": "-.",
    BOTH: "--",
    PEER: "-",
    "deepspeed-3": "-",
}
READY = {"ready": True}
BARE, BARE_CODES = "never talking, our plain bytes pass", "never talking, our codes pass"
CODES = "never talking, our codes made"
OF_WEIGHTS, OF_GRADIENTS = Blocks(8, 256), Blocks(4, 128)  # the codecs of `BOTH`


def ours(stage: int, zero: dict[str, Any], **others: Any) -> Build:
    """Return a builder of this library at a stage. zero, others: additional settings."""

    def build(make_model: MakeModel, job: Job) -> System:
        settings = engine_settings(
            job, {"stage": stage, "stage3_param_persistence_threshold": 0, **zero}
        )
        engine, *_ = dz.initialize(
            model=make_model(), config={**settings, "steps_per_print": None, **others}
        )
        return System(engine_step(engine))

    return build


def step_with_transfer(per_element: float) -> Build:
    """Return a builder of a step without collectives during which the ranks exchange bytes.

    per_element: bytes per parameter in each direction.
    """

    def build(make_model: MakeModel, job: Job) -> System:
        alone, nbytes = floor.build(make_model, job), int(per_element * job.cell.shape.numel)
        port = int(os.environ["MASTER_PORT"]) + 1
        if job.rank:
            dist.barrier()
            line = socket.create_connection((os.environ["MASTER_ADDR"], port))
        else:
            with socket.create_server(("", port)) as listener:
                dist.barrier()
                line = listener.accept()[0]
        sent, came = bytearray(nbytes), bytearray(nbytes)

        def step(batches: list[Batch]) -> list[Tensor]:
            ways = [
                threading.Thread(target=line.sendall, args=(sent,)),
                threading.Thread(target=line.recv_into, args=(came, nbytes, socket.MSG_WAITALL)),
            ]
            for way in ways:
                way.start()
            losses = alone.step(batches)
            for way in ways:
                way.join()
            return losses

        return System(step)

    return build


def step_with_codecs(make_model: MakeModel, job: Job) -> System:
    """Build a step without communication that encodes and decodes with the codecs of `BOTH`.

    A rank encodes its shard of the weights and every shard of the gradients, and decodes every
    shard of both.
    """
    alone = floor.build(make_model, job)
    numel = job.cell.shape.numel // job.size // OF_WEIGHTS.granule * OF_WEIGHTS.granule
    slice_, gathered, summed = (
        torch.randn(numel).bfloat16(),
        torch.empty(numel).bfloat16(),
        torch.empty(numel),
    )
    room = codec_scratch(OF_WEIGHTS, numel, slice_.device)
    weights, gradients = (
        torch.empty(each.length(numel), dtype=each.dtype) for each in (OF_WEIGHTS, OF_GRADIENTS)
    )

    def step(batches: list[Batch]) -> list[Tensor]:
        losses = alone.step(batches)
        OF_WEIGHTS.encode(slice_, weights, room)
        for _ in range(job.size):
            OF_WEIGHTS.decode(weights, 0, numel, gathered, room)
            OF_GRADIENTS.encode(slice_, gradients, room)
            OF_GRADIENTS.decode(gradients, 0, numel, summed, room)
        return losses

    return System(step)


def systems(each: int) -> dict[str, Build]:
    """Return the builders by name. each: ranks per host."""
    codes = (OF_WEIGHTS.length(1 << 20) + OF_GRADIENTS.length(1 << 20)) / 2**20
    # Bytes that a rank sends to the other one: half of the weights once and half of the gradients
    # once.
    bare = {
        BARE: step_with_transfer((2 + 2) / 2),
        BARE_CODES: step_with_transfer(codes / 2),
        CODES: step_with_codecs,
    }
    return {
        FLOOR: floor.build,
        **(bare if each == 1 else {}),
        PLAIN: ours(3, {}, ranks_per_host=1) if each > 1 else ours(3, {}),
        **(by_host(each) if each > 1 else {}),
        "ours, stage 3, gloo": ours(3, {}, transport="fastest"),
        "ours, stage 3, int8 weights": ours(3, WEIGHTS),
        "ours, stage 3, int4 gradients": ours(3, GRADIENTS),
        BOTH: ours(3, ALL),
        "ours, stage 3, int8 and int4, gloo": ours(3, ALL, transport="fastest"),
        "ours, stage 2": ours(2, {}),
        "ours, stage 2, int4 and differences": ours(2, DIFFERENCES),
        "DDP": ddp.build,
        PEER: partial(fsdp2.build, reshard_after_forward=True),
    }


def by_host(each: int) -> dict[str, Build]:
    """Return systems for several ranks per host.

    They reduce hierarchically or keep a second copy of the weights within the host (hpZ).
    """
    second_copy = {**TWICE, "zero_hpz_partition_size": each}
    return {
        "ours, stage 3 by host": ours(3, {}),
        "ours, stage 3 by host, gathered twice": ours(3, TWICE),
        "ours, stage 3 by host, hpZ": ours(3, second_copy),
        "ours, stage 3 by host, hpZ, int8 and int4": ours(3, {**second_copy, **ALL}),
    }


@dataclass(frozen=True)
class Turn:
    """A measured step.

    Attributes:
        seconds: Seconds of the slowest rank.
        busy: CPU seconds of this rank.
        sent: Bytes that left the host.
    """

    seconds: float
    busy: float
    sent: int


def be_a_rank(given: argparse.Namespace) -> None:
    """Build the named system, report readiness, and write a `Turn` for every line that arrives."""
    dz.init_distributed()
    job = Job(given.cell, dist.get_rank(), dist.get_world_size())
    take_a_core(job.rank, job.size)
    batches = Batches(job.cell, job.size, job.rank, job.size, given.tokens)
    (name,) = given.systems
    system = systems(given.ranks // HOSTS)[name](lambda: build_model(job.cell.shape), job)
    print(json.dumps(READY), flush=True)
    for number, _ in enumerate(sys.stdin):
        micro_batches = batches.of_step(number)
        for _ in range(given.in_a_row - 1):
            system.step(micro_batches)
        before, computed = sent_from_here(), time.process_time()
        took = torch.tensor(seconds_of(partial(system.step, micro_batches)), dtype=torch.float64)
        computed = time.process_time() - computed
        dist.all_reduce(took, dist.ReduceOp.MAX)
        print(
            json.dumps(asdict(Turn(float(took), computed, sent_from_here() - before))), flush=True
        )


class Team:
    """The ranks of one system, which wait between their turns.

    They are still starting after construction.
    """

    def __init__(
        self, name: str, port: int, pair: Sequence[Host], given: argparse.Namespace
    ) -> None:
        each = given.ranks // HOSTS
        world = {"WORLD_SIZE": given.ranks, "LOCAL_WORLD_SIZE": each}
        world |= {"MASTER_ADDR": pair[0].address, "MASTER_PORT": port}
        command = [
            sys.executable,
            "-m",
            "benchmarks.slow_link",
            "--as-rank",
            *map(str, given.words),
            "--systems",
            name,
        ]
        self._ranks = []
        for rank in range(given.ranks):
            here = {**world, "RANK": rank, "LOCAL_RANK": rank % each}
            words = {key: str(value) for key, value in here.items()}
            self._ranks.append(pair[rank // each].run(command, words, stdin=subprocess.PIPE))

    def turn(self) -> Turn:
        """Run the steps of a turn; return the measurements of rank 0 in the last one."""
        for rank in self._ranks:
            print(file=rank.stdin, flush=True)
        return Turn(**self.said()[0])

    def said(self) -> list[Any]:
        """Wait for the next line of every rank; raise SystemExit with a rank's output if it has
        ended.
        """
        return [self._next(rank) for rank in self._ranks]

    def end(self) -> None:
        """Free memory and cores for later systems."""
        for rank in self._ranks:
            rank.kill()
            rank.communicate()

    def _next(self, rank: Process) -> Any:
        others = []
        assert rank.stdout is not None
        for line in rank.stdout:
            if line.startswith("{"):
                return json.loads(line)
            others.append(line)
        raise SystemExit("".join(others))


@dataclass
class Found:
    """The results at one rate.

    Attributes:
        seconds: Median seconds of a step by system.
        busy: CPU seconds of rank 0, if measured.
        sent: Bytes that left the first host in a step, if measured.
    """

    rate: str
    seconds: dict[str, float]
    busy: dict[str, float]
    sent: dict[str, int]


def run(rate: str, given: argparse.Namespace) -> Found:
    with hosts(HOSTS, rate) as pair:
        names = given.systems or systems(given.ranks // HOSTS)
        teams = {
            name: Team(name, PORT + 2 * number, pair, given) for number, name in enumerate(names, 1)
        }
        for team in teams.values():
            assert team.said() == [READY] * given.ranks
        turns: dict[str, list[Turn]] = {name: [] for name in teams}
        for number in range(given.rounds + 1):
            for name, team in teams.items():
                turn = team.turn()
                if number:  # the first round opens connections and records schedules
                    turns[name].append(turn)
        sys.stderr.write(f"{rate}: {given.rounds} rounds of {len(teams)} systems\n")
        found = Found(rate, {}, {}, {})
        for name, each in turns.items():
            found.seconds[name] = statistics.median(turn.seconds for turn in each)
            found.busy[name] = statistics.median(turn.busy for turn in each)
            found.sent[name] = each[-1].sent
        for team in teams.values():
            team.end()
        for system in given.also:
            found.seconds[system] = seconds_of_its_own(system, pair, given)
        return found


def seconds_of_its_own(system: str, pair: Sequence[Host], given: argparse.Namespace) -> float:
    """Run a system of benchmarks/systems in its separate environment.

    Returns the median seconds of a step on the slowest rank. Raises SystemExit with the output of a
    rank that failed.
    """
    entry, ranks, each, started = SYSTEMS[system], given.ranks, given.ranks // HOSTS, []
    world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(each), "GLOO_SOCKET_IFNAME": DEVICE}
    world |= {"MASTER_ADDR": pair[0].address, "MASTER_PORT": str(PORT)}
    world |= THREADS | (deepspeed_environment() if entry.module == "deepspeed" else {})
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="slow-link-") as folder:
        outs = [Path(folder, f"{rank}.json") for rank in range(ranks)]
        for rank, out in enumerate(outs):
            core = cores[rank] if ranks <= len(cores) else None
            task = Task(
                given.cell.name,
                system,
                "time",
                given.rounds,
                rank,
                ranks,
                core,
                str(out),
                given.tokens,
            )
            here = {**world, "RANK": str(rank), "LOCAL_RANK": str(rank % each)}
            started.append(
                pair[rank // each].run(
                    [entry.python, "-m", "benchmarks.worker", task.as_json()], here
                )
            )
        said = [process.communicate()[0] for process in started]
        # A rank that aborts during exit has already measured.
        if not all(out.exists() for out in outs):
            raise SystemExit("\n".join(said))
        steps = [json.loads(out.read_text())["steps"] for out in outs]
    return statistics.median(map(max, zip(*steps, strict=True)))


def table(found: list[Found], given: argparse.Namespace) -> str:
    """Return the page."""
    shape, tokens = given.cell.shape, SEQUENCES_PER_RANK * given.tokens
    lines = [
        "# A step over the rate of the link",
        "",
        f"Written by `benchmarks/slow_link.py` on {date.today()}: {given.cell.name} "
        f"({shape.numel / 1e6:.1f}M",
        f"parameters), {given.ranks} ranks on {HOSTS} hosts, {tokens} tokens each, {given.rounds} "
        "rounds.  The last step",
        f"of each turn is measured; steps in a turn: {given.in_a_row}.  Load at the end: "
        f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.  Milliseconds of a step and of a "
        "rank's CPU",
        "in it, medians; megabytes that leave a host in a step; a step over its floor; times "
        "faster than our plain stage",
        f"3, and {PEER}.  The floor is a step without communication (for both codes, a step that "
        "also makes them), or the",
        "time of the bytes at the rate, whichever is longer.",
    ]
    for each in found:
        lines += [
            "",
            f"## {each.rate}",
            "",
            f"| system | step | CPU | sent | over its floor | faster than plain | than {PEER} |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, seconds in each.seconds.items():
            sent, over, faster = "-", "-", ["-", "-"]
            busy = f"{1e3 * each.busy[name]:.0f}" if name in each.busy else "-"
            if name in each.sent:
                sent = f"{each.sent[name] / 1e6:.1f}"
                line = each.sent[name] * 8 / bits_per_second(each.rate)
                computed = each.seconds.get(FLOOR, 0.0)
                if name.startswith(BOTH):
                    computed = each.seconds.get(CODES, computed)
                over = f"{seconds / max(computed, line):.2f}"
            for place, other in enumerate((PLAIN, PEER)):
                if other in each.seconds:
                    faster[place] = f"{each.seconds[other] / seconds:.2f}"
            lines.append(
                f"| {name} | {1e3 * seconds:.0f} | {busy} | {sent} | {over} | {' | '.join(faster)} "
                "|"
            )
    return "\n".join([*lines, ""])


def draw(found: list[Found], path: Path) -> None:
    """Draw the seconds of a step over the rate; for one rate, a bar per system.

    A plot over several rates has only the systems in `SHOWN`.
    """
    title = "Seconds of a step over the rate of the link"
    gains = [
        each.seconds[PLAIN] / each.seconds[BOTH]
        for each in found
        if {PLAIN, BOTH} <= {*each.seconds}
    ]
    if gains and max(gains) < 1.05:
        title = "int8 and int4 codes make a step no faster"
    elif gains:
        title = f"int8 and int4 codes make a step up to {max(gains):.1f} times as fast"
    if len(found) == 1:
        (only,) = found
        height = 1.1 + 0.27 * len(only.seconds)
        figure = Figure(figsize=(PICTURE_WIDTH, height), dpi=160, layout="constrained")
        axes = figure.subplots()
        names = [_label(name) for name in only.seconds]
        colours = [colour_of(name) for name in names]
        bars = axes.barh(names, list(only.seconds.values()), 0.62, color=colours)
        axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=3, color=INK)
        axes.margins(x=0.12)
        axes.invert_yaxis()
        axes.set_xlabel(f"seconds of a step, link of {only.rate}/s", fontsize=8.5)
        style_axes(axes, along="y", ticks=0)
    else:
        figure = Figure(figsize=(PICTURE_WIDTH, 3.8), dpi=160, layout="constrained")
        axes = figure.subplots()
        found = sorted(found, key=lambda each: bits_per_second(each.rate))
        rates = [bits_per_second(each.rate) / 1e6 for each in found]
        for name, style in SHOWN.items():
            if name not in found[0].seconds:
                continue
            line = [each.seconds[name] for each in found]
            colour = colour_of(name)
            axes.plot(
                rates, line, style, color=colour, marker="o", markersize=4, label=_label(name)
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.set_yticks(SECONDS, [f"{seconds:g}" for seconds in SECONDS])
        axes.minorticks_off()
        drawn = [line.get_ydata() for line in axes.lines]
        axes.set_ylim(min(map(min, drawn)) / 1.15, max(map(max, drawn)) * 1.15)
        axes.set_xlabel("rate of the link, Mbit/s", fontsize=8.5)
        axes.set_ylabel("seconds of a step", fontsize=8.5)
        axes.legend(fontsize=8.5, frameon=False, labelcolor=INK, handlelength=4)
        style_axes(axes)
    axes.tick_params(labelsize=8.5)
    titled(figure, title)
    save_figure(figure, path)


def _label(system: str) -> str:
    words = {
        "ours": "this library",
        BARE: "no communication, our bytes sent",
        BARE_CODES: "no communication, our codes sent",
        CODES: "no communication, our codes computed",
        FLOOR: "no communication",
        "deepspeed-3": "DeepSpeed, stage 3",
    }
    if system in words:
        return words[system]
    return system.replace("ours", words["ours"])


def redraw(page: Path) -> None:
    """Draw the picture of a page again from its tables, without a measurement."""
    found: list[Found] = []
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("## "):
            found.append(Found(line.removeprefix("## "), {}, {}, {}))
        elif found and len(cells) > 1 and cells[1].isdecimal():
            found[-1].seconds[cells[0]] = int(cells[1]) / 1e3
    draw(found, page.with_suffix(".png"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cell", type=Cell.parse, default=CELL, help="model and number format; default %(default)s"
    )
    parser.add_argument(
        "--tokens", type=int, default=CONTEXT, help="of a sequence; default %(default)s"
    )
    parser.add_argument("--rates", default=",".join(RATES), help="in tc's words")
    parser.add_argument("--ranks", type=int, default=HOSTS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--in-a-row", type=int, default=1, help="steps in a turn, of which the last is measured"
    )
    parser.add_argument(
        "--systems", nargs="*", default=[], help="names of the table's first column; default all"
    )
    parser.add_argument(
        "--also", nargs="*", choices=SYSTEMS, default=[], help="in processes of their own"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--as-rank", action="store_true", help="be one of the ranks")
    parser.add_argument(
        "--redraw", action="store_true", help="draw the picture of --out from its table"
    )
    given = parser.parse_args()
    if given.redraw:
        redraw(given.out)
        return
    if given.as_rank:
        be_a_rank(given)
        return
    if missing := [system for system in given.also if not SYSTEMS[system].is_installed]:
        parser.error(f"not installed (benchmarks/deepspeed_env installs it): {', '.join(missing)}")
    if unknown := set(given.systems) - set(systems(given.ranks // HOSTS)):
        parser.error(f"no such systems: {', '.join(sorted(unknown))}")
    given.words = ["--cell", given.cell.name, "--tokens", given.tokens, "--ranks", given.ranks]
    given.words += ["--in-a-row", given.in_a_row]
    found = [run(rate, given) for rate in given.rates.split(",")]
    given.out.write_text(table(found, given), encoding="utf-8")
    draw(found, given.out.with_suffix(".png"))
    print(given.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
