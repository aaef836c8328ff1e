"""Few cases out of a product: every pair of values of two different axes stands in at least one
case.

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
    """The pairs of values that a case tries."""
    return {(a, case[a], b, case[b]) for a, b in itertools.combinations(range(len(case)), 2)}


def pairwise(
    axes: Mapping[str, Sequence[Any]], fits: Callable[[Case], bool] = lambda case: True
) -> list[Case]:
    """Cases, one value per axis, that cover every pair; greedy, and the same at every call.

    fits: whether a case exists; a pair that no case has is not missed.
    """
    product = list(filter(fits, itertools.product(*axes.values())))
    numbers: dict[
        Pair, int
    ] = {}  # a bit for each pair: thousands of cases are compared again and again
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
    """Return whether whole products run."""
    return os.environ.get(FULL, "0") not in ("", "0")


def cases(
    axes: Mapping[str, Sequence[Any]],
    always: Sequence[Case] = (),
    fits: Callable[[Case], bool] = lambda case: True,
) -> tuple[str, Iterable[Case]]:
    """What `@parametrize(*cases(AXES))` takes.  always: cases that run beside the pairwise ones.
    fits: see `pairwise`.
    """
    if is_full():
        return ",".join(axes), list(filter(fits, itertools.product(*axes.values())))
    return ",".join(axes), list(dict.fromkeys([*pairwise(axes, fits), *always]))
