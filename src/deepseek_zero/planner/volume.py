"""The bytes that a step will send, computed from plan and schedule only.

base/meter.py counts the bytes that are really sent.

    G, gather      slice x (N-1), in the codec of weights; from a second copy on I ranks,
                   slice x N/I x (I-1)
    S, reduce      slice x (N-1), in the codec of gradients; at stage 0 once more, in the dtype of
                   gradients. Host by host, for H hosts with L ranks: slice x H x (L-1) inside, and
                   slice x (H-1) between hosts, in fp32 or as codes. If momenta are exchanged as
                   signs: slice x (N-1) twice, at any stage
    A, all-reduce  2 x slice/R x (R-1) if R ranks hold the same slices, in the dtype of gradients
    refresh        slice x (N-1) once, in the codec of weights, if the optimizer works on slices of
                   a weight that is whole

These are the terms for each action of a step. A slice has padded numel / N elements, so each term
is (N-1)/N of the padded size. With persistence 0, window 0 and G micro-batches, the sum is 2, 2,
G+1 and 3G times that at stages 0 to 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..precision.codecs import Cast, Codec
from .extras import momenta_codec_of, second_copy_of
from .pieces import PipelinePlan
from .plan_settings import PlanSettings
from .schedule import ActionKind, Pass, Schedule
from .spec import R, S
from .units import GroupPlan, UnitPlan, all_groups, trained_groups

STEP_FLAGS = 5  # numbers that a step's message has besides the sums of squares (optim/verdict.py)


@dataclass(frozen=True)
class StepVolume:
    """The bytes that one rank sends in one optimizer step, by purpose.

    Attributes:
        rows: Small values that every step exchanges, such as gradient norms.
        first_step_rows: The order of units, sent once.
        inner_gathers: The part of `gathers` that reads a second copy of the weights.
        tensor: Activations and their gradients of tensor-parallel layers.
        sequence: Attention and loss of sequence parallelism.
        boundaries: Activations and gradients between pipeline stages.
        first_step_headers: The shapes and dtypes of messages between pipeline stages, sent once.
        ties: Gradients of parameters that several pipeline stages use.
        inside_hosts: If gradients are summed within each host first, the part of gathers,
            reductions and refreshes that stays inside a host.
        gathers: The all-gathers of weights.
        reduces: The reductions of gradients.
        refresh: The all-gathers of replicated weights after the update.
    """

    gathers: int
    reduces: int
    refresh: int
    rows: int
    first_step_rows: int
    inner_gathers: int = 0
    tensor: int = 0
    sequence: int = 0
    boundaries: int = 0
    ties: int = 0
    first_step_headers: int = 0
    inside_hosts: int = 0

    @property
    def state_bytes(self) -> int:
        """The bytes of weights and gradients sent to ranks with the same part of the model."""
        return self.gathers + self.reduces + self.refresh

    @property
    def total_bytes(self) -> int:
        """The bytes that this rank sends in every step, without those sent once."""
        return (
            self.state_bytes + self.tensor + self.sequence + self.boundaries + self.ties + self.rows
        )


def step_volume(
    units: Sequence[UnitPlan],
    schedule: Schedule,
    settings: PlanSettings,
    replicas: int = 1,
    pipeline: PipelinePlan | None = None,
) -> StepVolume:
    """Return the bytes that a rank sends in a step to ranks with the same part of the model.

    A step has `settings.accumulation` micro-batches, each with one forward and one backward.

    Args:
        units: The planned units of the model, the root first.
        schedule: The schedule of a step, whose gathers and reductions are counted.
        settings: The ZeRO stage, dtypes, sizes and memories of the run.
        replicas: The number of ranks along "dp_replicate".
        pipeline: How often weights are gathered, if the model is cut into stages; gradients are
            then reduced once.
    """
    ranks = next((group.ranks for group in all_groups(units)), 1)
    world = ranks * replicas
    trained = trained_groups(units)
    sent: Counter[ActionKind] = Counter()
    gathers: Counter[int] = Counter()  # number of gathers, by unit
    for kind, number, times in _movements(units, schedule, settings, pipeline):
        sent[kind] += times * _bytes_of(kind, units[number])
        gathers[number] += times if kind is ActionKind.GATHER else 0
    found = [
        _gather_bytes(group, gathers[number])
        for number, unit in enumerate(units)
        for group in unit.sharded
    ]
    inside = sum(inner for _, inner in found)
    return StepVolume(
        gathers=sum(outer for outer, _ in found) + inside,
        reduces=sent[ActionKind.REDUCE] + sent[ActionKind.ALL_REDUCE],
        refresh=sum(_refresh_bytes(group) for group in trained),
        rows=8 * (STEP_FLAGS + ranks * len(trained)) * (world - 1),
        first_step_rows=8 * len(units) * (world - 1),
        inner_gathers=inside,
        inside_hosts=_inside_hosts(units, schedule, settings, pipeline),
    )


def _inside_hosts(
    units: Sequence[UnitPlan],
    schedule: Schedule,
    settings: PlanSettings,
    pipeline: PipelinePlan | None,
) -> int:
    """Return the bytes of gathers and sums that stay inside a host.

    They are counted if gradients are summed within each host first.
    """
    if not any(group.near > 1 for group in all_groups(units)):
        return 0
    gathers = Counter[int]()
    total = 0
    for kind, number, times in _movements(units, schedule, settings, pipeline):
        gathers[number] += times if kind is ActionKind.GATHER else 0
        if kind is ActionKind.REDUCE:
            total += times * sum(
                _reduce_bytes(group, inside=True) for group in units[number].trained
            )
    for number, unit in enumerate(units):
        for group in unit.sharded:
            times = _outer_gathers(group, gathers[number])
            total += times * _to_others(group, group.weight_wire, inside=True)
        total += sum(_refresh_bytes(group, inside=True) for group in unit.trained)
    return total


def passes_of(schedule: Schedule, accumulation: int) -> list[tuple[Pass, int]]:
    """Return the forwards and backwards of a step, each with the number of times that it runs.

    Args:
        schedule: The schedule of the step.
        accumulation: The number of micro-batches of the step.
    """
    return [
        (schedule.forward, accumulation),
        (schedule.accumulate, accumulation - 1),
        (schedule.backward, 1),
    ]


def _movements(
    units: Sequence[UnitPlan],
    schedule: Schedule,
    settings: PlanSettings,
    pipeline: PipelinePlan | None,
) -> Iterator[tuple[ActionKind, int, int]]:
    """Yield the movements of a step: kind, number of the unit, and repetitions."""
    if pipeline is None:
        for walk, times in passes_of(schedule, settings.accumulation):
            yield from ((action.kind, action.unit, times) for action in walk.actions)
        return
    for number, unit in enumerate(units):
        yield ActionKind.GATHER, number, pipeline.gathers_of(unit.name)
        yield from ((kind, number, 1) for kind in (ActionKind.REDUCE, ActionKind.ALL_REDUCE))


def _bytes_of(kind: ActionKind, unit: UnitPlan) -> int:
    """Return the bytes that a rank sends for one action."""
    match kind:
        case ActionKind.REDUCE:
            return sum(map(_reduce_bytes, unit.trained))
        case ActionKind.ALL_REDUCE:
            return sum(map(_all_reduce_bytes, unit.trained))
    return 0


def _gather_bytes(group: GroupPlan, times: int) -> tuple[int, int]:
    """Return the bytes that a rank sends to gather a weight `times` times in a step.

    The first gather after an update goes to all ranks and makes the second copy; later ones go to
    the ranks that share it. A frozen weight has the copy from the first step on.
    """
    outer = _outer_gathers(group, times)
    inner_slice = group.padded_numel // group.secondary_ranks * (group.secondary_ranks - 1)
    inner = (times - outer) * inner_slice * group.plan.weight.dtype.itemsize
    return outer * _to_others(group, group.weight_wire), inner


def _outer_gathers(group: GroupPlan, times: int) -> int:
    """Return how many of `times` gathers go to all ranks of the shard group."""
    if second_copy_of(group.plan) is None:
        return times
    reductions = 1 if group.plan.grad is not None else 0
    return min(times, reductions)


def _reduce_bytes(group: GroupPlan, *, inside: bool = False) -> int:
    """Return the bytes of one reduction; at stage 0 every rank receives the whole sum.

    Args:
        group: The plan of the parameter group.
        inside: Whether to count only the bytes inside a host, if gradients are summed within each
            host first.
    """
    plan = group.plan
    near = _near_slices(group)
    assert plan.grad is not None and plan.master is not None
    if momenta_codec_of(plan) is not None:
        return 2 * (group.ranks - 1) * group.exchange_length
    is_whole = plan.grad.placement is not S and plan.master.placement is R
    whole = _to_others(group, Cast(plan.grad.dtype), inside=inside) if is_whole else 0
    if not near:
        return _to_others(group, group.plan.grad_wire, inside=inside) + whole
    near_wire, far_wire = group.hop_wires
    between = 0 if inside else (group.ranks // group.near - 1) * _slice_bytes(group, far_wire)
    return near * _slice_bytes(group, near_wire) + between + whole


def _all_reduce_bytes(group: GroupPlan) -> int:
    """Return the bytes of one sum over replicas: a reduce-scatter and an all-gather."""
    assert group.plan.grad is not None
    part = -(-(group.padded_numel // group.ranks) // group.replicas)
    return 2 * (group.replicas - 1) * part * group.plan.grad.dtype.itemsize


def _refresh_bytes(group: GroupPlan, *, inside: bool = False) -> int:
    plan = group.plan
    is_cut = plan.master is not None and plan.master.placement is S and plan.weight.placement is R
    return _to_others(group, group.weight_wire, inside=inside) if is_cut else 0


def _to_others(group: GroupPlan, wire: Codec, *, inside: bool = False) -> int:
    return (_near_slices(group) if inside else group.ranks - 1) * _slice_bytes(group, wire)


def _near_slices(group: GroupPlan) -> int:
    """Return how many slices a rank sends inside its host in a host-by-host movement."""
    return group.ranks // group.near * (group.near - 1)


def _slice_bytes(group: GroupPlan, wire: Codec) -> int:
    return wire.nbytes(group.padded_numel // group.ranks)
