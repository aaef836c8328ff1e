"""DeepSpeed's `deepspeed.elasticity`: batch sizes that many numbers of ranks can train with.

DeepSpeed has taken the room out; schedulers of clusters still ask it.  For each micro-batch size,
and for their least common multiple, `elastic_batch` seeks the largest batch that is that size times
a highly composite number; of these, the one that the most numbers of ranks divide wins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ...base.errors import ConfigError, NotBuiltError


class ElasticityError(ConfigError):
    """An elastic batch cannot be found."""


class ElasticityConfigError(ElasticityError):
    """The `elasticity` section cannot be used."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """This number of ranks cannot train with the batch."""


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
    """Return whether a configuration asks for elastic batches."""
    return bool(ds_config.get("elasticity", {}).get("enabled", False))


def compute_elastic_config(
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str = "",
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[Any, ...]:
    """Return (batch, numbers of ranks that can train with it), and the micro-batch where a world
    size or `return_microbatch` asks for it.

    target_deepspeed_version: ignored; there is one arithmetic here.  Raises ElasticityConfigError
    for a section that cannot be used, ElasticityIncompatibleWorldSize for a world size that the
    batch does not fit.
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
    """Return the section with its defaults, checked."""
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
            fix="raise the one or leave out the other.",
        )
    if section["model_parallel_size"] != 1:
        raise NotBuiltError(
            f"elasticity.model_parallel_size {section['model_parallel_size']} is not built.",
            "Tensor parallelism comes with a later part.",
            "set it to 1.",
        )
    stated = [key for key in BATCH_KEYS if key in ds_config]
    if stated and not section["ignore_non_elastic_batch_info"]:
        raise ElasticityConfigError(
            f"{', '.join(stated)} stands beside `elasticity`, which computes the batch.",
            fix="leave it out, or set elasticity.ignore_non_elastic_batch_info to true.",
        )


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _counts(values: Any) -> bool:
    return isinstance(values, (list, tuple)) and bool(values) and all(map(_count, values))


MOST_FACTOR = 10**6  # a batch of a million micro-batches: beyond it the search would only take time


@dataclass(frozen=True)
class ElasticRequest:
    """max_batch: samples per step at most.  micro_batches: sizes a rank can run.  ranks: how few
    and how many.
    """

    max_batch: int
    micro_batches: tuple[int, ...]
    min_ranks: int = 1
    max_ranks: int = 10_000
    prefer_larger: bool = True


@dataclass(frozen=True)
class ElasticBatch:
    """The batch, and the numbers of ranks it can be trained with."""

    batch: int
    ranks: tuple[int, ...]

    def micro_batch_for(self, ranks: int, micro_batches: Sequence[int]) -> int | None:
        """The largest micro-batch with which so many ranks make this batch."""
        share, rest = divmod(self.batch, ranks)
        return max((size for size in micro_batches if not rest and share % size == 0), default=None)


def elastic_batch(request: ElasticRequest) -> ElasticBatch:
    """The batch that the most numbers of ranks can train with; `prefer_larger` decides between
    equals.
    """
    sizes = {*request.micro_batches, math.lcm(*request.micro_batches)}
    bases = [size for size in sizes if size <= request.max_batch]
    candidates = sorted({_largest_multiple(base, request.max_batch) for base in bases})
    found = [ElasticBatch(batch, _ranks_of(batch, request)) for batch in candidates]
    sign = 1 if request.prefer_larger else -1
    return max(found, key=lambda one: (len(one.ranks), sign * one.batch))


def _largest_multiple(base: int, limit: int) -> int:
    """base x the largest highly composite number that keeps it within the limit, which is at least
    base.
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
    """The numbers up to MOST_FACTOR with more divisors than any smaller one.

    Such a number is a product of the first primes with exponents that never rise, so only those are
    looked at.
    """
    products = {1: 1}  # number: its divisors
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
