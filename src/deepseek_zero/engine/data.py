"""The batches of one rank, in an order independent of the number of ranks.

A batch is moved to the device while the previous step runs.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from ..base.log import log_once
from ..base.mesh import Mesh
from ..base.nested import map_inputs

Collate = Callable[[list[Any]], Any]  # makes a batch of samples


def to_device(value: Any, device: torch.device) -> Any:
    """Return `value` with all its tensors copied to a device.

    Args:
        value: A tensor, or tensors nested in mappings, lists and tuples.
        device: The target of the copies. Tensors that are already there are not copied.

    Returns:
        The same nested structure with the copied tensors. Other values are returned unchanged.
    """
    return map_inputs(value, lambda tensor: tensor.to(device, non_blocking=True))


@dataclass(eq=False)
class StepOrder:
    """Iterator over the sample indices of this rank's micro-batches.

    A step has the same samples at any number of ranks. The order of an epoch is a permutation that
    is seeded with the epoch's number, or the order of the dataset (`shuffles=False`). Step s takes
    the positions [s * step_samples, (s + 1) * step_samples) of it, and blocks of `batch_size`
    positions are assigned to the data-parallel ranks round-robin. The last step is filled from the
    beginning of the order, or dropped (`drop_last`). `step_samples` is a multiple of batch_size *
    shares.

    Attributes:
        length: The number of samples of the dataset.
        step_samples: The number of samples of a step over all ranks.
        batch_size: The number of samples of one micro-batch.
        share: The index of this rank among the data-parallel ranks.
        shares: The number of data-parallel ranks.
        drop_last: Whether to drop the last incomplete step of an epoch.
        shuffles: Whether to permute the samples in each epoch.
        first: The first position of the epoch that is used, after a resume.
    """

    length: int
    step_samples: int
    batch_size: int
    share: int
    shares: int
    drop_last: bool = False
    shuffles: bool = True
    # Samples of the epoch that are done, including those that a resumed epoch skips without loading
    # them
    first: int = 0
    _epoch: int = 0
    _order: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64, device="cpu"))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, whose number seeds the permutation."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = torch.empty(0, dtype=torch.int64, device="cpu")

    @property
    def order(self) -> Tensor:
        """Return the sample order of the epoch, as torch's DistributedSampler makes it.

        Returns:
            The indices, dtype int64, shape ``(length,)``.
        """
        if len(self._order) != self.length:
            seed = torch.Generator().manual_seed(self._epoch)
            self._order = (
                torch.randperm(self.length, generator=seed, device="cpu")
                if self.shuffles
                else torch.arange(self.length, device="cpu")
            )
        return self._order

    def fingerprint(self) -> int:
        """Return the CRC-32 of the epoch's order.

        A checkpoint stores it to detect that a resumed run uses another order.
        """
        return zlib.crc32(self.order.numpy().data)

    def _stop(self, first: int) -> int:
        """Return the end of the epoch's last step, if it continues after `first` places."""
        rest = max(self.length - first, 0)
        steps = rest // self.step_samples if self.drop_last else -(-rest // self.step_samples)
        return first + steps * self.step_samples

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order
        dealt = self.batch_size * self.shares
        own = range(self.first + self.share * self.batch_size, self._stop(self.first), dealt)
        for place in own:
            yield order[
                torch.arange(place, place + self.batch_size, device="cpu") % self.length
            ].tolist()

    def __len__(self) -> int:
        return self._stop(0) // (self.batch_size * self.shares)


class _OwnEpoch(int):
    """An epoch that the loader has set in a sampler.

    Its identity distinguishes it from an equal number that the program sets.
    """


class _From:
    """The indices of a sampler from position `first` on.

    A resumed epoch thus does not load the samples that it skips.
    """

    def __init__(self, sampler: Iterable[Any]) -> None:
        self.sampler = sampler
        self.first = 0

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.sampler), self.first, None)

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]


class ShardedLoader:
    """Data loader for this rank's part of a dataset. It loads one micro-batch ahead of the step.

    Every rank gets the same number of batches. If `shuffles`, each epoch is shuffled with a seed
    that all ranks share. Without a sampler, samples are distributed by steps (`StepOrder`). The
    indices of a sampler are cut into batches in order. If the program sets the epoch of a
    DistributedSampler, the loader continues with that epoch. After `load_state_dict`, iteration
    continues at the position that `state_dict` returned.

    Args:
        dataset: The dataset of all ranks, map-style or iterable.
        batch_size: The number of samples of one micro-batch.
        mesh: The device mesh; ranks along its data axes get different samples.
        collate_fn: Combines a list of samples to a batch; None for PyTorch's default.
        drop_last: Whether to drop the last incomplete step of an epoch instead of filling it.
        sampler: An iterator that yields the indices of this rank; None to distribute samples by
            steps.
        take: A function that returns the part of a batch that this rank uses; None for all of it.
        step_samples: The samples of a step over all ranks; None for one micro-batch of each rank.
        shuffles: Whether to shuffle each epoch. Not used with a sampler.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        mesh: Mesh,
        collate_fn: Collate | None = None,
        drop_last: bool = False,
        sampler: Any = None,
        take: Callable[[Any], Any] | None = None,
        step_samples: int | None = None,
        shuffles: bool = True,
    ) -> None:
        self._take = take or _all
        self.device = mesh.device
        self.epoch = 0
        self.batch_size = batch_size
        # Samples that all ranks together receive at a time
        self.dealt = batch_size * mesh.data_size
        # Samples of this epoch that all ranks received, also before a restart
        self.samples = self._resume_at = 0
        self._samples_before = 0  # the same for the previous epoch
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.sampler = sampler
        self._own_epoch: object = None  # the epoch of the sampler after this loader has set it
        if sampler is None and not isinstance(dataset, IterableDataset):
            many: int = len(dataset)  # type: ignore[arg-type]  # map-style data have a length
            shares = mesh.data_index, mesh.data_size
            self.sampler = StepOrder(
                many, step_samples or self.dealt, batch_size, *shares, drop_last, shuffles
            )
        self.data_sampler = self.sampler  # DeepSpeed's name
        self._indices = (
            None
            if isinstance(self.sampler, StepOrder) or self.sampler is None
            else _From(self.sampler)
        )
        cut: dict[str, Any] = {
            "batch_size": batch_size,
            "sampler": self._indices,
            "drop_last": drop_last,
        }
        if isinstance(self.sampler, StepOrder):
            cut = {"batch_sampler": self.sampler}
        self.loader: DataLoader[Any] = DataLoader(
            dataset,
            collate_fn=collate_fn,
            pin_memory=mesh.device.type == "cuda",
            # Separate: each epoch draws a number, and a resumed run starts one more epoch.
            generator=torch.Generator(),
            **cut,
        )

    def state_dict(self, again: int = 0) -> dict[str, int]:
        """Return the position in the epoch and a description of the sample order.

        The position is the epoch and the number of samples that all ranks have taken from it.

        Args:
            again: The number of last batches that count as not taken, because their step has not
                ended.
        """
        epoch = self.epoch
        samples = self.samples - again * self.dealt
        if samples < 0 and epoch > 0:  # the step began in the previous epoch
            epoch = epoch - 1
            samples = samples + self._samples_before
        return {"epoch": epoch, "samples": max(samples, 0), **self._described(epoch)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at a saved position, at any number of ranks.

        A batch of a sampler that this number of ranks would cut is taken again. A different order
        than in the saved run is logged as a warning, and so is the state of another data loader,
        after which the data start again.
        """
        if not {"epoch", "samples"} <= set(state):
            log_once(
                "the saved state of the data loader has no position, because another class of "
                "data loader has saved it: the data start from the beginning.",
                logging.WARNING,
            )
            state = {"epoch": 0, "samples": 0}
        self.epoch = int(state["epoch"])
        samples = int(state["samples"])
        is_by_steps = isinstance(self.sampler, StepOrder)
        self.samples = self._resume_at = (
            samples if is_by_steps else samples // self.dealt * self.dealt
        )
        here = self._described(self.epoch)
        if any(state.get(name, value) != value for name, value in here.items()):
            log_once(
                f"the data have another order than in the saved run ({here['length']:,} "
                f"samples; it had {int(state['length']):,}): the epoch continues at sample "
                f"{samples:,} of this order, which may repeat some samples and skip others.",
                logging.WARNING,
            )

    def deal_steps_of(self, samples: int) -> None:
        """Set the number of samples of a step over all ranks, from the next epoch on."""
        if isinstance(self.sampler, StepOrder):
            self.sampler.step_samples = samples

    def _described(self, epoch: int) -> dict[str, int]:
        """Return a description of an epoch's order, or an empty one for a sampler's order."""
        if not isinstance(self.sampler, StepOrder):
            return {}
        self.sampler.set_epoch(epoch)
        found = {"length": self.sampler.length, "order": self.sampler.fingerprint()}
        self.sampler.set_epoch(self.epoch)
        return found

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which seeds the shuffle. It increases by one at the end of each epoch."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.samples = 0
            self._resume_at = 0

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.sampler, DistributedSampler):
            found = self.sampler.epoch
            # A new sampler has the epoch 0, which the program need not have set
            is_new = self._own_epoch is None and not found
            if found is not self._own_epoch and not is_new:
                self.set_epoch(found)
            self.sampler.set_epoch(_OwnEpoch(self.epoch))
            self._own_epoch = self.sampler.epoch  # a subclass may store a plain number
        elif isinstance(self.sampler, StepOrder):
            self.sampler.set_epoch(self.epoch)
        self.samples = self._resume_at
        self._resume_at = 0
        with torch.device("cpu"):  # DataLoader draws a number from its generator
            batches = iter(self._rest_of_epoch())
        moved = (to_device(self._take(batch), self.device) for batch in batches)
        ahead = list(islice(moved, 1))
        while ahead:
            batch = ahead.pop()
            ahead = list(islice(moved, 1))
            self.samples += self.dealt
            yield batch
        self._samples_before = self.samples
        self.samples = 0
        self.epoch += 1

    def _rest_of_epoch(self) -> Iterable[Any]:
        """Return the remaining batches of the epoch.

        Samples of a sampler that are skipped are not loaded.
        """
        over = self.samples // self.dealt
        if isinstance(self.sampler, StepOrder):
            self.sampler.first = self.samples
        elif self._indices is not None:
            self._indices.first = over * self.batch_size
        else:
            return islice(self.loader, over, None)
        return self.loader


def _all(batch: Any) -> Any:
    return batch
