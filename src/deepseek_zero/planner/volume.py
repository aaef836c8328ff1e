"""What a step will send, in bytes, from plan and schedule alone; base/meter.py counts what is sent.

    G, gather      slice x (N-1), as weights are sent; from a second copy cut among I ranks,
                   slice x N/I x (I-1)
    S, reduce      slice x (N-1), as gradients are sent; at stage 0 once more, in the dtype
                   gradients are kept in; by host, of H hosts with L ranks, slice x H x (L-1)
                   inside, and slice x (H-1) between hosts, in fp32 or as codes; of momenta that
                   are exchanged as signs, slice x (N-1) twice, at any stage
    A, all-reduce  2 x slice/R x (R-1), where R ranks hold the same slices, in the dtype gradients
                   are kept in
    refresh        slice x (N-1), once, as weights are sent, where the optimizer works on slices of
                   a weight that is whole

for each such action in the passes of a step.  A slice is padded numel / N elements, so each term is
(N-1)/N of the padded size.  With persistence 0, window 0 and G micro-batches the sum is 2, 2, G+1
and 3G times that at stages 0 to 3. Nothing is allocated and nothing is sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..precision.codecs import Cast, Codec
from .extras import momenta_codec_of, second_copy_of
from .pieces import PipelinePlan
from .plan_settings import PlanSettings
from .schedule import ActionKind, Schedule
from .spec import R, S
from .units import GroupPlan, UnitPlan


@dataclass(frozen=True)
class StepVolume:
    """Bytes that one rank sends in one optimizer step, by what they are for.

    rows: control messages that carry no state: the table of norms, and whether gradients came late;
    first_step_rows:
    once, the order of units.  inner_gathers: the part of `gathers` that comes from a second copy of
    the weights.
    tensor: activations and their gradients of layers that ranks share; sequence: those of attention
    over sequences that ranks share; boundaries: those that stages pass on;
    first_step_headers: once, what these messages hold; ties: gradients of parameters that stages
    share.  inside_hosts: where sums are formed by host, the part of gathers, reduces and refresh
    that stays inside one.
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
        """Everything that moves weights and gradients between ranks that have the same piece of the
        model.
        """
        return self.gathers + self.reduces + self.refresh

    @property
    def total_bytes(self) -> int:
        """Everything that every step sends."""
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
    """The volume, between the ranks that have one piece of the model, of one step of
    `settings.accumulation` micro-batches, forward and backward once each.

    replicas: ranks along dp_replicate.  pipeline: says how often what is gathered, where the model
    is cut into stages; gradients are then reduced once.
    """
    ranks = next((group.ranks for unit in units for group in unit.groups), 1)
    world = ranks * replicas
    trained = [group for unit in units for group in unit.trained]
    sent: Counter[ActionKind] = Counter()
    gathers: Counter[int] = Counter()  # by unit
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
        rows=8 * (1 + ranks * len(trained)) * (world - 1),
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
    """Return the part of all gathers and sums of a step that stays inside a host, where sums are
    formed by host.
    """
    if not any(group.near > 1 for unit in units for group in unit.groups):
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


def _movements(
    units: Sequence[UnitPlan],
    schedule: Schedule,
    settings: PlanSettings,
    pipeline: PipelinePlan | None,
) -> Iterator[tuple[ActionKind, int, int]]:
    """What moves in a step: its kind, the number of its unit, and how often."""
    if pipeline is None:
        for walk, times in schedule.passes(settings.accumulation):
            yield from ((action.kind, action.unit, times) for action in walk.actions)
        return
    for number, unit in enumerate(units):
        yield ActionKind.GATHER, number, pipeline.gathers_of(unit.name)
        yield from ((kind, number, 1) for kind in (ActionKind.REDUCE, ActionKind.ALL_REDUCE))


def _bytes_of(kind: ActionKind, unit: UnitPlan) -> int:
    """Return the bytes a rank sends for one action."""
    match kind:
        case ActionKind.REDUCE:
            return sum(map(_reduce_bytes, unit.trained))
        case ActionKind.ALL_REDUCE:
            return sum(map(_all_reduce_bytes, unit.trained))
    return 0


def _gather_bytes(group: GroupPlan, times: int) -> tuple[int, int]:
    """Return the bytes a rank sends when a weight is gathered so often in a step: to every other
    rank, and to those that share the second copy.

    The first gather behind an update goes over all ranks and makes the copy; what nothing updates
    has it from the first step on.
    """
    outer = _outer_gathers(group, times)
    inner_slice = group.padded_numel // group.secondary_ranks * (group.secondary_ranks - 1)
    inner = (times - outer) * inner_slice * group.plan.weight.dtype.itemsize
    return outer * _to_others(group, group.weight_wire), inner


def _outer_gathers(group: GroupPlan, times: int) -> int:
    """Return how many of so many gathers go over all ranks that share slices."""
    if second_copy_of(group.plan) is None:
        return times
    reductions = 1 if group.plan.grad is not None else 0
    return min(times, reductions)


def _reduce_bytes(group: GroupPlan, *, inside: bool = False) -> int:
    """Return the bytes of one sum over the shards; at stage 0 every rank wants all of it.

    inside: those alone that stay in a host, where sums are formed by host.
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
    """Return the bytes of one sum over replicas: a slice is reduced in parts, and the parts are
    gathered.
    """
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
    """Return how many slices' worth a rank sends inside its host in a gather or sum by host: each
    host's to each.
    """
    return group.ranks // group.near * (group.near - 1)


def _slice_bytes(group: GroupPlan, wire: Codec) -> int:
    return wire.nbytes(group.padded_numel // group.ranks)
