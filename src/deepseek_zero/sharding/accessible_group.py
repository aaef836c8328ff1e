"""How a program accesses the sharded parameters of a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .group import Group
from .param_ranges import write_param
from .weight_gather import WeightGather


class AccessibleGroup(Group):
    """Base class of `ParamGroup`: an `Owner` (sharded_parameter.py) of its parameters."""

    weight_gather: WeightGather
    runtime: Callable[[], Any]

    def fetch_for(self, param: nn.Parameter) -> bool:
        self.refuse_offloaded_weight()
        runtime = self.runtime()
        found = runtime is not None and bool(runtime.externals.fetch(self))
        if found and not self.is_sharded:
            # A load_state_dict that an exception ended has left them without values
            for member in self.members:
                member.unshard(self.weight.view(member.slot))
        return found

    def name_of(self, param: nn.Parameter) -> str:
        return self.members[self.index[id(param)]].name

    def is_in_engine(self) -> bool:
        runtime = self.runtime()
        return runtime is not None and not runtime.is_destroyed

    def write_param(self, param: nn.Parameter, value: Tensor) -> None:
        slot = self.members[self.index[id(param)]].slot
        self.weight_gather.before_write(slot.name)
        self.weight_gather.changed()
        write_param(self, slot, value)
