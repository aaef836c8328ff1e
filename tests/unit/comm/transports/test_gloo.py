"""Collectives in flight have unique gloo tags, and numbers that are still in use are not reused."""

from __future__ import annotations

import pytest

from deepseek_zero.base.errors import UsageError
from deepseek_zero.comm.ids import LANES, CollectiveId, lane_number, tag_of
from deepseek_zero.comm.transports import base
from deepseek_zero.comm.transports.gloo import SLOTS, WINDOW, Tags


def mark(engine: int, lane: str, sequence: int, check: int = 0) -> CollectiveId:
    return CollectiveId(
        f"engine {engine}/{lane}", lane_number(engine + 1, lane), sequence, check, []
    )


def make(tags: Tags, engine: int) -> None:
    tags.take(f"engine {engine}", tags.free_slots())


def test_all_collectives_that_can_be_in_flight_have_unique_tags() -> None:
    tags, seen = Tags(), set()
    for engine in range(SLOTS - 1):
        make(tags, engine)
        for lane in LANES:
            seen |= {tags.begin(mark(engine, lane, sequence)) for sequence in range(WINDOW)}
    seen |= {
        tags.begin(CollectiveId("world/rows", 0, sequence, 0, [])) for sequence in range(WINDOW)
    }
    assert len(seen) == ((SLOTS - 1) * len(LANES) + 1) * WINDOW
    assert min(seen) >= 0
    assert max(seen) < 1 << 31, "torch takes a positive int32"


def test_a_lane_waits_for_its_oldest_collective_before_sequence_numbers_wrap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(base, "POLL_SECONDS", 0.01)
    tags = Tags()
    make(tags, 0)
    first = [tags.begin(mark(0, "gather", sequence)) for sequence in range(WINDOW)]
    with pytest.raises(TimeoutError):
        tags.begin(mark(0, "gather", WINDOW))
    tags.begin(mark(0, "reduce", 0))
    tags.end("engine 0/gather")
    assert tags.begin(mark(0, "gather", WINDOW)) == first[0]


def test_a_slot_is_reused_only_if_its_engine_has_no_collective_in_flight() -> None:
    tags = Tags()
    make(tags, 0)
    make(tags, 1)
    tags.begin(mark(0, "gather", 0))
    for engine in (0, 1):
        tags.release(f"engine {engine}")
    assert tags.free_slots() & 0b11 == 0b10
    tags.end("engine 0/gather")
    assert tags.free_slots() & 0b11 == 0b11


def test_an_engine_may_be_collected_while_slots_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tags, left = Tags(), iter(range(3, SLOTS))
    is_busy = tags._is_busy

    def collects(engine: str) -> bool:
        # The garbage collector may do this between any two lines.
        tags.release(f"engine {next(left)}")
        return is_busy(engine)

    for engine in range(3):
        make(tags, engine)
        tags.release(f"engine {engine}")
    monkeypatch.setattr(tags, "_is_busy", collects)
    assert tags.free_slots() & 0b111 == 0b111


def test_a_world_without_a_free_engine_slot_raises_an_error() -> None:
    tags = Tags()
    for engine in range(SLOTS - 1):
        make(tags, engine)
    with pytest.raises(UsageError, match="63 engines"):
        make(tags, SLOTS)


def test_the_name_is_part_of_a_messages_identity() -> None:
    tags = Tags()
    make(tags, 0)
    seen = set()
    for check in range(1 << 13):
        seen.add(tags.begin(mark(0, "gather", 0, check)))
        tags.end("engine 0/gather")
    assert len(seen) == 1 << 13
    wide = {
        tag_of(mark(*place))
        for place in ((0, "gather", 0, 1), (0, "gather", 1 << 20, 1), (1, "gather", 0, 1))
    }
    assert len(wide) == 3
    assert max(wide) < 1 << 96
