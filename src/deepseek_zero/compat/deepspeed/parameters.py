"""DeepSpeed's attributes of sharded parameters, such as `ds_shape`.

Each read of an attribute (VIEWS) is computed from the parameter's owner. The attributes are set on
`torch.nn.Parameter`, because that is the class of a gathered parameter. Parameters that no stage 3
engine or zero.Init has sharded do not have them, and this library does not read them. They are
removed with the last engine and zero.Init.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...base.device import keep_parameters_in, parameters_dict
from ...base.errors import UnknownNameError
from ...extensions.gathered_parameters import GatheredParameters
from ...extensions.zero_init import InitShard
from ...planner.layout import Slot
from ...sharding.param_group import ParamGroup
from ...sharding.param_ranges import owned_range
from ...sharding.sharded_parameter import ShardedParameter, owner_of
from ...tiers.tier import Tier
from .comm import get_world_group


class ZeroParamStatus(Enum):
    """Whether a parameter is gathered on this rank."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(Enum):
    """DeepSpeed's kinds of parameters as an enum, for programs that import the name."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


Owner = ParamGroup | InitShard

_orig_torch_empty = torch.empty  # zero.Init of this library does not replace torch's functions


def _slot(owner: ParamGroup, param: nn.Parameter) -> Slot:
    return owner.members[owner.index[id(param)]].slot


def _number(owner: Owner, param: nn.Parameter) -> int:
    """Return the parameter's index in the model's parameters(), equal on every rank."""
    if isinstance(owner, InitShard):
        return owner.number
    return next(
        number
        for number, each in enumerate(owner.runtime().units[0].module.parameters())
        if each is param
    )


def _slice(owner: Owner, param: nn.Parameter) -> Tensor:
    """Return the part of the weight for which this rank has the main weights.

    The result is a flat view of the weight's memory.
    """
    if isinstance(owner, InitShard):
        return owner.slice
    weight = owner.plan.weight
    is_elsewhere = weight.tier is not Tier.DEVICE
    if is_elsewhere or weight.stored_as is not None:
        where = f"on {weight.tier.value}" if is_elsewhere else f"as {weight.stored_as}"
        fix = "gather the parameter (deepseek_zero.zero.GatheredParameters), which decodes it."
        if is_elsewhere:
            fix = "read this rank's part by deepseek_zero.utils.safe_get_local_fp32_param(param)."
        raise UnknownNameError(
            f"ds_tensor of '{owner.name_of(param)}' is not available: the weights are stored "
            f"{where}.",
            fix=fix,
        )
    return owner.weight.write(
        *owned_range(owner.weight, _slot(owner, param), owner.comm_ctx.comm.rank)
    )


def _numel_here(owner: Owner, param: nn.Parameter) -> int:
    if isinstance(owner, InitShard):
        return owner.slice.numel()
    start, stop = owner.layout.owned(_slot(owner, param), owner.comm_ctx.comm.rank)
    return max(0, stop - start)


def _status(owner: Owner, param: nn.Parameter) -> ZeroParamStatus:
    return (
        ZeroParamStatus.NOT_AVAILABLE
        if isinstance(param, ShardedParameter)
        else ZeroParamStatus.AVAILABLE
    )


def _summary(owner: Owner, param: nn.Parameter) -> dict[str, Any]:
    return {
        "id": _number(owner, param),
        "status": _status(owner, param).name,
        "numel": param.numel(),
        "shape": tuple(param.shape),
        "requires_grad": param.requires_grad,
        "partition_numel": _numel_here(owner, param),
        "persist": VIEWS["ds_persist"](owner, param),
    }


class _Whole:
    """A gathered group, until `partition` was called for all of its parameters."""

    def __init__(self, param: nn.Parameter) -> None:
        self.block = GatheredParameters(param, modifier_rank=0)
        self.held = set[int]()
        self.block.__enter__()


# Owner -> its gathered group
_whole: weakref.WeakKeyDictionary[Any, _Whole] = weakref.WeakKeyDictionary()


class GatherHandle:
    """Handle of a gather that has already finished."""

    def wait(self, **words: Any) -> None:
        """Return immediately."""


class MultipleAllGatherHandles:
    """Wait for several gathers through one handle."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self.handles = handles

    def wait(self, handle_dependency: bool = True) -> None:
        """Wait for every handle."""
        for handle in self.handles:
            handle.wait(handle_dependency=handle_dependency)


def _those(given: Any, param: nn.Parameter) -> list[tuple[Any, nn.Parameter]]:
    params: list[Any] = (
        [param] if given is None else [given] if isinstance(given, Tensor) else list(given)
    )
    found = [(owner_of(each), each) for each in params]
    return [(owner, each) for owner, each in found if isinstance(owner, InitShard | ParamGroup)]


def _all_gather(
    param: nn.Parameter, param_list: Any = None, async_op: bool = False, **words: Any
) -> GatherHandle | None:
    """Gather parameters until `partition` is called for them.

    Args:
        param: Parameter whose attribute was called.
        param_list: One or more parameters; None for `param`.
        async_op: Whether to return a handle.
        **words: Ignored.

    Note:
        Collective: every rank must call it.
    """
    for holder, each in _those(param_list, param):
        if holder not in _whole:
            _whole[holder] = _Whole(each)
        _whole[holder].held.add(id(each))
    return GatherHandle() if async_op else None


def _all_gather_coalesced(param: nn.Parameter, params: Any, **words: Any) -> GatherHandle | None:
    """Gather parameters until `partition` is called for them, and return a handle.

    Note:
        Collective: every rank must call it.
    """
    return _all_gather(param, params, async_op=True)


def _partition(
    param: nn.Parameter,
    param_list: Any = None,
    hierarchy: int = 0,
    has_been_updated: bool = False,
    **words: Any,
) -> None:
    """Release parameters that `all_gather` has gathered.

    Args:
        param: Parameter whose attribute was called.
        param_list: One or more parameters; None for `param`.
        hierarchy: Ignored.
        has_been_updated: Whether to keep the current values of rank 0. Otherwise the values from
            before the gather are restored.
        **words: Ignored.

    Note:
        Collective: every rank must call it.
    """
    for holder, each in _those(param_list, param):
        if (whole := _whole.get(holder)) is None:
            continue
        whole.held.discard(id(each))
        if not whole.held:
            del _whole[holder]
            if has_been_updated:
                whole.block.__exit__(None, None, None)
            else:
                whole.block.discard()


VIEWS: dict[str, Callable[[Any, nn.Parameter], Any]] = {
    "ds_id": _number,
    "ds_shape": lambda owner, param: param.shape,
    "ds_numel": lambda owner, param: param.numel(),
    "ds_status": _status,
    "ds_tensor": _slice,
    "ds_persist": lambda owner, param: isinstance(owner, ParamGroup) and not owner.is_sharded,
    "ds_process_group": lambda owner, param: get_world_group(),
    # The schedule decides which modules use it.
    "ds_active_sub_modules": lambda owner, param: set(),
    "partition_numel": lambda owner, param: partial(_numel_here, owner, param),
    # Uses outside of the parameter's module are detected, not registered.
    "is_external_param": lambda owner, param: False,
    # A second copy belongs to a unit, not to a parameter.
    "ds_secondary_tensor": lambda owner, param: None,
    "ds_zero_param_process_group": lambda owner, param: None,
    "all_gather": lambda owner, param: partial(_all_gather, param),
    "all_gather_coalesced": lambda owner, param: partial(_all_gather_coalesced, param),
    "partition": lambda owner, param: partial(_partition, param),
    "ds_summary": lambda owner, param: partial(_summary, owner, param),
}


class _View:
    """Descriptor that computes an attribute from the parameter's owner.

    It is not a data descriptor, so an attribute that was set on the parameter takes precedence.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.read = VIEWS[name]

    def __get__(self, param: nn.Parameter | None, kind: type) -> Any:
        owner = owner_of(param) if param is not None else None
        runtime = owner.runtime() if isinstance(owner, ParamGroup) else None
        is_third = runtime is not None and runtime.settings.stage == 3
        if param is None or not (isinstance(owner, InitShard) or is_third):
            raise AttributeError(f"{kind.__name__!r} object has no attribute {self.name!r}")
        return self.read(owner, param)


_needed_by: set[int] = set()


def show_ds_names(user: object) -> None:
    """Enable DeepSpeed's attributes of parameters as long as `user` exists.

    `user` is an engine of stage 3 or a zero.Init.
    """
    if not _needed_by:
        for name in VIEWS:
            setattr(nn.Parameter, name, _View(name))
    if id(user) not in _needed_by:
        _needed_by.add(id(user))
        weakref.finalize(user, _no_longer, id(user)).atexit = False


def _no_longer(user: int) -> None:
    """Remove the attributes from `torch.nn.Parameter` with the last user."""
    _needed_by.discard(user)
    if not _needed_by:
        for name in VIEWS:
            delattr(nn.Parameter, name)


class ZeROOrderedDict(OrderedDict[str, Any]):
    """Dictionary of a module's own parameters, with a reference to the module.

    It exists for compatibility and does not change how parameters are found.

    Args:
        parent_module: The module.
        *given: Arguments of OrderedDict.
        **named: Items of the dictionary.
    """

    def __init__(self, parent_module: Any, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._parent_module = parent_module
        self._in_forward = False


def ensure_zero_ordered_dict(module: Any) -> None:
    """Store a module's own parameters in a `ZeROOrderedDict`.

    The previous dictionary is kept as `_original_parameters`.
    """
    params = parameters_dict(module)
    if params is None or isinstance(params, ZeROOrderedDict):
        return
    if not hasattr(module, "_original_parameters"):
        module._original_parameters = params
    keep_parameters_in(module, ZeROOrderedDict(module, params))


class NoHook:
    """Placeholder for a hook that TRL removes while a gathered model generates."""

    def remove(self) -> None:
        """Do nothing."""


class ParameterOffload:
    """Placeholder for the hooks that TRL removes from a stage 3 optimizer.

    TRL removes them while a gathered model generates and restores them afterwards. Here this is not
    necessary, because forward gathers parameters itself and skips those that are gathered already.
    TRL looks for parameters to reset in `module`, and `forward_hooks` is empty while it has removed
    the hooks.
    """

    def __init__(self) -> None:
        self.forward_hooks: list[Any] = [NoHook()]
        self.backward_hooks: list[Any] = []
        self.module = self

    def named_parameters(self, recurse: bool = True) -> Iterator[tuple[str, Any]]:
        """Return an iterator without elements: no parameter needs a reset."""
        return iter(())

    def ds_external_parameters(self) -> Iterator[tuple[str, Any]]:
        """Return an iterator without elements: no parameter needs a reset."""
        return iter(())

    def _register_deepspeed_module(self, module: Any) -> None:
        """Restore the placeholder in `forward_hooks`."""
        self.forward_hooks = [NoHook()]
