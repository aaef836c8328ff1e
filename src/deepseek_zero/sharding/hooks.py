"""Where torch calls us: module hooks around each unit's forward, gradient hooks on parameters and outputs.

Hooks hold the runtime weakly, so that dropping an engine returns its memory at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..base.device import backward_id
from ..base.errors import UsageError
from .sharded_parameter import Hook

if TYPE_CHECKING:
    from .param_group import ParamGroup
    from .runtime import Runtime


def install(runtime: Runtime) -> list[Any]:
    """Hook every unit of a runtime; returns torch's handles."""
    handles: list[Any] = []
    for unit in runtime.units:
        before, after = (_bound(hook, runtime, unit.number) for hook in (_before_forward, _after_forward))
        handles.append(unit.module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        returned = _bound(_forward_returned, runtime)  # torch calls it, before the other, only where nothing was raised
        handles.append(unit.module.register_forward_hook(returned))
        handles.append(unit.module.register_forward_hook(after, with_kwargs=True, always_call=True))
        for group in unit.trained:
            handles += watch_grads(runtime, unit.number, group)
    for part in _parts_of_root(runtime):
        handles.append(part.register_forward_pre_hook(_bound(_before_part, runtime), with_kwargs=True, prepend=True))
        handles.append(part.register_forward_hook(_bound(_after_part, runtime), always_call=True))
    return handles


def watch_grads(runtime: Runtime, number: int, group: ParamGroup) -> list[Any]:
    """Tell the runtime of every gradient of a group that is complete; returns torch's handles."""
    handles = []
    for member in group.members:
        if not member.is_frozen:
            hook = _bound(_on_grad, runtime, number)
            handles.append(member.param.register_post_accumulate_grad_hook(hook))
    return handles


def _parts_of_root(runtime: Runtime) -> list[nn.Module]:
    """Modules inside the root that own its parameters: a custom generate() may call an embedding by itself."""
    mine = {id(member.param) for group in runtime.root.groups for member in group.members}
    return [
        module
        for module in runtime.root.module.modules()
        if module is not runtime.root.module and any(id(param) in mine for param in module.parameters(recurse=False))
    ]


def watch_output(runtime: Runtime, number: int, tensor: Tensor) -> None:
    """Tell the runtime when backward reaches a unit's output."""
    tensor.register_hook(_bound(_on_output_grad, runtime, number))


def output_alias(runtime: Runtime, tensor: Tensor) -> Tensor:
    """A view whose gradient is multiplied by what it lacks of the engine's factor (loss_factor.py).

    An alias, because a hook on the tensor itself would also scale what other outputs (a loss computed from logits)
    send back through it.
    """
    return _alias(runtime, tensor, _scale)


def input_alias(runtime: Runtime, tensor: Tensor) -> Tensor:
    """A view whose gradient leaves the engine without its factor; a parameter stays itself."""
    return tensor if isinstance(tensor, nn.Parameter) else _alias(runtime, tensor, _unscale)


def _alias(runtime: Runtime, tensor: Tensor, hook: Callable[..., Any]) -> Tensor:
    if not tensor.requires_grad:
        return tensor
    alias = tensor.view_as(tensor)
    alias.register_hook(_bound(hook, runtime))
    return alias


def at_backward_end(runtime: Runtime) -> Callable[[], None]:
    """The callback that ends a backward.

    torch drops it unrun when an exception ends the backward; that is how a plain `loss.backward()` that failed is seen.
    """
    callback = _bound(_on_backward_end, runtime)
    weakref.finalize(callback, _on_backward_dropped, weakref.ref(runtime), backward_id()).atexit = False
    return callback


def _bound(function: Callable[..., Any], runtime: Runtime, *first: Any) -> Callable[..., Any]:
    return Hook(_call, weakref.ref(runtime), function, first)


def _call(
    reference: weakref.ref[Runtime], function: Callable[..., Any], first: tuple[Any, ...], *args: Any, **kwargs: Any
) -> Any:
    runtime = reference()
    if runtime is None and function in (_forward_returned, _after_forward, _after_part):
        return None  # the hook before this forward has raised already
    if runtime is None:
        raise UsageError(
            "the model is used after its engine was deleted.",
            "Its weights are slices that only the engine can gather.",
            "keep the engine as long as the model is used; take state_dict() before deleting it.",
        )
    if torch.compiler.is_compiling():
        # A compiled block runs our hooks and traces none.  Only here, because importing the compiler takes a second.
        return torch.compiler.disable(function, recursive=True)(runtime, *first, *args, **kwargs)
    return function(runtime, *first, *args, **kwargs)


def _before_forward(runtime: Runtime, number: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return runtime.forward.pre_forward(runtime.units[number], args, kwargs)


def _forward_returned(runtime: Runtime, module: nn.Module, args: Any, output: Any) -> None:
    runtime.forward.returned()


def _after_forward(runtime: Runtime, number: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    return runtime.forward.post_forward(runtime.units[number], (args, kwargs), output)


def _before_part(runtime: Runtime, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return runtime.forward.pre_forward_part(module, args, kwargs)


def _after_part(runtime: Runtime, module: nn.Module, args: Any, output: Any) -> Any:
    return runtime.forward.post_forward_part(module, output)


def _on_output_grad(runtime: Runtime, number: int, grad: Tensor) -> None:
    runtime.on_output_grad(runtime.units[number], grad)


def _on_grad(runtime: Runtime, number: int, param: Tensor) -> None:
    assert isinstance(param, nn.Parameter)
    if torch.is_grad_enabled():  # under create_graph
        with torch.no_grad():
            runtime.on_grad(runtime.units[number], param)
    else:
        runtime.on_grad(runtime.units[number], param)


def _scale(runtime: Runtime, grad: Tensor) -> Tensor:
    factor = runtime.loss_factor.at_output()
    return grad if factor == 1.0 else grad * factor


def _unscale(runtime: Runtime, grad: Tensor) -> Tensor:
    factor = runtime.loss_factor.at_output()
    return grad if factor == 1.0 else grad * (1.0 / factor)


def _on_backward_end(runtime: Runtime) -> None:
    runtime.end_backward()


def _on_backward_dropped(reference: weakref.ref[Runtime], number: int) -> None:
    runtime = reference()
    if runtime is not None:
        runtime.on_backward_dropped(number)
