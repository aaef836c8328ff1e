"""Transports that combine others.

`HostStaged` copies through the host for ranks that share a GPU. `Hierarchical` uses shared memory
within a host and another transport between hosts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ids import CollectiveId
from .base import CopyingTransport, Transport, Use, Wait, filled, once


class HostStaged(CopyingTransport):
    """Sends CUDA tensors through host memory and gloo.

    It is for ranks that share a GPU, which NCCL refuses. It is slow.

    Args:
        host: The transport of CPU tensors.
        rank: This rank's index in the group.
        size: Number of ranks in the group.
        device: The device of the tensors.
    """

    description = "through the host, by gloo"

    def __init__(self, host: Transport, rank: int, size: int, device: torch.device) -> None:
        self.host = host
        self.rank = rank
        self.size = size
        self.device = device
        self.limitation = f"{device.type} has no NCCL"
        if device.type == "cuda":
            self.limitation = "ranks share a GPU"

    def all_gather(self, full: Tensor, cid: CollectiveId) -> Wait:
        """Fill `full` with the slices of all ranks; see `Transport.all_gather`.

        Args:
            full: Shape ``(size * slice,)``, with this rank's slice in place.
            cid: The identity of the collective.

        Returns:
            A function that waits for the data.
        """
        host = torch.empty_like(full, device="cpu")
        host.chunk(self.size)[self.rank].copy_(full.chunk(self.size)[self.rank])
        return once(self.host.all_gather(host, cid), lambda: full.copy_(host))

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
        incoming = [torch.empty_like(box, device="cpu") for box in received]

        def arrive(found: Sequence[Tensor]) -> None:
            for peer, (box, host) in enumerate(zip(received, found, strict=True)):
                if peer != self.rank:
                    box.copy_(host)
            use(received)

        return self.host.exchange([piece.cpu() for piece in pieces], incoming, cid, arrive)


class Hierarchical(CopyingTransport):
    """Uses one transport within a host and another between hosts.

    Args:
        intra_node: The transport between ranks of this host.
        inter_node: The transport to ranks of other hosts.
        rank: This rank's index in the group.
    """

    def __init__(self, intra_node: Transport, inter_node: Transport, rank: int) -> None:
        self.intra_node = intra_node
        self.inter_node = inter_node
        self.rank = rank
        self.description = (
            f"{intra_node.description} within a host, {inter_node.description} between hosts"
        )

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.intra_node.empty(numel, dtype)

    def is_read(self, tensor: Tensor) -> bool:
        """Return whether another rank may still read this buffer."""
        return self.intra_node.is_read(tensor)

    def wait_until_read(self, tensor: Tensor) -> None:
        """Wait until no other rank reads this buffer."""
        self.intra_node.wait_until_read(tensor)

    @property
    def expects(self) -> bool:
        """Return whether something is in flight that `progress` may complete."""
        return self.intra_node.expects

    def progress(self) -> None:
        """Receive and send what is possible without waiting."""
        self.intra_node.progress()

    def end_engine(self, engine: str) -> None:
        """Free what was kept for the lanes of an engine that no longer exists."""
        self.intra_node.end_engine(engine)
        self.inter_node.end_engine(engine)

    def all_gather(self, full: Tensor, cid: CollectiveId) -> Wait:
        """Fill `full` with the slices of all ranks; see `Transport.all_gather`.

        Args:
            full: Shape ``(size * slice,)``, with this rank's slice in place.
            cid: The identity of the collective.

        Returns:
            A function that waits for the data.
        """
        inter_node = self.inter_node.all_gather(full, cid)  # First, because it may raise
        return _both(self.intra_node.all_gather(full, cid), inter_node)

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
        # First, because it raises if there is no room to begin. Nothing has been issued then.
        inter_node = self.inter_node.exchange(pieces, inbox, cid, _keep_waiting)
        intra_node = self.intra_node.exchange(pieces, inbox, cid, _keep_waiting)
        return once(_both(intra_node, inter_node), lambda: use(received))


def _keep_waiting(received: Sequence[Tensor]) -> None:
    """Do nothing: only half of the pieces are here."""


def _both(first: Wait, second: Wait) -> Wait:
    def wait() -> None:
        first()
        second()

    return wait
