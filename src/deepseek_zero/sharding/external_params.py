"""Parameters that the forward of another unit reads, or that a program reads in a forward."""

from __future__ import annotations

from ..base.device import backward_id
from .gather_lane import GatherLane
from .step_state import Phase, StepState
from .unit import Unit


def fetch_external(unit: Unit, step: StepState, gathers: GatherLane) -> bool:
    """Gather a unit when a program reads one of its sharded parameters.

    Args:
        unit: The unit of the sharded parameter.
        step: The phase of the model.
        gathers: Issues the all-gathers of the model.

    Returns:
        Whether the unit was gathered. Outside forward and backward it is not.

    Note:
        Collective if the unit is gathered: every rank of the shard group must call it in the same
        order.
    """
    if step.phase is Phase.IDLE and not step.active and backward_id() == -1:
        return False
    if step.active:
        remember_external(step.active[-1].unit, unit)
    gathers.unshard(unit)
    return True


def remember_external(reader: Unit, owner: Unit) -> None:
    """Record that the forward of `reader` reads a parameter of `owner`.

    The backward of `reader` reads it too if autograd saved the parameter itself.

    Args:
        reader: The unit whose forward reads the parameter.
        owner: The unit that has the parameter.
    """
    if owner is not reader and owner not in reader.externals:
        reader.externals.append(owner)


def forget_external(reader: Unit, owner: Unit) -> None:
    """Remove a record of `remember_external`; a later read is recorded again.

    Args:
        reader: The unit whose forward reads the parameter.
        owner: The unit that has the parameter.
    """
    if owner in reader.externals:
        reader.externals.remove(owner)
