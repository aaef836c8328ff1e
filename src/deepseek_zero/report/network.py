"""Report the bytes that a step sends between hosts and inside a host.

The values are computed on request from the meter's counters and the plan, with and without
compression.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..base.meter import Meter
from ..base.quantities import format_bytes
from ..comm.collectives import Comm
from ..comm.measure import Line
from ..extensions.by_host import TwoHops
from ..planner.plan import Plan
from ..sharding.comm_context import CommContext

BETWEEN_HOSTS = "between hosts"
INSIDE_A_HOST = "inside a host"


@dataclass(frozen=True)
class NetworkLink:
    """The bytes that one rank sends over one kind of link in a step.

    Attributes:
        name: Name of the link.
        sent_bytes: Bytes sent.
        uncoded_bytes: Bytes that would be sent without compression.
        step_seconds: Time of a step.
        line: The measured or configured bandwidth of the link; None if unknown.
    """

    name: str
    sent_bytes: float
    uncoded_bytes: float
    step_seconds: float
    line: Line | None = None

    @property
    def rate(self) -> float:
        """Return bytes per second over a whole step."""
        return self.sent_bytes / self.step_seconds if self.step_seconds else 0.0

    def explain(self) -> str:
        """Return a description in one line."""
        words = f"{self.name}: this rank sends {format_bytes(self.sent_bytes)} per step"
        if self.uncoded_bytes > self.sent_bytes:
            times = self.uncoded_bytes / self.sent_bytes
            words += (
                f" instead of {format_bytes(self.uncoded_bytes)} without quantization "
                f"({times:.2f} x less)"
            )
        words += f", {format_bytes(self.rate)}/s over a whole step"
        if self.line is not None:
            words += (
                f": {self.rate / self.line.rate:.0%} of the {format_bytes(self.line.rate)}/s that "
                f"{self.line.source}"
            )
        return words


def network_links(
    plan: Plan, meter: Meter, line: Line | None, comm_ctx: CommContext
) -> list[NetworkLink]:
    """Return the bytes per step that this rank sends over each kind of link.

    The kinds are links between hosts and links inside this rank's host. Bytes that ranks of a host
    read from each other's memory count as sent inside the host. Compression affects only messages
    among the ranks over which states are sharded. The sums of gradients over replicas and the
    gathers from the second copy of the weights (hpZ) are sent uncompressed.

    Args:
        plan: Plan of the run, which has the sizes of messages.
        meter: Counts of the bytes that this rank sent.
        line: Bandwidth between hosts; None if it is unknown.
        comm_ctx: The communicators of the shard group.

    Returns:
        A list with one `NetworkLink` for the bytes between hosts and one for those inside this
        host. A link without bytes is omitted. The list is empty until two steps have been taken,
        and after `Meter.reset` until the end of the next step.
    """
    steps = meter.counted_steps
    if steps <= 0:
        return []
    sent, far = meter.counted_bytes
    exact = plan.uncoded().volume()
    coded = plan.volume()
    saved = exact.state_bytes - coded.state_bytes
    saved_near = exact.inside_hosts - coded.inside_hosts
    first = comm_ctx.comm
    last = comm_ctx.comm
    if isinstance(comm_ctx.route, TwoHops):
        first = comm_ctx.route.hosts.intra_node
        last = comm_ctx.route.hosts.inter_node
    saved_far = saved_near * far_share(first) + (saved - saved_near) * far_share(last)
    seconds = sum(meter.clock.seconds.values()) / meter.clock.steps
    found = (
        NetworkLink(BETWEEN_HOSTS, far / steps, far / steps + saved_far, seconds, line),
        NetworkLink(
            INSIDE_A_HOST, (sent - far) / steps, (sent - far) / steps + saved - saved_far, seconds
        ),
    )
    return [link for link in found if link.sent_bytes]


def far_share(comm: Comm) -> float:
    """Return the fraction of a rank's messages in a group that leave its host."""
    return len(comm.inter_node) / max(1, comm.size - 1)
