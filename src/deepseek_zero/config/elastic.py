"""Batch sizes that many numbers of ranks can train with: DeepSpeed's elastic arithmetic.

For each micro-batch size, and for their least common multiple, the largest batch is sought that is that size times a
highly composite number; of these, the one that the most numbers of ranks divide wins.  Pure arithmetic; called by
compat/deepspeed/elasticity.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

MOST_FACTOR = 10**6  # a batch of a million micro-batches: beyond it the search would only take time


@dataclass(frozen=True)
class ElasticRequest:
    """max_batch: samples per step at most.  micro_batches: sizes a rank can run.  ranks: how few and how many."""

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
    """The batch that the most numbers of ranks can train with; `prefer_larger` decides between equals."""
    bases = {*request.micro_batches, math.lcm(*request.micro_batches)}
    candidates = sorted({_largest_multiple(base, request.max_batch) for base in bases})
    found = [ElasticBatch(batch, _ranks_of(batch, request)) for batch in candidates]
    sign = 1 if request.prefer_larger else -1
    return max(found, key=lambda one: (len(one.ranks), sign * one.batch))


def _largest_multiple(base: int, limit: int) -> int:
    """base x the largest highly composite number that keeps it within the limit; base itself where that exceeds it."""
    wanted = limit // base
    return base * max((each for each in highly_composite() if each <= wanted), default=1)


def _ranks_of(batch: int, request: ElasticRequest) -> tuple[int, ...]:
    counts = set[int]()
    for size in request.micro_batches:
        if batch % size == 0:
            counts |= _divisors(batch // size)
    return tuple(sorted(count for count in counts if request.min_ranks <= count <= request.max_ranks))


def _divisors(number: int) -> set[int]:
    small = {each for each in range(1, math.isqrt(number) + 1) if number % each == 0}
    return small | {number // each for each in small}


@cache
def highly_composite() -> tuple[int, ...]:
    """The numbers up to MOST_FACTOR with more divisors than any smaller one.

    Such a number is a product of the first primes with exponents that never rise, so only those are looked at.
    """
    products = {1: 1}  # number: its divisors
    _extend(products, 1, 1, (2, 3, 5, 7, 11, 13, 17), 64)
    found, most = [], 0
    for number in sorted(products):
        if products[number] > most:
            most = products[number]
            found.append(number)
    return tuple(found)


def _extend(products: dict[int, int], number: int, divisors: int, primes: tuple[int, ...], most: int) -> None:
    if not primes:
        return
    for exponent in range(1, most + 1):
        number *= primes[0]
        if number > MOST_FACTOR:
            return
        products[number] = divisors * (exponent + 1)
        _extend(products, number, divisors * (exponent + 1), primes[1:], exponent)
