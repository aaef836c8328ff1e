r"""Where a state's elements are over the ranks of the data-parallel axis, and what changes one placement into another.

    from \ to    REPLICATE            SHARD
    SHARD        all-gather           (same)
    PARTIAL      all-reduce           reduce-scatter
    REPLICATE    (same)               local slice

Read by plan.py; carried out by buffer.py's `move`.
"""

from __future__ import annotations

from enum import Enum


class Placement(Enum):
    """One letter each in tables: R, S, P."""

    REPLICATE = "R"  # every rank holds every element
    SHARD = "S"  # rank r holds slice r
    PARTIAL = "P"  # every rank holds a summand of every element


class Movement(Enum):
    """What `move` does; the names of torch.distributed."""

    NOTHING = "nothing"
    ALL_GATHER = "all-gather"
    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    LOCAL_SLICE = "local slice"


R, S, P = Placement.REPLICATE, Placement.SHARD, Placement.PARTIAL

TRANSITIONS: dict[tuple[Placement, Placement], Movement] = {
    (S, R): Movement.ALL_GATHER,
    (S, S): Movement.NOTHING,
    (P, R): Movement.ALL_REDUCE,
    (P, S): Movement.REDUCE_SCATTER,
    (R, R): Movement.NOTHING,
    (R, S): Movement.LOCAL_SLICE,
}
