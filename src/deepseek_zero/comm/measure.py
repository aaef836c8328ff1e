"""What the link between hosts carries, measured at the start of a run by the movement that a run
makes: an all-gather of all ranks at once.

Nothing is measured where no byte leaves a host.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from ..base.capabilities import Capability
from ..base.device import synchronize
from ..base.errors import PeerError, UsageError
from ..base.launch import uses_tls
from ..base.network import interface_of
from ..base.quantities import format_bytes
from .collectives import Comm
from .context import WorldContext
from .net.key_value_store import listening_host

PROBE = "probe"  # as what the meter counts it
# of a whole buffer; it grows until it takes long enough
FIRST_BYTES = 1 << 19
MOST_BYTES = 1 << 26
GROWTH = 4
# Seconds, beside which the start of a message is nothing; all of it takes less than half a second
LONG_ENOUGH = 0.08
INTERFACES = Path("/sys/class/net")
BRIEFLY = 0.04  # the same, where two ways are tried
WORTH_GLOO = 1.05


def inter_node_rate(comm: Comm, what: str, long_enough: float = LONG_ENOUGH) -> float:
    """Return the bytes a second that a rank sends to other hosts while all ranks send: of the
    slowest rank of all.

    long_enough: seconds of the movement that counts. Collective in the world, over the groups of
    `comm`; each has ranks on several hosts.  the meter of `comm` keeps it.
    """
    nbytes = FIRST_BYTES
    while True:
        full = comm.empty(max(1, nbytes // comm.size) * comm.size, torch.uint8).zero_()
        comm.whole.barrier(what)
        began = time.perf_counter()
        comm.all_gather(full, "gather", what, PROBE).wait()
        synchronize(comm.device)
        row = torch.tensor(
            [time.perf_counter() - began, len(comm.inter_node) * full.numel() / comm.size],
            dtype=torch.float64,
        )
        table = comm.whole.all_gather_rows(row, what)
        seconds = float(table[:, 0].max())
        if seconds >= long_enough or nbytes >= MOST_BYTES:
            comm.meter.inter_node_rate = found = float(table[:, 1].min()) / seconds
            return found
        nbytes *= GROWTH


@dataclass(frozen=True)
class TriedTransport:
    """Which transport an engine takes; tried: what each was seen to carry between hosts, "" where
    none was tried.

    rate: what the chosen one was seen to carry, as `Meter.inter_node_rate`.
    """

    name: str
    tried: str = ""
    lacks: str = ""
    rate: float | None = None

    def capabilities(self) -> list[Capability]:
        """Return what was tried, if something was."""
        return [Capability("tried between hosts", self.tried, self.lacks)] if self.tried else []


def try_transports(device: torch.device) -> TriedTransport:
    """Try gloo and our own sockets between hosts, and return what carries more; sockets unless gloo
    carries a twentieth more, since on a line that bounds both they take less of a core, and a row
    is there in half the time.

    It takes up to half a second, and nothing where all ranks are on one host.  Collective in the
    world; every rank gets the same.
    """
    ways = {"fastest": "gloo", "tcp": "our own sockets"}
    world = WorldContext.of_this_world_if_any()
    if world is None or world.hosts.is_one or device.type != "cpu" or uses_tls():
        return TriedTransport("fastest")  # under TLS that is our own sockets: gloo encrypts nothing
    rates = {
        "fastest": inter_node_rate(
            Comm(device, transport="fastest", trains=False), "trying gloo", BRIEFLY
        )
    }
    lacks = ""
    try:
        rates["tcp"] = inter_node_rate(
            Comm(device, transport="tcp", trains=False), "trying our own sockets", BRIEFLY
        )
    except PeerError as error:  # every rank has one, where a port is closed
        lacks = f"our own sockets: {error.what}"
    chosen = "tcp" if WORTH_GLOO * rates.get("tcp", 0.0) > rates["fastest"] else "fastest"
    told = [f"{format_bytes(rate)}/s of a rank by {ways[way]}" for way, rate in rates.items()]
    return TriedTransport(chosen, f"{', '.join(told)}; taken: {ways[chosen]}", lacks, rates[chosen])


@dataclass(frozen=True)
class Line:
    """What one rank can have of the link between hosts.  rate: bytes a second.  source: who says
    so, as a clause.
    """

    rate: float
    source: str


def line_of(comm: Comm) -> Line | None:
    """Return what this rank can have of the link between hosts: what it carried at the start if
    that was measured, else what the interface says of itself, shared by the ranks of this host;
    None where nobody knows.  Local.
    """
    if comm.meter.inter_node_rate is not None:
        return Line(comm.meter.inter_node_rate, "it carried at the start")
    hosts = comm.hosts
    if hosts.is_one:
        return None
    try:
        name = interface_of(listening_host(hosts))
        megabits = int((INTERFACES / name / "speed").read_text())
    except (OSError, ValueError, UsageError):  # no such interface here, or one that does not say
        return None
    ranks = hosts.local_size
    return (
        Line(megabits * 1e6 / 8 / ranks, f"{name} has for each of {ranks} ranks")
        if megabits > 0
        else None
    )
