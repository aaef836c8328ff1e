"""Decide the placement, dtype and memory of a parameter group's four states."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..precision.codecs import Cast, Codec
from ..tiers.tier import Tier
from .extras import ErrorsKept, LateGradient, SecondCopy
from .plan_settings import Compression, PlanSettings
from .spec import COLUMNS, Extra, P, R, S, ShardPlan, Spec


def predivide_of(settings: PlanSettings, ranks: int) -> float:
    """Return the number by which gradients are divided before they are summed.

    The sum is then divided by the rest, so that the result is the mean.

    Args:
        settings: The ZeRO stage, dtypes, sizes and memories of the run.
        ranks: The number of ranks whose gradients are added.
    """
    return float(ranks) if settings.prescale else settings.predivide


def gradient_wires(
    settings: PlanSettings, *, is_coded: bool, near: int
) -> tuple[Codec | None, Codec | None]:
    """Return the codecs of gradient messages: in general, and within a host.

    The second one is used if gradients are summed within each host first. None means that gradients
    are sent in the dtype in which they are collected.

    Args:
        settings: The ZeRO stage, dtypes, sizes and memories of the run.
        is_coded: Whether the configured compression applies to the parameters.
        near: The number of ranks per host if gradients are summed within each host first, else 1.
    """
    compression = settings.compression if is_coded else Compression()
    reduced = Cast(settings.policy.reduce) if settings.policy.reduce is not None else None
    inside = compression.inside if near > 1 and compression.gradients is not None else None
    return compression.gradients or reduced, inside


def plan_for(
    settings: PlanSettings,
    dtype: torch.dtype,
    *,
    trainable: bool,
    persistent: bool,
    ranks: int,
    is_coded: bool = False,
    near: int = 1,
) -> ShardPlan:
    """Decide the placement, dtype and memory of weight, gradient, main weight and moments.

    The result applies to parameters of one dtype. On a single rank, the gradient is not sharded at
    any ZeRO stage, unless it is offloaded. Offloaded weights have no second copy (hpZ), because it
    would be on the device.

    Args:
        settings: The ZeRO stage, dtypes, sizes and memories of the run.
        dtype: The dtype with which the parameters were built.
        trainable: Whether the parameters require gradients, so there are a gradient and optimizer
            states.
        persistent: Whether the parameters stay gathered at stage 3, because they are small.
        ranks: The number of ranks over which states are sharded.
        is_coded: Whether the configured compression applies to the parameters.
        near: The number of ranks per host if gradients are summed within each host first, else 1.

    Returns:
        The placement, dtype, memory and codec of the weight, gradient, main weight and moments.
    """
    weight_place, grad_place, state_place = COLUMNS[
        2 if persistent and settings.stage == 3 else settings.stage
    ]
    weight_tier = settings.weight_tier if weight_place is S else Tier.DEVICE
    compression = settings.compression if is_coded else Compression()
    sends_changes = (
        trainable and weight_place is R and state_place is S and compression.weights is not None
    )
    coded_as = compression.weights if weight_place is S or sends_changes else None
    weight = Spec(weight_place, settings.policy.weight_dtype(dtype), weight_tier, coded_as)
    if weight_place is S and not trainable and compression.frozen is not None:
        weight = replace(weight, wire=compression.frozen, stored_as=compression.frozen)
    extras: list[Extra] = []
    if weight_place is S and weight_tier is Tier.DEVICE and 1 < settings.secondary_ranks < ranks:
        # The second copy holds decoded values, and is gathered among neighbors.
        extras.append(SecondCopy(replace(weight, wire=None, stored_as=None)))
    if not trainable:
        return ShardPlan(weight, extras=tuple(extras))
    policy = settings.policy
    tier = settings.state_tier
    moments = Spec(state_place, policy.master_dtype(weight.dtype), tier)
    master = moments if sends_changes else replace(moments, dtype=policy.stored_dtype(weight.dtype))
    is_weight = master.dtype == weight.dtype and not sends_changes
    if is_weight:
        master = replace(master, tier=weight.tier)
    in_place = grad_place is P or settings.reduces_once or (ranks == 1 and tier is Tier.DEVICE)
    grad_dtype = policy.grad_dtype(weight.dtype, settings.accumulation * settings.row_parts)
    wire, inside = gradient_wires(settings, is_coded=is_coded, near=near)
    place, tier_of_grad = (P, Tier.DEVICE) if in_place else (S, tier)
    grad = Spec(place, grad_dtype, tier_of_grad, wire, wire_inside=inside)
    kept = policy.moments if moments.dtype == torch.float32 else "fp32"
    if settings.delayed_update:
        extras.append(LateGradient())
    if compression.feedback is not None:
        extras.append(ErrorsKept(compression.feedback))
    return ShardPlan(weight, grad, master, moments, is_weight, kept, tuple(extras))
