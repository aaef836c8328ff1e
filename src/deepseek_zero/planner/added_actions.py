"""Actions that features add to a schedule: updates, sums over replicas, micro-batches."""

from __future__ import annotations

from collections.abc import Collection

from .schedule import Action, ActionKind, Pass


def with_updates(walk: Pass, updated: Collection[int]) -> Pass:
    """Return a forward in which some units are updated before they are gathered.

    Args:
        walk: The forward.
        updated: The numbers of the units whose update may run in it.
    """
    actions = list[Action]()
    for action in walk.actions:
        if action.kind is ActionKind.GATHER and action.unit in updated:
            actions.append(Action(ActionKind.UPDATE, action.unit))
        actions.append(action)
    return Pass(tuple(actions))


def with_totals(walk: Pass, all_reduced: Collection[int], ahead: Collection[int]) -> Pass:
    """Return a backward that ends a step, with sums over replicas and updates before the step.

    Args:
        walk: The backward, which reduces the gradients of all units, those of the root last.
        all_reduced: Units whose reduced gradients are also summed over replicas.
        ahead: Units that are updated after their last reduction, before the step.
    """
    actions = list[Action]()

    def end_sum(unit: int) -> None:
        if unit in ahead:
            actions.append(Action(ActionKind.UPDATE, unit))

    for action in walk.actions:
        actions.append(action)
        if action.kind is not ActionKind.REDUCE:
            continue
        if action.unit not in all_reduced:
            end_sum(action.unit)
        if action.unit == walk.reduces[-1]:
            for unit in walk.reduces:
                if unit in all_reduced:
                    actions.append(Action(ActionKind.ALL_REDUCE, unit))
                    end_sum(unit)
    return Pass(tuple(actions))


def with_micro_batches(walk: Pass, count: int, cut: Collection[int]) -> Pass:
    """Return a pass in which some units process micro-batches one after the other.

    Backward processes the last micro-batch first, as autograd does.

    Args:
        walk: The forward or backward of the whole batch.
        count: The number of micro-batches.
        cut: The units that process them one by one; the others process the whole batch.
    """
    actions = list[Action]()
    for action in walk.actions:
        if not action.kind.computes or action.unit not in cut:
            actions.append(action)
            continue
        numbers = list(range(count))
        if action.kind is ActionKind.BACKWARD:
            numbers.reverse()
        actions += [Action(action.kind, action.unit, number) for number in numbers]
    return Pass(tuple(actions))
