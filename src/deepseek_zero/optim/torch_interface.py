"""The attributes and methods of `torch.optim.Optimizer` that a sharded optimizer forwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torch.optim import Optimizer

from ..base.device import ScalesItself, adopt_step_hooks
from ..base.errors import UsageError
from ..precision.loss_scale import LossScaler
from .added_params import AddedParams
from .inner_states import apply_owed, load_saved_states, load_states, saved_states
from .master_shard import MasterShard
from .shard_set import ShardSet
from .step import Step
from .update_policy import UpdatePolicy
from .verdict import StepResult

P = TypeVar("P", bound=UpdatePolicy)


class TorchInterface(ScalesItself, Optimizer):
    """Base class of `ShardedOptimizer`, which forwards the attributes of torch's optimizers.

    `Optimizer.__init__` is not called, because it would require parameters.

    Args:
        shards: The shards of the optimizer.

    Attributes:
        shard_set: The shards of the main weights, which `inner` updates.
        policies: The update policies, the same on every rank.
        runtime: The runtime of the wrapped model.
        settings: The settings of a step.
        scaler: The loss scaler, or None.
        inner: The optimizer that computes the updates.
        moments: The states of `inner`.
        updater: Runs `inner` over the shards.
        scratch: The buffers of updates.
        steps: The number of calls of `step`.
        last: The result of the last step.
        take_step: A weak reference to the method that takes a step of the engine that owns the
            optimizer; it returns None without an engine.
    """

    steps: int
    take_step: Callable[[], Callable[[], None] | None] = staticmethod(lambda: None)
    last: StepResult | None
    _step: Step

    def __init__(self, shards: ShardSet) -> None:
        self.shard_set = shards
        self.policies = shards.policies
        self.runtime = shards.runtime
        self.settings = shards.settings
        self.scaler: LossScaler | None = shards.scaler
        self.inner: Optimizer = shards.inner
        self.moments = shards.moments
        self.updater = shards.updater
        self.scratch = shards.scratch
        adopt_step_hooks(self, self.inner)  # they run around this optimizer's step
        self._added_params = AddedParams(shards, weakref.ref(self))

    def step_through(self, take_step: Callable[[], None]) -> None:
        """Make calls of `step` by the program steps of the engine that owns the optimizer.

        Args:
            take_step: A method of the engine, which is held weakly.
        """
        self.take_step = weakref.WeakMethod(take_step)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's state, with pending updates applied and offloaded moments fetched.

        Reading this property may wait for transfers. The library itself calls `load_states`.
        """
        return load_states(self.shard_set)

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The default hyper-parameters of the inner optimizer."""
        return self.inner.defaults

    @property
    def optimizer(self) -> Optimizer:
        """The inner optimizer, under DeepSpeed's name."""
        return self.inner

    @property
    def loss_scale(self) -> float:
        """The current loss scale, by which losses are multiplied."""
        return self.scaler.scale if self.scaler is not None else 1.0

    def policy(self, cls: type[P]) -> P | None:
        """Return the update policy of this class, or None if the optimizer has none."""
        return next((policy for policy in self.policies if isinstance(policy, cls)), None)

    def shards(self) -> list[MasterShard]:
        """Return all shards that this rank updates, in the order of parameter groups."""
        return self.shard_set.all()

    def finish(self) -> None:
        """Run or undo pending updates, so that every state is as the last step left it."""
        self.shard_set.finish()

    def flush(self) -> None:
        """Run the update that a policy delayed to the next step, if there is one.

        Raises:
            UsageError: A backward has run since the last step.

        Note:
            Collective: every rank must call it, between two steps.
        """
        apply_owed(self._step)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group with separate hyper-parameters.

        Args:
            param_group: Parameters of the wrapped model under "params", and their hyper-parameters.

        Note:
            Collective: every rank must call it, between two steps.
        """
        self._added_params.add_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients of the current accumulation."""
        self.shard_set.runtime.backward.discard_step()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state in the layout of the inner optimizer.

        Checkpoints of the engine name the states by parameter instead, and can be loaded with any
        number of ranks.
        """
        scaler = self.scaler.state_dict() if self.scaler else None
        return {**saved_states(self.shard_set), "scaler": scaler, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict` of the same rank, world size and stage.

        Args:
            state: The result of `state_dict`.

        Raises:
            UsageError: The state belongs to another optimizer, model, rank, world size or stage.
        """
        load_saved_states(self.shard_set, state)
        self.steps = int(state.get("steps", self.shard_set.updater.updates))
        if self.scaler is not None and state.get("scaler") is not None:
            self.scaler.load_state_dict(state["scaler"])

    def __repr__(self) -> str:
        return f"ShardedOptimizer({self.inner!r})"


def no_closure() -> UsageError:
    """Create the error for a closure that a program passed to `step`."""
    return UsageError(
        "step(closure) is not supported by sharded optimizers.",
        "A closure would run forward and backward inside the update of one slice.",
        "call forward, backward and step() in turn.",
    )
