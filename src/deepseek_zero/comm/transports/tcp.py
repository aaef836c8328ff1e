"""Transport over this library's sockets between hosts (`net/links.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..ids import CollectiveId
from ..net.links import Links
from .base import CopyingTransport, Use, Wait, filled, once


class Tcp(CopyingTransport):
    """Sends over this library's sockets to ranks that share no memory with this one.

    Args:
        rank: This rank's index in `ranks`.
        ranks: The group's members as world ranks.
        peers: The indices of the ranks to exchange with.
        links: The sockets of this process.
    """

    description = "our own sockets"

    def __init__(self, rank: int, ranks: Sequence[int], peers: Sequence[int], links: Links) -> None:
        self.rank = rank
        self.ranks = ranks
        self.size = len(ranks)
        self.peers = peers
        self.links = links

    def end_engine(self, engine: str) -> None:
        """Free what was kept for the lanes of an engine that no longer exists."""
        self.links.end_engine(engine)

    def all_gather(self, full: Tensor, cid: CollectiveId) -> Wait:
        """Fill `full` with the slices of all ranks; see `Transport.all_gather`.

        Args:
            full: Shape ``(size * slice,)``, with this rank's slice in place.
            cid: The identity of the collective.

        Returns:
            A function that waits for the data.
        """
        slices = full.chunk(self.size)
        own = slices[self.rank]
        return self.links.start({self.ranks[peer]: (own, slices[peer]) for peer in self.peers}, cid)

    def exchange(
        self, pieces: Sequence[Tensor], inbox: Sequence[Tensor | None], cid: CollectiveId, use: Use
    ) -> Wait:
        """Exchange one piece with every other rank; see `Transport.exchange`.

        Args:
            pieces: The piece for each rank.
            inbox: The output for each rank's piece.
            cid: The identity of the collective.
            use: Called once with the received pieces.

        Returns:
            A function that waits for the data.
        """
        received = filled(inbox, pieces[self.rank], self.rank)
        wait = self.links.start(
            {self.ranks[peer]: (pieces[peer], received[peer]) for peer in self.peers}, cid
        )
        return once(wait, lambda: use(received))
