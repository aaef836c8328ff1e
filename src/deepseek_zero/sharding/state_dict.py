"""`state_dict()` gathers real tensors and `load_state_dict()` shards them, through torch's own hooks, unit by unit.

state_dict: collective; every rank gets full tensors of its own (on the CPU where the model trains on a GPU), never
more than one unit gathered at a time. load_state_dict: local; every rank reads its slices out of the full values it
is given.  Called by build.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..base.device import without_torch_function
from ..base.errors import UsageError
from .handle import Hook, put_to_rest, wake
from .unit import Unit, UnitState


def shard_state_dicts(units: Sequence[Unit]) -> None:
    """Hook every module that holds parameters, so that the state dict of a part of a unit works too."""
    for unit in units:
        loader = _Loader(unit)
        mine = {id(member.param) for member in unit.members()}
        for module in unit.module.modules():
            holds = any(id(param) in mine for param in module.parameters(recurse=False))
            if module is unit.module or holds:
                _Saver(unit, module).install()
                loader.install(module)


def own_names(unit: Unit, module: nn.Module) -> list[str]:
    """Names, relative to a module, under which a unit's parameters stand in a state dict (tied ones under each)."""
    mine = {id(member.param) for member in unit.members()}
    return [name for name, param in module.named_parameters(remove_duplicate=False) if id(param) in mine]


class _Saver:
    """Gathers a unit while torch reads its parameters, then replaces the views by copies."""

    def __init__(self, unit: Unit, module: nn.Module) -> None:
        self.unit, self.module, self.woken = unit, module, False

    def install(self) -> None:
        # torch marks the hooks it is given, and a bound method cannot be marked.
        self.module.register_state_dict_pre_hook(Hook(self.before))
        self.module.register_state_dict_post_hook(Hook(self.after))

    def before(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self.woken = self.unit.state is UnitState.AT_REST and bool(self.unit.sharded)
        with torch.inference_mode(False), torch.no_grad():
            self.unit.start_gather()
            self.unit.finish_gather()

    def after(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        if self.woken or module is self.unit.module:
            self._copy(state, prefix)
        if self.woken:
            with torch.no_grad():
                self.unit.release()

    def _copy(self, state: dict[str, Any], prefix: str) -> None:
        copies: dict[int, Tensor] = {}
        for name in own_names(self.unit, self.module):
            value = state.get(prefix + name)
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                key = value.data_ptr() if value.numel() else id(value)
                state[prefix + name] = copies.setdefault(key, value.detach().to("cpu", copy=True)).view(value.shape)


class _Loader:
    """Puts a unit to rest while torch copies values in, so that each copy reaches slice and master (handle.py)."""

    def __init__(self, unit: Unit) -> None:
        self.unit, self.depth = unit, 0

    def install(self, module: nn.Module) -> None:
        module.register_load_state_dict_pre_hook(Hook(self.before))
        module.register_load_state_dict_post_hook(Hook(self.after))

    def before(self, module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *details: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise UsageError(
                "load_state_dict(assign=True) cannot be used on a wrapped model.",
                "It would put other tensors in the place of parameters whose slices the engine holds.",
                "leave assign out: the values are copied into the slices.",
            )
        self.depth += 1
        if self.depth == 1:
            for group in self.unit.groups:
                if not group.is_sharded:
                    for member in group.members:
                        with without_torch_function():
                            put_to_rest(member.param, group.placeholder)

    def after(self, module: nn.Module, incompatible: Any) -> None:
        self.depth -= 1
        if self.depth == 0:
            for group in self.unit.groups:
                if not group.is_sharded:
                    for member in group.members:
                        wake(member.param, member.kind, group.weight.view(member.slot))
