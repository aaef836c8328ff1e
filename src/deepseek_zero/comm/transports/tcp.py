"""Transport over this library's sockets between hosts (`net/links.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ..ids import CollectiveId
from ..net.links import Links
from .base import PointToPoint, Wait


class Tcp(PointToPoint):
    """Send over this library's sockets to ranks on other hosts.

    Args:
        rank: This rank's index in `ranks`.
        ranks: The group's members as world ranks.
        peers: The indices of the ranks to exchange with.
        links: The sockets of this process.
    """

    description = "our own sockets"

    def __init__(self, rank: int, ranks: Sequence[int], peers: Sequence[int], links: Links) -> None:
        super().__init__(rank, ranks, peers)
        self.links = links

    def end_engine(self, engine: str) -> None:
        self.links.end_engine(engine)

    def start(self, messages: Mapping[int, tuple[Tensor, Tensor]], cid: CollectiveId) -> Wait:
        return self.links.start(messages, cid)
