"""The identity of a collective: an engine's lane, its place in that lane, and a check of its
name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

LANES = ("gather", "reduce", "rows")  # of each engine
WORLD_LANE = "world"  # stands for an engine in the one lane that engines themselves are made in
_LANE_STEP = 4  # lane numbers of one engine


class CollectiveId(NamedTuple):
    """The identity of one collective's messages. lane: "engine 0/gather". number: the lane's, which
    no other lane of this world ever has. arrived: gets the time of arrival. poll_interval: seconds
    that a wait for it may last before its caller is asked whether to go on; None: as long as any
    (transports/base.py).
    """

    lane: str
    lane_number: int
    sequence: int
    check: (
        int  # 32 bits of the name: a rank that strayed stands in the same place under another name
    )
    arrived: list[float]
    poll_interval: Callable[[], float] | None = None


def lane_number(engine: int, lane: str) -> int:
    """Return the number of a lane. engine: 0 for the world, then in the order that all ranks make
    them in.
    """
    return engine * _LANE_STEP + LANES.index(lane)


def engine_of(lane: str) -> str:
    """Return the name of the engine that a lane ("engine 0/gather") belongs to."""
    return lane.partition("/")[0]


def lane_of(lane: str) -> str:
    """Return the last part of a lane's full name: "gather", "reduce" or "rows"."""
    return lane.rpartition("/")[2]


def tag_of(cid: CollectiveId) -> int:
    """Return the identity of a collective in 96 bits: 24 of the lane, 40 of the place, 32 of the
    name.
    """
    return (cid.lane_number << 40 | cid.sequence) << 32 | cid.check


def lane_of_tag(tag: int) -> int:
    """Return the number of the lane that a tag belongs to."""
    return tag >> 72
