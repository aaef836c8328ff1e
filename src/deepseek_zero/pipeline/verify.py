"""Verify and simulate the schedule of a pipeline.

All ranks' programs are executed together, without processes. A verified schedule cannot deadlock or
use missing values. Messages are received in the order in which they are sent, and no ranks wait for
each other in a cycle. Weights are gathered while they are used, and each gradient is reduced once,
after it is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..base.errors import DeepSeekZeroError
from .schedule import (
    COMPUTES,
    MESSAGES,
    SENDS,
    PipelineSchedule,
    StageAction,
    StageActionKind,
    crosses_ranks,
)


class ScheduleError(DeepSeekZeroError):
    """Raised if a schedule would deadlock or use a value before it is available."""


@dataclass(frozen=True)
class TimedAction:
    """A forward or backward in a simulated step, with its start and end in seconds."""

    rank: int
    action: StageAction
    start: float
    end: float


@dataclass
class _Lane:
    """The messages of one kind from one rank to another.

    Attributes:
        sent: Stage, micro-batch and time of each message.
        received: The time at which each was received.
    """

    sent: list[tuple[int, int | None, float]] = field(default_factory=list)
    received: list[float] = field(default_factory=list)


def verify(schedule: PipelineSchedule) -> None:
    """Check that a schedule is complete, cannot deadlock, and uses no missing value.

    Args:
        schedule: The schedule whose programs for all ranks are checked.

    Raises:
        ScheduleError: The schedule is wrong; the message names the action.
    """
    trains = any(
        action.kind is StageActionKind.BACKWARD
        for program in schedule.programs
        for action in program
    )
    for rank, program in enumerate(schedule.programs):
        _check_program(schedule, rank, program, trains=trains)
    simulate(schedule, 0.0, 0.0)


def simulate(
    schedule: PipelineSchedule, forward: float, backward: float
) -> tuple[list[TimedAction], float]:
    """Simulate a step of a pipeline schedule, to find its timeline and its duration.

    A receive waits for the matching send. A send waits while the receiving rank has not yet
    received n earlier messages of the same sender in the same direction, to later or to earlier
    stages. n is the sender's entry in `PipelineSchedule.in_flight`. The sum of tied gradients waits
    for all ranks that share weights. Messages, gathers and reductions take no time.

    Args:
        schedule: The schedule to simulate, with the actions of every rank.
        forward: Duration of one micro-batch's forward in one stage, in seconds.
        backward: Duration of one micro-batch's backward in one stage, in seconds.

    Returns:
        A tuple. The first element is a list of all forwards and backwards with their start and end
        times; those of one rank are in the order of its program. The second element is the duration
        of the step in seconds.

    Raises:
        ScheduleError: The ranks deadlock, a message is never received, or a rank receives messages
            in an order that differs from the order in which they are sent.
    """
    programs = schedule.programs
    tied = len({schedule.placement[stage] for stage in schedule.tied})
    cost = {StageActionKind.FORWARD: forward, StageActionKind.BACKWARD: backward}
    spans: list[TimedAction] = []
    places = [0] * len(programs)
    clocks = [0.0] * len(programs)
    lanes: dict[tuple[int, int, bool], _Lane] = {}
    at_tie: dict[int, float] = {}

    def finish(rank: int, action: StageAction) -> float | None:
        """Return when a rank finishes its next action; None if it waits for another rank."""
        now = clocks[rank]
        kind = action.kind
        if kind in COMPUTES:
            spans.append(TimedAction(rank, action, now, now + cost[kind]))
            return now + cost[kind]
        if kind is StageActionKind.TIE:
            at_tie.setdefault(action.stage, now)
            return max(now, *at_tie.values()) if len(at_tie) == tied else None
        if not action.is_message:
            return now
        stage, other = action.ends
        source = schedule.placement[stage]
        target = schedule.placement[other]
        lane = lanes.setdefault((source, target, stage < other), _Lane())
        number = len(lane.received)
        if kind in SENDS:
            overtaken = len(lane.sent) - schedule.in_flight[source]
            if overtaken >= number:
                return None
            if overtaken >= 0:
                now = max(now, lane.received[overtaken])
            lane.sent.append((stage, action.micro, now))
            return now
        if number == len(lane.sent):
            return None
        sent_stage, micro, arrived = lane.sent[number]
        if (sent_stage, micro) != (stage, action.micro):
            raise _fail(
                f"from pipeline rank {source} to {target}, message {number} is sent for stage "
                f"{sent_stage}, micro-batch {micro}, and received as stage {stage}, micro-batch "
                f"{action.micro}.",
                "A lane has one order.",
            )
        now = max(now, arrived)
        lane.received.append(now)
        return now

    has_moved = True
    while has_moved:
        has_moved = False
        for rank, program in enumerate(programs):
            while places[rank] < len(program):
                end = finish(rank, program[places[rank]])
                if end is None:
                    break
                clocks[rank] = end
                places[rank] += 1
                has_moved = True
    stuck = [
        f"rank {rank} at {program[place]}"
        for rank, (program, place) in enumerate(zip(programs, places, strict=True))
        if place < len(program)
    ]
    if stuck:
        raise _fail(
            f"the schedule hangs: pipeline {', '.join(stuck[:8])}.",
            "Each waits for one of the others.",
        )
    for (source, target, _), lane in lanes.items():
        if len(lane.sent) > len(lane.received):
            raise _fail(
                f"{len(lane.sent)} messages are sent from pipeline rank {source} to {target}, and "
                f"{len(lane.received)} received.",
                "",
            )
    return spans, max(clocks, default=0.0)


def _fail(what: str, why: str) -> ScheduleError:
    return ScheduleError(
        what, why, "take another schedule, and report this one: its generator is wrong."
    )


def _check_program(
    schedule: PipelineSchedule, rank: int, program: Sequence[StageAction], *, trains: bool
) -> None:
    """Check one rank's program: it has all actions of a step, and each follows those it needs."""
    due = set(_due(schedule, rank, trains=trains))
    done: set[StageAction] = set()
    gathered = set[int]()
    in_flight = 0

    def fail(what: str, why: str = "") -> ScheduleError:
        return _fail(f"pipeline rank {rank}: {what}", why)

    for action in program:
        stage, kind, _ = action
        if kind in COMPUTES and action not in due:
            raise fail(f"{action} is of another rank or step.", "A stage has one rank.")
        if action in done and kind not in (StageActionKind.GATHER, StageActionKind.RELEASE):
            raise fail(f"{action} stands there twice.", "Each action runs once.")
        for each in _needs(schedule, rank, action):
            if each not in done:
                raise fail(f"{action} stands before {each}.", f"{action} uses what {each} makes.")
        is_gathered = stage in gathered
        if kind in COMPUTES and not is_gathered:
            raise fail(f"{action} runs while stage {stage} is not gathered.")
        if kind is StageActionKind.FORWARD:
            in_flight += trains
            if in_flight > schedule.in_flight[rank]:
                raise fail(
                    f"{action} makes {in_flight} in flight.",
                    f"The schedule declares {schedule.in_flight[rank]}.",
                )
        elif kind is StageActionKind.BACKWARD:
            in_flight -= 1
        elif kind is StageActionKind.GATHER:
            gathered.add(stage)
        elif kind is StageActionKind.RELEASE:
            if not is_gathered:
                raise fail(f"{action} of a stage that is not gathered.")
            gathered.discard(stage)
        done.add(action)
    if gathered:
        raise fail(f"stage {min(gathered)} stays gathered after the step.")
    if missing := sorted(map(str, due - done)):
        raise fail(
            f"{', '.join(missing[:8])} is missing.",
            f"A step runs {schedule.micro_batches} micro-batches in each stage and reduces its "
            "gradients; otherwise the optimizer would use only those of this rank.",
        )


def _due(schedule: PipelineSchedule, rank: int, *, trains: bool) -> Iterator[StageAction]:
    """Yield the computations and reductions of a rank in a step."""
    for stage in schedule.stages_of(rank):
        for micro in range(schedule.micro_batches):
            yield StageAction(stage, StageActionKind.FORWARD, micro)
            if trains:
                yield StageAction(stage, StageActionKind.BACKWARD, micro)
        if trains:
            yield StageAction(stage, StageActionKind.REDUCE)


def _needs(schedule: PipelineSchedule, rank: int, action: StageAction) -> Iterator[StageAction]:
    """Yield the actions of the same rank that must precede an action."""
    stage, kind, micro = action
    tied = [each for each in schedule.tied if schedule.placement[each] == rank]
    last_micro = schedule.micro_batches - 1
    if kind in COMPUTES:
        receive = action._replace(kind=MESSAGES[kind][0])
        source, _ = receive.ends
        if crosses_ranks(receive, schedule.placement):
            yield receive
        elif 0 <= source < schedule.stages:
            yield action._replace(stage=source)
    if kind is StageActionKind.BACKWARD:
        yield action._replace(kind=StageActionKind.FORWARD)
        if micro:  # gradients have one order in every schedule
            yield action._replace(micro=micro - 1)
    elif kind is StageActionKind.SEND_F:
        yield action._replace(kind=StageActionKind.FORWARD)
    elif kind is StageActionKind.SEND_B:
        yield action._replace(kind=StageActionKind.BACKWARD)
    elif kind is StageActionKind.REDUCE:
        yield StageAction(stage, StageActionKind.BACKWARD, last_micro)
        if stage in tied:
            yield StageAction(tied[0], StageActionKind.TIE)
    elif kind is StageActionKind.TIE:
        for each in tied:
            yield StageAction(each, StageActionKind.BACKWARD, last_micro)
