"""The part of update policies that acts between steps: their start, their end and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from ..precision.loss_scale import LossScaler
from ..sharding.param_group import ParamGroup
from ..sharding.runtime import Runtime
from .master_shard import MasterShard, Tiles
from .moments import Moments
from .step_settings import StepSettings
from .tile_memory import TileScratch
from .updater import Updater


class Stepping(Protocol):
    """Interface of a sharded optimizer, as its update policies use it."""

    runtime: Runtime
    inner: Optimizer
    updater: Updater
    moments: Moments
    scratch: TileScratch
    scaler: LossScaler | None
    settings: StepSettings

    @property
    def loss_scale(self) -> float: ...

    def shards(self) -> list[MasterShard]: ...


class PolicyState:
    """Base class of `UpdatePolicy` with the hooks that run between steps.

    They attach a policy to its optimizer, follow its shards, and save and restore its state.

    Attributes:
        checkpoint_key: The key under which a checkpoint stores `state_dict`; empty if there is
            none.
        needs_moments: Whether `state_dict` is restored only together with the optimizer's states.
    """

    checkpoint_key = ""
    needs_moments = False

    def attach(self, optimizer: Stepping) -> None:
        """Store the optimizer, and check that it supports the policy, before the first step.

        Note:
            Collective in some policies: every rank must call it.
        """

    def explain(self) -> list[str]:
        """Return the lines of `engine.explain` about this policy."""
        return []

    def tiles_changed(self, tiles: Tiles) -> None:
        """React to a new division of the main weights into shards."""

    def refuse_joining(self, what: str, fix: str) -> None:
        """Raise `UsageError` if no parameter can join the optimizer now.

        Args:
            what: The event that adds parameters, for the error message.
            fix: The last sentence of the error message: what the user can do.
        """

    @property
    def owes_update(self) -> bool:
        """Whether gradients of an earlier step have not been applied yet; equal on all ranks."""
        return False

    def finish(self) -> None:
        """Complete or undo updates, so that states are as after the last step."""

    def discard(self) -> None:
        """Drop unfinished updates, because other states are about to be loaded."""

    # -- checkpoints

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
