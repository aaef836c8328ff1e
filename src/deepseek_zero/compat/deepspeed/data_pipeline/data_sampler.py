"""Choose samples by difficulty, in the same order as DeepSpeed for the same seed.

A cluster contains the samples that became eligible when difficulties rose, in shuffled order. The
number of samples that a step takes from each cluster is drawn in proportion to the clusters' sizes.
An exhausted cluster is shuffled again.

Every rank draws the samples of all ranks from the same seed and index files, and keeps its own
rows. Nothing is sent or written. The state dict has the generator's state before each shuffle, from
which the clusters are rebuilt.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ....base.errors import UsageError
from ....base.log import log_once, logger
from .curriculum_scheduler import CurriculumScheduler
from .indexed_dataset import MMapIndexedDataset, find_fit_int_dtype

Array = np.ndarray[Any, Any]
Difficulties = dict[str, Any]  # metric -> difficulty; None before the first

_MOST_EMPTY_STEPS = 100_000  # in succession; a schedule has then no samples at all

WHERE = "data_efficiency.data_sampling.curriculum_learning"


@dataclass
class Cluster:
    """Samples that became eligible when difficulties rose.

    Attributes:
        name: Name in logs and state dicts.
        previous: Difficulties before; exclusive.
        current: Difficulties after; inclusive.
        samples: Indices of the samples in their current order.
        position: Number of samples that were taken since the last shuffle.
        shuffles: State of the generator before each shuffle.
    """

    name: str
    previous: Difficulties
    current: Difficulties
    samples: Array
    position: int = 0
    shuffles: list[dict[str, Any]] = field(default_factory=list)

    def shuffle(self, generator: np.random.Generator) -> None:
        """Shuffle the samples, after recording the state of the generator."""
        self.shuffles.append(dict(generator.bit_generator.state))
        generator.shuffle(self.samples)


class DeepSpeedDataSampler:
    """Yield the samples of this rank's micro-batches according to a curriculum.

    Args:
        data_efficiency_config: Result of `get_data_efficiency_config`.
        one_epoch_total_samples: Number of samples in the dataset.
        micro_batch_size: Samples of a micro-batch of one rank.
        data_parallel_rank: This rank along the data axis.
        data_parallel_size: Number of data-parallel ranks.
        data_parallel_group: Ignored; every rank draws all samples.
        gradient_accumulation_steps: Micro-batches per step.
        global_rank: Ignored.
        drop_last: Whether to leave out a micro-batch that the clusters cannot fill.

    Raises:
        UsageError: The configuration has no curriculum, or the dataset is empty.
    """

    def __init__(
        self,
        data_efficiency_config: Mapping[str, Any],
        one_epoch_total_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        data_parallel_group: Any = None,
        gradient_accumulation_steps: int = 1,
        global_rank: int = 0,
        drop_last: bool = True,
    ) -> None:
        sampling = data_efficiency_config["data_sampling"]
        self.data_efficiency_config = data_efficiency_config
        self.drop_last = drop_last
        self.one_epoch_total_samples = one_epoch_total_samples
        self.total_samples = one_epoch_total_samples * sampling["num_epochs"]
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size
        self.micro_batch_times_data_parallel_size = micro_batch_size * data_parallel_size
        self.global_batch_size = (
            self.micro_batch_times_data_parallel_size * gradient_accumulation_steps
        )
        self.index_dtype = find_fit_int_dtype(0, one_epoch_total_samples)
        self.np_rng = np.random.default_rng(data_efficiency_config["seed"])
        self.consumed_samples = self.curriculum_step = 0
        self._empty_steps = 0  # in succession, without a full micro-batch
        self.batch: list[int] = []  # samples of all ranks that are left in the current step
        self._given: deque[list[int]] = deque(maxlen=gradient_accumulation_steps)
        self.current_difficulties: Difficulties = {}
        self.data_clusters: list[Cluster] = []
        if not sampling["curriculum_learning"]["enabled"] or self.total_samples <= 0:
            raise UsageError(
                f"a sampler by difficulty without a curriculum, or of {self.total_samples} "
                "samples.",
                fix=f"state {WHERE}, and a dataset that is not empty.",
            )
        self._metrics: Mapping[str, Mapping[str, Any]] = sampling["curriculum_learning"][
            "curriculum_metrics"
        ]
        self.curriculum_schedulers = {
            name: CurriculumScheduler(metric) for name, metric in self._metrics.items()
        }
        self.curriculum_index_to_sample: dict[str, MMapIndexedDataset] = {}
        # metric -> the value of each row; only for metrics by value
        self._values: dict[str, Array] = {}
        for name, metric in self._metrics.items():
            self._open(name, metric)

    def _open(self, name: str, metric: Mapping[str, Any]) -> None:
        """Open the index files of a metric, unless it has a single cluster."""
        kind = metric.get("difficulty_type")
        if kind not in ("value", "percentile") or "clustering_type" not in metric:
            raise UsageError(
                f"the metric {name} has the difficulty_type {kind!r} and the clustering_type "
                f"{metric.get('clustering_type')!r}.",
                fix=f'in {WHERE}.curriculum_metrics.{name} state difficulty_type "value" or '
                '"percentile", and clustering_type "single_cluster" or "schedule_based".',
            )
        if metric["clustering_type"] == "single_cluster":
            return
        self.curriculum_index_to_sample[name] = MMapIndexedDataset(metric["index_to_sample_path"])
        if kind == "value":
            values = MMapIndexedDataset(metric["index_to_metric_path"])
            self._values[name] = np.array([values[row][0] for row in range(len(values))])

    def __len__(self) -> int:
        return int(self.total_samples)

    @property
    def micro_batches(self) -> int:
        """Return the number of micro-batches of a rank in all epochs, if all are full."""
        return len(self) // self.micro_batch_times_data_parallel_size + 1

    def set_custom_curriculum_learning_schedule(
        self, schedule_func_dict: Mapping[str, Callable[[int], Any]]
    ) -> None:
        """Set the functions of metrics with a custom schedule.

        Args:
            schedule_func_dict: For each metric, a function that maps a step to a difficulty.
        """
        for metric, scheduler in self.curriculum_schedulers.items():
            if metric in schedule_func_dict:
                scheduler.set_custom_get_difficulty(schedule_func_dict[metric])

    def get_start_end_idx(self, batch_len: int | None = None) -> tuple[int, int]:
        """Return the range of this rank's samples in a micro-batch of all ranks."""
        many = batch_len or self.micro_batch_times_data_parallel_size
        rank = self.data_parallel_rank
        size = self.data_parallel_size
        return round(rank * many / size), round((rank + 1) * many / size)

    # -- clusters

    def get_sample_based_on_metric_value(
        self, metric: str, value_start: float, value_end: float
    ) -> Array:
        """Return the samples with value_start < value <= value_end.

        Args:
            metric: Name of the metric.
            value_start: Exclusive lower bound.
            value_end: Inclusive upper bound.

        Returns:
            The indices of the samples in the dataset, a 1-D integer array.
        """
        values = self._values[metric]
        rows = self.curriculum_index_to_sample[metric]
        found = np.flatnonzero((values > value_start) & (values <= value_end))
        return self._joined([rows[int(row)] for row in found])

    def get_sample_based_on_metric_percentile(
        self, metric: str, percentile_start: int, percentile_end: int
    ) -> Array:
        """Return the samples between two percentiles in the order of a metric.

        The metric's max_difficulty is the number of percentiles.

        Args:
            metric: Name of the metric.
            percentile_start: Lower bound.
            percentile_end: Upper bound.

        Returns:
            The indices of the samples in the dataset, a 1-D integer array ordered by the metric.
        """
        rows = self.curriculum_index_to_sample[metric]
        most = self._metrics[metric]["max_difficulty"]
        ends = rows.sizes.cumsum(dtype=np.int64)
        many = int(ends[-1]) if len(ends) else 0
        start = many // most * percentile_start
        stop = many if percentile_end == most else many // most * percentile_end
        parts = []
        for row in range(int(np.searchsorted(ends, start, "right")), len(rows)):
            before = int(ends[row]) - rows.size(row)
            if before >= stop:
                break
            parts.append(rows[row][max(0, start - before) : max(0, stop - before)])
        return self._joined(parts)

    def _joined(self, parts: list[Array]) -> Array:
        return np.concatenate([np.empty(0, self.index_dtype), *parts]).astype(self.index_dtype)

    def _between(self, metric: str, previous: Any, current: Any) -> Array:
        if metric in self._values:
            lowest = float("-inf") if previous is None else previous
            return self.get_sample_based_on_metric_value(metric, lowest, current)
        return self.get_sample_based_on_metric_percentile(metric, previous or 0, current)

    def _members(self, previous: Difficulties, current: Difficulties) -> Array:
        """Return the samples that become eligible, in the order of the index files."""
        everything = np.arange(self.one_epoch_total_samples, dtype=self.index_dtype)
        clustered = list(self.curriculum_index_to_sample)
        # With several metrics, a sample must be eligible for all of them. The new samples are then
        # those that are in no cluster yet.
        if len(clustered) > 1:
            found = everything
            for metric in clustered:
                part = self._between(metric, None, current[metric])
                found = np.intersect1d(found, part, assume_unique=True)
            for cluster in self.data_clusters:
                found = np.setdiff1d(found, cluster.samples, assume_unique=True)
            return found.astype(self.index_dtype)
        if clustered:
            (metric,) = clustered
            return self._between(metric, previous[metric], current[metric])
        return everything if not self.data_clusters else everything[:0]

    def get_new_cluster(self, previous_difficulties: Difficulties) -> None:
        """Add a cluster of the samples that the current difficulties newly allow."""
        current = dict(self.current_difficulties)
        samples = self._members(previous_difficulties, current)
        told = f"new data cluster (difficulties {previous_difficulties} -> {current})"
        if not len(samples):
            logger.info(f"{told} has no matched data thus skipped.")
            return
        logger.info(f"{told} with size {len(samples)} generated.")
        name = "_".join(["cluster", *(f"{metric}{level}" for metric, level in current.items())])
        self.data_clusters.append(Cluster(name, dict(previous_difficulties), current, samples))
        self.data_clusters[-1].shuffle(self.np_rng)

    def sample_from_clusters(self) -> Array:
        """Draw the number of samples that a step takes from each cluster.

        Returns:
            An integer array of shape ``(clusters,)``.

        Raises:
            UsageError: There is no cluster, because no sample is easy enough.
        """
        sizes = [len(cluster.samples) for cluster in self.data_clusters]
        if not sizes:
            raise UsageError(
                f"no sample is as easy as the curriculum begins: {self.current_difficulties}.",
                fix=f"raise min_difficulty in {WHERE}, or look at the index files.",
            )
        shares = [size / sum(sizes) for size in sizes]
        drawn = self.np_rng.choice(len(sizes), self.global_batch_size, replace=True, p=shares)
        return np.bincount(drawn, minlength=len(sizes))

    def get_sample_from_cluster(self, cidx: int, num_samples: int) -> list[int]:
        """Take the next samples of a cluster and shuffle it again if it is exhausted.

        Args:
            cidx: Index of the cluster.
            num_samples: Number of samples to take.

        Returns:
            Indices of the samples in the dataset.
        """
        cluster = self.data_clusters[cidx]
        found = cluster.samples[cluster.position : cluster.position + num_samples].tolist()
        cluster.position += num_samples
        if (rest := num_samples - len(found)) > 0:
            cluster.shuffle(self.np_rng)
            found += cluster.samples[:rest].tolist()
            cluster.position = rest
        return found  # type: ignore[no-any-return]

    # -- batches

    def get_next_global_batch(self) -> None:
        """Draw the samples of all ranks for one step into `batch`."""
        self.curriculum_step += 1
        previous = {
            metric: self.current_difficulties.get(metric) for metric in self.curriculum_schedulers
        }
        for metric, scheduler in self.curriculum_schedulers.items():
            self.current_difficulties[metric] = scheduler.update_difficulty(self.curriculum_step)
        if self.current_difficulties != previous or not self.data_clusters:
            self.get_new_cluster(previous)
        batch: list[int] = []
        for cidx, many in enumerate(self.sample_from_clusters()):
            batch += self.get_sample_from_cluster(cidx, int(many))
        self.np_rng.shuffle(batch)
        self.batch = batch

    def __iter__(self) -> Iterator[list[int]]:
        many = self.micro_batch_times_data_parallel_size
        # A smaller micro-batch would leave a rank without a sample.
        least = many if self.drop_last else self.data_parallel_size
        while self.consumed_samples <= self.total_samples:
            if not self.batch:
                self.get_next_global_batch()
                is_empty = len(self.batch) < least
                self._empty_steps = self._empty_steps + 1 if is_empty else 0
                self._refuse_too_few(least)
            current = self.batch[:many]
            self.batch = self.batch[many:]
            if len(current) < least:
                continue
            self.consumed_samples += len(current)
            self._given.append(current)
            first, last = self.get_start_end_idx(len(current))
            yield current[first:last]

    def _refuse_too_few(self, least: int) -> None:
        """Raise an error if neither this step nor any later one can fill a micro-batch.

        That is so if all difficulties are at their maximum and the clusters are still too small. A
        custom schedule may stay below its maximum, so the number of such steps is limited, too.
        """
        levels = self.current_difficulties.items()
        is_last = all(level >= self._metrics[metric]["max_difficulty"] for metric, level in levels)
        is_last = is_last or self._empty_steps >= _MOST_EMPTY_STEPS
        if is_last and len(self.batch) < least:
            raise UsageError(
                f"the curriculum finds {len(self.batch)} samples for a step, and a micro-batch "
                f"takes {least}.",
                fix=f"raise the difficulties in {WHERE}, or lower the micro-batch size.",
            )

    def deal_steps_of(self, samples: int) -> None:
        """Set the number of samples of all ranks per step, starting with the next step."""
        self.global_batch_size = samples
        self._given = deque(
            self._given, maxlen=samples // self.micro_batch_times_data_parallel_size
        )

    # -- states

    def state_dict(self, again: int = 0) -> dict[str, Any]:
        """Return the position in the curriculum as plain values.

        Args:
            again: Number of the most recent micro-batches to count as not yet yielded.
        """
        back = [
            sample for given in list(self._given)[len(self._given) - again :] for sample in given
        ]
        clusters = [
            {name: getattr(cluster, name) for name in ("previous", "current", "position")}
            | {"shuffles": list(cluster.shuffles)}
            for cluster in self.data_clusters
        ]
        return {
            "batch": back + self.batch,
            "consumed_samples": self.consumed_samples - len(back),
            "curriculum_step": self.curriculum_step,
            "current_difficulties": dict(self.current_difficulties),
            "data_cluster_paths": [cluster.name for cluster in self.data_clusters],
            "data_cluster_current_position": [cluster.position for cluster in self.data_clusters],
            "np_rng_state": self.np_rng.bit_generator.state,
            "clusters": clusters,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a state, at any number of ranks.

        DeepSpeed's own states refer to files of clusters and have no shuffles. The curriculum then
        continues with samples in a new order and a warning is logged.
        """
        self.consumed_samples = int(state_dict["consumed_samples"])
        self.curriculum_step = int(state_dict["curriculum_step"])
        self.current_difficulties = dict(state_dict["current_difficulties"])
        for metric, level in self.current_difficulties.items():
            if metric in self.curriculum_schedulers:
                self.curriculum_schedulers[metric].set_current_difficulty(level)
        self._given.clear()
        self.data_clusters = []
        self.batch = []
        if "clusters" not in state_dict:
            log_once(
                "DeepSpeed's own checkpoint does not contain the order of samples: the curriculum "
                "continues with a new order.",
                logging.WARNING,
            )
            self.current_difficulties = {}
            return
        self.batch = list(state_dict["batch"])
        for saved, name in zip(
            state_dict["clusters"], state_dict["data_cluster_paths"], strict=True
        ):
            previous = dict(saved["previous"])
            current = dict(saved["current"])
            cluster = Cluster(
                name, previous, current, self._members(previous, current), int(saved["position"])
            )
            for state in saved["shuffles"]:
                self.np_rng.bit_generator.state = state
                cluster.shuffle(self.np_rng)
            self.data_clusters.append(cluster)
        self.np_rng.bit_generator.state = state_dict["np_rng_state"]
