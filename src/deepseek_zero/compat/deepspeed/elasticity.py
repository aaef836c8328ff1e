"""DeepSpeed's `deepspeed.elasticity`: batch sizes that fit many numbers of ranks.

DeepSpeed has removed this package, but cluster schedulers still use it. For each micro-batch size,
and for their least common multiple, `elastic_batch` computes the largest batch that is this size
times a highly composite number. It selects the batch that the largest number of rank counts
divides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ...base.errors import ConfigError, NotBuiltError


class ElasticityError(ConfigError):
    """No elastic batch can be computed."""


class ElasticityConfigError(ElasticityError):
    """The section `elasticity` is invalid."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """The batch does not fit this number of ranks."""


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
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Return whether a configuration enables elastic batches."""
    return bool(ds_config.get("elasticity", {}).get("enabled", False))


def compute_elastic_config(
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str = "",
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[Any, ...]:
    """Compute the elastic batch of a configuration.

    Args:
        ds_config: The configuration.
        target_deepspeed_version: Ignored.
        world_size: Number of ranks to check; 0 for none.
        return_microbatch: Return the micro-batch even if `world_size` is 0.

    Returns:
        The batch size and the possible numbers of ranks. With a world size or `return_microbatch`,
        the micro-batch size follows.

    Raises:
        ElasticityConfigError: The section is invalid.
        ElasticityIncompatibleWorldSize: The batch does not fit `world_size`.
    """
    section = _section(ds_config)
    request = ElasticRequest(
        section["max_train_batch_size"],
        tuple(section["micro_batch_sizes"]),
        section["min_gpus"],
        section["max_gpus"],
        section["prefer_larger_batch"],
    )
    found = elastic_batch(request)
    if world_size and world_size not in found.ranks:
        raise ElasticityIncompatibleWorldSize(
            f"world size {world_size} cannot train with the elastic batch {found.batch}.",
            fix=f"use one of these numbers of ranks: {', '.join(map(str, found.ranks))}.",
        )
    if not world_size and not return_microbatch:
        return found.batch, list(found.ranks)
    return found.batch, list(found.ranks), _micro_batch(found, request, world_size)


def _micro_batch(found: ElasticBatch, request: ElasticRequest, world_size: int) -> int | None:
    return found.micro_batch_for(world_size or found.ranks[0], request.micro_batches)


def _section(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the validated section with its defaults."""
    given = ds_config.get("elasticity")
    if not isinstance(given, Mapping):
        raise ElasticityConfigError(
            "the configuration has no section `elasticity`.", fix="state one."
        )
    section = {**DEFAULTS, **given}
    problems = [
        (not section["enabled"], "elasticity.enabled is false"),
        (
            bool(unknown := sorted(given.keys() - DEFAULTS.keys())),
            f"elasticity has no key {', '.join(unknown)}",
        ),
        (
            not _count(section["max_train_batch_size"]),
            "elasticity.max_train_batch_size is missing or not a count",
        ),
        (
            not _counts(section["micro_batch_sizes"]),
            "elasticity.micro_batch_sizes is missing or not a list of counts",
        ),
        (
            not (_count(section["min_gpus"]) and _count(section["max_gpus"])),
            "min_gpus and max_gpus count from 1",
        ),
    ]
    wrong = [text for is_wrong, text in problems if is_wrong]
    if wrong:
        raise ElasticityConfigError(f"{'; '.join(wrong)}.", fix="correct the section `elasticity`.")
    _refuse(ds_config, section)
    return section


def _refuse(ds_config: Mapping[str, Any], section: Mapping[str, Any]) -> None:
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


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _counts(values: Any) -> bool:
    return isinstance(values, (list, tuple)) and bool(values) and all(map(_count, values))


# a limit for the search: a batch of a million micro-batches
MOST_FACTOR = 10**6


@dataclass(frozen=True)
class ElasticRequest:
    """Constraints on an elastic batch.

    Attributes:
        max_batch: Largest number of samples per step.
        micro_batches: Possible micro-batch sizes of a rank.
        min_ranks: Smallest number of ranks.
        max_ranks: Largest number of ranks.
        prefer_larger: Prefer the larger of two batches that fit equally many numbers of ranks.
    """

    max_batch: int
    micro_batches: tuple[int, ...]
    min_ranks: int = 1
    max_ranks: int = 10_000
    prefer_larger: bool = True


@dataclass(frozen=True)
class ElasticBatch:
    """An elastic batch.

    Attributes:
        batch: Samples per step.
        ranks: Possible numbers of ranks.
    """

    batch: int
    ranks: tuple[int, ...]

    def micro_batch_for(self, ranks: int, micro_batches: Sequence[int]) -> int | None:
        """Return the largest micro-batch size for a number of ranks, or None if none fits.

        Args:
            ranks: Number of ranks.
            micro_batches: Possible sizes.
        """
        share, rest = divmod(self.batch, ranks)
        return max((size for size in micro_batches if not rest and share % size == 0), default=None)


def elastic_batch(request: ElasticRequest) -> ElasticBatch:
    """Return the batch that fits the largest number of rank counts.

    `prefer_larger` decides between batches that fit equally many.
    """
    sizes = {*request.micro_batches, math.lcm(*request.micro_batches)}
    bases = [size for size in sizes if size <= request.max_batch]
    candidates = sorted({_largest_multiple(base, request.max_batch) for base in bases})
    found = [ElasticBatch(batch, _ranks_of(batch, request)) for batch in candidates]
    sign = 1 if request.prefer_larger else -1
    return max(found, key=lambda one: (len(one.ranks), sign * one.batch))


def _largest_multiple(base: int, limit: int) -> int:
    """Return the largest `base` * highly composite number that is at most `limit`.

    `limit` must be at least `base`.
    """
    return base * max(each for each in highly_composite() if each <= limit // base)


def _ranks_of(batch: int, request: ElasticRequest) -> tuple[int, ...]:
    counts = set[int]()
    for size in request.micro_batches:
        if batch % size == 0:
            counts |= _divisors(batch // size)
    return tuple(
        sorted(count for count in counts if request.min_ranks <= count <= request.max_ranks)
    )


def _divisors(number: int) -> set[int]:
    small = {each for each in range(1, math.isqrt(number) + 1) if number % each == 0}
    return small | {number // each for each in small}


@cache
def highly_composite() -> tuple[int, ...]:
    """Return the highly composite numbers up to MOST_FACTOR.

    A highly composite number has more divisors than any smaller number.
    It is a product of the first primes with non-increasing exponents, so only such products are
    enumerated.
    """
    products = {1: 1}  # number -> number of its divisors
    _extend(products, 1, 1, (2, 3, 5, 7, 11, 13, 17), 64)
    found = []
    most = 0
    for number in sorted(products):
        if products[number] > most:
            most = products[number]
            found.append(number)
    return tuple(found)


def _extend(
    products: dict[int, int], number: int, divisors: int, primes: tuple[int, ...], most: int
) -> None:
    if not primes:
        return
    for exponent in range(1, most + 1):
        number *= primes[0]
        if number > MOST_FACTOR:
            return
        products[number] = divisors * (exponent + 1)
        _extend(products, number, divisors * (exponent + 1), primes[1:], exponent)
