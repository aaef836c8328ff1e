"""Optimizer states that exist before the first update of the shards."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..base.errors import UsageError
from ..optimizers.plain_steps import raw_step, undecorated
from ..optimizers.registry import known_arguments
from .master_shard import MasterShard
from .param_overlap import ParamOverlap


class InitialStates(Protocol):
    """Interface to the states that an optimizer had before its parameters were sharded.

    The states of the shards are cut from them.
    """

    def describe(self) -> list[str]:
        """Return one line per state, the same on ranks that have the same state."""
        ...

    def release_trained(self) -> None:
        """Free the states of trainable parameters.

        Call it after the states of their shards were cut.
        """
        ...

    def counters(self, overlap: ParamOverlap) -> Hashable:
        """Return the properties of a state that must be equal for all parameters of one shard.

        Args:
            overlap: The part of a parameter that is in the shard.

        Returns:
            The names of the states, and counters such as the number of updates.
        """
        ...

    def cut_for(self, shard: MasterShard) -> dict[str, Any]:
        """Return the state of a shard, or an empty dict if there is none.

        Args:
            shard: The shard. The `counters` of all its parameters are equal.

        Raises:
            UsageError: A state cannot be cut.
        """
        ...


def makes_states(optimizer: Optimizer) -> bool:
    """Return whether an optimizer creates its states when it is built, not in its first step.

    If this rank has no slice, a probe optimizer with one element is built to find out.
    """
    if optimizer.state or any(group["params"] for group in optimizer.param_groups):
        return bool(optimizer.state)
    if not optimizer.param_groups:
        return False
    probe = {**optimizer.param_groups[0], "params": [nn.Parameter(torch.zeros(1, device="cpu"))]}
    try:
        return bool(states_at_construction(optimizer, probe))
    except UsageError:  # the class cannot be built here, so assume that it makes no state
        return False


def states_at_construction(
    optimizer: Optimizer, group: Mapping[str, Any]
) -> dict[Tensor, dict[str, Any]]:
    """Return the state that an optimizer's class makes at construction.

    Args:
        optimizer: The optimizer whose class and default arguments are used.
        group: The parameter group for which the state is made.

    Returns:
        For each parameter of the group, its state by name.

    Raises:
        UsageError: The class cannot be built from the optimizer's defaults.
    """
    cls: Any = type(optimizer)
    known = known_arguments(cls)
    given = {key: value for key, value in optimizer.defaults.items() if key in known}
    try:
        with undecorated():
            return dict(cls([dict(group)], **given).state)
    except Exception as error:
        raise UsageError(
            f"parameters join {cls.__name__}, which makes its state at construction, and it cannot "
            f"be built for them: {str(error)[:300]}.",
            "Its state for these parameters is needed before their first update.",
            "give the optimizer all parameters when you build it, also those that are frozen at "
            "first.",
        ) from error


def state_of_first_step(optimizer: Optimizer, shard: MasterShard, number: int) -> dict[str, Any]:
    """Return the state that an optimizer creates for a shard in its first step.

    The step runs on a parameter of zeros in place of the shard. It changes neither weights nor
    parameter groups.

    Args:
        optimizer: The inner optimizer, whose class and hyper-parameters are used.
        shard: The shard whose shape and dtype the state gets.
        number: The index of the shard's parameter group.

    Returns:
        The state by name, as in `optimizer.state[param]`.
    """
    twin = nn.Parameter(torch.zeros_like(shard.param, device=shard.master.update_device))
    twin.grad = torch.zeros_like(twin)
    held = [dict(group) for group in optimizer.param_groups]
    try:
        for place, group in enumerate(optimizer.param_groups):
            group["params"] = [twin] if place == number else []
        with torch.no_grad():
            raw_step(optimizer)()
        return dict(optimizer.state.pop(twin, {}))
    finally:
        for group, before in zip(optimizer.param_groups, held, strict=True):
            group.clear()
            group.update(before)
