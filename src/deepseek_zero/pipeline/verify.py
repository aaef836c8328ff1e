"""Verify and simulate the schedule of a pipeline.

All ranks' programs are executed together, without processes. A verified schedule cannot deadlock or
use missing values. Messages are received in the order in which they are sent, and no ranks wait for
each other in a cycle. Weights are gathered while they are used, and each gradient is reduced once,
after it is complete. `simulate` does the same with a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ..base.errors import DeepSeekZeroError
from .schedule import COMPUTES, SENDS, PipelineSchedule, StageAction, StageActionKind


class ScheduleError(DeepSeekZeroError):
    """A schedule would deadlock or use a missing value."""


@dataclass(frozen=True)
class TimedAction:
    """A computation of a rank, with its start and end."""

    rank: int
    action: StageAction
    start: float
    end: float


@dataclass(frozen=True)
class ScheduleTimes:
    """The result of a simulation.

    Attributes:
        spans: All computations.
        seconds: Duration of the step.
        bubble: Idle time divided by useful time, for the busiest rank.
        most_gathered: For each rank, the maximum number of virtual stages with gathered weights.
    """

    spans: tuple[TimedAction, ...]
    seconds: float
    bubble: float
    most_gathered: tuple[int, ...]


def verify(schedule: PipelineSchedule) -> None:
    """Verify a schedule.

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
    _check_messages(schedule)
    _walk(schedule, 0.0, 0.0, 0.0, None)


def simulate(
    schedule: PipelineSchedule,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0,
    transfer: float = 0.0,
) -> ScheduleTimes:
    """Compute when each computation runs.

    Args:
        schedule: The schedule.
        forward: Seconds of a micro-batch's forward, for all stages or for each stage.
        backward: Seconds of a micro-batch's backward, for all stages or for each stage.
        transfer: Seconds of a message.

    Raises:
        ScheduleError: The ranks deadlock.
    """
    spans: list[TimedAction] = []
    seconds = _walk(schedule, forward, backward, transfer, spans)
    busy = [0.0] * schedule.ranks
    for span in spans:
        busy[span.rank] += span.end - span.start
    useful = max(busy)
    gathered = tuple(_most_gathered(program) for program in schedule.programs)
    bubble = seconds / useful - 1 if useful else 0.0
    return ScheduleTimes(tuple(spans), seconds, bubble, gathered)


def _fail(what: str, why: str) -> ScheduleError:
    return ScheduleError(
        what, why, "take another schedule, and report this one: its generator is wrong."
    )


def _check_program(
    schedule: PipelineSchedule, rank: int, program: Sequence[StageAction], *, trains: bool
) -> None:
    """Check the order within one rank: each action follows those that it needs."""
    placement = schedule.placement
    many = schedule.micro_batches
    last_stage = len(placement) - 1
    own = set(schedule.stages_of(rank))
    forwards = dict.fromkeys(own, 0)
    backwards = dict.fromkeys(own, 0)
    done: set[StageAction] = set()
    gathered = set[int]()
    reduced = set[int]()
    in_flight = 0
    is_tied = False
    uses_gathers = any(action.kind is StageActionKind.GATHER for action in program)

    def needs(here: StageAction, *before: StageAction) -> None:
        for each in before:
            if each not in done:
                raise _fail(
                    f"pipeline rank {rank}: {here} stands before {each}.",
                    f"{here} uses what {each} makes.",
                )

    for action in program:
        stage, kind, micro = action
        if stage not in own:
            raise _fail(
                f"pipeline rank {rank}: {action} is of a stage of another rank.",
                "A stage has one rank.",
            )
        if micro is not None and micro >= many:
            raise _fail(
                f"pipeline rank {rank}: {action} of {many} micro-batches.",
                "They are numbered from 0 on.",
            )
        if action in done and kind not in (StageActionKind.GATHER, StageActionKind.RELEASE):
            raise _fail(
                f"pipeline rank {rank}: {action} stands there twice.", "Each action runs once."
            )
        if kind in COMPUTES:
            assert micro is not None
            if uses_gathers and stage not in gathered:
                raise _fail(
                    f"pipeline rank {rank}: {action} runs while stage {stage} is not gathered.", ""
                )
            if kind is StageActionKind.FORWARD:
                if stage:
                    source = StageAction(stage - 1, kind, micro)
                    if placement[stage - 1] != rank:
                        source = StageAction(stage, StageActionKind.RECV_F, micro)
                    needs(action, source)
                forwards[stage] += 1
                in_flight += trains
                if in_flight > schedule.in_flight[rank]:
                    raise _fail(
                        f"pipeline rank {rank}: {action} makes {in_flight} in flight.",
                        f"The schedule declares {schedule.in_flight[rank]}.",
                    )
            else:
                needs(action, StageAction(stage, StageActionKind.FORWARD, micro))
                if stage < last_stage:
                    source = StageAction(stage + 1, kind, micro)
                    if placement[stage + 1] != rank:
                        source = StageAction(stage, StageActionKind.RECV_B, micro)
                    needs(action, source)
                if micro != backwards[stage]:
                    raise _fail(
                        f"pipeline rank {rank}: {action} follows {backwards[stage]} backwards of "
                        "its stage.",
                        "Gradients are added up ascending in the micro-batch, so that every "
                        "schedule gives the same.",
                    )
                backwards[stage] += 1
                in_flight -= 1
        elif kind is StageActionKind.SEND_F:
            needs(action, StageAction(stage, StageActionKind.FORWARD, micro))
        elif kind is StageActionKind.SEND_B:
            needs(action, StageAction(stage, StageActionKind.BACKWARD, micro))
        elif kind is StageActionKind.GATHER:
            gathered.add(stage)
        elif kind is StageActionKind.RELEASE:
            if stage not in gathered:
                raise _fail(f"pipeline rank {rank}: {action} of a stage that is not gathered.", "")
            gathered.discard(stage)
        elif kind is StageActionKind.TIE or kind is StageActionKind.REDUCE:
            if backwards[stage] != many:
                raise _fail(
                    f"pipeline rank {rank}: {action} after {backwards[stage]} of {many} backwards.",
                    "",
                )
            if kind is StageActionKind.REDUCE:
                if stage in schedule.tied and not is_tied:
                    raise _fail(
                        f"pipeline rank {rank}: {action} before the tied gradients are added up.",
                        "",
                    )
                reduced.add(stage)
            else:
                for each in own & set(schedule.tied):
                    if backwards[each] != many:
                        raise _fail(
                            f"pipeline rank {rank}: {action} before the backwards of stage {each}.",
                            "",
                        )
                is_tied = True
        done.add(action)
    for stage in own:
        if forwards[stage] != many or (trains and backwards[stage] != many):
            raise _fail(
                f"pipeline rank {rank}: stage {stage} has {forwards[stage]} forwards and "
                f"{backwards[stage]} backwards.",
                f"A step has {many} micro-batches.",
            )
    if gathered:
        raise _fail(
            f"pipeline rank {rank}: stage {min(gathered)} stays gathered after the step.", ""
        )
    if trains and reduced != own:
        missing = ", ".join(map(str, sorted(own - reduced)))
        raise _fail(
            f"pipeline rank {rank}: stage {missing} is not reduced in the step.",
            "The optimizer would use only the gradients of this rank.",
        )


def _check_messages(schedule: PipelineSchedule) -> None:
    """Check that messages of each lane are received in the order of the sends."""
    sent: dict[tuple[int, int, StageActionKind], list[tuple[int, int | None]]] = {}
    received: dict[tuple[int, int, StageActionKind], list[tuple[int, int | None]]] = {}
    for rank, program in enumerate(schedule.programs):
        for action in program:
            if (place := _lane(schedule, rank, action)) is not None:
                (sent if action.kind in SENDS else received).setdefault(place[0], []).append(
                    place[1]
                )
    for lane in sent.keys() | received.keys():
        out = sent.get(lane, [])
        into = received.get(lane, [])
        if out == into:
            continue
        source, target, kind = lane
        first = next(
            (n for n, pair in enumerate(zip(out, into, strict=False)) if pair[0] != pair[1]), None
        )
        what = (
            f"{len(out)} messages are sent and {len(into)} received"
            if first is None
            else f"message {first} is sent for stage {out[first][0]}, micro-batch {out[first][1]}, "
            f"and received as stage {into[first][0]}, micro-batch {into[first][1]}"
        )
        lane_name = "activations" if kind is StageActionKind.SEND_F else "gradients"
        raise _fail(
            f"{lane_name} from pipeline rank {source} to {target}: {what}.", "A lane has one order."
        )


def _lane(
    schedule: PipelineSchedule, rank: int, action: StageAction
) -> tuple[tuple[int, int, StageActionKind], tuple[int, int | None]] | None:
    """Return the lane of a message and its identity in the lane.

    The lane is (source rank, target rank, kind of the send), the identity is (sending stage,
    micro-batch).
    """
    stage, kind, micro = action
    placement = schedule.placement
    if kind is StageActionKind.SEND_F:
        return (rank, placement[stage + 1], kind), (stage, micro)
    if kind is StageActionKind.RECV_F:
        return (placement[stage - 1], rank, StageActionKind.SEND_F), (stage - 1, micro)
    if kind is StageActionKind.SEND_B:
        return (rank, placement[stage - 1], kind), (stage, micro)
    if kind is StageActionKind.RECV_B:
        return (placement[stage + 1], rank, StageActionKind.SEND_B), (stage + 1, micro)
    return None


def _walk(
    schedule: PipelineSchedule,
    forward: float | Sequence[float],
    backward: float | Sequence[float],
    transfer: float,
    spans: list[TimedAction] | None,
) -> float:
    """Execute all programs together and return the end time.

    A receive waits for its send. A send waits while all slots of its lane contain messages that are
    not received; a rank has as many slots to a neighbour as micro-batches in flight. A tie waits
    for the other ranks with tied stages. Raises ScheduleError if the ranks deadlock.
    """
    programs = schedule.programs
    tied = len({schedule.placement[stage] for stage in schedule.tied})
    cost = {
        StageActionKind.FORWARD: _by_stage(forward, schedule.stages),
        StageActionKind.BACKWARD: _by_stage(backward, schedule.stages),
    }
    places = [0] * len(programs)
    clocks = [0.0] * len(programs)
    # By lane: arrival time of each message
    arrived: dict[tuple[int, int, StageActionKind], list[float]] = {}
    # by lane: time at which each message was received
    taken: dict[tuple[int, int, StageActionKind], list[float]] = {}
    at_tie: dict[int, float] = {}
    ready = deque(range(len(programs)))
    waiting: set[int] = set()
    while ready:
        rank = ready.popleft()
        program = programs[rank]
        place = places[rank]
        now = clocks[rank]
        while place < len(program):
            action = program[place]
            kind = action.kind
            if kind in COMPUTES:
                end = now + cost[kind][action.stage]
                if spans is not None:
                    spans.append(TimedAction(rank, action, now, end))
                now = end
            elif kind is StageActionKind.TIE:
                at_tie.setdefault(action.stage, now)
                if len(at_tie) < tied:
                    waiting.add(rank)
                    break
                now = max(now, *at_tie.values())
                ready += waiting
                waiting.clear()
            elif (lane := _lane(schedule, rank, action)) is not None:
                messages = arrived.setdefault(lane[0], [])
                receipts = taken.setdefault(lane[0], [])
                source, target, _ = lane[0]
                if kind in SENDS:
                    slots = schedule.in_flight[source]
                    if len(messages) - len(receipts) >= slots:
                        break
                    if len(messages) >= slots:
                        now = max(now, receipts[len(messages) - slots])
                    messages.append(now + transfer)
                    ready.append(target)
                else:
                    if len(receipts) == len(messages):
                        break
                    now = max(now, messages[len(receipts)])
                    receipts.append(now)
                    ready.append(source)
            place += 1
        places[rank], clocks[rank] = place, now
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
    return max(clocks, default=0.0)


def _by_stage(seconds: float | Sequence[float], stages: int) -> Sequence[float]:
    return [float(seconds)] * stages if isinstance(seconds, int | float) else seconds


def _most_gathered(program: Sequence[StageAction]) -> int:
    most = now = 0
    for action in program:
        now += (action.kind is StageActionKind.GATHER) - (action.kind is StageActionKind.RELEASE)
        most = max(most, now)
    return most
