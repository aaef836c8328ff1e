"""Memory for gathered weights, messages and sums, which is reused."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..base.device import storage_users
from ..comm.collectives import Comm
from ..tiers.budget import DeviceBudget

# Bytes. Returning the pages of a smaller buffer costs more than it saves.
WORTH_RETURNING = 1 << 20


def has_pages_to_return(tensor: Tensor) -> bool:
    """Return whether a tensor is on the CPU and so large that its idle pages are returned."""
    return tensor.device.type == "cpu" and tensor.nbytes >= WORTH_RETURNING


@dataclass
class Pool:
    """A pool of flat tensors, reused by dtype and size.

    Other ranks of a host may read a tensor in place, even after it was given back.
    `Comm.wait_until_read` waits until they have read it.

    Attributes:
        device: The device of the tensors.
        comm: The communicator of all ranks, which allocates the tensors.
        scratch_numel: The number of elements of `take_scratch`.
        budget: Counts the memory of the tensors.
        allocated_bytes: The size of all tensors of the pool, lent or idle.
    """

    device: torch.device
    comm: Comm
    scratch_numel: int
    budget: DeviceBudget = field(default_factory=DeviceBudget)
    _idle: dict[tuple[torch.dtype, int], list[Tensor]] = field(
        default_factory=lambda: defaultdict(list)
    )
    allocated_bytes: int = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized flat tensor, which `give` returns to the pool.

        Args:
            numel: The number of elements of the tensor.
            dtype: The dtype of the tensor.
        """
        idle = self._idle[dtype, numel]
        if idle:
            # The tensor that came back first: other ranks have finished reading it by now.
            tensor = idle.pop(0)
            self.comm.wait_until_read(tensor)
            return tensor
        self.budget.reserve(numel * dtype.itemsize, "a buffer of a unit or a message")
        tensor = self.comm.empty(numel, dtype)
        self.allocated_bytes += tensor.nbytes
        return tensor

    def take_scratch(self) -> Tensor:
        """Return fp32 scratch memory for sums and codecs, which `give` returns to the pool."""
        return self.take(self.scratch_numel, torch.float32)

    def give(self, tensor: Tensor) -> None:
        """Return a tensor to the pool.

        If a view of the tensor still exists, the pool drops the tensor, so that it is never
        overwritten.
        """
        if storage_users(tensor) > 1:
            self._uncount(tensor.nbytes)
        else:
            self._idle[tensor.dtype, tensor.numel()].append(tensor)

    def idle(self) -> list[Tensor]:
        """Return the tensors that are not in use."""
        return [tensor for tensors in self._idle.values() for tensor in tensors]

    def clear(self) -> None:
        """Free the tensors that are not in use."""
        self._uncount(sum(tensor.nbytes for tensor in self.idle()))
        self._idle.clear()

    def _uncount(self, nbytes: int) -> None:
        self.allocated_bytes -= nbytes
        self.budget.release(nbytes)
