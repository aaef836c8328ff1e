"""Forwards of parts of the root unit that a program calls by themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..base.device import next_node_number
from ..base.nested import tensors_in
from .backward import Backward
from .hooks import weak_hook
from .step_state import Phase
from .unit import Unit, UnitState


class RootParts:
    """Gathers the root unit while a program calls one of its modules directly.

    The root unit has the parameters that no other unit has. A custom `generate()` may, for example,
    call an embedding outside the forward of the model.
    """

    def __init__(self, backward: Backward) -> None:
        self.root = backward.units[0]
        self.backward = backward
        self.step = backward.step
        self.gathers = backward.gathers
        self.loss_factor = backward.loss_factor
        self._begin = 0  # autograd's first node in the outermost part
        self._gathered_for: nn.Module | None = None  # the part for which the root was gathered

    def install_hooks(self) -> list[Any]:
        """Register hooks on the forwards of the modules of the root unit.

        Returns:
            The handles with which PyTorch removes the hooks.
        """
        handles: list[Any] = []
        for part in _parts_of(self.root):
            before = weak_hook(self, RootParts._before)
            handles.append(part.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            after = weak_hook(self, RootParts._after, raises_if_gone=False)
            handles.append(part.register_forward_hook(after, always_call=True))
        return handles

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Prepare the forward of a part.

        The root is gathered for a part that the program calls outside any forward. Collective in
        this case.
        """
        if self.step.active:
            return None
        is_border = self.step.is_outermost and self.loss_factor.has_border
        self.step.parts.append(module)
        if is_border:
            self._begin = next_node_number()
        is_idle = self.step.phase is Phase.IDLE
        if is_idle and self.root.sharded and self.root.state is UnitState.SHARDED:
            self._gathered_for = module
            self.gathers.unshard(self.root)
        return self.loss_factor.inside((args, kwargs)) if is_border else None

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Prepare the backward of a part."""
        if self.step.active or not self.step.parts:
            return output
        self.step.parts.pop()
        if self._gathered_for is module:
            self._gathered_for = None
            self.root.reshard()
        if not self.step.is_outermost:
            return output
        for tensor in tensors_in(output):
            self.backward.watch_output(0, tensor)
        if self.loss_factor.has_border:
            output = self.loss_factor.outside(output, self._begin)
        return output


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
