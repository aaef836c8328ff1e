"""Exchanges texts between ranks before they have lanes: rows of bytes over a gloo group, never pickles."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..base import world


@dataclass(frozen=True)
class Hosts:
    """The ranks that share a host. keys: by rank, a text that ranks of one host have in common; "" if a rank cannot
    tell.
    """

    rank: int
    keys: tuple[str, ...]

    @property
    def near(self) -> list[int]:
        """Return the ranks of this host, this one included."""
        mine = self.keys[self.rank]
        return [rank for rank, key in enumerate(self.keys) if rank == self.rank or (mine and key == mine)]

    @property
    def is_one(self) -> bool:
        """Return whether all ranks are known to be on one host."""
        return all(self.keys) and len(set(self.keys)) == 1

    @property
    def local_size(self) -> int:
        """Return the number of ranks on this host: counted if this rank can tell, else as the launcher says, else
        all.
        """
        return len(self.near) if self.keys[self.rank] else world.local_size() or len(self.keys)


def all_gather_text(text: str, size: int, group: dist.ProcessGroup | None) -> list[str]:
    """Return every rank's text, by rank. Collective in the group."""
    payload = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(text.encode())]), group=group)
    row = torch.zeros(max(1, *(int(length) for length in lengths)), dtype=torch.uint8)
    row[: payload.numel()].copy_(payload)
    rows = [torch.empty_like(row) for _ in range(size)]
    dist.all_gather(rows, row, group=group)
    return [bytes(each[: int(length)].tolist()).decode() for each, length in zip(rows, lengths, strict=True)]
