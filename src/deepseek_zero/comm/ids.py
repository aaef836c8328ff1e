"""Identity of a collective: its lane, its number there and a check of its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

LANES = ("gather", "reduce", "rows")  # Per engine
WORLD_LANE = "world"  # Used in place of an engine's name for the lane in which engines are created
_LANE_STEP = 4  # Lane numbers per engine


class CollectiveId(NamedTuple):
    """The identity of one collective's messages.

    Attributes:
        lane: The full name of the lane ("engine 0/gather").
        lane_number: The number of the lane, unique in this world.
        sequence: The number of the collective in its lane.
        check: 32-bit checksum of the name. A rank that calls a different collective has the same
            sequence number but another check.
        arrived: Receives the time of arrival.
        poll_interval: A function that returns the seconds after which a wait times out, so that its
            caller can check for failures. None: the transports' default (`transports/base.py`).
    """

    lane: str
    lane_number: int
    sequence: int
    check: int
    arrived: list[float]
    poll_interval: Callable[[], float] | None = None


def lane_number(engine: int, lane: str) -> int:
    """Return the number that identifies a lane of an engine in the tags of messages.

    Args:
        engine: 0 for the world; engines are numbered in the order in which all ranks create them.
        lane: "gather", "reduce" or "rows".

    Returns:
        An integer of 24 bits.
    """
    return engine * _LANE_STEP + LANES.index(lane)


def engine_of(lane: str) -> str:
    """Return the name of the engine in a lane's full name ("engine 0/gather")."""
    return lane.partition("/")[0]


def lane_of(lane: str) -> str:
    """Return the last part of a lane's full name: "gather", "reduce" or "rows"."""
    return lane.rpartition("/")[2]


def tag_of(cid: CollectiveId) -> int:
    """Return the identity of a collective as one integer of 96 bits.

    From the top: 24 bits of the lane number, 40 bits of the sequence number, 32 bits of the check.
    """
    return (cid.lane_number << 40 | cid.sequence) << 32 | cid.check


def lane_of_tag(tag: int) -> int:
    """Return the lane number that a tag contains."""
    return tag >> 72
