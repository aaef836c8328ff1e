"""Transports that combine others.

`HostStaged` copies through the host for several ranks on one GPU. `Hierarchical` uses shared memory
within a host and another transport between hosts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ids import CollectiveId
from .base import Inbox, Transport, Use, Wait, filled, leave_in_place, once
from .shared_memory import HostPages, SharedMemory


class HostStaged(Transport):
    """Sends CUDA tensors through host memory and gloo.

    It is for several ranks on one GPU, which NCCL does not support. It is slow.

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
        host = torch.empty_like(full, device="cpu")
        host.chunk(self.size)[self.rank].copy_(full.chunk(self.size)[self.rank])
        return once(self.host.all_gather(host, cid), lambda: full.copy_(host))

    def exchange(self, pieces: Sequence[Tensor], inbox: Inbox, cid: CollectiveId, use: Use) -> Wait:
        received = filled(inbox, pieces[self.rank], self.rank)
        incoming = [torch.empty_like(box, device="cpu") for box in received]

        def arrive(found: Sequence[Tensor]) -> None:
            for peer, (box, host) in enumerate(zip(received, found, strict=True)):
                if peer != self.rank:
                    box.copy_(host)
            use(received)

        return self.host.exchange([piece.cpu() for piece in pieces], incoming, cid, arrive)


class Hierarchical(SharedMemory):
    """Uses shared memory within a host and another transport between hosts.

    Args:
        ranks: The group's members as world ranks.
        pages: The shared memory of this process.
        inter_node: The transport to ranks of other hosts.
    """

    shares_pages = False
    reads_in_place = False

    def __init__(self, ranks: Sequence[int], pages: HostPages, inter_node: Transport) -> None:
        super().__init__(ranks, pages)
        self.inter_node = inter_node
        self.description = (
            f"{self.description} within a host, {inter_node.description} between hosts"
        )

    def end_engine(self, engine: str) -> None:
        super().end_engine(engine)
        self.inter_node.end_engine(engine)

    def all_gather(self, full: Tensor, cid: CollectiveId) -> Wait:
        inter_node = self.inter_node.all_gather(full, cid)  # First, because it may raise
        return once(super().all_gather(full, cid), inter_node)

    def exchange(self, pieces: Sequence[Tensor], inbox: Inbox, cid: CollectiveId, use: Use) -> Wait:
        received = filled(inbox, pieces[self.rank], self.rank)
        # First, because it raises if there is no room to begin. Nothing has been issued then.
        inter_node = self.inter_node.exchange(pieces, inbox, cid, leave_in_place)
        intra_node = super().exchange(pieces, inbox, cid, leave_in_place)
        return once(once(intra_node, inter_node), lambda: use(received))
