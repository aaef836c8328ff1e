"""Transport over this library's sockets between hosts (`net/links.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ..ids import CollectiveId
from ..net.links import Links
from .base import PointToPoint, Wait


class Tcp(PointToPoint):
    """A transport that exchanges tensors with ranks on other hosts over TCP connections.

    Args:
        rank: This rank's index in `ranks`.
        ranks: The world ranks of the group's members.
        peers: The indices in `ranks` of the members with which this rank exchanges tensors.
        links: The connections of this process to other hosts.
    """

    description = "our own sockets"

    def __init__(self, rank: int, ranks: Sequence[int], peers: Sequence[int], links: Links) -> None:
        super().__init__(rank, ranks, peers)
        self.links = links

    def end_engine(self, engine: str) -> None:
        self.links.end_engine(engine)

    def start(self, messages: Mapping[int, tuple[Tensor, Tensor]], cid: CollectiveId) -> Wait:
        """Start to exchange tensors with other ranks over their connections.

        The tensors must not be changed until the returned function has returned.

        Args:
            messages: By world rank, a pair of the tensor to send and the tensor to receive into.
                The tensors are flat and in host memory. Empty tensors are not sent.
            cid: The identifier of the collective, by which ranks match their messages.

        Returns:
            A function that waits until all tensors were sent and received. It raises `TimeoutError`
            if that takes longer than the poll interval, and may be called again. It raises
            `ConnectionLost` if one of the ranks is lost.
        """
        return self.links.start(messages, cid)
