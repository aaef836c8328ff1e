"""Measure the bandwidth between hosts at the start of a run.

The measured collective is one that a run issues: an all-gather of all ranks at once. Nothing is
measured if all ranks are on one host.
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

PROBE = "probe"  # The meter's kind for these bytes
# Bytes of the whole buffer; it grows until the all-gather takes long enough
FIRST_BYTES = 1 << 19
MOST_BYTES = 1 << 26
GROWTH = 4
# Seconds after which the latency of a message is negligible; a measurement takes less than 0.5 s
LONG_ENOUGH = 0.08
INTERFACES = Path("/sys/class/net")
BRIEFLY = 0.04  # `LONG_ENOUGH` for a comparison of two transports
WORTH_GLOO = 1.05


def inter_node_rate(comm: Comm, what: str, long_enough: float = LONG_ENOUGH) -> float:
    """Measure the bytes per second that a rank sends to other hosts.

    All ranks send at the same time, and the result is that of the slowest rank. The meter of `comm`
    keeps it.

    Args:
        comm: A communicator whose groups each have ranks on several hosts.
        what: The name of the collective, the same on all ranks.
        long_enough: Minimum seconds of the all-gather that counts.

    Returns:
        Bytes per second of the slowest rank, the same on every rank.

    Note:
        Collective: every rank of the world must call it.
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
            device="cpu",
        )
        table = comm.whole.all_gather_rows(row, what)
        seconds = float(table[:, 0].max())
        if seconds >= long_enough or nbytes >= MOST_BYTES:
            comm.meter.inter_node_rate = found = float(table[:, 1].min()) / seconds
            return found
        nbytes *= GROWTH


@dataclass(frozen=True)
class TriedTransport:
    """The transport that an engine uses, and the result of the comparison.

    Attributes:
        name: The chosen transport.
        tried: The measured rates, as text; "" if nothing was compared.
        lacks: Why a transport could not be tried, or "".
        rate: The measured rate of the chosen one, in bytes per second (`Meter.inter_node_rate`).
    """

    name: str
    tried: str = ""
    lacks: str = ""
    rate: float | None = None

    def capabilities(self) -> list[Capability]:
        """Return a description of the comparison, if there was one."""
        return [Capability("measured between hosts", self.tried, self.lacks)] if self.tried else []


def try_transports(device: torch.device) -> TriedTransport:
    """Compare gloo and this library's sockets between hosts, and choose one.

    The sockets are chosen unless gloo is at least 5 % faster. On a link that limits both, they use
    less of a core, and a row arrives in half the time. The comparison takes up to half a second,
    and is skipped if all ranks are on one host.

    Args:
        device: The device of the tensors; only "cpu" is compared.

    Returns:
        The choice, the same on every rank.

    Note:
        Collective: every rank of the world must call it.
    """
    ways = {"fastest": "gloo", "tcp": "our own sockets"}
    world = WorldContext.of_this_world_if_any()
    if world is None or world.hosts.is_one or device.type != "cpu" or uses_tls():
        # With TLS, "fastest" means this library's sockets: gloo does not encrypt
        return TriedTransport("fastest")
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
    except PeerError as error:  # Raised on every rank, for example if a port is closed
        lacks = f"our own sockets: {error.what}"
    chosen = "tcp" if WORTH_GLOO * rates.get("tcp", 0.0) > rates["fastest"] else "fastest"
    told = [f"{format_bytes(rate)}/s per rank by {ways[way]}" for way, rate in rates.items()]
    return TriedTransport(
        chosen, f"{', '.join(told)}; chosen: {ways[chosen]}", lacks, rates[chosen]
    )


@dataclass(frozen=True)
class Line:
    """The bandwidth between hosts that one rank can use.

    Attributes:
        rate: Bytes per second.
        source: The source of the figure, as a clause.
    """

    rate: float
    source: str


def line_of(comm: Comm) -> Line | None:
    """Return the bandwidth between hosts available to this rank, or None if unknown.

    It is the measured rate if there is one. Otherwise it is the interface's nominal speed divided
    by the ranks of this host.
    """
    if comm.meter.inter_node_rate is not None:
        return Line(comm.meter.inter_node_rate, "the link transferred at the start")
    hosts = comm.hosts
    if hosts.is_one:
        return None
    try:
        name = interface_of(listening_host(hosts))
        megabits = int((INTERFACES / name / "speed").read_text())
    # The interface does not exist here, or does not report its speed
    except (OSError, ValueError, UsageError):
        return None
    ranks = hosts.local_size
    if megabits <= 0:
        return None
    return Line(megabits * 1e6 / 8 / ranks, f"{name} has for each of {ranks} ranks")
