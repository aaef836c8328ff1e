"""Batches for one rank: a sharded sampler, the move to the device while the step before still runs, and a look at the
first batch where several ranks must be given the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
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


class _From:
    """A sampler's indices from `first` on: samples that a resumed epoch skips are not loaded, either."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self.sampler, self.first = sampler, 0

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.sampler), self.first, None)

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]


class ShardedLoader:
    """Iterates over this rank's share of a dataset, one micro-batch ahead of the step.

    Every rank sees the same number of batches (the sampler pads the last ones); the order is shuffled anew each epoch
    with a seed all ranks share.  `state_dict` says how far it is; iteration after a `load_state_dict` begins there.
    take: what of a batch this rank is given; None: all of it.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        mesh: Mesh,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        sampler: Any = None,
        take: Callable[[Any], Any] | None = None,
    ) -> None:
        self._take = take or _all
        self.device, self.epoch, self.ranks = mesh.device, 0, mesh.data_size
        self.position = self._resume_at = 0  # batches of this epoch that were given, before a restart too
        iterable = isinstance(dataset, IterableDataset)
        self.sampler = sampler
        if sampler is None and not iterable:
            self.sampler = DistributedSampler(
                dataset, mesh.data_size, mesh.data_index, shuffle=True, drop_last=drop_last
            )
        self._indices = _From(self.sampler) if self.sampler is not None else None
        self.loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=self._indices,
            collate_fn=collate_fn,
            drop_last=drop_last,
            pin_memory=mesh.device.type == "cuda",
            # Of its own: an epoch that begins draws a number, and a resumed run begins one more.
            generator=torch.Generator(),
        )
        self.batch_size = batch_size

    def state_dict(self, again: int = 0) -> dict[str, int]:
        """The epoch, and how many samples of it all ranks together have been given.

        again: so many batches, the last ones, count as not given: the step they were for is not over.
        """
        epoch, position = self.epoch, self.position - again
        if position < 0 and epoch > 0 and self._indices is not None:  # the step began in the epoch before
            epoch, position = epoch - 1, position + len(self.loader)
        return {"epoch": epoch, "samples": max(position, 0) * self.batch_size * self.ranks}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on there, at any number of ranks; a batch that this number of ranks would cut is given again."""
        self.epoch = int(state["epoch"])
        self.position = self._resume_at = int(state["samples"]) // (self.batch_size * self.ranks)

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle; counted on by itself at the end of each epoch."""
        if epoch != self.epoch:
            self.epoch, self.position, self._resume_at = epoch, 0, 0

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.sampler, DistributedSampler):
            self.sampler.set_epoch(self.epoch)
        self.position, self._resume_at = self._resume_at, 0
        batches = iter(self._rest_of_epoch())
        ahead = [to_device(self._take(batch), self.device) for batch in islice(batches, 1)]
        while ahead:
            batch = ahead.pop()
            ahead = [to_device(self._take(batch), self.device) for batch in islice(batches, 1)]
            self.position += 1
            yield batch
        self.epoch, self.position = self.epoch + 1, 0

    def _rest_of_epoch(self) -> Iterable[Any]:
        """Return the batches of the epoch that were not given yet; a sampler of indices does not load the others."""
        if self._indices is None:
            return islice(self.loader, self.position, None)
        self._indices.first = self.position * self.batch_size
        return self.loader


def _all(batch: Any) -> Any:
    return batch
