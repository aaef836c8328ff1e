"""Exchange texts and bytes between ranks before an engine has a transport.

Messages are rows of bytes over a torch.distributed group. Nothing is pickled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..base import world
from ..base.device import CPU, default_device


@dataclass(frozen=True)
class Hosts:
    """The assignment of ranks to hosts.

    Attributes:
        rank: This rank.
        keys: By rank, a string that is the same for the ranks of one host; "" if unknown.
        names: By rank, the name of its host.
    """

    rank: int
    keys: tuple[str, ...]
    names: tuple[str, ...] = ()

    @property
    def local_ranks(self) -> list[int]:
        """Return the ranks on this host, including this rank."""
        return self._ranks_with(self.rank)

    def shared_with(self, rank: int) -> tuple[str, list[int]]:
        """Return the name of a rank's host and the ranks on that host."""
        return self.names[rank], self._ranks_with(rank)

    def _ranks_with(self, rank: int) -> list[int]:
        key = self.keys[rank]
        return [at for at, other in enumerate(self.keys) if at == rank or (key and other == key)]

    @property
    def is_one(self) -> bool:
        """Return whether all ranks are known to be on one host."""
        return all(self.keys) and len(set(self.keys)) == 1

    @property
    def per_host(self) -> int:
        """Return the number of ranks per host if all hosts have equal, consecutive blocks.

        If the blocks differ, if a host is unknown, or if there is only one host, return 1.
        """
        size = self.keys.count(self.keys[0])
        runs = [self.keys[start : start + size] for start in range(0, len(self.keys), size)]
        is_dealt = all(self.keys) and all(len(run) == size and len(set(run)) == 1 for run in runs)
        return size if is_dealt and len(runs) > 1 else 1

    @property
    def local_size(self) -> int:
        """Return the number of ranks on this host.

        It is counted if this rank's host is known. Otherwise it is the launcher's value, or else
        the world size.
        """
        return (
            len(self.local_ranks) if self.keys[self.rank] else world.local_size() or len(self.keys)
        )


def all_gather_text(text: str, size: int, group: dist.ProcessGroup | None) -> list[str]:
    """Return the texts of all ranks, by rank.

    Args:
        text: Text of this rank; the length may differ between ranks.
        size: Number of ranks in the group.
        group: The torch.distributed group; None for the default group.

    Returns:
        One text per rank, in rank order.

    Note:
        Collective: every rank of `group` must call it.
    """
    return [each.decode() for each in all_gather_bytes(text.encode(), size, group)]


def all_gather_bytes(payload: bytes, size: int, group: dist.ProcessGroup | None) -> list[bytes]:
    """Return the bytes of all ranks, by rank.

    Args:
        payload: Bytes of this rank; the length may differ between ranks.
        size: Number of ranks in the group.
        group: The torch.distributed group; None for the default group.

    Returns:
        One byte string per rank, in rank order.

    Note:
        Collective: every rank of `group` must call it.
    """
    # A group with only NCCL cannot send CPU tensors
    device = default_device() if dist.get_backend(group) == "nccl" else CPU
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(payload)], device=device), group=group)
    row = padded(payload, max(map(int, lengths))).to(device)
    rows = [torch.empty_like(row) for _ in range(size)]
    dist.all_gather(rows, row, group=group)
    return [
        each[: int(length)].cpu().numpy().tobytes()
        for each, length in zip(rows, lengths, strict=True)
    ]


def padded(payload: bytes, length: int) -> Tensor:
    """Return bytes as a uint8 tensor of at least one element, with zeros at the end.

    Args:
        payload: Bytes to copy.
        length: Minimum number of elements of the tensor.

    Returns:
        A 1-D uint8 tensor on the CPU.
    """
    row = torch.zeros(max(1, length), dtype=torch.uint8, device="cpu")
    if payload:  # `frombuffer` refuses an empty buffer
        row[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    return row
