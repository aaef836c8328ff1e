"""Save, load and reset all states of the inner optimizer, and complete its delayed updates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..base.errors import UsageError
from ..comm.collectives import propagate_errors
from ..optimizers.plain_steps import undecorated
from ..precision.compact import StochasticRounding
from .shard_set import ShardSet
from .step import Step


def reset_states(shards: ShardSet) -> dict[Tensor, dict[str, Any]]:
    """Reset the inner optimizer to the state before its first step.

    Args:
        shards: The shards that the optimizer updates.

    Returns:
        The previous state of each shard, by its parameter.
    """
    shards.finish()
    for shard in shards.all():
        shard.group.guard.before_write()
    before = dict(shards.inner.state)
    shards.inner.state.clear()
    shards.moments.forget()
    return before


def discard_updates(shards: ShardSet) -> None:
    """Discard all unfinished updates, because other states are about to be loaded."""
    shards.updater.guard.refuse_mixture()
    for policy in shards.policies:
        policy.discard()


def apply_owed(step: Step) -> None:
    """Apply the gradients of the last step if a policy delayed its update to the next step.

    Args:
        step: Runs the steps of the optimizer.

    Raises:
        UsageError: A backward has run since the last step.

    Note:
        Collective: every rank must call it, between two steps.
    """
    if not any(policy.owes_update for policy in step.policies):
        return
    runtime = step.runtime
    if runtime.step.backwards:
        raise UsageError(
            "flush was called between a backward and its step.",
            "The delayed gradient would overwrite the accumulated one.",
            "call it after step().",
        )
    step.shards.finish()
    with torch.no_grad(), propagate_errors(runtime.comm):
        runtime.comm.barrier("flush")  # from here on no rank computes with the weights
        step.update_by(None)
        runtime.backward.drop_grads()


def load_states(shards: ShardSet) -> dict[Tensor, dict[str, Any]]:
    """Run pending updates, fetch offloaded moments, and return the states of all shards.

    The result is ordered by shard, not by the order in which shards were updated.

    Args:
        shards: The shards that the optimizer updates.

    Raises:
        StorageError: A disk failed.
        UsageError: An earlier update failed.
    """
    shards.finish()
    states = shards.inner.state
    for shard in shards.all():
        shards.moments.load(shard, working=False)
        if shard.param in states:
            states[shard.param] = states.pop(shard.param)
    return states


def saved_states(shards: ShardSet) -> dict[str, Any]:
    """Return this rank's state of the inner optimizer, with the ranges of its shards."""
    load_states(shards)
    stretches = [
        [(shard.names[0], shard.start, shard.stop) for shard in of_group]
        for of_group in shards.shards_by_group
    ]
    # Not `Optimizer.state_dict`, because the class of the inner optimizer may override it
    inner = type(shards.inner).state_dict(shards.inner)
    return {
        "inner": inner,
        "updates": shards.updater.updates,
        "stretches": stretches,
        "identity": _identity(shards),
    }


def load_saved_states(shards: ShardSet, state: dict[str, Any]) -> None:
    """Load the result of `saved_states` from the same rank, world size and stage.

    Args:
        shards: The shards whose states are replaced.
        state: The result of `saved_states`.

    Raises:
        UsageError: The state belongs to another optimizer, model, rank, world size or stage, or is
            not a result of `saved_states`. No state has changed.
    """
    _refuse_foreign(shards, state)
    discard_updates(shards)
    shards.updater.updates = int(state["updates"])
    reset_states(shards)
    shards.cut_as(state.get("stretches"))
    load_inner(shards, state["inner"])


def _identity(shards: ShardSet) -> dict[str, Any]:
    """Return what must be equal so that the states of this rank's shards fit, by its name."""
    plan = shards.runtime.plan
    shapes = {
        member.name: tuple(member.param.shape)
        for group in shards.runtime.groups
        for member in group.members
    }
    return {
        "optimizer": type(shards.inner).__name__,
        "stage": plan.settings.stage,
        "number of ranks": plan.mesh.world_size,
        "rank": plan.mesh.rank,
        "parameters": [
            [(name, shapes.get(name)) for name in names] for names in shards.names_by_group
        ],
    }


def _refuse_foreign(shards: ShardSet, state: Any) -> None:
    """Raise an error if a state does not belong to the shards of this rank."""
    fix = (
        "load the state on the rank that saved it, with the same model, optimizer, number of ranks "
        "and stage; engine.save_checkpoint() writes states that fit any number of ranks and stage."
    )
    if not isinstance(state, dict) or not {"inner", "updates"} <= state.keys():
        raise UsageError(
            "load_state_dict() got what state_dict() of a sharded optimizer did not return.",
            "The states of a sharded optimizer belong to the slices of one rank.",
            fix,
        )
    saved = state.get("identity", {})
    for key, here in _identity(shards).items():
        if key not in saved or saved[key] == here:
            continue
        difference = f"{key} {saved[key]!r}, and this optimizer has {here!r}"
        if key == "parameters":
            difference = "other parameters, shapes or parameter groups than this optimizer"
        raise UsageError(
            f"the optimizer state to load has {difference}.",
            "The states belong to the slices of one rank, and would be applied to other elements.",
            fix,
        )


def load_inner(shards: ShardSet, state: dict[str, Any]) -> None:
    """Load states into the inner optimizer, and move them to their offload memories.

    Args:
        shards: The shards whose states are replaced. A shard that `state` does not contain keeps
            its state.
        state: A state dict of the inner optimizer.
    """
    kept = dict(shards.inner.state)
    with undecorated():
        type(shards.inner).load_state_dict(shards.inner, state)
    loaded = set(shards.inner.state)
    shards.inner.state.update({param: each for param, each in kept.items() if param not in loaded})
    for shard in shards.all():
        if shard.param in loaded:
            shards.moments.offload(shard, StochasticRounding(shards.updater.updates))
