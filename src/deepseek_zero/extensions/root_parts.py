"""Forwards of parts of the root unit that a program calls by themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..base.device import next_node_number
from ..base.nested import tensors_in
from ..sharding.hooks import weak_hook
from ..sharding.runtime import Runtime
from ..sharding.step_state import Phase
from ..sharding.unit import Unit, UnitState
from .loss_factor import loss_factor_of


class RootParts:
    """Gathers the root unit while a program calls one of its modules directly.

    The root unit has the parameters that no other unit has. A custom `generate()` may, for example,
    call an embedding outside the forward of the model.
    """

    def __init__(self) -> None:
        self._begin = 0  # autograd's first node in the outermost part
        self._gathered_for: nn.Module | None = None  # the part for which the root was gathered

    def before(
        self, runtime: Runtime, module: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        """Prepare the forward of a part.

        The root is gathered for a part that the program calls outside any forward. Collective in
        this case.
        """
        step = runtime.step
        if step.active:
            return None
        factor = loss_factor_of(runtime)
        is_border = step.is_outermost and factor.has_border
        step.root_calls.append(module)
        if is_border:
            self._begin = next_node_number()
        is_idle = step.phase is Phase.IDLE
        if is_idle and runtime.root.sharded and runtime.root.state is UnitState.SHARDED:
            self._gathered_for = module
            runtime.gathers.unshard(runtime.root)
        return factor.inside((args, kwargs)) if is_border else None

    def after(self, runtime: Runtime, module: nn.Module, args: Any, output: Any) -> Any:
        """Prepare the backward of a part."""
        step = runtime.step
        if step.active or not step.root_calls:
            return output
        step.root_calls.pop()
        if self._gathered_for is module:
            self._gathered_for = None
            runtime.root.reshard()
        if not step.is_outermost:
            return output
        for tensor in tensors_in(output):
            runtime.backward.watch_output(0, tensor)
        factor = loss_factor_of(runtime)
        if factor.has_border:
            output = factor.outside(output, self._begin)
        return output


def gather_parts(runtime: Runtime) -> None:
    """Let a program call modules of the root unit outside the forward of the model.

    Args:
        runtime: The runtime of the model.
    """
    parts = RootParts()
    for module in _parts_of(runtime.root):
        before = weak_hook(runtime, parts.before)
        runtime.hooks.append(
            module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        )
        after = weak_hook(runtime, parts.after, raises_if_gone=False)
        runtime.hooks.append(module.register_forward_hook(after, always_call=True))


def _parts_of(root: Unit) -> list[nn.Module]:
    """Return the modules inside the root that own its parameters.

    Modules of TorchScript are left out, because they cannot have hooks.
    """
    mine = {id(member.param) for member in root.members()}
    return [
        module
        for module in root.module.modules()
        if module is not root.module
        and not isinstance(module, torch.jit.ScriptModule)
        and any(id(param) in mine for param in module.parameters(recurse=False))
    ]
