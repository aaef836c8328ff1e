"""Transports made of others.

`HostStaged` goes through the host where ranks share a GPU; `Hierarchical` uses shared memory within
a host and gloo between hosts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ids import CollectiveId
from .base import CopyingTransport, Transport, Use, Wait, filled, once


class HostStaged(CopyingTransport):
    """CUDA tensors through the host and gloo: for ranks that share a GPU, which NCCL refuses.  Not
    fast.
    """

    def __init__(self, host: Transport, rank: int, size: int, device: torch.device) -> None:
        self.host = host
        self.rank = rank
        self.size = size
        self.device = device

    def all_gather(self, full: Tensor, cid: CollectiveId) -> Wait:
        host = torch.empty_like(full, device="cpu")
        host.chunk(self.size)[self.rank].copy_(full.chunk(self.size)[self.rank])
        return once(self.host.all_gather(host, cid), lambda: full.copy_(host))

    def exchange(
        self, pieces: Sequence[Tensor], inbox: Sequence[Tensor | None], cid: CollectiveId, use: Use
    ) -> Wait:
        received = filled(inbox, pieces[self.rank], self.rank)
        incoming = [torch.empty_like(box, device="cpu") for box in received]

        def arrive(found: Sequence[Tensor]) -> None:
            for peer, (box, host) in enumerate(zip(received, found, strict=True)):
                if peer != self.rank:
                    box.copy_(host)
            use(received)

        return self.host.exchange([piece.cpu() for piece in pieces], incoming, cid, arrive)


class Hierarchical(CopyingTransport):
    """Ranks of several hosts: near ones through shared memory, far ones through gloo."""

    def __init__(self, near: Transport, far: Transport, rank: int) -> None:
        self.near = near
        self.far = far
        self.rank = rank

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.near.empty(numel, dtype)

    def is_read(self, tensor: Tensor) -> bool:
        return self.near.is_read(tensor)

    def wait_until_read(self, tensor: Tensor) -> None:
        self.near.wait_until_read(tensor)

    @property
    def expects(self) -> bool:
        return self.near.expects

    def progress(self) -> None:
        self.near.progress()

    def end_engine(self, engine: str) -> None:
        self.near.end_engine(engine)
        self.far.end_engine(engine)

    def all_gather(self, full: Tensor, cid: CollectiveId) -> Wait:
        far = self.far.all_gather(full, cid)  # first: it may have no room yet
        return _both(self.near.all_gather(full, cid), far)

    def exchange(
        self, pieces: Sequence[Tensor], inbox: Sequence[Tensor | None], cid: CollectiveId, use: Use
    ) -> Wait:
        received = filled(inbox, pieces[self.rank], self.rank)
        far = self.far.exchange(pieces, inbox, cid, _keep_waiting)  # first: it may have no room yet
        near = self.near.exchange(pieces, inbox, cid, _keep_waiting)
        return once(_both(near, far), lambda: use(received))


def _keep_waiting(received: Sequence[Tensor]) -> None:
    """Half of the pieces are here."""


def _both(first: Wait, second: Wait) -> Wait:
    def wait() -> None:
        first()
        second()

    return wait
