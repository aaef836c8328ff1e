"""Cut the connection of two hosts: when does each system report it, and which host does it name?

    python -m benchmarks.cut                                # as root, six minutes
    python -m benchmarks.cut --rounds 1 --timeout 20 --out /tmp/cut.md    # a look

Two hosts of namespaces (`tests/hosts.py`) with one rank each train a small model over gloo. After
five steps the switch drops every packet of one host without any error. DDP and FSDP2 notice a cut
only by gloo's timeout, 30 minutes by default; here it is `--timeout`, to save time. This library
detects the cut by heartbeats and waits for a busy rank as long as necessary.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import deepseek_zero as dz
from deepseek_zero.base.launch import DEAD_AFTER
from tests.hosts import Host, Process, free_port, hosts

RESULTS = Path(__file__).parent / "results" / "cut.md"
WIDTH, LAYERS, STEPS = 64, 3, 5
FAREWELL_SECONDS = 60.0  # more than a system's own limit
Step = Callable[[Tensor], None]


def ours(model: nn.Module, timeout: timedelta) -> Step:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    engine: Any = dz.initialize(model=model, config=config | {"zero_optimization": {"stage": 3}})[0]

    def step(batch: Tensor) -> None:
        engine.backward(engine(batch).sum())
        engine.step()

    return step


def ddp(model: nn.Module, timeout: timedelta) -> Step:
    dist.init_process_group("gloo", timeout=timeout)
    return _plain(DistributedDataParallel(model))


def fsdp2(model: nn.Module, timeout: timedelta) -> Step:
    dist.init_process_group("gloo", timeout=timeout)
    mesh = init_device_mesh("cpu", (2,))
    for each in (*model.children(), model):
        fully_shard(each, mesh=mesh)
    return _plain(model)


def _plain(model: nn.Module) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Tensor) -> None:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


SYSTEMS = {"deepseek_zero": ours, "DDP": ddp, "FSDP2": fsdp2}


class End(NamedTuple):
    """The report of one host's rank. after: seconds since the cut; None if there was no report."""

    after: float | None
    words: str


def be_a_rank(name: str, timeout: float) -> None:
    """Train until an error occurs and print it."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    said = ""
    try:
        step = SYSTEMS[name](model, timedelta(seconds=timeout))
        for number in range(sys.maxsize):
            step(torch.ones(4, WIDTH))
            if number == STEPS:
                sys.stdout.write("ready\n")
                sys.stdout.flush()
            time.sleep(0.02)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    sys.stdout.write(f"end {time.monotonic()} {said.splitlines()[0][:300]}\n")
    sys.stdout.flush()
    os._exit(1)  # threads that wait for the other host must not delay the exit


def cut_once(name: str, pair: list[Host], options: argparse.Namespace) -> list[End]:
    """Let a system train on two hosts, cut them, and return the report of each host's rank."""
    world = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": pair[0].address,
    }
    world |= {"MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "v0", "OMP_NUM_THREADS": "1"}
    world |= {DEAD_AFTER: f"{options.dead_after:g}", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [
        sys.executable,
        "-m",
        "benchmarks.cut",
        "--as-rank",
        name,
        "--timeout",
        f"{options.timeout:g}",
    ]
    ranks = [host.run(command, {**world, "RANK": str(rank)}) for rank, host in enumerate(pair)]
    for rank in ranks:
        if not any(line == "ready\n" for line in iter(_lines(rank), "")):
            raise SystemExit(f"{name} does not train")
    began = time.monotonic()
    pair[1].cut()
    try:
        limit = options.dead_after if name == "deepseek_zero" else options.timeout
        return [_end(rank, began, limit + FAREWELL_SECONDS) for rank in ranks]
    finally:
        pair[1].heal()
        for rank in ranks:
            rank.kill()
            rank.wait()


def _lines(rank: Process) -> Callable[[], str]:
    assert rank.stdout is not None
    return rank.stdout.readline


def _end(rank: Process, began: float, seconds: float) -> End:
    while rank.poll() is None and time.monotonic() < began + seconds:
        time.sleep(0.1)
    rank.kill()
    said = [line for line in iter(_lines(rank), "") if line.startswith("end ")]
    if not said:
        return End(None, "nothing")
    _, at, words = said[-1].rstrip("\n").split(" ", 2)
    return End(float(at) - began, words)


def row(name: str, ends: list[list[End]], options: argparse.Namespace) -> str:
    """Return the row of one system.

    It has the median and the maximum over both hosts, whether each host named the other, and the
    message.
    """
    taken = [end.after for pair in ends for end in pair if end.after is not None]
    mute = sum(end.after is None for pair in ends for end in pair)
    named = sum(
        other in end.words for pair in ends for end, other in zip(pair, ("h1", "h0"), strict=True)
    )
    limit = (
        f"{options.dead_after:g} s of silence"
        if name == "deepseek_zero"
        else f"{options.timeout:g} s of waiting"
    )
    times = f"{statistics.median(taken):.1f} s, {max(taken):.1f} s" if taken else "never"
    # without log prefixes of source locations
    words = re.sub(r"\[[^]]*\] ", "", ends[0][0].words.replace("|", "/"))
    return f"| {name} | {limit} | {times} | {mute} | {named} of {2 * len(ends)} | `{words[:160]}` |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="gloo's limit for DDP and FSDP2, in seconds"
    )
    parser.add_argument("--dead-after", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--as-rank", choices=SYSTEMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        be_a_rank(options.as_rank, options.timeout)
    ends: dict[str, list[list[End]]] = {name: [] for name in SYSTEMS}
    for number in range(options.rounds):
        for name in SYSTEMS:
            with hosts(2) as pair:
                ends[name].append(cut_once(name, pair, options))
            said = ", ".join(
                "nothing" if end.after is None else f"{end.after:.1f} s" for end in ends[name][-1]
            )
            sys.stderr.write(f"round {number + 1} of {options.rounds}, {name}: {said}\n")
    rows = [row(name, ends[name], options) for name in SYSTEMS]
    text = f"""# A cut between two hosts, compared with PyTorch

Written by `benchmarks/cut.py` on {date.today()}: torch {torch.__version__}, two hosts of \
namespaces with one rank each,
{options.rounds} cuts for each system in turns.  Seconds are from the cut to the error in the \
program, of both hosts.
gloo's default limit is 30 minutes; DDP and FSDP2 were run with {options.timeout:g} s.

| system | limit | median, worst | ranks without an error | named the other host | \
start of the error |
|---|---|---|---|---|---|
"""
    options.out.write_text(text + "\n".join(rows) + "\n")
    sys.stderr.write(f"{options.out}\n")


if __name__ == "__main__":
    main()
