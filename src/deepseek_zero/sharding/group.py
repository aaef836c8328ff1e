"""The protocol through which the parts of a parameter group see the group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from ..base.device import without_torch_function
from ..planner.layout import FlatLayout, Slot
from ..planner.spec import ShardPlan
from ..planner.units import GroupPlan
from .buffer import FlatBuffer, StateGuard
from .comm_context import CommContext
from .main_weight import MasterWeight
from .sharded_parameter import reshard, unshard


@dataclass(eq=False)
class ParamInfo:
    """One parameter of a group, with its position and its sharded form.

    Attributes:
        param: The user's `nn.Parameter` object.
        slot: The position of the parameter in the flat layout.
        param_class: The class of the parameter before wrapping and while unsharded.
        placeholder: The data of the parameter while it is sharded.
        is_frozen: Whether `requires_grad` was off when the ranks last compared it (regroup.py).
    """

    param: nn.Parameter
    slot: Slot
    param_class: type[nn.Parameter]
    placeholder: Tensor = field(init=False)
    is_frozen: bool = field(init=False)

    def __post_init__(self) -> None:
        with without_torch_function():
            self.is_frozen = not self.param.requires_grad

    @property
    def name(self) -> str:
        """Return the full name of the parameter."""
        return self.slot.name

    def unshard(self, data: Tensor) -> None:
        """Make the parameter a view of `data`, in the class that it had before wrapping."""
        unshard(self.param, self.param_class, data)

    def reshard(self) -> None:
        """Make the parameter a `ShardedParameter` whose data is the placeholder."""
        reshard(self.param, self.placeholder)


class Group(Protocol):
    """Interface of a parameter group (`ParamGroup`) for the objects that it consists of.

    Attributes:
        members: The parameters, in the order of the layout.
        planned: The current plan of the group: its layout, and the placement, dtype and memory of
            its states.
        comm_ctx: The communicator of the shard group, with buffer pool and settings.
        weight: This rank's part of the weight.
        master: The main weight; None if no parameter is trained.
        guard: The guard of weight, main weight and moments.
        not_updated: The indices of parameters that no optimizer updates.
    """

    members: list[ParamInfo]
    planned: GroupPlan
    comm_ctx: CommContext
    weight: FlatBuffer
    master: MasterWeight | None
    guard: StateGuard
    not_updated: frozenset[int]

    @property
    def plan(self) -> ShardPlan:
        """The placement, dtype and memory of weight, gradient, main weight and moments."""

    @property
    def layout(self) -> FlatLayout:
        """The positions of the parameters in the flat buffer."""

    @property
    def index(self) -> dict[int, int]:
        """Return the index of each parameter, keyed by the `id()` of the parameter."""

    @property
    def own_weight(self) -> Tensor:
        """Return this rank's slice of the weight, flat."""


def updated_ranges(group: Group) -> list[tuple[int, int]]:
    """Return the ranges [start, stop) of the layout that the optimizer updates.

    Adjacent parameters are merged into one range.

    Args:
        group: The parameter group.
    """
    found = list[tuple[int, int]]()
    for number, member in enumerate(group.members):
        if number in group.not_updated:
            continue
        start = member.slot.start
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, member.slot.stop))
    return found
