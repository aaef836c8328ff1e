"""The dtypes of the values that are passed between the units of a model."""

from __future__ import annotations

from typing import Any

import torch

from ..base.nested import cast_inputs
from ..precision.policy import Policy
from .unit import Unit


class Casts:
    """Casts the arguments and outputs of units.

    Args:
        root: The unit of parameters outside all other units.
        policy: The dtypes of the model.

    Attributes:
        any_promoted: Whether some units compute in fp32 and others in 16 bits (precision "auto"),
            so values passed between them are cast.
    """

    def __init__(self, root: Unit, policy: Policy) -> None:
        self.root = root
        self.policy = policy
        self.any_promoted = False

    def as_computed(self, unit: Unit, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Cast a unit's arguments to its compute dtype.

        Args:
            unit: The unit.
            args: The positional arguments of its forward.
            kwargs: The keyword arguments of its forward.
        """
        is_cast = unit is self.root and self.policy.auto_cast
        if not is_cast and not self.any_promoted:
            return args, kwargs
        dtype = self._compute_dtype(unit)
        return cast_inputs(args, dtype), cast_inputs(kwargs, dtype)

    def as_passed(self, unit: Unit, output: Any) -> Any:
        """Cast a unit's output to the dtype that is passed between units.

        Args:
            unit: The unit.
            output: The value that its forward returned.
        """
        if not self.any_promoted or unit is self.root:
            return output
        return cast_inputs(output, self._compute_dtype(self.root))

    def _compute_dtype(self, unit: Unit) -> torch.dtype | None:
        return torch.float32 if unit.is_promoted else self.policy.compute
