"""The transition table: complete where a plan can ask for a change, silent where no change makes
sense.
"""

from __future__ import annotations

from deepseek_zero.planner.spec import TRANSITIONS, Movement, P, Placement, R, S


def test_placements_are_one_letter_each_in_tables() -> None:
    assert [(placement.name, placement.value) for placement in Placement] == [
        ("REPLICATE", "R"),
        ("SHARD", "S"),
        ("PARTIAL", "P"),
    ]


def test_the_table_is_the_one_in_the_modules_words() -> None:
    assert TRANSITIONS == {
        (S, R): Movement.ALL_GATHER,
        (S, S): Movement.NOTHING,
        (P, R): Movement.ALL_REDUCE,
        (P, S): Movement.REDUCE_SCATTER,
        (R, R): Movement.NOTHING,
        (R, S): Movement.LOCAL_SLICE,
    }


def test_every_placement_reaches_replicate_and_shard_and_nothing_becomes_partial() -> None:
    assert {source for source, target in TRANSITIONS} == set(Placement)
    assert {target for source, target in TRANSITIONS} == {R, S}
    assert all((source, target) in TRANSITIONS for source in Placement for target in (R, S))
