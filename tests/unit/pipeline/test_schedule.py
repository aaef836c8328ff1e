"""Pipeline schedules have the specified numbers, and the verifier detects every invalid one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, product

import pytest
from torch.distributed.pipelining.schedules import _Action

from deepseek_zero.base.errors import UsageError
from deepseek_zero.pipeline.schedule import (
    PipelineSchedule,
    StageAction,
    StageActionKind,
    forward_only,
    lower,
    make_schedule,
)
from deepseek_zero.pipeline.verify import ScheduleError, simulate, verify

F, B = StageActionKind.FORWARD, StageActionKind.BACKWARD


def one_f_one_b(ranks: int, many: int, tied: Sequence[int] = ()) -> PipelineSchedule:
    return make_schedule("1f1b", ranks, 1, many, tied=tied)


def interleaved(ranks: int, virtual: int, many: int, tied: Sequence[int] = ()) -> PipelineSchedule:
    return make_schedule("interleaved", ranks, virtual, many, tied=tied)


def breadth_first(
    ranks: int, virtual: int, many: int, group: int | None = None, tied: Sequence[int] = ()
) -> PipelineSchedule:
    return make_schedule("breadth_first", ranks, virtual, many, group=group, tied=tied)


def compute(schedule: PipelineSchedule, rank: int) -> str:
    return " ".join(str(action) for action in schedule.programs[rank] if action.kind in (F, B))


def count(schedule: PipelineSchedule, rank: int, kind: StageActionKind) -> int:
    return sum(action.kind is kind for action in schedule.programs[rank])


def most_in_flight(program: Sequence[StageAction]) -> int:
    """Return the largest number of forwards that wait for their backward."""
    changes = [(action.kind is F) - (action.kind is B) for action in program]
    return max(accumulate(changes))


def most_gathered(program: Sequence[StageAction]) -> int:
    """Return the largest number of stages of a rank that are gathered at the same time."""
    gather, release = StageActionKind.GATHER, StageActionKind.RELEASE
    return max(accumulate((action.kind is gather) - (action.kind is release) for action in program))


def bubble(schedule: PipelineSchedule) -> float:
    """Return idle time divided by useful time for the busiest rank."""
    spans, seconds = simulate(schedule, 1.0, 2.0)
    busy = [0.0] * schedule.ranks
    for span in spans:
        busy[span.rank] += span.end - span.start
    return seconds / max(busy) - 1


def all_schedules() -> list[PipelineSchedule]:
    found = []
    for ranks, many in product((1, 2, 3, 4), (1, 2, 3, 5, 8)):
        tied = (0, ranks - 1)
        found.append(one_f_one_b(ranks, many, tied=tied))
        for virtual in (1, 2, 3):
            tied = (0, ranks * virtual - 1)
            found.append(interleaved(ranks, virtual, many, tied=tied))
            found.append(breadth_first(ranks, virtual, many, tied=tied))
            found.append(breadth_first(ranks, virtual, many, max(ranks, many // 2), tied=tied))
            found.append(forward_only(ranks, virtual, many))
    return found


@pytest.mark.parametrize(
    "schedule", all_schedules(), ids=lambda each: f"{each.name}-{each.ranks}-{each.stages}"
)
def test_generated_schedules_are_verified(schedule: PipelineSchedule) -> None:
    verify(schedule)
    for rank, program in enumerate(schedule.programs):
        if schedule.name != "forward_only":
            assert most_in_flight(program) <= schedule.in_flight[rank]
            assert count(schedule, rank, StageActionKind.REDUCE) == len(schedule.stages_of(rank))


def test_1f1b_has_the_order_of_the_literature() -> None:
    found = one_f_one_b(3, 4)
    assert compute(found, 0) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"
    assert compute(found, 1) == "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3"
    assert compute(found, 2) == "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
    assert found.in_flight == (3, 2, 1)
    assert str(found).splitlines()[2].startswith("2UNSHARD 2RECV_F0 2F0 2B0 2SEND_B0 2RECV_F1 2F1")


def test_interleaved_visits_the_stages_of_a_rank_in_groups() -> None:
    found = interleaved(2, 2, 4)
    assert compute(found, 1) == "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"
    assert found.in_flight == (5, 3)


def test_breadth_first_gathers_a_stage_twice_and_two_at_once() -> None:
    for ranks, virtual, many in ((1, 4, 3), (2, 3, 4), (4, 2, 8)):
        found = breadth_first(ranks, virtual, many)
        for rank in range(ranks):
            own = found.stages_of(rank)
            # The backward of a rank's last stage directly follows its forward, so one gather is
            # enough.
            assert count(found, rank, StageActionKind.GATHER) == 2 * len(own) - 1
            assert count(found, rank, StageActionKind.REDUCE) == len(own)
        assert max(map(most_gathered, found.programs)) <= 2


def test_groups_gather_as_often_as_there_are_groups() -> None:
    ranks, virtual, many, group = 2, 3, 16, 4
    found = breadth_first(ranks, virtual, many, group)
    verify(found)
    for rank in range(ranks):
        assert count(found, rank, StageActionKind.GATHER) <= 2 * many // group * virtual
        assert most_in_flight(found.programs[rank]) <= virtual * group + 2 * ranks
    assert max(map(most_gathered, found.programs)) <= 3


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "breadth_first"])
def test_the_bubble_equals_that_of_the_table(name: str) -> None:
    ranks, many = 4, 8
    for virtual in (1,) if name == "1f1b" else (1, 2):
        found = make_schedule(name, ranks, virtual, many)
        assert bubble(found) == pytest.approx((ranks - 1) / (virtual * many))


def test_backwards_ascend_in_the_micro_batch() -> None:
    for found in (breadth_first(2, 2, 4), interleaved(3, 2, 6), one_f_one_b(4, 7)):
        for program in found.programs:
            for stage in {action.stage for action in program}:
                micros = [
                    action.micro for action in program if action.kind is B and action.stage == stage
                ]
                assert micros == sorted(micros)


def changed(schedule: PipelineSchedule, rank: int, program: list[StageAction]) -> PipelineSchedule:
    programs = list(schedule.programs)
    programs[rank] = tuple(program)
    return replace(schedule, programs=tuple(programs))


def without(schedule: PipelineSchedule, rank: int, kind: StageActionKind) -> PipelineSchedule:
    program = list(schedule.programs[rank])
    program.remove(next(action for action in program if action.kind is kind))
    return changed(schedule, rank, program)


def swapped(
    schedule: PipelineSchedule, rank: int, first: StageAction, second: StageAction
) -> PipelineSchedule:
    program = list(schedule.programs[rank])
    here, there = program.index(first), program.index(second)
    program[here], program[there] = program[there], program[here]
    return changed(schedule, rank, program)


def test_the_verifier_finds_what_is_wrong() -> None:
    good = one_f_one_b(2, 3, tied=(0, 1))
    for broken, said in (
        (
            without(good, 0, StageActionKind.SEND_F),
            "sent",
        ),
        (without(good, 1, StageActionKind.RECV_F), "1F0 stands before 1RECV_F0"),
        (without(good, 1, StageActionKind.GATHER), "not gathered"),
        (without(good, 1, StageActionKind.RELEASE), "stays gathered"),
        (without(good, 1, StageActionKind.REDUCE), "1REDUCE_GRAD is missing"),
        (changed(good, 1, [*good.programs[1], StageAction(1, StageActionKind.REDUCE)]), "twice"),
        (without(good, 1, StageActionKind.TIE), "1REDUCE_GRAD stands before 1TIE"),
        (without(good, 1, StageActionKind.BACKWARD), "before 1B0"),
        (
            swapped(
                good,
                1,
                StageAction(1, StageActionKind.RECV_F, 1),
                StageAction(1, StageActionKind.RECV_F, 2),
            ),
            "before",
        ),
        (
            swapped(
                good,
                0,
                StageAction(0, StageActionKind.SEND_F, 0),
                StageAction(0, StageActionKind.SEND_F, 1),
            ),
            "before",
        ),
        (
            swapped(good, 1, StageAction(1, StageActionKind.REDUCE), StageAction(1, B, 2)),
            "1REDUCE_GRAD stands before 1B2",
        ),
        (replace(good, in_flight=(1, 1)), "in flight"),
    ):
        with pytest.raises(ScheduleError, match=said):
            verify(broken)


def test_messages_that_pass_each_other_are_found() -> None:
    good = one_f_one_b(2, 4)
    program = [action for action in good.programs[0] if action.kind is not StageActionKind.SEND_F]
    place = program.index(StageAction(0, F, 1)) + 1
    program[place:place] = [
        StageAction(0, StageActionKind.SEND_F, 1),
        StageAction(0, StageActionKind.SEND_F, 0),
    ]
    for micro in (2, 3):
        program.insert(
            program.index(StageAction(0, F, micro)) + 1,
            StageAction(0, StageActionKind.SEND_F, micro),
        )
    with pytest.raises(
        ScheduleError, match="message 0 is sent for stage 0, micro-batch 1, and received as stage 0"
    ):
        verify(changed(good, 0, program))


def test_a_circular_wait_is_detected() -> None:
    # Rank 0 receives the gradient of micro-batch 0 before it sends its activation.
    good = one_f_one_b(2, 2)
    program = [
        action for action in good.programs[0] if action != StageAction(0, StageActionKind.RECV_B, 0)
    ]
    program.insert(
        program.index(StageAction(0, StageActionKind.SEND_F, 0)),
        StageAction(0, StageActionKind.RECV_B, 0),
    )
    with pytest.raises(
        ScheduleError, match="hangs: pipeline rank 0 at 0RECV_B0, rank 1 at 1RECV_F0"
    ):
        verify(changed(good, 0, program))


def test_the_notation_is_pytorchs() -> None:
    for schedule in (one_f_one_b(3, 4), interleaved(2, 2, 4), breadth_first(2, 2, 4)):
        for action in str(schedule).split():
            assert str(_Action.from_str(action)) == action


def parsed(*rows: str) -> list[list[StageAction]]:
    """Parse one row of computations such as 0F0 and 1B0 per rank."""
    return [
        [
            StageAction(int(stage), StageActionKind(kind), int(micro))
            for stage, kind, micro in row.split()
        ]
        for row in rows
    ]


def test_a_table_of_computations_is_completed() -> None:
    found = lower("1f1b", 2, (0, 1), parsed("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), (2, 1))
    verify(found)
    assert StageAction(1, StageActionKind.RECV_F, 1) in found.programs[1]
    # A "V" of four stages on two ranks: the first and last stage are on rank 0.
    table = lower("v", 1, (0, 1, 1, 0), parsed("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"), (2, 2))
    verify(table)
    assert table.edges == ((0, 1), (1, 0))


def test_numbers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="1f1b with 2 virtual"):
        make_schedule("1f1b", 2, 2, 4)
    with pytest.raises(UsageError, match="groups of 2"):
        make_schedule("breadth_first", 4, 2, 8, group=2)
    with pytest.raises(UsageError, match="unknown"):
        make_schedule("gpipe", 2, 1, 4)
    for group in (0, -1):
        with pytest.raises(UsageError, match="in groups of"):
            make_schedule("breadth_first", 2, 1, 4, group=group)
    with pytest.raises(UsageError, match="at least 1"):
        make_schedule("1f1b", 2, 1, 0)


def test_a_plan_for_16384_ranks_is_made_and_proven_in_two_seconds() -> None:
    began = time.process_time()
    for name, virtual in (("1f1b", 1), ("interleaved", 4), ("breadth_first", 4)):
        # A mesh of 16 x 8 x 128 ranks has one program per pipeline rank.
        verify(make_schedule(name, 16, virtual, 64))
    assert time.process_time() - began < 2.0
