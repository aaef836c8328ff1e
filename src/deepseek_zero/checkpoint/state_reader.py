"""Define the interface by which the states of an open checkpoint are read."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from ..base.errors import CheckpointError
from .boxes import ParamPart, PlacedValues
from .format import StateRange


class StateReader(ABC):
    """Read ranges of a checkpoint's states by kind, parameter name and optimizer key."""

    @abstractmethod
    def has(self, kind: str, name: str, key: str = "") -> bool:
        """Return whether the checkpoint contains any elements of a state.

        Args:
            kind: Kind of state, such as `WEIGHT` or `MOMENT`.
            name: Name of the parameter or buffer.
            key: The optimizer's name of the state; empty for other kinds.
        """

    def keys(self, kind: str, name: str) -> list[str]:
        """Return the optimizer's names of the states of one parameter.

        Args:
            kind: Kind of state.
            name: Name of the parameter.
        """
        return []

    @abstractmethod
    def read(self, wanted: StateRange) -> PlacedValues:
        """Yield the elements of a range, in order.

        Args:
            wanted: The range.

        Yields:
            Pairs of position and flat values; each is valid until the next one is requested.

        Raises:
            CheckpointError: Elements are missing or cannot be read.
        """

    def whole(self, name: str, key: str, part: ParamPart | None = None) -> Tensor:
        """Read an optimizer state that has a shape different from its parameter.

        Args:
            name: Name of the parameter.
            key: The optimizer's name of the state.
            part: The part of the parameter that the state belongs to; None means all of it.

        Raises:
            CheckpointError: The checkpoint does not contain the state for this part.
        """
        raise CheckpointError(f"'{name}' has no state '{key}' with another shape.")

    @abstractmethod
    def of_rank(self, name: str, rank: int) -> Tensor:
        """Read the buffer that a rank saved, as a flat tensor.

        Args:
            name: Name of the buffer.
            rank: The rank that saved it. If that rank saved no value, that of the first rank that
                did is returned.
        """
