"""Activation checkpointing: `deepseek_zero.checkpointing` (not saving models)."""

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
    "synchronize",  # no effect: all operations are ordered already
    "profile",
)


class _Process:
    """The object that was last passed as `mpu_` in this process."""

    mpu: ClassVar[Any] = None


def remember_mpu(mpu: Any) -> None:
    """Store an object that returns this rank's position on the mesh axis "tp".

    Args:
        mpu: An object with the getters of a Megatron mpu. With None, the engine's mesh is used.
    """
    _Process.mpu = mpu


def remembered_mpu() -> Any:
    """Return the object that was last passed to `remember_mpu`."""
    return _Process.mpu


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function without storing its activations, and recompute them in backward.

    The result is that of `checkpoint`, which is never reentrant either. The two functions are
    separate objects because the engine of a `PipelineModule` checks which of them the model uses.

    Args:
        function: Function to call in forward, and a second time in backward.
        *args: Arguments of the function; tensors among them are kept for backward.

    Returns:
        The return value of `function`.
    """
    return checkpoint(function, *args)


def configure(mpu_: Any = None, deepspeed_config: Any = None, **words: Any) -> None:
    """Configure activation checkpointing for the whole process.

    The settings determine, among other things, where `checkpoint` stores the inputs of functions.
    They replace those of an earlier call or of an engine. Memory that was reserved for offloaded
    inputs is freed as soon as no autograd graph needs it.

    Args:
        mpu_: An object with the getters of a Megatron mpu. `model_parallel_cuda_manual_seed` reads
            this rank's tensor-parallel index from it. Sharding of inputs uses the engine's mesh
            instead. None keeps the object of an earlier call.
        deepspeed_config: A dict, a path, JSON text or an engine's configuration. Only its section
            `activation_checkpointing` is used. With None, the current settings are changed.
        **words: DeepSpeed's keyword arguments: `partition_activations`,
            `contiguous_checkpointing`, `num_checkpoints`, `checkpoint_in_cpu`, `synchronize` and
            `profile`. `synchronize` has no effect. Each other argument overrides one setting, and
            None leaves the setting unchanged. `partition_activations` can disable the sharding
            that an engine has enabled, and enable it again. If it is true and no engine has enabled
            sharding, the inputs stay whole, and rank 0 logs a message.

    Raises:
        ConfigError: `deepspeed_config` is invalid.
        NotBuiltError: The only problems of `deepspeed_config` are keys that are not implemented.
        StorageError: The directory for offloaded inputs cannot be used.
        UsageError: An argument is unknown, `num_checkpoints` is not a positive integer, or the
            policy of `deepspeed_config` names an operator that torch does not have.
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
    tp = before.tp if before is not None else None
    if settings.partitioned and tp is None:
        log_once(
            "partition_activations: inputs of checkpoints are not cut: there are no "
            "tensor-parallel ranks, or the engine was not told "
            "(activation_checkpointing.partition_activations)."
        )
    recompute.configure(settings, tp)


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Set whether the inputs of activation checkpoints are sharded over tensor-parallel ranks.

    The call is equivalent to `configure(partition_activations=partition_activation)`. It can
    disable the sharding that an engine has enabled with the configuration key
    `activation_checkpointing.partition_activations`, and enable it again. If the argument is true
    and no engine has enabled sharding, the inputs stay whole, and rank 0 logs a message.

    Args:
        partition_activation: Whether to shard the inputs.
    """
    configure(partition_activations=partition_activation)


def settings_of(deepspeed_config: Any) -> RecomputeSettings:
    """Return the activation-checkpointing settings of a configuration.

    Args:
        deepspeed_config: A dict, a path, JSON text or an engine's configuration. With None, the
            current settings of this process are returned.
    """
    # The `config` of an engine of the drop-in is a dict, which has the checked one as an attribute
    deepspeed_config = getattr(deepspeed_config, "config", deepspeed_config)
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
    changed = replace(settings, tier=tier)
    count = words.get("num_checkpoints")
    if count is not None:
        count = whole_number("configure", "num_checkpoints", count, 1)
        changed = replace(changed, checkpoints=count)
    profile = words.get("profile")
    if profile is not None:
        changed = replace(changed, profile=bool(profile))
    partitioned = words.get("partition_activations")
    if partitioned is not None:
        changed = replace(changed, partitioned=bool(partitioned))
    return changed


def is_configured() -> bool:
    """Return whether `configure` or an engine that still exists has configured checkpointing."""
    return recompute.current() is not None


def reset() -> None:
    """Free the memory that is reserved for the offloaded inputs of checkpoints.

    The next forward reserves new memory. If the number of checkpoints is not configured, that
    forward also determines the required size. Autograd graphs that still exist keep their inputs.
    The call has no effect if checkpointing is not configured.
    """
    if (current := recompute.current()) is not None:
        current.reset()
