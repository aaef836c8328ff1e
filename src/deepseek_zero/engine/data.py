"""Batches for one rank: a sharded sampler, and the move to the device while the step before still runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from ..base.mesh import Mesh


def to_device(value: Any, device: torch.device) -> Any:
    """`value` with its tensors on the device; usual containers are walked."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [to_device(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


class ShardedLoader:
    """Iterates over this rank's share of a dataset, one micro-batch ahead of the step.

    Every rank sees the same number of batches (the sampler pads the last ones); the order is shuffled anew each epoch
    with a seed all ranks share.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        mesh: Mesh,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        sampler: Any = None,
    ) -> None:
        self.device, self.epoch = mesh.device, 0
        iterable = isinstance(dataset, IterableDataset)
        self.sampler = sampler
        if sampler is None and not iterable:
            self.sampler = DistributedSampler(dataset, mesh.size, mesh.rank, shuffle=True, drop_last=drop_last)
        self.loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=self.sampler,
            collate_fn=collate_fn,
            drop_last=drop_last,
            pin_memory=mesh.device.type == "cuda",
        )
        self.batch_size = batch_size

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle; counted on by itself at the end of each epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.sampler, DistributedSampler):
            self.sampler.set_epoch(self.epoch)
        ahead: Any = None
        waiting = False
        for batch in self.loader:
            moved = to_device(batch, self.device)
            if waiting:
                yield ahead
            ahead, waiting = moved, True
        if waiting:
            yield ahead
        self.epoch += 1
