"""Few cases out of a product: every pair of values of two different axes stands in at least one case.

CI runs these; DEEPSEEK_ZERO_FULL=1 runs the whole product.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

FULL = "DEEPSEEK_ZERO_FULL"

Case = tuple[Any, ...]
Pair = tuple[int, Any, int, Any]


def pairs_of(case: Case) -> set[Pair]:
    """The pairs of values that a case tries."""
    return {(a, case[a], b, case[b]) for a, b in itertools.combinations(range(len(case)), 2)}


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Cases, one value per axis, that cover every pair; greedy, and the same at every call."""
    product = list(itertools.product(*axes.values()))
    missing = set().union(*map(pairs_of, product))
    chosen: list[Case] = []
    while missing:
        best = max(product, key=lambda case: len(pairs_of(case) & missing))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen


def cases(axes: Mapping[str, Sequence[Any]], always: Sequence[Case] = ()) -> tuple[str, Iterable[Case]]:
    """What `@parametrize(*cases(AXES))` takes.  always: cases that run beside the pairwise ones."""
    if os.environ.get(FULL, "0") not in ("", "0"):
        return ",".join(axes), list(itertools.product(*axes.values()))
    return ",".join(axes), list(dict.fromkeys([*pairwise(axes), *always]))
