"""DeepSpeed's `deepspeed.elasticity`: batch sizes that fit many numbers of ranks.

DeepSpeed has removed this package, but cluster schedulers still use it. For each micro-batch size,
and for their least common multiple, `_elastic_batch` computes the largest batch that is this size
times a highly composite number. It selects the batch that the largest number of rank counts
divides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...base.errors import ConfigError, NotBuiltError
from ...config.batch import BATCH_KEYS


class ElasticityError(ConfigError):
    """Raised if no elastic batch size can be computed."""


class ElasticityConfigError(ElasticityError):
    """Raised if the section `elasticity` of the configuration is invalid."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """Raised if the elastic batch size is not valid for this number of ranks."""


Section = Mapping[str, Any]

DEFAULTS: dict[str, Any] = {
    "enabled": False,
    "max_train_batch_size": None,
    "micro_batch_sizes": None,
    "min_gpus": 1,
    "max_gpus": 10_000,
    "prefer_larger_batch": True,
    "version": 0.2,
    "num_gpus_per_node": 1,
    "model_parallel_size": 1,
    "min_time": 0,
    "ignore_non_elastic_batch_info": False,
}


def elasticity_enabled(ds_config: Section) -> bool:
    """Return whether a configuration enables elastic batches."""
    return bool(ds_config.get("elasticity", {}).get("enabled", False))


def compute_elastic_config(
    ds_config: Section,
    target_deepspeed_version: str = "",
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[Any, ...]:
    """Compute the elastic batch of a configuration.

    Args:
        ds_config: Configuration with a section `elasticity`.
        target_deepspeed_version: Ignored.
        world_size: Number of ranks to check; 0 for none.
        return_microbatch: Whether to return the micro-batch even if `world_size` is 0.

    Returns:
        The batch size and the possible numbers of ranks. With a world size or `return_microbatch`,
        the micro-batch size follows.

    Raises:
        ElasticityConfigError: The section is invalid, or no number of ranks fits the batch.
        ElasticityIncompatibleWorldSize: The batch does not fit `world_size`.
    """
    section = _section(ds_config)
    batch, ranks = _elastic_batch(section)
    if not ranks:
        raise ElasticityConfigError(
            f"no number of ranks from elasticity.min_gpus {section['min_gpus']} to max_gpus "
            f"{section['max_gpus']} divides the batch {batch} into micro-batches.",
            fix="lower min_gpus, raise max_gpus, or increase max_train_batch_size.",
        )
    if world_size and world_size not in ranks:
        raise ElasticityIncompatibleWorldSize(
            f"world size {world_size} cannot train with the elastic batch {batch}.",
            fix=f"use one of these numbers of ranks: {', '.join(map(str, ranks))}.",
        )
    if not world_size and not return_microbatch:
        return batch, ranks
    share = batch // (world_size or ranks[0])
    fitting = [size for size in section["micro_batch_sizes"] if share % size == 0]
    return batch, ranks, max(fitting, default=None)


def _section(ds_config: Section) -> dict[str, Any]:
    """Return the validated section with its defaults."""
    given = ds_config.get("elasticity")
    if not isinstance(given, Mapping):
        raise ElasticityConfigError(
            "the configuration has no section `elasticity`.", fix="state one."
        )
    section = {**DEFAULTS, **given}
    wrong = []
    if not section["enabled"]:
        wrong.append("elasticity.enabled is false")
    if unknown := sorted(given.keys() - DEFAULTS.keys()):
        wrong.append(f"elasticity has no key {', '.join(unknown)}")
    if not _count(section["max_train_batch_size"]):
        wrong.append("elasticity.max_train_batch_size is missing or not a count")
    if not _counts(section["micro_batch_sizes"]):
        wrong.append("elasticity.micro_batch_sizes is missing or not a list of counts")
    if not _counts([section["min_gpus"], section["max_gpus"]]):
        wrong.append("min_gpus and max_gpus count from 1")
    if wrong:
        raise ElasticityConfigError(f"{'; '.join(wrong)}.", fix="correct the section `elasticity`.")
    if section["max_train_batch_size"] < max(section["micro_batch_sizes"]):
        raise ElasticityConfigError(
            f"elasticity.micro_batch_sizes has {max(section['micro_batch_sizes'])}, which exceeds "
            f"max_train_batch_size {section['max_train_batch_size']}.",
            fix="increase max_train_batch_size, or remove that micro-batch size.",
        )
    if section["model_parallel_size"] != 1:
        raise NotBuiltError(
            f"elasticity.model_parallel_size {section['model_parallel_size']} is not built.",
            "Elastic batches do not support tensor parallelism.",
            "set it to 1.",
        )
    stated = [key for key in BATCH_KEYS if key in ds_config]
    if stated and not section["ignore_non_elastic_batch_info"]:
        raise ElasticityConfigError(
            f"{', '.join(stated)} cannot be combined with `elasticity`, which computes the batch.",
            fix="leave it out, or set elasticity.ignore_non_elastic_batch_info to true.",
        )
    return section


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _counts(values: Any) -> bool:
    return isinstance(values, (list, tuple)) and bool(values) and all(map(_count, values))


# The highly composite numbers up to a million: each has more divisors than any smaller number.
HIGHLY_COMPOSITE = tuple(
    map(
        int,
        "1 2 4 6 12 24 36 48 60 120 180 240 360 720 840 1260 1680 2520 5040 7560 10080 15120 20160 "
        "25200 27720 45360 50400 55440 83160 110880 166320 221760 277200 332640 498960 554400 "
        "665280 720720".split(),
    )
)


def _elastic_batch(section: Section) -> tuple[int, list[int]]:
    """Return the batch that fits the largest number of rank counts, and these counts.

    `prefer_larger_batch` decides between batches that fit equally many.
    """
    most = section["max_train_batch_size"]
    sizes = section["micro_batch_sizes"]
    batches = {
        size * max(number for number in HIGHLY_COMPOSITE if number <= most // size)
        for size in (*sizes, math.lcm(*sizes))
        if size <= most
    }
    sign = 1 if section["prefer_larger_batch"] else -1
    found = [(batch, _ranks_of(batch, section)) for batch in batches]
    return max(found, key=lambda row: (len(row[1]), sign * row[0]))


def _ranks_of(batch: int, section: Section) -> list[int]:
    """Return the numbers of ranks that divide a batch into micro-batches of a possible size."""
    shares = [batch // size for size in section["micro_batch_sizes"] if batch % size == 0]
    most = min(section["max_gpus"], max(shares, default=0))
    counts = range(section["min_gpus"], most + 1)
    return [count for count in counts if any(share % count == 0 for share in shares)]
