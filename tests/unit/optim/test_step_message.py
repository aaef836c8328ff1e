"""The fields of a step message are read by name and rank."""

from __future__ import annotations

import pytest

from deepseek_zero.optim.step_message import StepMessage


def message_of(rank: int) -> StepMessage:
    message = StepMessage()
    message.add("squares", [0.5 * rank, 2.0**60 + rank])
    message.add("late", [rank == 1])
    message.add("nothing", [])
    message.add("checksum", [2**32 - 1 - rank])
    return message


def test_each_field_of_each_rank_is_found_by_its_name() -> None:
    rows = [message_of(rank).pack() for rank in range(3)]
    assert rows[1] == [0.5, 2.0**60, 1.0, 2.0**32 - 2]
    assert message_of(0).unpack(rows) == {
        "squares": [(0.0, 2.0**60), (0.5, 2.0**60), (1.0, 2.0**60)],
        "late": [(0,), (1,), (0,)],
        "nothing": [(), (), ()],
        "checksum": [(2**32 - 1,), (2**32 - 2,), (2**32 - 3,)],
    }


def test_fields_of_another_message_come_after_its_own() -> None:
    message = message_of(0)
    extra = StepMessage()
    extra.add("signal", [15])
    message.add_all(extra)
    found = message.unpack([message.pack()])
    assert list(found) == ["squares", "late", "nothing", "checksum", "signal"]
    assert found["signal"] == [(15.0,)]


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="already has a field 'late'"):
        message_of(0).add("late", [0])
