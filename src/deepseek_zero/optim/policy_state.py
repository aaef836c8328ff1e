"""The states of update policies in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..sharding.param_group import ParamGroup


class PolicyState:
    """Base class of `UpdatePolicy` with the hooks that save and restore its state.

    Attributes:
        checkpoint_key: The key under which a checkpoint stores `state_dict`; empty if there is
            none.
        needs_moments: Whether `state_dict` is restored only together with the optimizer's states.
    """

    checkpoint_key = ""
    needs_moments = False

    def state_dict(self) -> dict[str, Any] | None:
        """Return the policy's state for a checkpoint, as plain values; None if it has none."""
        return None

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore the result of `state_dict` from a checkpoint; None if it has none."""

    @property
    def keeps_own_states(self) -> bool:
        """Whether ranks have states that are not shared, such as error-feedback buffers."""
        return False

    def restore_own_states(self, group: ParamGroup, saved: Mapping[str, Tensor]) -> None:
        """Restore this rank's own states of one group, by name, from a checkpoint."""

    def states_loaded(self, rescale: float) -> None:
        """Adapt the policy to the states of a checkpoint after all of them have been loaded.

        Args:
            rescale: The loss scale divided by the one that the states were saved with.

        Note:
            Collective in some policies: every rank must call it.
        """
