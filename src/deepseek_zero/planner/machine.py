"""The assumptions of a plan about the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..tiers.tier import Tier


@dataclass(frozen=True)
class Machine:
    """The assumptions of a plan about the machine.

    Attributes:
        reads_in_place: The ranks that share slices are on one host and read each other's memory, so
            a gather needs no buffer.
        replicas_read_in_place: The same for the ranks that hold the same slices.
        near_read_in_place: The same for the ranks of one host, if sums are formed host by host.
        far_read_in_place: The same for the ranks with the same position on different hosts.
        budgets: For each memory, the bytes for states and buffers of one rank; used if the settings
            leave the choice of memory open.
        spans_hosts: The ranks that share slices are on several hosts.
    """

    reads_in_place: bool = False
    budgets: Mapping[Tier, int] = field(default_factory=dict)
    replicas_read_in_place: bool = False
    near_read_in_place: bool = False
    far_read_in_place: bool = False
    spans_hosts: bool = False

    @property
    def most_reductions(self) -> int:
        """The number of units whose gradients are reduced at the same time.

        Between hosts it is more than one: the link would be idle while one sum is formed and the
        next gradient is collected and coded.
        """
        return 2 if self.spans_hosts else 1
