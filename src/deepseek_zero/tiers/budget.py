"""Memory budget of the training device.

On a CPU, this budget is the only difference between the device's memory and the host's.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar
from weakref import WeakSet

from torch import Tensor

from ..base.errors import OutOfMemoryError
from ..base.quantities import format_bytes

T = TypeVar("T")
NO_LIMIT = 2**63 - 1


class DeviceBudget:
    """Counts the bytes in use on the training device, and raises an error at a limit."""

    def __init__(self, limit_bytes: int = NO_LIMIT) -> None:
        self.limit_bytes = limit_bytes
        self.taken_bytes = 0
        self.most_bytes = 0
        self._with_states: WeakSet[Any] = WeakSet()  # owners whose states are counted

    def reserve(self, nbytes: int, what: str) -> None:
        """Count bytes that are about to be allocated.

        Args:
            nbytes: Number of bytes.
            what: Name of the allocation for the error message.

        Raises:
            OutOfMemoryError: The limit would be exceeded.
        """
        if self.taken_bytes + nbytes > self.limit_bytes:
            raise OutOfMemoryError(
                f"{what} needs {format_bytes(nbytes)} of the training device; "
                f"{format_bytes(self.taken_bytes)} of the {format_bytes(self.limit_bytes)} that "
                "memory_budget.device allows are taken.",
                "Asked before anything is allocated.",
                "allow more, offload more (offload_optimizer, offload_param), or gather less at a "
                "time (stage3_max_live_parameters, stage3_prefetch_bucket_size).",
            )
        self.taken_bytes += nbytes
        self.most_bytes = max(self.most_bytes, self.taken_bytes)

    def release(self, nbytes: int) -> None:
        """Count these bytes as free again."""
        self.taken_bytes -= nbytes

    def reserve_for(self, owner: T, nbytes: int, what: str) -> T:
        """Count bytes as used until an object is deleted.

        Args:
            owner: Object whose deletion releases the bytes.
            nbytes: Number of bytes.
            what: Name of the allocation for the error message.

        Returns:
            `owner` itself.

        Raises:
            OutOfMemoryError: The limit would be exceeded.
        """
        self.reserve(nbytes, what)
        weakref.finalize(owner, self.release, nbytes).atexit = False
        return owner

    def count_states(
        self, owner: object, names: Sequence[str], states: Mapping[str, Any] | None
    ) -> None:
        """Count the states that an optimizer allocated, once, until their owner is deleted.

        Args:
            owner: The object to which the states belong.
            names: Names of parameters for the error message.
            states: The states by name, or None; values other than tensors are not counted.

        Raises:
            OutOfMemoryError: The limit would be exceeded.
        """
        if states and owner not in self._with_states:
            self._with_states.add(owner)
            nbytes = sum(state.nbytes for state in states.values() if isinstance(state, Tensor))
            self.reserve_for(owner, nbytes, f"the optimizer's state of {names[0]}")
