"""The transport over our own sockets between hosts (net/links.py)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..ids import CollectiveId
from ..net.links import Links
from .base import CopyingTransport, Use, Wait, filled, once


class Tcp(CopyingTransport):
    """Our own sockets between those ranks of a group that share no memory.

    ranks: the group's, as the world counts them. rank, peers: indices into them.
    """

    description = "our own sockets"

    def __init__(self, rank: int, ranks: Sequence[int], peers: Sequence[int], links: Links) -> None:
        self.rank = rank
        self.ranks = ranks
        self.size = len(ranks)
        self.peers = peers
        self.links = links

    def end_engine(self, engine: str) -> None:
        self.links.end_engine(engine)

    def all_gather(self, full: Tensor, cid: CollectiveId) -> Wait:
        slices = full.chunk(self.size)
        own = slices[self.rank]
        return self.links.start({self.ranks[peer]: (own, slices[peer]) for peer in self.peers}, cid)

    def exchange(
        self, pieces: Sequence[Tensor], inbox: Sequence[Tensor | None], cid: CollectiveId, use: Use
    ) -> Wait:
        received = filled(inbox, pieces[self.rank], self.rank)
        wait = self.links.start(
            {self.ranks[peer]: (pieces[peer], received[peer]) for peer in self.peers}, cid
        )
        return once(wait, lambda: use(received))
