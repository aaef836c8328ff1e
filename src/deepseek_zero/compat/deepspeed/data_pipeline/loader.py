"""The loader that a curriculum deals the samples of."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ....base.errors import UsageError
from ....base.log import log_once
from ....base.mesh import Mesh
from ....engine.data import ShardedLoader, to_device
from .data_sampler import WHERE, DeepSpeedDataSampler


class CurriculumLoader(ShardedLoader):
    """Iterates over this rank's micro-batches as a curriculum deals them, `num_epochs` of the data
    in all.

    A loop that is left goes on where it was when the loader is iterated again.  settings: what
    `get_data_efficiency_config` returns.  accumulation: micro-batches of a step.  The rest: as
    `ShardedLoader` has it.
    """

    post_process_func: Callable[[Any, dict[str, Any]], Any] | None = None

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        mesh: Mesh,
        settings: Mapping[str, Any],
        accumulation: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
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
                "the curriculum has given all its epochs.",
                fix=f"raise num_epochs beside {WHERE.rsplit('.', 1)[1]}.",
            )
        for batch in self.loader:
            if self.post_process_func is not None:
                batch = self.post_process_func(batch, self.data_sampler.state_dict())
            yield to_device(self._take(batch), self.device)

    def deal_steps_of(self, samples: int) -> None:
        """Have the steps from the next one on take so many samples of all ranks."""
        self.data_sampler.deal_steps_of(samples)

    def state_dict(self, again: int = 0) -> dict[str, Any]:
        """Return the curriculum's state.  again: so many batches, the last ones, count as not
        given.
        """
        state = self.data_sampler.state_dict(again)
        # Epoch and samples are for a run that goes on without a curriculum.
        epoch, samples = divmod(
            state["consumed_samples"], self.data_sampler.one_epoch_total_samples
        )
        return {"epoch": epoch, "samples": samples, "curriculum": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on there, at any number of ranks; a run that was saved without a curriculum begins it,
        with a warning.
        """
        if "curriculum" in state:
            self.data_sampler.load_state_dict(state["curriculum"])
        else:
            log_once(
                "the checkpoint was saved without a curriculum: it begins here.", logging.WARNING
            )
