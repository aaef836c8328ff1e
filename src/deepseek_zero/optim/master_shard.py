"""The parts of main weights that the inner optimizer sees as parameters, and tiles of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..precision.policy import scratch_numel
from ..sharding.grad_sum import GradSum
from ..sharding.main_weight import MasterWeight
from ..sharding.param_group import ParamGroup
from .scratch import Scratch

GradSource = Callable[[ParamGroup], GradSum]  # the gradient that a group is updated from


def collected(group: ParamGroup) -> GradSum:
    """Return the reduced gradient of a group in the current step."""
    return group.gradient.sum


@dataclass(eq=False)
class MasterShard:
    """A range of a group's main weight that the inner optimizer treats as one parameter.

    If the main weight is copied for updates (`MasterWeight.is_copied_for_update`), `param` has
    values only during an update, and NaN between updates.

    Attributes:
        group: The parameter group to whose main weight the range belongs.
        start: First element in this rank's main weight and reduced gradient.
        stop: End of the range.
        param: The parameter that the inner optimizer updates.
        names: Names of the parameters that the range covers.
        at: Offset of the shard, in elements, in the scratch buffers of its tile.
        has_kernel: Whether a fused kernel can update the shard with some hyper-parameters.
    """

    group: ParamGroup
    start: int
    stop: int
    param: nn.Parameter
    names: tuple[str, ...]
    at: int = 0
    has_kernel: bool = False

    @property
    def numel(self) -> int:
        """The number of elements of the shard."""
        return self.stop - self.start

    @property
    def master(self) -> MasterWeight:
        """The main weight of which the shard is a part."""
        assert self.group.master is not None
        return self.group.master

    def grad(self, source: GradSource) -> Tensor | None:
        """Return the gradient of the shard in the shape of `param`, or None if there is none."""
        if self.is_absent(source):
            return None
        part = source(self.group).read(self.start, self.stop)
        return None if part is None else part.view(self.param.shape)

    def is_absent(self, source: GradSource) -> bool:
        """Return whether no parameter of the shard has a gradient, so the shard is not updated."""
        absent = source(self.group).absent
        if not absent:
            return False
        return {self.group.members[number].name for number in absent}.issuperset(self.names)

    def part_of(self, scratch: Scratch, what: str) -> Tensor:
        """Return this shard's part of a scratch buffer, in the dtype of the main weight."""
        buffer = scratch.take(what, self.master.dtype, self.master.update_device)
        return buffer[self.at : self.at + self.numel]

    def load_values(self, scratch: Scratch) -> None:
        """Load the main weight into `param`, through `scratch` unless it is updated in place."""
        self.group.guard.before_write()
        values = self.master.in_place_view(self.start, self.stop)
        home = self.master.update_device
        if values is None:
            into = self.part_of(scratch, "masters")
            helper = None
            if self.master.is_split:
                helper = scratch.take(
                    "join", torch.int32, home, scratch_numel(home, scratch.numel[home])
                )
            values = self.master.read(self.start, self.stop, into, helper)
        self.param.data = values.view(self.param.shape)

    def store_values(self, scratch: Scratch, random: Tensor | None, *, keep: bool) -> None:
        """Store the updated values of `param` if `keep`, and free them in `param`.

        Args:
            scratch: Has the placeholder that `param` holds between updates.
            random: Random bits for stochastic rounding.
            keep: Whether to write the values; False after an error.
        """
        if keep and self.master.in_place_view(self.start, self.stop) is None:
            self.master.write_consuming(self.start, self.stop, self.param.data.reshape(-1), random)
        if keep:
            self.master.copy_to_weight(self.start, self.stop)
        if self.master.is_copied_for_update:
            self.param.data = scratch.placeholder(
                self.param.shape, self.param.dtype, self.master.update_device
            )


Tile = list[tuple[int, MasterShard]]  # (number of the user's parameter group, shard)


@dataclass(frozen=True)
class Tiles:
    """The shards of an optimizer in lists that are updated together, called tiles.

    A tile is the unit of an optimizer call, of fetching and of storing (DeepSpeed's sub-group).

    Attributes:
        now: The tiles that are updated in the step, before it returns.
        later: The tiles that may be updated early or after the step, by unit number.
    """

    now: list[Tile]
    later: dict[int, list[Tile]]


def tiles_by_group(tiles: Iterable[Tile]) -> Counter[ParamGroup]:
    """Count the tiles that contain a part of each parameter group."""
    return Counter(group for tile in tiles for group in {shard.group for _, shard in tile})
