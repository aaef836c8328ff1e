"""The additions of extensions to the rows of the table, one class for each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch

from ..precision.codecs import Signs
from ..precision.feedback import Feedback
from ..tiers.tier import Tier
from .describe import describe_spec
from .spec import Extra, S, ShardPlan, Spec

# Tiers that are the same memory if the training device is a CPU
MEMORY_OF_CPU = (Tier.DEVICE, Tier.HOST)


@dataclass(frozen=True)
class SecondCopy(Extra):
    """A second copy of a sharded weight, sharded over fewer ranks (hpZ).

    Gathers read it until the weight changes.

    Attributes:
        spec: The dtype and memory of the copy.
    """

    spec: Spec

    state = "weight"

    def promoted(self) -> Self:
        """Return the plan of the second copy for a weight that is switched to fp32."""
        return replace(self, spec=replace(self.spec, dtype=torch.float32))

    def words(self, plan: ShardPlan) -> str:
        """Return the placement, dtype and memory of the second copy, as text for reports."""
        return f" + {describe_spec(self.spec)} inner"


@dataclass(frozen=True)
class LateGradient(Extra):
    """Delayed updates: each rank also keeps its slice of the previous step's gradient.

    The update uses it while the current gradient is accumulated.
    """

    state = "grad"
    updates_late = True

    def words(self, plan: ShardPlan) -> str:
        """Return the placement, dtype and memory of the delayed gradient, as text for reports."""
        late = late_gradient_of(plan)
        assert late is not None
        return f" + {describe_spec(late)}"


@dataclass(frozen=True)
class ErrorsKept(Extra):
    """Error feedback: each rank keeps the rounding errors of its quantized gradients.

    Attributes:
        feedback: The codec of the errors, and when they are reset.
    """

    feedback: Feedback

    state = "grad"

    def words(self, plan: ShardPlan) -> str:
        """Return the codec in which errors are stored, as text for reports."""
        return f" + errors {self.feedback.codec}"


@dataclass(frozen=True)
class MomentaExchanged(Extra):
    """Ranks exchange quantized momenta instead of gradients (1-bit Adam).

    Attributes:
        codec: The codec of the momenta.
    """

    codec: Signs

    state = "grad"

    def words(self, plan: ShardPlan) -> str:
        """Return the codec of the exchanged momenta, as text for reports."""
        return f", momenta sent as {self.codec}"


def with_momenta_exchanged(plan: ShardPlan, codec: Signs | None) -> ShardPlan:
    """Return the plan of a group in which momenta are exchanged in place of gradients.

    Momenta are fp32.

    Args:
        plan: The placements and dtypes of the group's states. It is returned unchanged if the group
            has no gradient.
        codec: The codec of the momenta; None returns `plan` unchanged.
    """
    if codec is None or plan.grad is None:
        return plan
    grad = replace(plan.grad, dtype=torch.float32)
    return replace(plan, grad=grad, extras=(*plan.extras, MomentaExchanged(codec)))


def second_copy_of(plan: ShardPlan) -> Spec | None:
    """Return the planned second copy of a weight (hpZ), or None if there is none."""
    extra = plan.extra(SecondCopy)
    return extra.spec if extra is not None else None


def can_be_shared(plan: ShardPlan, device: torch.device) -> bool:
    """Return whether ranks of one host can use a sharded weight in shared memory.

    Gathers then copy nothing.

    Args:
        plan: The placement, dtype and memory of each state of the group.
        device: The device on which the ranks train.
    """
    weight = plan.weight
    memories = MEMORY_OF_CPU if device.type == "cpu" else (Tier.DEVICE,)
    is_plain = weight.wire is None and second_copy_of(plan) is None
    return weight.placement is S and is_plain and weight.tier in memories


def late_gradient_of(plan: ShardPlan) -> Spec | None:
    """Return the planned buffer of the previous gradient; None if updates are not delayed."""
    if plan.grad is None or plan.extra(LateGradient) is None:
        return None
    return replace(plan.grad, placement=S)


def feedback_of(plan: ShardPlan) -> Feedback | None:
    """Return the settings of error feedback for quantized gradients, or None without it."""
    extra = plan.extra(ErrorsKept)
    return extra.feedback if extra is not None else None


def momenta_codec_of(plan: ShardPlan) -> Signs | None:
    """Return the codec of exchanged momenta; None if gradients are reduced."""
    extra = plan.extra(MomentaExchanged)
    return extra.codec if extra is not None else None
