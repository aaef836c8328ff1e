"""One parameter of a parameter group."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from ..base.device import version_of, without_torch_function
from ..planner.layout import Slot
from .sharded_parameter import ShardedParameter


@dataclass(eq=False)
class ParamInfo:
    """One parameter of a group, with its position and its sharded form.

    Attributes:
        param: The user's `nn.Parameter` object.
        slot: The position of the parameter in the flat layout.
        param_class: The class of the parameter before wrapping and while unsharded.
        placeholder: The data of the parameter while it is sharded.
        is_frozen: Whether `requires_grad` was off when the ranks last compared it (regroup.py).
        version: The number of in-place changes of the parameter when it was last unsharded.
        has_warned: Whether a warning about an in-place change was logged.
    """

    param: nn.Parameter
    slot: Slot
    param_class: type[nn.Parameter]
    placeholder: Tensor = field(init=False)
    is_frozen: bool = field(init=False)
    version: int | None = None
    has_warned: bool = False

    def __post_init__(self) -> None:
        with without_torch_function():
            self.is_frozen = not self.param.requires_grad

    @property
    def name(self) -> str:
        """The full name of the parameter."""
        return self.slot.name

    def unshard(self, data: Tensor) -> None:
        """Make the parameter a view of `data`, in the class that it had before wrapping."""
        self.param.__class__ = self.param_class
        self.param.data = data
        self.version = _version_of(self.param)

    def was_written(self) -> bool:
        """Return whether the parameter was changed in place since it was unsharded."""
        return self.version is not None and _version_of(self.param) not in (None, self.version)

    def reshard(self) -> None:
        """Make the parameter a `ShardedParameter` whose data is the placeholder."""
        self.param.data = self.placeholder
        self.param.__class__ = ShardedParameter


def _version_of(param: nn.Parameter) -> int | None:
    """Return the version of a parameter; an inference tensor has none."""
    return None if param.is_inference() else version_of(param)
