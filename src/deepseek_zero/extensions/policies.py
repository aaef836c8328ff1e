"""Chooses the update policies of an optimizer from the settings of a run."""

from __future__ import annotations

from dataclasses import dataclass

from torch.optim import Optimizer

from .. import extensions, optimizers
from ..base.errors import UsageError
from ..optim.step_settings import StepSettings
from ..optim.update_policy import UpdatePolicy
from ..sharding.runtime import Runtime


@dataclass(frozen=True)
class PolicySettings:
    """The settings that decide which update policies an optimizer has.

    Attributes:
        speculates: Whether to update some units during backward, before the gradient norm is known.
        delay_after: The number of updates after which updates are delayed by a step; None means
            never.
        precision_window: The number of steps after which gradients are examined, to choose the
            units that compute in fp32. None if units do not change their precision.
    """

    speculates: bool = False
    delay_after: int | None = None
    precision_window: int | None = None


def policies_of(
    settings: PolicySettings, step: StepSettings, runtime: Runtime, cls: type[Optimizer]
) -> list[UpdatePolicy]:
    """Create the update policies of an optimizer, in the order in which their hooks run.

    Args:
        settings: The settings that enable policies.
        step: The settings of the optimizer step, such as the clipping norm.
        runtime: The runtime of the wrapped model.
        cls: The class of the optimizer that computes the updates.

    Returns:
        The enabled policies; empty if every step updates all weights from its own gradients.

    Raises:
        UsageError: A policy does not support the settings of the step or the optimizer's class.
    """
    found: list[UpdatePolicy] = []
    if runtime.comm_ctx.comm.size > 1 and issubclass(cls, optimizers.OneBitAdam):
        exchange = extensions.MomentumSteps(
            clips=step.clips,
            keeps_grads=step.keep_grads,
            adapts_precision=settings.precision_window is not None,
        )
        found.append(exchange)
    if step.can_defer:
        found.append(extensions.DeferredUpdate())
    if step.by_unit and step.keep_grads:
        raise UsageError(
            "super_offload and delayed_update_after cannot be used with ZeroOptimizer.",
            "It keeps gradients until zero_grad(), and with them a step may be repeated: updates "
            "have no other time.",
            "use initialize() and engine.step(), or leave both keys out.",
        )
    if settings.speculates and not extensions.works_by_shard(cls):
        raise extensions.unsupported_optimizer(cls)
    delay = None
    if settings.delay_after is not None:
        delay = extensions.DelayedUpdate(runtime.trained_groups, settings.delay_after)
    if step.by_unit and extensions.works_by_shard(cls):
        early = extensions.SpeculativeUpdate(delay, step.undo_bytes, speculates=settings.speculates)
        found.append(early)
    if delay is not None:
        found.append(delay)
    if settings.precision_window is not None:
        found.append(extensions.AdaptivePrecision(runtime, settings.precision_window))
    feedback = runtime.settings.compression.feedback
    if feedback is not None:
        found.append(extensions.ErrorFeedbackSteps(feedback))
    return found
