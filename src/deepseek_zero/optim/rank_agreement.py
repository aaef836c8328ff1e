"""Check that the ranks agree on their optimizers and on the gradients of a step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..base.errors import UsageError
from ..base.log import log_once
from ..comm.agreement import agree, agree_on, values_in
from ..comm.collectives import Comm
from ..sharding.runtime import Runtime
from .shard_set import ShardSet
from .step_message import StepMessage
from .verdict import (
    SCHEDULED,
    StepFlags,
    Verdict,
    absent_among,
    agree_on_norm,
    root_of,
)


def compare_optimizers(shards: ShardSet) -> None:
    """Raise an error on every rank if the optimizers of the ranks differ.

    The number of shards may differ between ranks.

    Args:
        shards: The shards of this rank's optimizer.

    Note:
        Collective: every rank must call it.
    """
    values = values_in(shards.settings, "step")
    if shards.scaler is not None:
        values |= values_in(shards.scaler.settings, "loss scaling")
    values["optimizer"] = type(shards.inner).__name__
    for number, group in enumerate(shards.inner.param_groups):
        for key, value in group.items():
            if isinstance(value, (bool, int, float, str, tuple)):
                values[f"{key} of parameter group {number}"] = value
    if shards.initial_states is not None:
        for number, line in enumerate(shards.initial_states.describe()):
            values[f"initial state {number}"] = line
    agree_on(
        shards.runtime.comm,
        values,
        "their optimizer",
        "Each rank updates its slices of the same tensors, so one rule must hold for all.",
        "build the optimizer and the configuration from the same arguments on every rank.",
    )


class IdleReport:
    """Warns of steps in which no rank has a gradient, so nothing is updated.

    Args:
        runtime: The runtime of the wrapped model.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._idle_steps = 0

    def report(self, verdict: Verdict, step: int) -> None:
        """Log the 1st, 2nd, 4th, 8th ... of these steps.

        Args:
            verdict: The gradient norm and the other facts that all ranks agreed on.
            step: The number of the step.

        Raises:
            UsageError: A rank's loss had no graph; raised on all ranks.
        """
        self._idle_steps += 1
        if verdict.flags.any_graphless:
            self._runtime.backward.discard_step()
            raise UsageError(
                f"step {step}: no rank's loss required a gradient, so there is nothing to update "
                "with.",
                "The loss was computed under torch.no_grad(), detached, or made of parameters that "
                "are frozen.",
                "compute it from the model's outputs with gradients on; a rank alone may be "
                "without.",
            )
        if self._idle_steps & (self._idle_steps - 1) == 0:
            log_once(
                f"step {step}: no gradient has reached the model since the last step, on any "
                "rank, so nothing was updated.\n  What to do: call backward before step(); leave "
                "out both where a batch is passed over.",
                logging.WARNING,
            )


def refuse_disagreement(shards: ShardSet, verdict: Verdict) -> None:
    """Raise an error on every rank if the ranks contradict each other.

    Call it before any state changes.

    Args:
        shards: The shards of this rank's optimizer, whose parameter names appear in messages.
        verdict: The facts that the ranks exchanged.

    Raises:
        ModelMismatchError: The ranks differ in the parameters without gradients, or in the values
            that schedules set.
        UsageError: A rank changed gradients, and others arrived after their sum.

    Note:
        Collective: every rank must call it.
    """
    comm = shards.runtime.comm
    if verdict.facts_differ:
        agree(
            comm,
            absent_among(shards.runtime.trained_groups) or ["none"],
            "which parameters have no gradient",
            "A parameter is frozen, or its gradient dropped (`grad = None`, zero_grad), on all "
            "ranks or on none: each rank updates its slices of the same tensors.",
            "decide it from what all ranks know (the step, an all-reduced loss), the same "
            "everywhere.",
        )
        agree_on(
            comm,
            {
                f"{key} of parameter group {number}": group[key]
                for number, group in enumerate(shards.inner.param_groups)
                for key in SCHEDULED
                if key in group
            },
            "what their schedules have set",
            "Each rank updates its slices of the same tensors, so the same numbers must hold on "
            "all ranks.",
            "compute them from what all ranks know: the step, or a metric that was all-reduced "
            "before the schedule reads it.",
        )
    if verdict.flags.any_edited and verdict.flags.any_late:
        raise UsageError(
            "gradients were changed in a step in which some came after their sum.",
            "They are added now, behind what the program saw when it changed them.",
            "use a block's parameters in one checkpoint (or none) of the forward, or leave the "
            "gradients as they are.",
        )


Measure = Callable[[Runtime, list[dict[str, Any]], StepMessage], Verdict]


def measure_of(runtime: Runtime) -> Measure:
    """Return the function that computes the gradient norm of a model."""
    has_pieces = runtime.comm.whole is not runtime.comm
    return agree_over_pieces if has_pieces else agree_on_norm


def agree_over_pieces(
    runtime: Runtime, options: list[dict[str, Any]], extra: StepMessage
) -> Verdict:
    """Compute the gradient norm of all model pieces, and exchange the other facts about the step.

    The pieces are the stages of a pipeline and the parts of tensor parallelism.

    Args:
        runtime: The runtime of this rank's piece.
        options: The parameter groups of the optimizer, whose scheduled values are compared.
        extra: Fields that are sent with the norm; the same fields on every rank.

    Returns:
        The norm and the facts, equal on every rank of the world.

    Note:
        Collective over the world.
    """
    comm = runtime.comm
    verdict = agree_on_norm(runtime, options, extra)
    counted = zip(runtime.trained_groups, verdict.by_group, strict=True)
    message = StepMessage()
    message.add("flags", verdict.flags)
    message.add("square", [sum(square for group, square in counted if group.planned.is_counted)])
    message.add_all(extra)
    fields = message.exchange(comm.whole, "gradient norm of all pieces")
    # `pieces` has the first rank of each model piece.
    total = sum(fields["square"][first][0] for first in comm.pieces)
    flags = StepFlags.of_ranks(fields["flags"])
    return replace(verdict, norm=root_of(total), flags=flags, fields=fields)


def equalise_edits(runtime: Runtime) -> None:
    """Send gradients that the program changed to the ranks that hold the same slices.

    Args:
        runtime: The runtime of the wrapped model.

    Note:
        Collective: every rank must call it.
    """
    groups = runtime.trained_groups
    for each in [group.grad_view.edits.equalise(group.members[0].name) for group in groups]:
        each.wait()


def comm_of_units(runtime: Runtime) -> Comm:
    """Return the communicator of the ranks that hold parts of the same units.

    These are all ranks except those of other pipeline stages.

    Args:
        runtime: The runtime of the wrapped model.
    """
    return runtime.comm if "pp" in runtime.comm.along else runtime.comm.whole
