"""Exchanges texts and bytes between ranks that have no lanes: rows over a group of torch's, never
pickles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..base import world
from ..base.device import CPU, default_device


@dataclass(frozen=True)
class Hosts:
    """The ranks that share a host. keys: by rank, a text that ranks of one host have in common; ""
    if a rank cannot
    tell. names: of their hosts, by rank.
    """

    rank: int
    keys: tuple[str, ...]
    names: tuple[str, ...] = ()

    @property
    def local_ranks(self) -> list[int]:
        """Return the ranks of this host, this one included."""
        mine = self.keys[self.rank]
        return [
            rank
            for rank, key in enumerate(self.keys)
            if rank == self.rank or (mine and key == mine)
        ]

    def shared_with(self, rank: int) -> tuple[str, list[int]]:
        """Return the name of a rank's host, and the ranks on it."""
        key = self.keys[rank]
        return self.names[rank], [
            at for at, other in enumerate(self.keys) if at == rank or (key and other == key)
        ]

    @property
    def is_one(self) -> bool:
        """Return whether all ranks are known to be on one host."""
        return all(self.keys) and len(set(self.keys)) == 1

    @property
    def per_host(self) -> int:
        """Return how many ranks every host has, where each has the next so many; else, and on one
        host, 1.
        """
        size = self.keys.count(self.keys[0])
        runs = [self.keys[start : start + size] for start in range(0, len(self.keys), size)]
        is_dealt = all(self.keys) and all(len(run) == size and len(set(run)) == 1 for run in runs)
        return size if is_dealt and len(runs) > 1 else 1

    @property
    def local_size(self) -> int:
        """Return the number of ranks on this host: counted if this rank can tell, else as the
        launcher says, else all.
        """
        return (
            len(self.local_ranks) if self.keys[self.rank] else world.local_size() or len(self.keys)
        )


def all_gather_text(text: str, size: int, group: dist.ProcessGroup | None) -> list[str]:
    """Return every rank's text, by rank. Collective in the group."""
    return [each.decode() for each in all_gather_bytes(text.encode(), size, group)]


def all_gather_bytes(payload: bytes, size: int, group: dist.ProcessGroup | None) -> list[bytes]:
    """Return every rank's bytes, by rank, of any lengths. Collective in the group."""
    # NCCL alone carries nothing of the host's
    device = default_device() if dist.get_backend(group) == "nccl" else CPU
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(payload)], device=device), group=group)
    row = torch.zeros(max(1, *(int(length) for length in lengths)), dtype=torch.uint8)
    if payload:
        row[: len(payload)].copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    row = row.to(device)
    rows = [torch.empty_like(row) for _ in range(size)]
    dist.all_gather(rows, row, group=group)
    return [
        each[: int(length)].cpu().numpy().tobytes()
        for each, length in zip(rows, lengths, strict=True)
    ]
