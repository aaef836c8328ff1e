"""Partitioned activations: checkpoint inputs sharded over tensor-parallel ranks.

Between the layers that the ranks along "tp" compute together, every rank has the same activations,
so each rank keeps only one part. Of n elements it keeps [rank * c, (rank + 1) * c) with c = ceil(n
/ ranks). Backward all-gathers the parts of a checkpoint when it recomputes it, and prefetches those
of the checkpoint before, which is next. Data-parallel ranks have different inputs, so these are not
sharded over them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base.errors import UsageError
from ..base.quantities import ceil_div
from ..comm.collectives import Comm
from ..parallel.inputs import difference
from .offload import ActivationOffload, ParkedTensors

KIND = "activations"  # The meter's kind for these bytes


class PartitionedInputs:
    """Shards the inputs of activation checkpoints over the tensor-parallel ranks.

    All ranks of the group must checkpoint and recompute in the same order.

    Args:
        comm: The communicator of the ranks along "tp". No other object may use its queue of
            messages (lane) "gather".
        parking: Stores this rank's shards until backward.
    """

    def __init__(self, comm: Comm, parking: ActivationOffload) -> None:
        self.comm = comm
        self.parking = parking
        self._shares: list[weakref.ref[InputShare]] = []  # In order of arrival
        self._ahead: tuple[InputShare, list[Gathering]] | None = None
        self._pages: list[Tensor] = []
        self._compares = True  # until the first recomputation

    def park(self, tensors: Sequence[Tensor]) -> InputShare:
        """Store this rank's shard of each input tensor of a checkpoint.

        Until the first recomputation, the call compares the tensors of all ranks.

        Args:
            tensors: The inputs, which must be equal on all ranks of the group.

        Returns:
            An object whose `restore()` returns copies of the whole tensors.

        Raises:
            UsageError: Ranks have different tensors, so that their shards do not form one.

        Note:
            Until the first recomputation, collective: every rank of the group must call it.
        """
        if self._compares and (found := difference(tensors, self.comm)) is not None:
            raise UsageError(
                "activation_checkpointing.partition_activations: the inputs of a checkpoint differ "
                f"over tp: {found}.",
                "Each rank keeps one part of a tensor that all of them have.",
                "leave partition_activations out, or put the checkpoint where every rank has the "
                "same input.",
            )
        sizes = [tensor.size() if tensor.is_contiguous() else None for tensor in tensors]
        share = InputShare(self, self.parking.park(tensors, self._own), sizes)
        self._shares = [known for known in self._shares if known() is not None]
        self._shares.append(weakref.ref(share))
        return share

    def _own(self, tensor: Tensor) -> Tensor:
        """Return this rank's shard of a contiguous tensor, or another tensor whole."""
        if not tensor.is_contiguous():
            return tensor
        flat = tensor.detach().view(-1)
        count = ceil_div(flat.numel(), self.comm.size)
        own = flat[self.comm.rank * count : (self.comm.rank + 1) * count]
        return own if own.numel() == count else F.pad(own, (0, count - own.numel()))

    def restore(self, share: InputShare) -> list[Tensor]:
        """All-gather the input tensors of a checkpoint.

        The call also starts the all-gather for the previous checkpoint, which backward needs next.

        Args:
            share: This rank's shards of the inputs.

        Returns:
            New tensors with the whole inputs.

        Note:
            Collective: every rank of the group must call it.
        """
        self._compares = False
        ahead = self._ahead
        self._ahead = None
        if ahead is not None and ahead[0] is not share:
            for gathering in ahead[1]:  # the backward of its graph was abandoned
                gathering.wait()
            ahead = None
        found = [
            gathering.wait() for gathering in (self._start(share) if ahead is None else ahead[1])
        ]
        before = self._before(share)
        if before is not None:
            self._ahead = (before, self._start(before))
        return found

    def _before(self, share: InputShare) -> InputShare | None:
        alive = [each for each in (known() for known in self._shares) if each is not None]
        place = alive.index(share) if share in alive else 0
        return alive[place - 1] if place else None

    def _start(self, share: InputShare) -> list[Gathering]:
        return [
            Gathering(self, own, size)
            for own, size in zip(share.parked.restore(), share.sizes, strict=True)
        ]

    def take(self, nbytes: int) -> Tensor:
        """Return a send buffer of at least `nbytes` bytes that no rank reads now.

        `give_back` returns it to the pool.
        """
        page = next((each for each in self._pages if each.numel() >= nbytes), None)
        if page is None:
            return self.comm.empty(nbytes, torch.uint8)
        self._pages = [each for each in self._pages if each is not page]
        return page

    def give_back(self, page: Tensor) -> None:
        """Return a buffer that `take` returned to the pool, so that it can be reused."""
        self._pages.append(page)


@dataclass(eq=False)
class InputShare:
    """This rank's shards of the inputs of one checkpoint.

    Attributes:
        partition: All-gathers the shards.
        parked: The shards in the memory that stores them.
        sizes: The shape of each whole tensor; None if this rank stores the whole tensor.
    """

    partition: PartitionedInputs
    parked: ParkedTensors
    sizes: list[torch.Size | None]

    def restore(self) -> list[Tensor]:
        """All-gather the shards, and return the whole input tensors.

        Note:
            Collective: every rank of the group must call it.
        """
        return self.partition.restore(self)


class Gathering:
    """Handle of an all-gather of one tensor, which the constructor starts.

    Args:
        partition: Provides the communicator and the send buffer.
        own: The shard of this rank.
        size: The shape of the whole tensor; None if `own` is the whole tensor.

    Note:
        The constructor is collective unless `size` is None.
    """

    def __init__(self, partition: PartitionedInputs, own: Tensor, size: torch.Size | None) -> None:
        self._partition = partition
        self._own = own
        self._size = size
        if size is None:
            return
        comm = partition.comm
        self._page = partition.take(own.nbytes)
        page = self._page[: own.nbytes].view(own.dtype).copy_(own)
        self._whole = own.new_empty(comm.size, own.numel())
        self._whole[comm.rank].copy_(own)
        inbox = list(self._whole.unbind(0))
        self._pending = comm.exchange([page] * comm.size, inbox, "gather", "activations", kind=KIND)

    def wait(self) -> Tensor:
        """Block until the all-gather is complete, and return the whole tensor."""
        if self._size is None:
            return self._own
        self._pending.wait()
        self._partition.give_back(self._page)
        return self._whole.view(-1)[: prod(self._size)].view(self._size)
