"""Make the schedule of a step from the sizes and the order of units.

`plan_schedule` adds gathers before each use of a unit, and releases and reductions after it.

The order of units is recorded in the first step and is only a hint: a unit that is used out of
order costs time, never correctness. Every rank computes the same schedule and runs all of it, so a
unit that one rank skips is still gathered by all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

from .added_actions import Additions
from .enclosed_units import backward_order, enclosing, ends_of_use
from .plan_settings import PlanSettings
from .schedule import Action, ActionKind, Pass, Schedule
from .schedule_proof import verify
from .spec import S
from .units import UnitPlan, trained_groups


def schedule_units(
    units: Sequence[UnitPlan],
    settings: PlanSettings,
    order: Sequence[int] | None = None,
    *,
    updates_in_forward: Collection[int] = (),
    ahead: Collection[int] = (),
) -> Schedule:
    """Return the order of gathers, computations, releases and reductions of a step.

    Args:
        units: The planned units of the model, the root first.
        settings: The ZeRO stage, dtypes, sizes and memories of the run.
        order: The order in which units compute; None for the order of their declaration.
        updates_in_forward: The numbers of units whose optimizer update may run in the next forward.
        ahead: The numbers of units that may be updated during backward, before the step.
    """
    grads = [group.plan.grad for group in trained_groups(units)]
    return plan_schedule(
        [unit.gathered_numel for unit in units],
        order or range(len(units)),
        settings,
        enclosing([unit.name for unit in units]),
        Additions.from_units(units, settings, updates_in_forward, ahead),
        reduces_each_backward=any(grad is not None and grad.placement is S for grad in grads),
    )


def plan_schedule(
    sizes: Sequence[int],
    order: Sequence[int],
    settings: PlanSettings,
    around: Mapping[int, int] | None = None,
    additions: Additions = Additions(),  # noqa: B008  # frozen
    *,
    reduces_each_backward: bool = True,
) -> Schedule:
    """Return the order of gathers, computations, releases and reductions for units of given sizes.

    Args:
        sizes: For each unit, the elements that a gather adds to this rank; 0 if nothing is sharded.
        order: The units in the order of forward, the root first, which is in use throughout.
        settings: The ZeRO stage, dtypes, sizes and memories of the run.
        around: For each unit inside another, the number of the innermost unit around it, which is
            in use until the last unit inside it is done.
        additions: The actions that features add.
        reduces_each_backward: Whether every backward reduces gradients, because they are sharded.
    """
    around = around or {}
    forward = list(order)
    backward = backward_order(order, around)
    at_turn = set[int]()
    if settings.streams_weights:
        at_turn = {order[0], *ends_of_use(forward, around)[-1]}
    kept = _kept(sizes, backward, settings, at_turn)
    lower = partial(_lower, sizes, around, settings)
    lower_backward = partial(lower, ActionKind.BACKWARD, backward, resident=kept)
    plain = Schedule(
        forward=lower(ActionKind.FORWARD, forward, stays=kept),
        inference=lower(ActionKind.FORWARD, forward),
        accumulate=lower_backward(reduces=reduces_each_backward),
        backward=lower_backward(reduces=True),
        kept=kept,
    )
    schedule = additions.add_to(plain, settings)
    verify(
        schedule,
        around,
        reduces_each_backward=reduces_each_backward,
        all_reduced=additions.all_reduced,
    )
    return schedule


def _lower(
    sizes: Sequence[int],
    around: Mapping[int, int],
    settings: PlanSettings,
    kind: ActionKind,
    order: Sequence[int],
    *,
    resident: frozenset[int] = frozenset(),
    stays: frozenset[int] = frozenset(),
    reduces: bool = False,
) -> Pass:
    """Return the forward or backward (`kind`) in which units compute in a given order.

    Units in `resident` are gathered when it begins, and units in `stays` when it ends.
    """
    ends = ends_of_use(order, around)
    gathers = _gathers(sizes, order, ends, settings, resident, stays)
    ends[-1].append(order[0])
    actions = list[Action]()
    for unit, gathered, ended in zip(order, gathers, ends, strict=True):
        actions += [Action(ActionKind.GATHER, each) for each in gathered]
        actions.append(Action(kind, unit))
        for each in ended:
            if reduces:
                actions.append(Action(ActionKind.REDUCE, each))
            if each not in stays:
                actions.append(Action(ActionKind.RELEASE, each))
    return Pass(tuple(actions))


def _kept(
    sizes: Sequence[int], backward: Sequence[int], settings: PlanSettings, at_turn: set[int]
) -> frozenset[int]:
    """Return the units to keep gathered between forward and backward.

    Units are kept, the last used first, while they fit into the window (`window_numel`: the most
    gathered elements at a time) and are used again within `keep_numel` elements. Units in
    `at_turn` are in use when forward ends and when backward begins. They are kept in any case,
    because a release would repeat a load without lowering the peak.
    """
    kept = set[int]()
    total = 0
    for unit in backward:
        distance = 2 * total  # elements used between this unit's forward and its backward
        total += sizes[unit]
        fits = total <= settings.window_numel or {*kept, unit} <= at_turn
        if not fits or distance > settings.keep_numel:
            break
        kept.add(unit)
    return frozenset(kept)


def _gathers(
    sizes: Sequence[int],
    order: Sequence[int],
    ends: Sequence[Sequence[int]],
    settings: PlanSettings,
    resident: frozenset[int],
    stays: frozenset[int],
) -> list[list[int]]:
    """Return, for each position of a pass, the units to start gathering there.

    A gather starts up to `ahead_numel` elements early (at least one unit, unless it is 0), but not
    before it fits into the window. `ends` lists the units last used at each position.
    """
    window = settings.window_numel
    ahead = settings.ahead_numel if settings.overlap else 0
    issued = set(resident)
    live = sum(sizes[unit] for unit in resident)
    issue: list[list[int]] = []
    for k, unit in enumerate(order):
        now = []
        early = 0
        for later in order[k:]:
            if later in issued:
                continue
            if later != unit:
                # The first of them may be larger than `ahead`
                is_far = early + sizes[later] > ahead and (early or not ahead)
                if is_far or live + sizes[later] > window:
                    break
                early += sizes[later]
            now.append(later)
            issued.add(later)
            live += sizes[later]
        issue.append(now)
        live -= sum(sizes[each] for each in ends[k] if each not in stays)
    return issue
