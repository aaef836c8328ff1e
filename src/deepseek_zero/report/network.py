"""What a step sends between hosts and inside one: bytes with and without codes, and how much of the
line that is.

Made of what the meter counts in any case and of the plan, when somebody asks.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..base.meter import Meter
from ..base.quantities import format_bytes
from ..comm.collectives import Comm
from ..comm.measure import Line
from ..planner.plan import Plan
from ..sharding.buffer import CommContext

BETWEEN_HOSTS = "between hosts"
INSIDE_A_HOST = "inside a host"


@dataclass(frozen=True)
class NetworkLink:
    """What one rank sends over one kind of link in a step; uncoded_bytes: and would without codes.

    line: None: unknown, or no line.
    """

    name: str
    sent_bytes: float
    uncoded_bytes: float
    step_seconds: float
    line: Line | None = None

    @property
    def rate(self) -> float:
        """Bytes a second, over a whole step."""
        return self.sent_bytes / self.step_seconds if self.step_seconds else 0.0

    def explain(self) -> str:
        """Return all of it in one line."""
        words = f"{self.name}: this rank sends {format_bytes(self.sent_bytes)} a step"
        if self.uncoded_bytes > self.sent_bytes:
            times = self.uncoded_bytes / self.sent_bytes
            words += (
                f" instead of {format_bytes(self.uncoded_bytes)} without codes ({times:.2f} x less)"
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
    """Return the links that carried something, far ones first; none before there were two steps.

    Where ranks of a host read each other's memory, what others would be sent counts as sent inside
    the host.  What codes save is saved among the ranks that share slices, each of which is sent the
    same: sums over replicas, and what is gathered from a second copy, are sent as they are.
    """
    steps = meter.counted_steps
    if steps <= 0:
        return []
    sent, far = meter.counted_bytes
    exact = plan.uncoded().volume()
    coded = plan.volume()
    saved = exact.state_bytes - coded.state_bytes
    saved_near = exact.inside_hosts - coded.inside_hosts
    first, last = comm_ctx.route.hops(comm_ctx.comm)
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
    """Return the part of what a rank sends each other of a group that leaves its host."""
    return len(comm.inter_node) / max(1, comm.size - 1)
