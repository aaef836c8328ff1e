"""Define the schedule of a pipeline as a list of actions for each pipeline rank.

A model is divided into `stages` virtual stages, numbered along the model. Stage g runs on pipeline
rank `placement[g]`, usually g mod P. A generator creates the order of forwards and backwards,
`lower` adds the actions that follow from it (messages, gathers, reductions), verify.py verifies the
schedule, and executor.py executes it. There are P programs, regardless of the number of ranks along
other axes. `print(schedule)` uses PyTorch's notation, with the stage first and the micro-batch
last:

    0F3  0B3                            forward, backward of micro-batch 3 in stage 0
    0SEND_F3  1RECV_F3                  its output from stage 0 to stage 1
    1SEND_B3  0RECV_B3                  the gradient of this output
    0UNSHARD  0RESHARD  0REDUCE_GRAD    gather and release stage 0's weights, reduce its gradients
    0TIE                                sum the gradients of a weight that two stages share

The optimizer's step is not an action; the engine runs it after the schedule. Every stage runs its
backwards in the order of the micro-batches. Sums of gradients therefore have the same order in
every schedule, that of a single process with gradient accumulation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from ..base.errors import UsageError, shown


class StageActionKind(Enum):
    """Kinds of actions; the values are PyTorch's names, except TIE."""

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

    # Members are singletons; Enum's own hash is of the name and costs a Python call each time
    __hash__ = object.__hash__


COMPUTES = frozenset({StageActionKind.FORWARD, StageActionKind.BACKWARD})
SENDS = frozenset({StageActionKind.SEND_F, StageActionKind.SEND_B})
RECEIVES = frozenset({StageActionKind.RECV_F, StageActionKind.RECV_B})


class StageAction(NamedTuple):
    """One action of a rank; `micro` is None if it concerns all micro-batches."""

    stage: int
    kind: StageActionKind
    micro: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{'' if self.micro is None else self.micro}"


Program = tuple[StageAction, ...]


@dataclass(frozen=True)
class PipelineSchedule:
    """The actions of every pipeline rank in a step.

    Attributes:
        name: Name of the schedule.
        micro_batches: Number of micro-batches.
        placement: The pipeline rank of each virtual stage.
        programs: The actions of each rank.
        in_flight: For each rank, the maximum number of forwards without a backward, counted for
            each virtual stage. It is also the number of message slots to a neighbour.
        tied: Stages that share a weight, ascending; empty or at least two.
    """

    name: str
    micro_batches: int
    placement: tuple[int, ...]
    programs: tuple[Program, ...]
    in_flight: tuple[int, ...]
    tied: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        """Return the number of pipeline ranks."""
        return len(self.programs)

    @property
    def stages(self) -> int:
        """Return the number of virtual stages."""
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the virtual stages of a rank, ascending."""
        return self._stages_by_rank[rank]

    @cached_property
    def _stages_by_rank(self) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in self.programs]
        for stage, rank in enumerate(self.placement):
            found[rank].append(stage)
        return tuple(map(tuple, found))

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Return the pairs of ranks that exchange messages, in stage order.

        A pair is (rank of stage g, rank of stage g + 1) and occurs once.
        """
        pairs = zip(self.placement, self.placement[1:], strict=False)
        return tuple(dict.fromkeys((here, there) for here, there in pairs if here != there))

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, program)) for program in self.programs)


# -- generators


def one_f_one_b(ranks: int, micro_batches: int, *, tied: Sequence[int] = ()) -> PipelineSchedule:
    """Return a 1F1B schedule.

    Rank s starts with P - s - 1 forwards, then alternates a forward and a backward. At most min(P -
    s, m) micro-batches are in flight. Weights stay gathered for the whole step.

    Args:
        ranks: Number of pipeline ranks P.
        micro_batches: Number of micro-batches m.
        tied: Stages that share a weight.
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
    """Return an interleaved 1F1B schedule with several stages per rank.

    A rank runs a group of P micro-batches in one stage before its next stage. At most min(2(P - s -
    1) + (v - 1)P + 1, v m) micro-batches are in flight. An incomplete last group is planned as a
    full one without the missing micro-batches.

    Args:
        ranks: Number of pipeline ranks P.
        virtual: Number of stages v per rank.
        micro_batches: Number of micro-batches m.
        tied: Stages that share a weight.
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
    """Return a breadth-first schedule.

    A stage runs `group` micro-batches before the next stage of the rank. The weights of a virtual
    stage are gathered for each group, with the default twice a step, for forward and for backward.
    At most two virtual stages of a rank are gathered at a time. Up to v m micro-batches are in
    flight; with a smaller group k, v k and the warm-up.

    Args:
        ranks: Number of pipeline ranks P.
        virtual: Number of stages v per rank.
        micro_batches: Number of micro-batches m.
        group: Size of a group, from P to m; None means m.
        tied: Stages that share a weight.

    Raises:
        UsageError: There are several stages per rank, and the group is smaller than the number of
            ranks.
    """
    size = micro_batches if group is None else min(group, micro_batches)
    if size < min(ranks, micro_batches) and virtual > 1:
        raise UsageError(
            f"breadth_first in groups of {size} micro-batches over {ranks} pipeline ranks.",
            "With a group smaller than the number of ranks, ranks wait until its first "
            "micro-batch returns to them.",
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
    """Return a schedule with only forwards, for evaluation.

    Args:
        ranks: Number of pipeline ranks P.
        virtual: Number of stages per rank.
        micro_batches: Number of micro-batches, run in groups of P.
    """
    compute = [
        [action for action in program if action.kind is StageActionKind.FORWARD]
        for program in _grouped(ranks, virtual, micro_batches, ranks)
    ]
    # Nothing is kept for a backward; the slots limit how far a rank runs ahead
    in_flight = [virtual * micro_batches] * ranks
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
    """Return the schedule with the given name.

    Args:
        name: One of `GENERATORS`.
        ranks: Number of pipeline ranks.
        virtual: Number of stages per rank.
        micro_batches: Number of micro-batches.
        group: Size of a group, for "breadth_first".
        tied: Stages that share a weight.

    Raises:
        UsageError: The name is unknown, or the numbers do not fit the schedule.
    """
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
    """Return for each rank the computations of interleaved 1F1B with groups of a size.

    Full groups are planned. Omitting all actions of some micro-batches removes waits and adds none.
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
    """Return `warm_up` forwards, then forwards and backwards in turn, then backwards.

    `groups` are the [first, last) micro-batches that a stage of the rank runs before the next one.
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


# -- actions that follow from the order of computations


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
    """Add messages, gathers, releases, ties and reductions to a table of computations.

    Args:
        name: Name of the schedule.
        micro_batches: Number of micro-batches.
        placement: The pipeline rank of each virtual stage.
        compute: For each rank, its forwards and backwards in order.
        in_flight: See `PipelineSchedule`.
        gathers_runs_of: Gather a stage's weights for each run of this many micro-batches; None
            gathers once per step.
        tied: Stages that share a weight.
        trains: Add reductions and ties.
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
            if ties:  # one action sums all tied gradients of the rank
                actions.append(StageAction(ties[0], StageActionKind.TIE))
            actions += [StageAction(stage, StageActionKind.REDUCE) for stage in ties]
        programs.append(tuple(actions))
    return PipelineSchedule(
        name, micro_batches, tuple(placement), tuple(programs), tuple(in_flight), shared
    )


def _with_messages(action: StageAction, placement: Sequence[int]) -> list[StageAction]:
    """Add the receive and the send of a computation, if the neighbour is another rank."""
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
    """Return the gathers before and the releases after each position of the program.

    Runs of a stage that overlap or are adjacent are merged. A gather is one computation ahead of
    its run, unless more than two stages of the rank would be gathered at the same time.
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
