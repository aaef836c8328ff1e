"""Add parameters to an optimizer after it was built."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..base.errors import UsageError
from ..base.given import refuse
from ..base.log import log_once
from ..optimizers.registry import granularity_of
from ..sharding.param_group import ParamGroup
from ..sharding.sharded_parameter import owner_of
from .param_groups import are_updated_on_cpu, prefer_fused, with_replacements
from .shard_set import ShardSet, unknown_parameter


class AddedParams:
    """Adds parameters that were unfrozen, or that a program adds, to an optimizer.

    Args:
        shards: The shards of the optimizer.
        optimizer: A weak reference to the optimizer.
    """

    def __init__(self, shards: ShardSet, optimizer: Callable[[], object]) -> None:
        self._shards = shards
        self._optimizer = optimizer

    def refuse_regrouping(self) -> None:
        """Raise `UsageError` if an update policy does not support newly unfrozen parameters."""
        for policy in self._shards.policies:
            policy.refuse_joining(
                "a parameter that was frozen when the model was wrapped was unfrozen",
                "wrap the model with that parameter trained and freeze it then, or leave both keys "
                "out.",
            )

    def regroup(self, groups: Sequence[ParamGroup]) -> None:
        """Start to update the parameters of groups that have become trainable.

        Each parameter stays in the parameter group in which the optimizer received it.

        Args:
            groups: The new groups of the wrapped model. Frozen groups are skipped.
        """
        self._shards.finish()
        new = {id(group) for group in groups if group.trainable}
        for number, params in enumerate(self._shards.params_by_group):
            self._shards.take(number, [param for param in params if id(owner_of(param)) in new])
        self._shards.replan()
        for group in groups:
            group.optimizer = self._optimizer if group.trainable else group.optimizer
        known = {id(param) for params in self._shards.params_by_group for param in params}
        members = [member for group in groups if group.trainable for member in group.members]
        if unknown := [member.name for member in members if id(member.param) not in known]:
            log_once(
                f"'{unknown[0]}' and {len(unknown) - 1} more parameters were unfrozen and are "
                "in no group of the optimizer: they get gradients and are not updated.  Give it "
                "all parameters, or add_param_group.",
                logging.WARNING,
            )

    def add_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group with separate hyper-parameters.

        Args:
            param_group: Parameters of the wrapped model under "params", and their hyper-parameters.

        Raises:
            UsageError: `param_group` has no parameters of the wrapped model, one of them is already
                in a group, or a policy cannot add parameters. Nothing has changed.

        Note:
            Collective: every rank must call it, between two steps.
        """
        shards = self._shards
        given = param_group.get("params") if isinstance(param_group, Mapping) else None
        params = [given]
        if isinstance(given, Iterable) and not isinstance(given, Tensor):
            params = list(given)
        if not all(isinstance(param, Tensor) for param in params):
            raise refuse(
                "add_param_group",
                "param_group",
                param_group,
                'a dict with "params", a parameter or an iterable of parameters',
                'pass one, for example {"params": model.head.parameters(), "lr": 1e-4}.',
            )
        (group,) = with_replacements([{**param_group, "params": params}])
        names = {id(param) for params in shards.params_by_group for param in params}
        if any(id(param) in names for param in group["params"]):
            raise UsageError(
                "some parameters appear in more than one parameter group.",
                "Each element is updated once, by the hyper-parameters of one group.",
                "give add_param_group parameters that the optimizer does not have.",
            )
        known = set(map(id, shards.runtime.groups))
        for param in group["params"]:
            if id(owner_of(param)) not in known:
                raise unknown_parameter(param)
        for policy in shards.policies:
            policy.refuse_joining(
                "add_param_group() was called",
                "give the optimizer all its parameter groups before the model is wrapped, or leave "
                "both keys out.",
            )
        shards.finish()
        shards.inner.add_param_group({**group, "params": []})
        shards.uncut.append(granularity_of(shards.inner, group) != "element")
        shards.params_by_group.append(group["params"])
        shards.shards_by_group.append([])
        shards.names_by_group.append([])
        prefer_fused(shards.inner, on_cpu=are_updated_on_cpu(shards.runtime))
        shards.take(len(shards.params_by_group) - 1, group["params"])
        shards.replan()
