"""`state_dict()` gathers real tensors and `load_state_dict()` shards them, through torch's own hooks, unit by unit.

state_dict: collective; every rank gets full tensors of its own (on the CPU where the model trains on a GPU), never
more than one unit gathered at a time. load_state_dict: local; every rank reads its slices out of the full values it
is given.  Called by build.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..base.device import without_torch_function
from .handle import put_to_rest, wake
from .unit import Unit, UnitState


def shard_state_dicts(units: Sequence[Unit]) -> None:
    """Hook every unit's module."""
    for unit in units:
        _Saver(unit).install()
        _Loader(unit).install()


def own_names(unit: Unit) -> list[str]:
    """Names, relative to the unit's module, under which its parameters stand in a state dict (tied ones under each)."""
    mine = {id(member.param) for member in unit.members()}
    return [name for name, param in unit.module.named_parameters(remove_duplicate=False) if id(param) in mine]


class _Saver:
    """Gathers a unit while torch reads its parameters, then replaces the views by copies."""

    def __init__(self, unit: Unit) -> None:
        self.unit, self.woken = unit, False

    def install(self) -> None:
        # torch marks the hooks it is given, and a bound method cannot be marked.
        self.unit.module.register_state_dict_pre_hook(partial(self.before))
        self.unit.module.register_state_dict_post_hook(partial(self.after))

    def before(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.woken = self.unit.state is UnitState.AT_REST
            self.unit.start_gather()
            self.unit.finish_gather()

    def after(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        copies: dict[int, Tensor] = {}
        for name in own_names(self.unit):
            value = state.get(prefix + name)
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                key = value.data_ptr() if value.numel() else id(value)
                state[prefix + name] = copies.setdefault(key, value.detach().to("cpu", copy=True)).view(value.shape)
        if self.woken:
            with torch.no_grad():
                self.unit.release()


class _Loader:
    """Puts a unit to rest while torch copies values in, so that each copy reaches slice and master (handle.py)."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def install(self) -> None:
        self.unit.module.register_load_state_dict_pre_hook(partial(self.before))
        self.unit.module.register_load_state_dict_post_hook(partial(self.after))

    def before(self, module: nn.Module, *details: Any) -> None:
        for group in self.unit.groups:
            if not group.is_sharded:
                for member in group.members:
                    with without_torch_function():
                        put_to_rest(member.param, group.placeholder)

    def after(self, module: nn.Module, incompatible: Any) -> None:
        for group in self.unit.groups:
            if not group.is_sharded:
                for member in group.members:
                    wake(member.param, member.kind, group.weight.view(member.slot))
