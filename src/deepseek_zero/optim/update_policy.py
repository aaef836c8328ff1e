"""When and from what a step updates units: an extension point of the core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from ..precision.loss_scale import LossScaler
from ..sharding.param_group import ParamGroup
from ..sharding.runtime import Runtime
from ..sharding.unit import Unit
from .master_shard import MasterShard, Tile, Tiles
from .moments import Moments
from .tile_memory import Scratch
from .updater import Decision, Updater
from .verdict import StepResult, Verdict


class Stepping(Protocol):
    """A sharded optimizer, as its policies see it."""

    runtime: Runtime
    inner: Optimizer
    updater: Updater
    moments: Moments
    scratch: Scratch
    scaler: LossScaler | None

    @property
    def tiles(self) -> Tiles: ...

    @property
    def loss_scale(self) -> float: ...

    def shards(self) -> list[MasterShard]: ...


class UpdatePolicy:
    """The default: every unit is updated in the step, from the gradients of the step.

    Extensions derive from this class. An optimizer has a sequence of policies, the same on every
    rank, and calls each hook of all of them in order. A hook must not communicate unless its
    docstring says that it is collective.

    Attributes:
        keeps_decisions: Decisions are compared or outlive their step, so each has a copy of the
            hyper-parameters.
        watches_overflows: The unit where numbers stop being finite is searched even if the loss
            scale moves.
        undoes: Some updates come before their step, with a log that undoes them.
        checkpoint_key: The name of `state_dict` in a checkpoint; empty without one.
        needs_moments: The result of `state_dict` is loaded only with the optimizer's states.
    """

    keeps_decisions = False
    watches_overflows = False
    undoes = False
    checkpoint_key = ""
    needs_moments = False

    def attach(self, optimizer: Stepping) -> None:
        """Attach the optimizer before its first step. Some policies make this collective."""

    def explain(self) -> list[str]:
        """Return the lines of `engine.explain` about this policy."""
        return []

    def tiles_changed(self, tiles: Tiles) -> None:
        """Use the new tiles after shards were cut again."""

    def refuse_joining(self, what: str, fix: str) -> None:
        """Raise `UsageError` if no parameter can join the optimizer now.

        Args:
            what: The event that makes parameters join.
            fix: What the user can do.
        """

    # -- one step, in this order

    def after_reduce(self, unit: Unit) -> None:
        """Note in a backward that a unit's gradient has been reduced."""

    def before_step(self) -> None:
        """Run the updates that must be over when the next step begins."""

    def before_update(self, verdict: Verdict) -> None:
        """Read the reduced gradients before the update uses them.

        Note:
            Collective: every rank must call it.
        """

    def due(self, made: Decision | None) -> Decision | None:
        """Return the decision that is carried out in this step. Changes nothing.

        Args:
            made: The decision of this step; None if it updates nothing.
        """
        return made

    def conclude(self, due: Decision | None) -> frozenset[int]:
        """Return the numbers of the units that this decision has already updated.

        Args:
            due: The decision that is carried out in this step; None if there is none.
        """
        return frozenset()

    def keep(self, made: Decision | None) -> None:
        """Keep this step's decision for a later one, if `due` returned another."""

    def postpone(self, tiles: Sequence[Tile], due: Decision) -> None:
        """Take over the tiles that the plan allows to be updated later.

        Args:
            tiles: The tiles of units that `conclude` did not return.
            due: The decision of their update.
        """

    def after_update(self, result: StepResult, origin: Unit | None) -> bool:
        """Return whether the loss scale can stay because an overflow's cause is removed.

        Args:
            result: Result of the step.
            origin: First unit with nonfinite numbers, if it is known.

        Note:
            Collective: every rank must call it.
        """
        return False

    def after_step(self, result: StepResult, rescale: float) -> None:
        """End a step. Every rank must call it.

        Args:
            result: The result of the step.
            rescale: The new loss scale divided by the old one.
        """

    # -- between steps

    @property
    def owes_update(self) -> bool:
        """Whether a kept decision has not been carried out; equal on all ranks."""
        return False

    def finish(self) -> None:
        """Complete or undo updates, so that states are as after the last step."""

    def discard(self) -> None:
        """Drop unfinished updates, because other states are about to be loaded."""

    # -- checkpoints

    def state_dict(self) -> dict[str, Any] | None:
        """Return the values that the next steps depend on, as plain values."""
        return None

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Take the values of a checkpoint.

        Args:
            state: The result of `state_dict`; None if the checkpoint has none.
        """

    @property
    def keeps_own_states(self) -> bool:
        """Whether ranks have private states, which belong to no element of the model."""
        return False

    def restore_own_states(self, group: ParamGroup, saved: Mapping[str, Tensor]) -> None:
        """Restore this rank's own states of one group from a checkpoint.

        Args:
            group: The parameter group.
            saved: The saved states by name.
        """

    def states_loaded(self, rescale: float) -> None:
        """Follow the states of a checkpoint after they have been loaded. Every rank must call it.

        Args:
            rescale: The loss scale divided by the one that the states were saved with.
        """
