"""Parameters that the forward of another unit reads, or that a program reads in a forward."""

from __future__ import annotations

from collections.abc import Sequence

from ..base.device import backward_id
from .backward import Backward
from .param_group import ParamGroup
from .step_state import Phase
from .unit import Unit


class ExternalReads:
    """Gathers units whose sharded parameters are read outside of the forward of the unit.

    Args:
        backward: The backward of the model.
    """

    def __init__(self, backward: Backward) -> None:
        self.backward = backward
        self.step = backward.step

    def fetch(self, group: ParamGroup) -> bool:
        """Gather the unit of a group when a program reads one of its sharded parameters.

        Args:
            group: The group of the sharded parameter.

        Returns:
            Whether the unit was gathered. Outside forward and backward it is not.

        Note:
            Collective if the unit is gathered: every rank of the shard group must call it in the
            same order.
        """
        step = self.step
        if step.phase is Phase.IDLE and not step.active and backward_id() == -1:
            return False
        unit = unit_of(group, self.backward.units)
        if step.active:
            remember_external(step.active[-1].unit, unit)
        self.backward.gathers.unshard(unit)
        return True

    def fetch_saved(self, group: ParamGroup) -> None:
        """Gather the unit of a group when backward needs a weight of it.

        Args:
            group: The group of the weight that autograd has saved.

        Note:
            Collective: every rank of the shard group must call it in the same order.
        """
        if self.step.phase is not Phase.BACKWARD and backward_id() != -1:
            self.backward.begin()
        self.fetch(group)


def unit_of(group: ParamGroup, units: Sequence[Unit]) -> Unit:
    """Return the unit to which a group belongs.

    Args:
        group: The parameter group.
        units: The units of the group's model.
    """
    return next(unit for unit in units if group in unit.groups)


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
