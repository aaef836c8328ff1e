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

Numbers = tuple[int, ...]  # of stages or ranks


class StageActionKind(Enum):
    """Kinds of actions in a pipeline schedule, such as a forward, a send or a gather.

    The values are the names that PyTorch uses for these actions, except for TIE, which does not
    exist in PyTorch.

    - FORWARD and BACKWARD compute one micro-batch in a stage.
    - SEND_F and RECV_F send and receive an output of a stage, SEND_B and RECV_B its gradient.
    - GATHER gathers the weights of a stage, and RELEASE frees them.
    - REDUCE reduces the gradients of a stage over the ranks with the same stage.
    - TIE sums the gradients of weights that stages on several ranks share.
    """

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


# By kind of computation: the receive of its input and the send of its result
MESSAGES = {
    StageActionKind.FORWARD: (StageActionKind.RECV_F, StageActionKind.SEND_F),
    StageActionKind.BACKWARD: (StageActionKind.RECV_B, StageActionKind.SEND_B),
}
COMPUTES = frozenset(MESSAGES)
RECEIVES = frozenset(receive for receive, _ in MESSAGES.values())
SENDS = frozenset(send for _, send in MESSAGES.values())
# By kind of message: the sending and the receiving stage, relative to the action's stage
_ENDS = {
    StageActionKind.SEND_F: (0, 1),
    StageActionKind.RECV_F: (-1, 0),
    StageActionKind.SEND_B: (0, -1),
    StageActionKind.RECV_B: (1, 0),
}


class StageAction(NamedTuple):
    """One action of a rank in a pipeline schedule.

    Attributes:
        stage: Number of the stage.
        kind: What is done, for example a forward or a send.
        micro: Number of the micro-batch; None if the action concerns all of them.
    """

    stage: int
    kind: StageActionKind
    micro: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{'' if self.micro is None else self.micro}"

    @property
    def is_message(self) -> bool:
        """Return whether the action is a send or a receive."""
        return self.kind in _ENDS

    @property
    def ends(self) -> tuple[int, int]:
        """Return the sending and the receiving stage of a message."""
        source, target = _ENDS[self.kind]
        return self.stage + source, self.stage + target


Program = tuple[StageAction, ...]
ActionsAt = dict[int, list[StageAction]]  # by position in a program


@dataclass(frozen=True)
class PipelineSchedule:
    """The order of actions of every pipeline rank in one step.

    Attributes:
        name: Name of the schedule, for example "1f1b".
        micro_batches: Number of micro-batches of the step.
        placement: The pipeline rank of each stage. The executor requires that consecutive stages
            are on different ranks.
        programs: The actions of each rank, in order.
        in_flight: For each rank, the maximum number of forwards without a backward, counted for
            each stage. It is also the number of messages to a neighbor that may be in progress.
        tied: Stages that share a weight, ascending; empty or at least two.
    """

    name: str
    micro_batches: int
    placement: Numbers
    programs: tuple[Program, ...]
    in_flight: Numbers
    tied: Numbers = ()

    @property
    def ranks(self) -> int:
        """Return the number of pipeline ranks."""
        return len(self.programs)

    @property
    def stages(self) -> int:
        """Return the number of stages of the model."""
        return len(self.placement)

    def stages_of(self, rank: int) -> Numbers:
        """Return the stages that a pipeline rank runs, ascending."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

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


SCHEDULES = ("1f1b", "interleaved", "breadth_first")


def make_schedule(
    name: str,
    ranks: int,
    virtual: int,
    micro_batches: int,
    *,
    group: int | None = None,
    tied: Sequence[int] = (),
) -> PipelineSchedule:
    """Return the training schedule with the given name.

    A rank runs a group of micro-batches in one stage before its next stage. It starts with some
    forwards, then alternates a forward and a backward.

    - "1f1b" has one stage per rank. Rank s starts with P - s - 1 forwards.
    - "interleaved" has several stages per rank and groups of P micro-batches. Rank s starts with
      2(P - s - 1) + (v - 1)P forwards.
    - "breadth_first" gathers the weights of a stage for each group instead of once per step. With
      the default group it runs all forwards first, and gathers twice a step. At most two stages of
      a rank are gathered at a time.

    One more micro-batch than a rank starts with is in flight. An incomplete last group is planned
    as a full one without the missing micro-batches.

    Args:
        name: One of `SCHEDULES`.
        ranks: Number of pipeline ranks P.
        virtual: Number of stages v per rank.
        micro_batches: Number of micro-batches m of a step.
        group: Number of micro-batches in a group for "breadth_first", from P to m; None means m.
        tied: Stages that share a weight, whose gradients the schedule sums before their reduction.

    Returns:
        The order of actions of every rank, including messages, gathers and reductions.

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
    if group is not None and group < 1:
        raise UsageError(
            f"breadth_first in groups of {group} micro-batches.",
            "A group has at least 1.",
            "give a whole number from 1 on, or leave group out.",
        )
    if name not in SCHEDULES:
        raise UsageError(
            f"pipeline schedule {shown(name)} is unknown.",
            "",
            f"take one of {', '.join(SCHEDULES)}.",
        )
    if name == "1f1b" and virtual > 1:
        raise UsageError(
            f"schedule 1f1b with {virtual} virtual stages on each rank.",
            "1f1b has one stage on each rank.",
            'take "interleaved" or "breadth_first", or virtual 1.',
        )
    size = ranks
    is_breadth_first = name == "breadth_first"
    if is_breadth_first:
        size = micro_batches if group is None else min(group, micro_batches)
    if size < min(ranks, micro_batches) and virtual > 1:
        raise UsageError(
            f"breadth_first in groups of {size} micro-batches over {ranks} pipeline ranks.",
            "With a group smaller than the number of ranks, ranks wait until its first "
            "micro-batch returns to them.",
            f"take a group of {ranks} at least.",
        )
    if virtual == 1 and not is_breadth_first:
        name = "1f1b"
    many = virtual * micro_batches
    compute = []
    in_flight = []
    for rank in range(ranks):
        behind = ranks - rank - 1
        ahead = behind if virtual == 1 else 2 * behind + (virtual - 1) * size
        if is_breadth_first and size == micro_batches:
            ahead = many
        compute.append(_computations(ranks, rank, virtual, micro_batches, size, ahead))
        in_flight.append(min(ahead + 1, many))
    return lower(
        name,
        micro_batches,
        tuple(range(ranks)) * virtual,
        compute,
        in_flight,
        gathers_runs_of=size if is_breadth_first else None,
        tied=tied,
    )


def forward_only(ranks: int, virtual: int, micro_batches: int) -> PipelineSchedule:
    """Return a schedule with only forwards, for evaluation.

    Args:
        ranks: Number of pipeline ranks P.
        virtual: Number of stages per rank.
        micro_batches: Number of micro-batches, run in groups of P.
    """
    many = virtual * micro_batches
    compute = []
    for rank in range(ranks):
        actions = _computations(ranks, rank, virtual, micro_batches, ranks, many)
        compute.append([each for each in actions if each.kind is StageActionKind.FORWARD])
    # Nothing is kept for a backward; the slots limit how far a rank runs ahead
    placement = tuple(range(ranks)) * virtual
    return lower("forward_only", micro_batches, placement, compute, [many] * ranks)


def _computations(
    ranks: int, rank: int, virtual: int, micro_batches: int, group: int, ahead: int
) -> list[StageAction]:
    """Return `ahead` forwards of a rank, then forwards and backwards in turn, then backwards.

    Full groups are planned. Omitting all actions of some micro-batches removes waits and adds none.
    """
    own = range(rank, ranks * virtual, ranks)
    forward: list[StageAction] = []
    backward: list[StageAction] = []
    for first in range(0, micro_batches, group):
        micros = range(first, first + group)
        forward += _for_each(own, StageActionKind.FORWARD, micros)
        backward += _for_each(reversed(own), StageActionKind.BACKWARD, micros)
    found = forward[:ahead]
    for later, earlier in zip(forward[ahead:], backward, strict=False):
        found += (later, earlier)
    found += backward[max(len(forward) - ahead, 0) :]
    return [action for action in found if action.micro in range(micro_batches)]


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
) -> PipelineSchedule:
    """Build a schedule from the order of forwards and backwards.

    Messages, gathers and releases of weights, sums of tied gradients and reductions are added.

    Args:
        name: Name of the schedule.
        micro_batches: Number of micro-batches of a step.
        placement: The pipeline rank of each stage.
        compute: For each rank, its forwards and backwards in order.
        in_flight: For each rank, the maximum number of forwards without a backward.
        gathers_runs_of: Gather a stage's weights again after this many micro-batches; None gathers
            them once per step.
        tied: Stages that share a weight.

    Returns:
        The complete schedule.
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
            if last.get(action.stage) == place and action.stage not in shared:
                actions.append(StageAction(action.stage, StageActionKind.REDUCE))
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
    receive, send = (action._replace(kind=kind) for kind in MESSAGES[action.kind])
    before = [receive] if crosses_ranks(receive, placement) else []
    behind = [send] if crosses_ranks(send, placement) else []
    return [*before, action, *behind]


def crosses_ranks(message: StageAction, placement: Sequence[int]) -> bool:
    """Return whether a message is sent between two ranks.

    Args:
        message: The send or receive.
        placement: The pipeline rank of each stage.
    """
    source, target = message.ends
    is_inside = min(source, target) >= 0 and max(source, target) < len(placement)
    return is_inside and placement[source] != placement[target]


def _gathers_and_releases(
    program: Sequence[StageAction], group: int | None
) -> tuple[ActionsAt, ActionsAt]:
    """Return the gathers before and the releases after each position of the program.

    Runs of a stage that overlap or are adjacent are merged. A gather is one computation ahead of
    its run, unless more than two stages of the rank would be gathered at the same time.
    """
    runs: dict[tuple[int, StageActionKind, int], list[int]] = {}
    for place, (stage, kind, micro) in enumerate(program):
        assert micro is not None
        key = (stage, StageActionKind.FORWARD, 0)
        if group is not None:
            key = (stage, kind, micro // group)
        runs.setdefault(key, [place, place])[1] = place
    spans: dict[int, list[list[int]]] = {}
    for (stage, _, _), (first, last) in sorted(runs.items(), key=lambda item: item[1]):
        own = spans.setdefault(stage, [])
        if own and first <= own[-1][1] + 1:
            own[-1][1] = max(own[-1][1], last)
        else:
            own.append([first, last])
    before: ActionsAt = {}
    behind: ActionsAt = {}
    whole = sorted((first, last, stage) for stage, own in spans.items() for first, last in own)
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
