"""Recomputation of activations: `deepseek_zero.checkpointing` (not saving models)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from ..activations import recompute
from ..activations.recompute import RecomputeSettings, checkpoint
from ..base.errors import UsageError
from ..base.given import whole_number
from ..base.log import log_once
from ..config import Config
from ..config.load import load
from ..engine.settings import recompute_settings_of
from ..tiers.tier import Tier

__all__ = [
    "checkpoint",
    "configure",
    "is_configured",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
]

WORDS = (
    "partition_activations",
    "contiguous_checkpointing",
    "num_checkpoints",
    "checkpoint_in_cpu",
    "synchronize",  # without effect: it orders nothing that is not ordered already
    "profile",
)


class _Process:
    """The object that was passed last as an mpu."""

    mpu: ClassVar[Any] = None


def remember_mpu(mpu: Any) -> None:
    """Remember an object that says which rank along "tp" this is; None: the engine's mesh says."""
    _Process.mpu = mpu


def remembered_mpu() -> Any:
    """Return what was passed to `remember_mpu` last."""
    return _Process.mpu


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Do what `checkpoint` does, which is never reentrant; a `PipelineModule` tells the two
    apart.
    """
    return checkpoint(function, *args)


def configure(mpu_: Any = None, deepspeed_config: Any = None, **words: Any) -> None:
    """Say where `checkpoint` keeps its inputs, for the whole process.

    deepspeed_config: a dict, a path, JSON text or an engine's configuration, whose
    `activation_checkpointing` section is read; without it, what was configured before stays.
    words: DeepSpeed's (WORDS); each changes one thing, None
    leaves it.  mpu_: says where this rank is along "tp", for `model_parallel_cuda_manual_seed`;
    inputs are cut along an engine's own mesh.
    """
    unknown = [name for name in words if name not in WORDS]
    if unknown:
        raise UsageError(
            f"checkpointing.configure has no argument {', '.join(unknown)}.",
            fix=f"use {', '.join(WORDS)}.",
        )
    if mpu_ is not None:
        remember_mpu(mpu_)
    before = recompute.current()
    settings = _changed(settings_of(deepspeed_config), words)
    tp = before.tp if before is not None and settings.partitioned else None
    if settings.partitioned and tp is None:
        log_once(
            "partition_activations: inputs of checkpoints are not cut: there are no "
            "tensor-parallel ranks, or the engine was not told "
            "(activation_checkpointing.partition_activations)."
        )
    recompute.configure(settings, tp)


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Say whether tensor-parallel ranks keep shares of inputs, as
    `configure(partition_activations=...)` does.
    """
    configure(partition_activations=partition_activation)


def settings_of(deepspeed_config: Any) -> RecomputeSettings:
    """Return the settings of a configuration; without one, those in force."""
    if isinstance(deepspeed_config, Config):  # an engine's
        return recompute_settings_of(deepspeed_config)
    if deepspeed_config is not None:
        return recompute_settings_of(load(deepspeed_config).config)
    current = recompute.current()
    return current.settings if current is not None else RecomputeSettings()


def _changed(settings: RecomputeSettings, words: dict[str, Any]) -> RecomputeSettings:
    tier = settings.tier
    cpu = words.get("checkpoint_in_cpu")
    contiguous = words.get("contiguous_checkpointing")
    if cpu is not None:
        tier = Tier.HOST if cpu else None if tier is Tier.HOST else tier
    if contiguous is not None:
        tier = tier or Tier.DEVICE if contiguous else None if tier is Tier.DEVICE else tier
    count = words.get("num_checkpoints")
    profile = words.get("profile")
    partitioned = words.get("partition_activations")
    return replace(
        settings,
        tier=tier,
        checkpoints=settings.checkpoints
        if count is None
        else whole_number("configure", "num_checkpoints", count, 1),
        profile=settings.profile if profile is None else bool(profile),
        partitioned=settings.partitioned if partitioned is None else bool(partitioned),
    )


def is_configured() -> bool:
    """Return whether `configure` was called, or a living engine has a configuration of it."""
    return recompute.current() is not None


def reset() -> None:
    """Free the arena of offloaded inputs and learn its size anew.  Graphs that are alive keep
    theirs.
    """
    if (current := recompute.current()) is not None:
        current.reset()
