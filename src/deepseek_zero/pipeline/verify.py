"""Proves a pipeline's schedule, and tells how long it takes: all ranks' programs are walked
together, without ranks.

What `verify` lets pass cannot hang and cannot use what is not there: every message is received in
the order it was sent in, no rank waits for itself around a ring, weights are gathered while they
are used, and each gradient is reduced once, when it is complete.  `simulate` is the same walk with
a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ..base.errors import DeepSeekZeroError
from .schedule import COMPUTES, SENDS, PipelineSchedule, StageAction, StageActionKind


class ScheduleError(DeepSeekZeroError):
    """A schedule that would hang, or use what is not there."""


@dataclass(frozen=True)
class TimedAction:
    """One computation of one rank, and when."""

    rank: int
    action: StageAction
    start: float
    end: float


@dataclass(frozen=True)
class ScheduleTimes:
    """A schedule with a clock.  bubble: idle time over useful time, of the rank that is busiest.
    most_gathered: by rank, the most virtual stages whose weights are gathered at once.
    """

    spans: tuple[TimedAction, ...]
    seconds: float
    bubble: float
    most_gathered: tuple[int, ...]


def verify(schedule: PipelineSchedule) -> None:
    """Prove a schedule; ScheduleError says what is wrong and where."""
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
    """Say when each computation runs.  forward, backward: seconds of one micro-batch in a stage, or
    in each of them.
    transfer: seconds of one message.  ScheduleError where ranks wait for each other.
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
    """One rank's own order: what an action needs of the same rank has run before it."""
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
            f"pipeline rank {rank}: stage {min(gathered)} stays gathered behind the step.", ""
        )
    if trains and reduced != own:
        missing = ", ".join(map(str, sorted(own - reduced)))
        raise _fail(
            f"pipeline rank {rank}: stage {missing} is not reduced in the step.",
            "The optimizer would use gradients of this rank alone.",
        )


def _check_messages(schedule: PipelineSchedule) -> None:
    """Every message is received in the order it was sent in, between the same two ranks and in the
    same lane.
    """
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
    """The lane of a message (from, to, its send's kind) and what it is there (sending stage,
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
    """Run all programs together and return when the last one ends; ScheduleError where they wait in
    a ring.

    A receive waits for its send; a send waits while all slots of its lane hold messages that are
    not received, and a rank has as many slots to a neighbour as it has micro-batches in flight; a
    tie waits for the other ranks of tied stages.
    """
    programs = schedule.programs
    tied = len({schedule.placement[stage] for stage in schedule.tied})
    cost = {
        StageActionKind.FORWARD: _by_stage(forward, schedule.stages),
        StageActionKind.BACKWARD: _by_stage(backward, schedule.stages),
    }
    places = [0] * len(programs)
    clocks = [0.0] * len(programs)
    arrived: dict[
        tuple[int, int, StageActionKind], list[float]
    ] = {}  # by lane: when each message was there
    taken: dict[tuple[int, int, StageActionKind], list[float]] = {}  # and when each was received
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
