"""Data loader whose samples are chosen by a curriculum."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ....base.errors import UsageError
from ....base.log import log_once
from ....base.mesh import Mesh
from ....engine.data import Collate, ShardedLoader, to_device
from .data_sampler import WHERE, DeepSpeedDataSampler


class CurriculumLoader(ShardedLoader):
    """Iterate over this rank's micro-batches in the order of a curriculum.

    One pass covers `num_epochs` of the data. Iterating again after a `break` resumes at the same
    position.

    Args:
        dataset: Dataset with `__len__` and `__getitem__`.
        batch_size: Samples of a micro-batch of one rank.
        mesh: Mesh of ranks, which gives this rank's position along the data axis.
        settings: Result of `get_data_efficiency_config`.
        accumulation: Micro-batches per step.
        collate_fn: Function that makes a batch of a list of samples.
        drop_last: Whether to leave out a micro-batch that the data cannot fill.
        take: Function that selects this rank's part of a batch; None uses the whole batch.

    Raises:
        UsageError: The dataset is an IterableDataset.
    """

    data_sampler: DeepSpeedDataSampler
    post_process_func: Callable[[Any, dict[str, Any]], Any] | None = None

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        mesh: Mesh,
        settings: Mapping[str, Any],
        accumulation: int,
        collate_fn: Collate | None = None,
        drop_last: bool = False,
        take: Callable[[Any], Any] | None = None,
    ) -> None:
        if isinstance(dataset, IterableDataset):
            raise UsageError(
                "curriculum learning over an IterableDataset.",
                "It chooses samples by their numbers.",
                "pass a dataset with __len__ and __getitem__.",
            )
        if settings["data_sampling"]["num_workers"]:
            log_once(
                "data_sampling.num_workers: batches are made in this process.", logging.WARNING
            )
        self.data_sampler = DeepSpeedDataSampler(
            settings,
            len(dataset),
            batch_size,
            mesh.data_index,
            mesh.data_size,
            gradient_accumulation_steps=accumulation,
            global_rank=mesh.rank,
            drop_last=drop_last,
        )
        super().__init__(dataset, batch_size, mesh, collate_fn, drop_last, self.data_sampler, take)
        self.loader = DataLoader(
            dataset,
            batch_sampler=self.data_sampler,
            collate_fn=collate_fn,
            pin_memory=mesh.device.type == "cuda",
            generator=self.loader.generator,
        )

    def __len__(self) -> int:
        return self.data_sampler.micro_batches

    def __iter__(self) -> Iterator[Any]:
        if self.data_sampler.consumed_samples > len(self.data_sampler):
            raise UsageError(
                "the curriculum has ended: all its epochs were used.",
                fix=f"increase num_epochs in {WHERE.rsplit('.', 1)[0]}.",
            )
        with torch.device("cpu"):  # as in the base class
            batches = iter(self.loader)
        for batch in batches:
            if self.post_process_func is not None:
                batch = self.post_process_func(batch, self.data_sampler.state_dict())
            yield to_device(self._take(batch), self.device)

    def deal_steps_of(self, samples: int) -> None:
        """Set the number of samples of all ranks per step, starting with the next step."""
        self.data_sampler.deal_steps_of(samples)

    def state_dict(self, again: int = 0) -> dict[str, Any]:
        """Return the state of the curriculum.

        Args:
            again: Number of the most recent micro-batches to count as not yet yielded.
        """
        state = self.data_sampler.state_dict(again)
        # Epoch and samples are used if the run resumes without a curriculum.
        epoch, samples = divmod(
            state["consumed_samples"], self.data_sampler.one_epoch_total_samples
        )
        return {"epoch": epoch, "samples": samples, "curriculum": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state, at any number of ranks.

        If the state was saved without a curriculum, the curriculum starts from the beginning and a
        warning is logged.
        """
        if "curriculum" in state:
            self.data_sampler.load_state_dict(state["curriculum"])
        else:
            log_once(
                "the checkpoint was saved without a curriculum: it begins here.", logging.WARNING
            )
