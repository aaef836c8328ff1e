"""A limited link between two hosts: what of it an exchange of two ranks uses, receives posted first and sends first.

    python -m benchmarks.link                                    # as root, two minutes
    python -m benchmarks.link --rates 100mbit --out link.md

The hosts are namespaces of this machine (`tests/hosts.py`), the link is a pair of veth devices that `tc tbf` limits at
both ends.  Both ranks send and receive all the time.  "ours" is the library's own transport (`Gloo.exchange`); "sends
first" is gloo's messages in the order that it had before.  Both take turns in one run; medians of the rounds.  A
share of 100 % is the rate in bytes of data, each way: headers alone take 4 % of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from deepseek_zero.comm.ids import CollectiveId
from deepseek_zero.comm.transports.base import Use
from deepseek_zero.comm.transports.gloo import Gloo, Tags
from tests.hosts import Host, bits_per_second, hosts

RESULTS = Path(__file__).parent / "results" / "link.md"
RATES = ("100mbit", "1gbit")
MIB = 1 << 20
SHAPES = ((8 * MIB, 1), (MIB, 8))  # bytes of a message, messages under way
PORT, ROUNDS = 29400, 5


def nothing(received: object) -> None:
    """Leave what came in its box."""


class Sends:
    """Messages between two ranks over gloo's world, each under a number of its own."""

    def __init__(self) -> None:
        rank = dist.get_rank()
        self.other, self.sequence = 1 - rank, 0
        self.gloo = Gloo(rank, (0, 1), dist.group.WORLD, (self.other,), Tags())

    def ours(self, out: list[Tensor], into: list[Tensor]) -> None:
        waits = []
        for piece, box in zip(out, into, strict=True):
            cid = CollectiveId("world/rows", 0, self.sequence, 0, [])
            self.sequence += 1
            use: Use = nothing
            waits.append(self.gloo.exchange([piece, piece], [box, box], cid, use))
        for wait in waits:
            while True:
                try:
                    wait()
                    break
                except TimeoutError:  # a wait of ours is asked now and then whether to go on
                    continue

    def sends_first(self, out: list[Tensor], into: list[Tensor]) -> None:
        works = []
        for tag, (piece, box) in enumerate(zip(out, into, strict=True), 1 << 30):
            works += [dist.isend(piece, self.other, tag=tag), dist.irecv(box, self.other, tag=tag)]
        for work in works:
            assert work is not None
            work.wait()


def measure(rounds: int) -> None:
    """Print, on rank 0, seconds by way and shape: the median round, in which the slower rank counts."""
    dist.init_process_group("gloo", init_method="env://")
    ways, taken = Sends(), dict[str, list[float]]()
    for turn in range(rounds + 1):
        for nbytes, count in SHAPES:
            out = [torch.full((nbytes,), turn, dtype=torch.uint8) for _ in range(count)]
            into = [torch.empty_like(piece) for piece in out]
            for name, way in (("ours", ways.ours), ("sends first", ways.sends_first)):
                dist.barrier()
                began = time.perf_counter()
                way(out, into)
                seconds = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
                assert all(bool((box == turn).all()) for box in into)
                if turn:  # the first one opens connections
                    taken.setdefault(f"{name}/{nbytes}/{count}", []).append(float(seconds))
    if dist.get_rank() == 0:
        print(json.dumps({key: statistics.median(seconds) for key, seconds in taken.items()}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def run_on(pair: list[Host], rounds: int) -> dict[str, float]:
    """Return what rank 0 measured between two hosts."""
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": pair[0].address, "MASTER_PORT": str(PORT)}
    command = [sys.executable, "-m", "benchmarks.link", "--as-rank", "--rounds", str(rounds)]
    ranks = [host.run(command, {**world, "RANK": str(rank)}) for rank, host in enumerate(pair)]
    said, other = (rank.communicate(timeout=600)[0] for rank in ranks)
    if any(rank.returncode for rank in ranks):
        raise SystemExit(said + other)
    found: dict[str, float] = json.loads(said.splitlines()[-1])
    return found


def table(found: dict[str, dict[str, float]]) -> str:
    """Return the page."""
    lines = [
        "# A limited link between two hosts",
        "",
        f"Written by `benchmarks/link.py` on {date.today()}: one rank on each host, both send and receive at once,",
        "shares of the rate each way, the median round.  An interface's headers take 4 % of every rate.",
        "",
        "| rate | messages | ours, ms | of the rate | sends first, ms | of the rate | times faster |",
        "|---|---|---|---|---|---|---|",
    ]
    for rate, fastest in found.items():
        for nbytes, count in SHAPES:
            ours, before = (fastest[f"{name}/{nbytes}/{count}"] for name in ("ours", "sends first"))
            least = nbytes * count * 8 / bits_per_second(rate)
            lines.append(
                f"| {rate} | {count} of {nbytes // MIB} MiB | {ours * 1e3:.0f} | **{least / ours:.1%}** | "
                f"{before * 1e3:.0f} | {least / before:.1%} | {before / ours:.2f} |"
            )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default=",".join(RATES), help="in tc's words")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--as-rank", action="store_true", help="be one of the two ranks")
    args = parser.parse_args()
    if args.as_rank:
        measure(args.rounds)
        return
    found = {}
    for rate in args.rates.split(","):
        with hosts(2, rate) as pair:
            found[rate] = run_on(pair, args.rounds)
    args.out.write_text(table(found))
    print(args.out.read_text())


if __name__ == "__main__":
    main()
