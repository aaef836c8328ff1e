"""A few cases of a product such that every pair of values of two axes occurs in at least one.

CI runs these; DEEPSEEK_ZERO_FULL=1 runs the whole product.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

FULL = "DEEPSEEK_ZERO_FULL"

Case = tuple[Any, ...]
Pair = tuple[int, Any, int, Any]


def pairs_of(case: Case) -> set[Pair]:
    """Return the pairs of values in a case."""
    return {(a, case[a], b, case[b]) for a, b in itertools.combinations(range(len(case)), 2)}


def pairwise(
    axes: Mapping[str, Sequence[Any]], fits: Callable[[Case], bool] = lambda case: True
) -> list[Case]:
    """Return cases with one value per axis that cover every pair.

    The choice is greedy and deterministic. fits: whether a case exists; pairs without a case are
    ignored.
    """
    product = list(filter(fits, itertools.product(*axes.values())))
    numbers: dict[
        Pair, int
    ] = {}  # one bit per pair, because thousands of cases are compared repeatedly
    masks = [
        sum(1 << numbers.setdefault(pair, len(numbers)) for pair in pairs_of(case))
        for case in product
    ]
    missing = (1 << len(numbers)) - 1
    chosen: list[Case] = []
    while missing:
        best = max(range(len(product)), key=lambda number: (masks[number] & missing).bit_count())
        chosen.append(product[best])
        missing &= ~masks[best]
    return chosen


def is_full() -> bool:
    """Return whether the whole product runs."""
    return os.environ.get(FULL, "0") not in ("", "0")


def cases(
    axes: Mapping[str, Sequence[Any]],
    always: Sequence[Case] = (),
    fits: Callable[[Case], bool] = lambda case: True,
) -> tuple[str, Iterable[Case]]:
    """Return the arguments of `@parametrize(*cases(AXES))`.

    Args:
        axes: Values by name.
        always: Cases in addition to the pairwise ones.
        fits: See `pairwise`.
    """
    if is_full():
        return ",".join(axes), list(filter(fits, itertools.product(*axes.values())))
    return ",".join(axes), list(dict.fromkeys([*pairwise(axes, fits), *always]))
