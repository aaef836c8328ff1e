"""`state_dict()` with whole tensors and `load_state_dict()` into shards.

Both use torch's own hooks, one set per unit.

`state_dict()` is collective. Every rank gets whole tensors of its own (on the CPU if the model
trains on a GPU), and at most one unit is gathered at a time. `load_state_dict()` is local: every
rank reads its slices out of the whole values. Parameters that are split along "tp" are whole in
both. If a model has pipeline stages, its state dict contains all stages on every rank, and that of
a submodule contains this rank's part. Both can be loaded.

With `StateDicts.gathers` false, `state_dict()` is local, as in DeepSpeed. A sharded parameter is
then an empty tensor under its name, and a gathered one is this rank's copy.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..base.device import state_names, without_torch_function
from ..base.errors import UsageError
from ..base.log import log_first
from ..comm.collectives import Comm, propagate_errors, scatter
from ..parallel.cuts import cut
from ..planner.split import split_of
from ..sharding.hooks import Hook
from ..sharding.param_info import ParamInfo
from ..sharding.runtime import Runtime
from ..sharding.sharded_parameter import ShardedParameter
from ..sharding.unit import Unit, UnitState
from .gathered_parameters import GatheredParameters, join_split

EMPTY_VALUES = (
    "state_dict() does not communicate, as in DeepSpeed: parameters that are sharded now are empty "
    "tensors in it.  For whole values call engine.module_state_dict() or engine.save_16bit_model() "
    "on all ranks, or state_dict() inside zero.GatheredParameters.  This is said once."
)


class StateDicts:
    """Hooks with which the state dict of a sharded model contains whole tensors.

    `state_dict()` gathers them, and `load_state_dict()` stores this rank's slices of them.

    Attributes:
        gathers: Whether `state_dict()` gathers sharded parameters, so that every rank must call it.
            If false, it does not communicate, and sharded parameters are empty tensors.
    """

    def __init__(self, runtime: Runtime, *, gathers: bool = True) -> None:
        """Register hooks on every module with parameters.

        Hooks on submodules of a unit make their own state dicts work too. Submodules of TorchScript
        cannot have hooks.

        Args:
            runtime: The runtime of the wrapped model.
            gathers: Whether to gather sharded parameters in `state_dict()`; the attribute can be
                changed later.

        Note:
            Collective if the model has pipeline stages.
        """
        self.gathers = gathers
        handles: list[Any] = []
        for unit in runtime.units:
            saver = _Saver(unit, self)
            loader = _Loader(unit)
            mine = {id(member.param) for member in unit.members()}
            for module in unit.module.modules():
                if module is not unit.module and isinstance(module, torch.jit.ScriptModule):
                    continue
                own = map(id, module.parameters(recurse=False))
                if module is unit.module or not mine.isdisjoint(own):
                    # torch sets an attribute of the hooks, which a bound method does not allow
                    handles += [
                        module.register_state_dict_pre_hook(Hook(saver.before)),
                        module.register_state_dict_post_hook(Hook(saver.after)),
                        module.register_load_state_dict_pre_hook(Hook(loader.before)),
                        module.register_load_state_dict_post_hook(Hook(loader.after)),
                    ]
        if (pipe := runtime.comm.along.get("pp")) is not None:
            stages = _Stages(runtime.model, pipe, self)
            handles += [
                runtime.model.register_state_dict_post_hook(Hook(stages.after)),
                runtime.model.register_load_state_dict_pre_hook(Hook(stages.before_load)),
            ]
        runtime.hooks.extend(handles)

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Return a context inside which `state_dict()` gathers sharded parameters."""
        before = self.gathers
        self.gathers = True
        try:
            yield
        finally:
            self.gathers = before


def own_parameters(unit: Unit, module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a unit's parameters by their names in the state dict of a module.

    Tied parameters have several names.

    Args:
        unit: The unit whose parameters are listed.
        module: The module to whose state dict the names are relative.
    """
    mine = {id(member.param) for member in unit.members()}
    named = module.named_parameters(remove_duplicate=False)
    return {name: param for name, param in named if id(param) in mine}


class _Stages:
    """Adds the state of other stages to a state dict, and drops it before loading."""

    def __init__(self, model: nn.Module, comm: Comm, mode: StateDicts) -> None:
        self.comm = comm
        self.mode = mode
        own = list(state_names(model))
        everyone = [
            json.loads(text)
            for text in comm.all_gather_text(json.dumps(own), "names of all stages")
        ]
        self.others = {name for names in everyone for name in names} - set(own)

    def after(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Add the state of all stages to a state dict.

        If several stages have a name, the value of the first one is used.

        Note:
            Collective over the ranks along "pp".
        """
        if not self.mode.gathers:
            return
        here = {
            name.removeprefix(prefix): state[name]
            for name in list(state)
            if name.startswith(prefix)
        }
        own = {name: value.detach() for name, value in here.items() if isinstance(value, Tensor)}
        forms = [
            (name, str(each.dtype).removeprefix("torch."), *each.shape)
            for name, each in own.items()
        ]
        with propagate_errors(self.comm), torch.no_grad():
            told = self.comm.all_gather_text(json.dumps(forms), "state dict: forms")
            everyone = [{name: form for name, *form in json.loads(text)} for text in told]
            whole = dict[str, Any]()
            for owner, found in enumerate(everyone):
                for name, (dtype, *shape) in found.items():
                    if name not in whole:
                        lacking = [name not in others for others in everyone]
                        value = here.get(name)
                        if any(lacking):
                            there = self._brought(
                                own.get(name), getattr(torch, dtype), shape, lacking, owner, name
                            )
                            value = there if value is None else value
                        whole[name] = value
        for name in here:
            del state[prefix + name]
        state.update({prefix + name: value for name, value in (whole | here).items()})

    def _brought(
        self,
        value: Tensor | None,
        dtype: torch.dtype,
        shape: list[int],
        lacking: list[bool],
        owner: int,
        name: str,
    ) -> Tensor:
        """Return the owner's tensor on the ranks that lack it, on the CPU."""
        comm = self.comm
        pieces = list[Tensor]()
        is_mine = comm.rank == owner
        if is_mine and value is not None:
            flat = value.to(comm.device).contiguous().reshape(-1).view(torch.uint8)
            pieces = [flat if wanted else flat[:0] for wanted in lacking]
        numel = torch.Size(shape).numel() * dtype.itemsize if lacking[comm.rank] else 0
        into = torch.empty(numel, dtype=torch.uint8, device=comm.device)
        scatter(comm, pieces, into, f"state dict: {name}", owner)
        return into.to("cpu").view(dtype).view(shape) if lacking[comm.rank] else into

    def before_load(self, module: nn.Module, state: Any, prefix: str, *details: Any) -> None:
        """Remove the entries of other stages."""
        for name in self.others:
            state.pop(prefix + name, None)


@dataclass
class _Saver:
    """Gathers a unit while torch reads it, then replaces the views by copies.

    Weights that forward gathers as codes are gathered exactly here.
    """

    unit: Unit
    mode: StateDicts
    woken: bool = False
    # The parameters that a local state dict shows as empty
    resting: list[ParamInfo] | None = None
    exact: GatheredParameters | None = None
    # The module whose state dict is being made; hooks of inner modules do nothing
    outermost: nn.Module | None = None

    def before(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if self.outermost is module:  # an exception ended its last state dict
            self._release()
        if self.outermost is None and not self.mode.gathers:
            self.outermost = module
            self.resting = _show_empty(self.unit)
        elif self.outermost is None:
            self.woken = self.unit.state is UnitState.SHARDED
            if coded := [
                group for group in self.unit.sharded if group.plan.weight.wire is not None
            ]:
                self.exact = GatheredParameters(
                    [member.param for group in coded for member in group.members]
                )
                self.exact.__enter__()
            runtime = _runtime_of(self.unit)
            lone_call = (
                runtime.comm.waits.lone_call("state_dict()")
                if runtime is not None
                else nullcontext()
            )
            with torch.inference_mode(False), torch.no_grad(), lone_call:
                self.unit.unshard()
                self.unit.wait_for_unshard()
            self.outermost = module

    def after(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        if self.outermost is not module:
            return
        copies: dict[int, Tensor] = {}
        for name, param in own_parameters(self.unit, module).items():
            value = state.get(prefix + name)
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                key = value.data_ptr() if value.numel() else id(value)
                if key not in copies:
                    copies[key] = self._joined(value, param, name).to("cpu", copy=True)
                state[prefix + name] = copies[key].view(copies[key].shape)
        self._release()

    def _release(self) -> None:
        """Undo what `before` has done for the outermost module."""
        self.outermost = None
        for member in self.resting or ():
            member.reshard()
        self.resting = None
        if self.exact is not None:
            self.exact.__exit__(None, None, None)
            self.exact = None
        if self.woken:
            with torch.no_grad():
                self.unit.reshard()

    def _joined(self, value: Tensor, param: nn.Parameter, name: str) -> Tensor:
        """Return the whole value of a parameter, in its shape.

        Collective along "tp" if the parameter is split.
        """
        value = value.detach()
        split = split_of(param)
        comm = along_tp(self.unit)
        if split is None or comm is None or self.resting is not None:
            return value
        return join_split(value.reshape(-1), split, comm, f"state dict: {name}").view(split.shape)


def _show_empty(unit: Unit) -> list[ParamInfo]:
    """Make each sharded parameter of a unit empty until `reshard`, and return them."""
    resting = [member for member in unit.members() if type(member.param) is ShardedParameter]
    for member in resting:
        member.unshard(member.placeholder.new_empty(0))
    if resting:
        log_first(EMPTY_VALUES, logging.WARNING)
    return resting


def along_tp(unit: Unit) -> Comm | None:
    """Return the communicator of the tensor-parallel ranks; None without tensor parallelism.

    Args:
        unit: A unit of the model.
    """
    runtime = _runtime_of(unit)
    return runtime.comm.along.get("tp") if runtime is not None else None


def _runtime_of(unit: Unit) -> Runtime | None:
    """Return the runtime of a unit; None if the unit has no parameters."""
    return unit.groups[0].runtime() if unit.groups else None


@dataclass
class _Loader:
    """Shards a unit while torch copies values in.

    Each copy then reaches both the slice and the main weight (`sharded_parameter.py`).
    """

    unit: Unit
    outermost: nn.Module | None = None
    # The list in which torch collects the error messages of a load. If another list arrives, an
    # exception has ended the load of `outermost`.
    messages: list[str] | None = None

    def before(
        self, module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *details: Any
    ) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise UsageError(
                "load_state_dict(assign=True) cannot be used on a wrapped model.",
                "It would put other tensors in the place of parameters whose slices the engine "
                "holds.",
                "leave assign out: the values are copied into the slices.",
            )
        if self.outermost in (None, module) or details[-1] is not self.messages:
            self.outermost = module
            self.messages = details[-1]
            self._cut(module, state, prefix)
            for group in self.unit.groups:
                if not group.is_sharded:
                    for member in group.members:
                        with without_torch_function():
                            member.reshard()

    def _cut(self, module: nn.Module, state: Any, prefix: str) -> None:
        """Replace whole values by this rank's parts along "tp".

        `state` is torch's own copy of the dictionary.
        """
        comm = along_tp(self.unit)
        if comm is None:
            return
        for name, param in own_parameters(self.unit, module).items():
            value = state.get(prefix + name)
            split = split_of(param)
            is_whole = isinstance(value, Tensor) and split and tuple(value.shape) == split.shape
            if split is not None and is_whole:
                state[prefix + name] = cut(value, split, comm.rank)

    def after(self, module: nn.Module, incompatible: Any) -> None:
        if self.outermost is not module:
            return
        self.outermost = None
        self.messages = None
        for group in self.unit.groups:
            if not group.is_sharded:
                for member in group.members:
                    member.unshard(group.weight.view(member.slot))
