"""Measure the share of a link between two hosts that an exchange of two ranks uses, over gloo and
over our sockets.

    python -m benchmarks.link                                    # as root, three minutes
    python -m benchmarks.link --rates 100mbit,unlimited --out link.md

The hosts are namespaces of this machine (`tests/hosts.py`). The link is a pair of veth devices that
`tc tbf` limits at both ends. Both ranks send and receive all the time. "gloo" is the library's
transport over gloo (`Gloo.exchange`), "sends first" posts gloo's messages in an older order,
"sockets" is `"transport": "tcp"` (`Tcp.exchange`). All take turns in one run; figures are medians
of the rounds. A share of 100 % means payload bytes at the full rate in each direction; headers take
4 % of the rate. A second table, with one and with two ranks on each host, has an all-gather of one
flat tensor (hierarchical with two ranks per host) and an all-gather of one row per rank, next to
the round trip time of one byte.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import deepseek_zero as dz
from benchmarks.systems.common import seconds_of
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.comm.by_host import ByHost
from deepseek_zero.comm.collectives import Comm
from deepseek_zero.comm.context import WorldContext
from deepseek_zero.comm.ids import CollectiveId
from deepseek_zero.comm.transports.base import Transport
from tests.hosts import Host, bits_per_second, hosts, run_ranks

RESULTS = Path(__file__).parent / "results" / "link.md"
RATES = ("100mbit", "1gbit", "unlimited")
WAYS = ("sockets", "gloo", "sends first")
MIB = 1 << 20
SHAPES = ((8 * MIB, 1), (MIB, 8), (64 * MIB, 1))  # bytes of a message, messages in flight
MOST_SECONDS = 2.0  # limit for a round at the given rate
PORT, ROUNDS, HOSTS = 29400, 5, 2
COLLECTIVES_RATE, GATHERED = "1gbit", 16 * MIB  # elements of fp32
# transport between hosts, by name of the setting
COLLECTIVES_BY = {"fastest": "gloo", "tcp": "sockets"}
# Consecutive row all-gathers in a chain; round trips of one byte.
CHAINS, TABLES, TRIPS = (30, 20, 300)


def nothing(received: object) -> None:
    """Ignore the received message."""


class Sends:
    """Exchange messages between two ranks of a world, each with a separate sequence number."""

    def __init__(self) -> None:
        world = WorldContext.of_this_world()
        world.connect_inter_node()
        self.other, self.sequence = 1 - world.rank, 0
        self.transports = {"gloo": world.gloo, "sockets": world.tcp_over(world.ranks)}

    def send(self, way: str, out: list[Tensor], into: list[Tensor]) -> None:
        """Exchange with one of WAYS and wait for all messages."""
        if way == "sends first":
            self.sends_first(out, into)
        else:
            self.ours(self.transports[way], out, into)

    def ours(self, transport: Transport, out: list[Tensor], into: list[Tensor]) -> None:
        waits = []
        for piece, box in zip(out, into, strict=True):
            cid = CollectiveId("world/rows", 0, self.sequence, 0, [])
            self.sequence += 1
            waits.append(transport.exchange([piece, piece], [box, box], cid, nothing))
        for wait in waits:
            while True:
                try:
                    wait()
                    break
                except TimeoutError:  # the wait raises periodically so that the caller can give up
                    continue

    def sends_first(self, out: list[Tensor], into: list[Tensor]) -> None:
        works = []
        for tag, (piece, box) in enumerate(zip(out, into, strict=True), 1 << 30):
            works += [dist.isend(piece, self.other, tag=tag), dist.irecv(box, self.other, tag=tag)]
        for work in works:
            assert work is not None
            work.wait()


def shapes_at(rate: str) -> list[tuple[int, int]]:
    """Return the shapes whose rounds do not take too long."""
    if rate == "unlimited":
        return list(SHAPES)
    return [
        shape for shape in SHAPES if shape[0] * shape[1] * 8 / bits_per_second(rate) < MOST_SECONDS
    ]


def measure(rate: str, rounds: int) -> None:
    """Print on rank 0 the median seconds by transport and shape; the slower rank counts."""
    dist.init_process_group("gloo", init_method="env://")
    ways, taken = Sends(), dict[str, list[float]]()
    for turn in range(rounds + 1):
        for nbytes, count in shapes_at(rate):
            out = [torch.full((nbytes,), turn, dtype=torch.uint8) for _ in range(count)]
            into = [torch.empty_like(piece) for piece in out]
            for name in WAYS:
                dist.barrier()
                began = time.perf_counter()
                ways.send(name, out, into)
                seconds = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
                assert all(bool((box == turn).all()) for box in into)
                if turn:  # the first round opens connections
                    taken.setdefault(f"{name}/{nbytes}/{count}", []).append(float(seconds))
    if dist.get_rank() == 0:
        print(
            json.dumps({key: statistics.median(seconds) for key, seconds in taken.items()}),
            flush=True,
        )
    dist.barrier()
    dist.destroy_process_group()


def round_trip(rank: int, times: int) -> float:
    """Return the median seconds of a round trip from rank 0 to the last rank; 0 on other ranks."""
    there, port, taken = dist.get_world_size() - 1, PORT + 50, []
    if rank == there:
        with socket.create_server(("", port)) as listener:
            dist.barrier()
            with listener.accept()[0] as line:
                while byte := line.recv(1):
                    line.sendall(byte)
    else:
        dist.barrier()
        if rank == 0:
            with socket.create_connection((last_address(), port)) as line:
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for _ in range(times):
                    began = time.perf_counter()
                    line.sendall(b"x")
                    line.recv(1)
                    taken.append(time.perf_counter() - began)
    dist.barrier()
    return statistics.median(taken) if taken else 0.0


def last_address() -> str:
    """Return the address of the last host; hosts are numbered from 1."""
    net, _, _ = os.environ["MASTER_ADDR"].rpartition(".")
    return f"{net}.{HOSTS}"


def measure_collectives(rounds: int, transport: str) -> None:
    """Print on rank 0 the median seconds of each collective.

    These are an all-gather, a row all-gather, its CPU time, torch's all-reduce, and a round trip.
    """
    dz.init_distributed()
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = Mesh(dp_shard=size, rank=rank)
    comm = Comm(torch.device("cpu"), transport=transport).lay_out(mesh)
    hosts_of = ByHost.over(comm.whole, *mesh.host_groups(size // HOSTS)) if size > HOSTS else None
    full, gathers = comm.empty(GATHERED, torch.float32), []
    for turn in range(rounds + 1):
        full.chunk(size)[rank].fill_(turn + rank)

        def gather() -> None:
            way = comm.all_gather if hosts_of is None else hosts_of.all_gather
            way(full, "gather", "a unit", "gather").wait()

        gathers.append(slowest(gather))
        assert all(
            bool((piece == turn + each).all()) for each, piece in enumerate(full.chunk(size))
        )

    def tables() -> None:
        for _ in range(TABLES):
            comm.all_gather_rows(torch.zeros(4, dtype=torch.float64), "verdict")

    def sums() -> None:
        for _ in range(TABLES):
            dist.all_reduce(one)

    one, rows, torchs, busy = torch.zeros(1), [], [], []
    for _ in range(CHAINS):
        began = time.process_time()
        rows.append(slowest(tables) / TABLES)
        # includes the all-reduce in `slowest`, one of 21 collectives
        busy.append((time.process_time() - began) / TABLES)
        torchs.append(slowest(sums) / TABLES)
    trip = round_trip(rank, TRIPS)
    if rank == 0:
        print(
            json.dumps([*map(statistics.median, (gathers[1:], rows, busy, torchs)), trip]),
            flush=True,
        )
    dist.barrier()


def slowest(work: Callable[[], object]) -> float:
    """Return the seconds of some work on the slowest rank. Collective."""
    seconds = torch.tensor(seconds_of(work), dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def run_on(pair: list[Host], rate: str, rounds: int) -> dict[str, float]:
    """Return the measurements of rank 0 between two hosts."""
    said = run_ranks(
        "benchmarks.link", pair, PORT, ["--rates", rate, "--rounds", rounds], timeout=600
    )
    found: dict[str, float] = json.loads(said.splitlines()[-1])
    return found


def collectives_on(pair: list[Host], each: int, transport: str, rounds: int) -> list[float]:
    """Return the measurements of rank 0 with `each` ranks on each of two hosts."""
    words = ["--collectives", transport, "--rounds", rounds]
    said = run_ranks("benchmarks.link", pair, PORT, words, each=each, timeout=600)
    found: list[float] = json.loads(said.splitlines()[-1])
    return found


def collectives_table(found: dict[tuple[int, str], list[float]]) -> list[str]:
    """Return the lines of the second table. found: by ranks per host and transport."""
    lines = [
        "",
        f"A flat tensor of {4 * GATHERED // MIB} MiB gathered over {COLLECTIVES_RATE}; each "
        "host receives a half",
        "(goal: 300 ms).  Rows: a table with a row of every rank (goal: 1.5 round trips and 0.3 "
        "ms), compared with torch's sum",
        f"of one number; {TABLES} are run in sequence.  Medians of the slowest rank's time, and "
        "of rank 0's CPU time in a table.",
        f"With two ranks per host {os.cpu_count()} cores do the work of four ranks.",
        "",
        "| ranks | over | gather, ms | share | rows, ms | CPU, ms | torch's sum, ms | round trip, "
        "ms | goal, ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (each, transport), (gather, rows, busy, torchs, trip) in found.items():
        share = 4 * GATHERED / HOSTS * 8 / bits_per_second(COLLECTIVES_RATE) / gather
        times = " | ".join(f"{1e3 * seconds:.2f}" for seconds in (rows, busy, torchs))
        trips = f"{trip * 1e3:.3f} | {1.5e3 * trip + 0.3:.2f}"
        way = COLLECTIVES_BY[transport]
        lines.append(
            f"| {HOSTS} x {each} | {way} | {gather * 1e3:.0f} | {share:.1%} | {times} | {trips} |"
        )
    return lines


def table(
    found: dict[str, dict[str, float]], collectives: dict[tuple[int, str], list[float]]
) -> str:
    """Return the page."""
    lines = [
        "# A limited link between two hosts",
        "",
        f"Written by `benchmarks/link.py` on {date.today()}: one rank on each host, both send and "
        "receive at once.",
        "Shares of the rate in each direction, the median round.  Headers take 4 % of every rate.",
        "Without a limit: GB/s in each direction, all cores for both hosts.  Load at the end: "
        f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.",
        "",
        "| rate | messages | " + " | ".join(f"{way}, ms | share" for way in WAYS) + " |",
        "|---" * (2 + 2 * len(WAYS)) + "|",
    ]
    for rate, medians in found.items():
        for nbytes, count in shapes_at(rate):
            cells = [f"{rate} | {count} of {nbytes // MIB} MiB"]
            for way in WAYS:
                seconds, sent = medians[f"{way}/{nbytes}/{count}"], nbytes * count
                share = f"{sent / seconds / 1e9:.2f} GB/s"
                if rate != "unlimited":
                    share = f"{sent * 8 / bits_per_second(rate) / seconds:.1%}"
                cells += [f"{seconds * 1e3:.0f}", f"**{share}**"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, *collectives_table(collectives), ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", default=",".join(RATES), help="in tc's words")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--as-rank", action="store_true", help="be one of the two ranks")
    parser.add_argument("--collectives", choices=COLLECTIVES_BY, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank and args.collectives:
        measure_collectives(args.rounds, args.collectives)
        return
    if args.as_rank:
        measure(args.rates, args.rounds)
        return
    found = {}
    for rate in args.rates.split(","):
        with hosts(HOSTS, None if rate == "unlimited" else rate) as pair:
            found[rate] = run_on(pair, rate, args.rounds)
    with hosts(HOSTS, COLLECTIVES_RATE) as pair:
        collectives = {
            (each, transport): collectives_on(pair, each, transport, args.rounds)
            for each in (1, 2)
            for transport in COLLECTIVES_BY
        }
    args.out.write_text(table(found, collectives))
    print(args.out.read_text())


if __name__ == "__main__":
    main()
