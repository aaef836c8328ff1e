"""Whether a wrapped model is still the one that was wrapped.  Local; asked once per step by forward.py.

A parameter that joined later would train unsynchronised, one whose memory was replaced (a cast, a move, `.data = ...`)
would no longer be the one that steps: both are wrong gradients that nothing else would show.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..base.device import held_by
from ..base.errors import UsageError
from .param_group import ParamGroup


class Structure:
    """The modules of one wrapped model, and what each held when somebody looked closely."""

    def __init__(self, model: nn.Module, groups: Sequence[ParamGroup]) -> None:
        self.model, self.groups = model, list(groups)
        self._seen: list[tuple[nn.Module, list[int]]] = []

    def follow(self, groups: Sequence[ParamGroup]) -> None:
        """The parameters are in other groups now."""
        self.groups = list(groups)

    def check(self) -> None:
        """Raise if the model has parameters that no group holds, or if a whole parameter left its buffer."""
        if not self._seen or any(_holds(module) != held for module, held in self._seen):
            _refuse_strangers(self.model, self.groups)
            self._seen = [(module, _holds(module)) for module in self.model.modules()]
        _refuse_moved(self.groups)


def _holds(module: nn.Module) -> list[int]:
    """Its own parameters and submodules, as numbers.

    Those that were seen are kept alive, so that no other object gets their number.
    """
    return [id(held) for held in held_by(module)]


def _refuse_strangers(model: nn.Module, groups: Sequence[ParamGroup]) -> None:
    known = {id(member.param) for group in groups for member in group.members}
    if any(id(param) not in known for param in model.parameters()):
        new = next(name for name, param in model.named_parameters() if id(param) not in known)
        raise UsageError(
            f"parameter '{new}' joined the model after it was wrapped.",
            "Its gradient would not be reduced, nor its values kept equal on all ranks.",
            "change the model (adapters, resized embeddings, new heads) before initialize() or DeepSeekZeRO3 wraps it.",
        )


def _refuse_moved(groups: Sequence[ParamGroup]) -> None:
    for group in groups:
        if group.is_sharded or group.is_pinned:
            continue  # at rest a parameter guards itself (handle.py)
        start, step = group.weight.memory.data_ptr(), group.weight.memory.element_size()
        for member in group.members:
            if member.param.data_ptr() != start + member.slot.start * step and member.slot.numel:
                raise UsageError(
                    f"the memory of parameter '{member.name}' was replaced after the model was wrapped; it is now "
                    f"{member.param.dtype}, {tuple(member.param.shape)} on {member.param.device}.",
                    "Casting or moving the model, or assigning to `.data`, parts it from what the optimizer updates.",
                    "cast, move and resize before wrapping; change values in place (`copy_`, load_state_dict).",
                )
