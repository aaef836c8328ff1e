"""State that an optimizer has for a parameter before its first update over slices."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..base.errors import UsageError
from ..optimizers.plain_steps import undecorated
from ..optimizers.registry import known_arguments
from .updater import MasterShard, ParamOverlap


class InitialStates(Protocol):
    """State of whole parameters that is cut for shards."""

    def describe(self) -> list[str]:
        """Return one line per state, the same on ranks that have the same state."""
        ...

    def release_trained(self) -> None:
        """Drop the state of parameters that require a gradient.

        Call it after the state was cut for their shards.
        """
        ...

    def counters(self, overlap: ParamOverlap) -> Hashable:
        """Return what parameters must have in common to share a shard.

        These are the kinds of state and the scalar values.
        """
        ...

    def cut_for(self, shard: MasterShard) -> dict[str, Any]:
        """Return the state of a shard whose parameters agree in `counters`; empty without one.

        Raises:
            UsageError: A state cannot be cut.
        """
        ...


def makes_states(optimizer: Optimizer) -> bool:
    """Return whether an optimizer that was just built has made state.

    A rank without a slice returns whether it would have made state.
    """
    if optimizer.state or any(group["params"] for group in optimizer.param_groups):
        return bool(optimizer.state)
    if not optimizer.param_groups:
        return False
    probe = {**optimizer.param_groups[0], "params": [nn.Parameter(torch.zeros(1))]}
    try:
        return bool(states_at_construction(optimizer, probe))
    except UsageError:  # it cannot be built here, so nothing says that it makes state
        return False


def states_at_construction(
    optimizer: Optimizer, group: Mapping[str, Any]
) -> dict[Tensor, dict[str, Any]]:
    """Return the state that an optimizer's class creates at construction for a group.

    The class is built with the optimizer's arguments.

    Args:
        optimizer: The optimizer.
        group: The parameter group.

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
