"""The schedule of a pipeline, as data: for each pipeline rank a list of actions on virtual stages
and micro-batches.

A model is cut into `stages` virtual stages, numbered along the model; stage g stands on pipeline
rank `placement[g]`, usually g mod P.  A generator makes the order of forwards and backwards,
`lower` adds what follows from it (messages, gathers, reductions), verify.py proves the table,
executor.py runs it.  There are P programs, however many ranks the other axes add.
`print(schedule)` has PyTorch's notation, stage first and micro-batch last:

    0F3  0B3                            forward, backward of micro-batch 3 in stage 0
    0SEND_F3  1RECV_F3                  its output from stage 0 to stage 1
    1SEND_B3  0RECV_B3                  that output's gradient back
    0UNSHARD  0RESHARD  0REDUCE_GRAD    gather and release stage 0's weights, reduce its gradients
    0TIE                                add up the gradients of a weight that two stages share

The optimizer's step is not an action: the engine takes it after the schedule. Every stage runs its
backwards ascending in the micro-batch: sums of gradients then have one order, that of one process
which accumulates, whatever the schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from ..base.errors import UsageError, shown


class StageActionKind(Enum):
    """The kinds of actions; the values are PyTorch's words, TIE is ours."""

    FORWARD = "F"
    BACKWARD = "B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    GATHER = "UNSHARD"
    RELEASE = "RESHARD"
    REDUCE = "REDUCE_GRAD"
    TIE = "TIE"

    # Members are single objects; Enum's own hashes their names, a Python call each time
    __hash__ = object.__hash__


COMPUTES = frozenset({StageActionKind.FORWARD, StageActionKind.BACKWARD})
SENDS = frozenset({StageActionKind.SEND_F, StageActionKind.SEND_B})
RECEIVES = frozenset({StageActionKind.RECV_F, StageActionKind.RECV_B})


class StageAction(NamedTuple):
    """One action of one rank.  micro: the micro-batch; None for what concerns all of them."""

    stage: int
    kind: StageActionKind
    micro: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{'' if self.micro is None else self.micro}"


Program = tuple[StageAction, ...]


@dataclass(frozen=True)
class PipelineSchedule:
    """What every pipeline rank does in one step.

    placement: by virtual stage, the pipeline rank it stands on.  programs: by rank.  in_flight: by
    rank, the most micro-batches that are forward and not yet backward, counted once for each
    virtual stage; also the number of slots a rank has for messages to one neighbour.  tied: stages
    that share a weight, ascending; none, or two or more.
    """

    name: str
    micro_batches: int
    placement: tuple[int, ...]
    programs: tuple[Program, ...]
    in_flight: tuple[int, ...]
    tied: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        """The number of pipeline ranks."""
        return len(self.programs)

    @property
    def stages(self) -> int:
        """The number of virtual stages."""
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The virtual stages of one rank, ascending."""
        return self._stages_by_rank[rank]

    @cached_property
    def _stages_by_rank(self) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in self.programs]
        for stage, rank in enumerate(self.placement):
            found[rank].append(stage)
        return tuple(map(tuple, found))

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """The pairs (rank of stage g, rank of stage g + 1) between which messages travel, each
        once, in stage order.
        """
        pairs = zip(self.placement, self.placement[1:], strict=False)
        return tuple(dict.fromkeys((here, there) for here, there in pairs if here != there))

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, program)) for program in self.programs)


# -- generators


def one_f_one_b(ranks: int, micro_batches: int, *, tied: Sequence[int] = ()) -> PipelineSchedule:
    """1F1B: rank s begins with P - s forwards, then takes a backward and a forward in turn.

    In flight at most min(P - s, m); the weights of a stage stay gathered for the step.
    """
    compute = [
        _warm_up_then_alternate(ranks - rank - 1, [(0, micro_batches)], ranks, rank, 1)
        for rank in range(ranks)
    ]
    in_flight = [min(ranks - rank, micro_batches) for rank in range(ranks)]
    return lower("1f1b", micro_batches, _loop(ranks, 1), compute, in_flight, tied=tied)


def interleaved(
    ranks: int, virtual: int, micro_batches: int, *, tied: Sequence[int] = ()
) -> PipelineSchedule:
    """Interleaved 1F1B: `virtual` stages on each rank, visited in turn by groups of P
    micro-batches.

    In flight at most min(2(P - s - 1) + (v - 1)P + 1, v m).  A last group that is short is planned
    as a full one whose missing micro-batches do nothing.
    """
    if virtual == 1:
        return one_f_one_b(ranks, micro_batches, tied=tied)
    compute = _grouped(ranks, virtual, micro_batches, ranks)
    in_flight = [
        min(2 * (ranks - rank - 1) + (virtual - 1) * ranks + 1, virtual * micro_batches)
        for rank in range(ranks)
    ]
    return lower("interleaved", micro_batches, _loop(ranks, virtual), compute, in_flight, tied=tied)


def breadth_first(
    ranks: int,
    virtual: int,
    micro_batches: int,
    group: int | None = None,
    *,
    tied: Sequence[int] = (),
) -> PipelineSchedule:
    """Breadth first: a stage takes `group` micro-batches in turn before the next stage of the rank
    does.

    group: from P to m, all of them by default.  The weights of a virtual stage are gathered for
    each run of a group, twice a step with the default, once forward and once backward; at most two
    virtual stages of a rank are gathered at once, and in flight are up to v m (with a smaller group
    v k and the warm-up).
    """
    size = micro_batches if group is None else min(group, micro_batches)
    if size < min(ranks, micro_batches) and virtual > 1:
        raise UsageError(
            f"breadth_first in groups of {size} micro-batches over {ranks} pipeline ranks.",
            "A group smaller than the number of ranks leaves ranks waiting for its first "
            "micro-batch to come round.",
            f"take a group of {ranks} at least.",
        )
    if size == micro_batches:
        compute = []
        for rank in range(ranks):
            own = range(rank, ranks * virtual, ranks)
            forward = _for_each(own, StageActionKind.FORWARD, range(micro_batches))
            backward = _for_each(reversed(own), StageActionKind.BACKWARD, range(micro_batches))
            compute.append(forward + backward)
        in_flight = [virtual * micro_batches] * ranks
    else:
        compute = _grouped(ranks, virtual, micro_batches, size)
        in_flight = [
            min(2 * (ranks - rank - 1) + (virtual - 1) * size + 1, virtual * micro_batches)
            for rank in range(ranks)
        ]
    placement = _loop(ranks, virtual)
    return lower(
        "breadth_first",
        micro_batches,
        placement,
        compute,
        in_flight,
        gathers_runs_of=size,
        tied=tied,
    )


def forward_only(ranks: int, virtual: int, micro_batches: int) -> PipelineSchedule:
    """The forwards alone, for evaluation: micro-batches in groups of P."""
    compute = [
        [action for action in program if action.kind is StageActionKind.FORWARD]
        for program in _grouped(ranks, virtual, micro_batches, ranks)
    ]
    in_flight = [
        virtual * micro_batches
    ] * ranks  # nothing is kept for a backward; slots are what bounds the run ahead
    return lower(
        "forward_only", micro_batches, _loop(ranks, virtual), compute, in_flight, trains=False
    )


GENERATORS = ("1f1b", "interleaved", "breadth_first")


def make_schedule(
    name: str,
    ranks: int,
    virtual: int,
    micro_batches: int,
    *,
    group: int | None = None,
    tied: Sequence[int] = (),
) -> PipelineSchedule:
    """The schedule of that name (`GENERATORS`).  UsageError where the numbers do not fit it."""
    if ranks < 1 or virtual < 1 or micro_batches < 1:
        raise UsageError(
            f"a pipeline of {ranks} ranks, {virtual} virtual stages on each and {micro_batches} "
            "micro-batches.",
            "Each is at least 1.",
            "give whole numbers from 1 on.",
        )
    if name == "1f1b":
        if virtual > 1:
            raise UsageError(
                f"schedule 1f1b with {virtual} virtual stages on each rank.",
                "1f1b has one stage on each rank.",
                'take "interleaved" or "breadth_first", or virtual 1.',
            )
        return one_f_one_b(ranks, micro_batches, tied=tied)
    if name == "interleaved":
        return interleaved(ranks, virtual, micro_batches, tied=tied)
    if name == "breadth_first":
        return breadth_first(ranks, virtual, micro_batches, group, tied=tied)
    raise UsageError(
        f"pipeline schedule {shown(name)} is unknown.", "", f"take one of {', '.join(GENERATORS)}."
    )


def _loop(ranks: int, virtual: int) -> tuple[int, ...]:
    return tuple(range(ranks)) * virtual


def _grouped(ranks: int, virtual: int, micro_batches: int, group: int) -> list[list[StageAction]]:
    """By rank, the computations of interleaved 1F1B with groups of that size.

    Planned for full groups: leaving out every action of some micro-batches removes waits and adds
    none.
    """
    whole = -(-micro_batches // group) * group
    groups = [(first, first + group) for first in range(0, whole, group)]
    found = []
    for rank in range(ranks):
        warm_up = (
            2 * (ranks - rank - 1) + (virtual - 1) * group if virtual > 1 else ranks - rank - 1
        )
        planned = _warm_up_then_alternate(warm_up, groups, ranks, rank, virtual)
        found.append(
            [
                action
                for action in planned
                if action.micro is not None and action.micro < micro_batches
            ]
        )
    return found


def _warm_up_then_alternate(
    warm_up: int, groups: Iterable[tuple[int, int]], ranks: int, rank: int, virtual: int
) -> list[StageAction]:
    """`warm_up` forwards, then a forward and a backward in turn, then the backwards that are left.

    groups: [first, last) micro-batches that one stage of the rank takes before the next does.
    """
    own = range(rank, ranks * virtual, ranks)
    forward: list[StageAction] = []
    backward: list[StageAction] = []
    for first, last in groups:
        forward += _for_each(own, StageActionKind.FORWARD, range(first, last))
        backward += _for_each(reversed(own), StageActionKind.BACKWARD, range(first, last))
    ahead = min(warm_up, len(forward))
    found = forward[:ahead]
    for later, earlier in zip(forward[ahead:], backward, strict=False):
        found += (later, earlier)
    return found + backward[len(forward) - ahead :]


def _for_each(
    stages: Iterable[int], kind: StageActionKind, micros: Sequence[int]
) -> list[StageAction]:
    return [StageAction(stage, kind, micro) for stage in stages for micro in micros]


# -- what follows from the order of computations


def lower(
    name: str,
    micro_batches: int,
    placement: Sequence[int],
    compute: Sequence[Sequence[StageAction]],
    in_flight: Sequence[int],
    *,
    gathers_runs_of: int | None = None,
    tied: Sequence[int] = (),
    trains: bool = True,
) -> PipelineSchedule:
    """Complete a table of computations: messages, gathers and releases, ties, reductions.

    compute: by rank, forwards and backwards in their order.  in_flight: as in `PipelineSchedule`.
    gathers_runs_of: the weights of a stage are gathered anew for each run over that many
    micro-batches; None: once for the step.
    """
    shared = tuple(sorted(tied)) if len({placement[stage] for stage in tied}) > 1 else ()
    programs = []
    for program in compute:
        before, behind = _gathers_and_releases(program, gathers_runs_of)
        actions: list[StageAction] = []
        last = {
            action.stage: place
            for place, action in enumerate(program)
            if action.kind is StageActionKind.BACKWARD
        }
        for place, action in enumerate(program):
            actions += before.get(place, ())
            actions += _with_messages(action, placement)
            actions += behind.get(place, ())
            if trains and last.get(action.stage) == place and action.stage not in shared:
                actions.append(StageAction(action.stage, StageActionKind.REDUCE))
        if trains:
            ties = [stage for stage in sorted(last) if stage in shared]
            if ties:  # one action adds up all tied gradients of the rank
                actions.append(StageAction(ties[0], StageActionKind.TIE))
            actions += [StageAction(stage, StageActionKind.REDUCE) for stage in ties]
        programs.append(tuple(actions))
    return PipelineSchedule(
        name, micro_batches, tuple(placement), tuple(programs), tuple(in_flight), shared
    )


def _with_messages(action: StageAction, placement: Sequence[int]) -> list[StageAction]:
    """An action between the receive it needs and the send of what it makes; neighbours on one rank
    need neither.
    """
    stage, kind, micro = action
    here = placement[stage]
    last = len(placement) - 1
    from_below = stage > 0 and placement[stage - 1] != here
    from_above = stage < last and placement[stage + 1] != here
    found = [action]
    if kind is StageActionKind.FORWARD:
        if from_below:
            found.insert(0, StageAction(stage, StageActionKind.RECV_F, micro))
        if from_above:
            found.append(StageAction(stage, StageActionKind.SEND_F, micro))
    elif kind is StageActionKind.BACKWARD:
        if from_above:
            found.insert(0, StageAction(stage, StageActionKind.RECV_B, micro))
        if from_below:
            found.append(StageAction(stage, StageActionKind.SEND_B, micro))
    return found


def _gathers_and_releases(
    program: Sequence[StageAction], group: int | None
) -> tuple[dict[int, list[StageAction]], dict[int, list[StageAction]]]:
    """By place in the program, the gathers that stand before it and the releases that stand behind
    it.

    Runs of one stage that overlap or follow each other are one.  A run's gather stands one
    computation ahead of its first, unless more than two stages of this rank would then be gathered
    at once.
    """
    runs: dict[tuple[int, StageActionKind, int], list[int]] = {}
    for place, (stage, kind, micro) in enumerate(program):
        assert micro is not None
        key = (
            (stage, StageActionKind.FORWARD, 0) if group is None else (stage, kind, micro // group)
        )
        runs.setdefault(key, [place, place])[1] = place
    by_stage: dict[int, list[list[int]]] = {}
    for (stage, _, _), (first, last) in sorted(runs.items(), key=lambda item: item[1]):
        spans = by_stage.setdefault(stage, [])
        if spans and first <= spans[-1][1] + 1:
            spans[-1][1] = max(spans[-1][1], last)
        else:
            spans.append([first, last])
    before: dict[int, list[StageAction]] = {}
    behind: dict[int, list[StageAction]] = {}
    whole = sorted(
        (first, last, stage) for stage, spans in by_stage.items() for first, last in spans
    )
    for first, last, stage in whole:
        ahead = max(first - 1, 0)
        others = {
            each
            for begin, end, each in whole
            if each != stage and begin <= ahead + 1 and end >= ahead
        }
        gathered_at = ahead if len(others) <= 1 else first
        before.setdefault(gathered_at, []).append(StageAction(stage, StageActionKind.GATHER))
        behind.setdefault(last, []).append(StageAction(stage, StageActionKind.RELEASE))
    return before, behind
