"""Actions that features add to a schedule: updates, sums over replicas, micro-batches."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .enclosed_units import cut_units
from .plan_settings import PlanSettings
from .schedule import Action, ActionKind, Pass, Schedule
from .units import UnitPlan


@dataclass(frozen=True)
class Additions:
    """The actions that features add to the schedule of a step; none by default.

    Attributes:
        updates_in_forward: The numbers of units whose optimizer update may run in the next forward.
        ahead: The numbers of units that may be updated during backward, before the step.
        all_reduced: Units whose reduced gradients are also summed over replicas.
        cut: Units that take the micro-batches of the settings one after the other.
    """

    updates_in_forward: Collection[int] = ()
    ahead: Collection[int] = ()
    all_reduced: Collection[int] = ()
    cut: Collection[int] = ()

    @classmethod
    def from_units(
        cls,
        units: Sequence[UnitPlan],
        settings: PlanSettings,
        updates_in_forward: Collection[int],
        ahead: Collection[int],
    ) -> Additions:
        """Return the additions to the schedule of planned units.

        Args:
            units: The planned units of the model, the root first.
            settings: The ZeRO stage, dtypes, sizes and memories of the run.
            updates_in_forward: The numbers of units whose update may run in the next forward.
            ahead: The numbers of units that may be updated during backward, before the step.
        """
        all_reduced = [
            number
            for number, unit in enumerate(units)
            if any(group.replicas > 1 for group in unit.groups)
        ]
        cut = cut_units(units) if settings.layerwise_micro_batches > 1 else ()
        return cls(updates_in_forward, ahead, all_reduced, cut)

    def add_to(self, plain: Schedule, settings: PlanSettings) -> Schedule:
        """Return a schedule with these actions.

        Args:
            plain: The schedule without them.
            settings: The settings with the number of micro-batches.
        """
        count = settings.layerwise_micro_batches
        forward = with_updates(plain.forward, self.updates_in_forward)
        backward = with_totals(plain.backward, self.all_reduced, self.ahead)
        return Schedule(
            forward=with_micro_batches(forward, count, self.cut),
            inference=with_updates(plain.inference, self.updates_in_forward),
            accumulate=with_micro_batches(plain.accumulate, count, self.cut),
            backward=with_micro_batches(backward, count, self.cut),
            kept=plain.kept,
        )


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
