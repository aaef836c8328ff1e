"""`deepspeed.checkpointing`: activation checkpointing under DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...activations.recompute import RecomputeSettings
from ...api import checkpointing
from ...api.checkpointing import (
    checkpoint,
    is_configured,
    non_reentrant_checkpoint,
    partition_activations_in_checkpoint,
    reset,
    settings_of,
)
from ...base.errors import UsageError
from ...config import Config
from ...config.load import load
from ...tiers.tier import Tier
from .random_streams import (
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
    model_parallel_reconfigure_tp_seed,
)

__all__ = [
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
]

# DeepSpeed has these as module variables, which programs read.
VARIABLES: dict[str, Callable[[RecomputeSettings], Any]] = {
    "PARTITION_ACTIVATIONS": lambda settings: settings.partitioned,
    "CONTIGUOUS_CHECKPOINTING": lambda settings: settings.tier is Tier.DEVICE,
    "CPU_CHECKPOINT": lambda settings: settings.tier is Tier.HOST,
    "PROFILE_TIME": lambda settings: settings.profile,
    "SYNCHRONIZE": lambda settings: False,
    "num_layers": lambda settings: settings.checkpoints,
    "mpu": lambda settings: None,
    "deepspeed_checkpointing_enabled": lambda settings: is_configured(),
    # An engine offloads inputs to its own arena instead.
    "_cpu_offload_engine": lambda settings: None,
}


def __getattr__(name: str) -> Any:
    if name in VARIABLES:
        return VARIABLES[name](settings_of(None))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def configure(mpu_: Any = None, deepspeed_config: Any = None, **words: Any) -> None:
    """Configure activation checkpointing for the whole process.

    This function calls `deepseek_zero.checkpointing.configure`, after one more check of its
    arguments. As in `deepspeed.initialize`, unknown keys of the configuration cause a warning.

    Args:
        mpu_: An object with the getters of a Megatron mpu. `model_parallel_cuda_manual_seed` reads
            this rank's tensor-parallel index from it. None keeps the object of an earlier call.
        deepspeed_config: A configuration, of which only the section `activation_checkpointing` is
            used. With None, the current settings are changed.
        **words: DeepSpeed's keyword arguments, which override the configuration.

    Raises:
        ConfigError: `deepspeed_config` is invalid.
        NotBuiltError: The only problems of `deepspeed_config` are keys that are not implemented.
        StorageError: The directory for offloaded inputs cannot be used.
        UsageError: An argument is unknown or invalid. As in DeepSpeed, `contiguous_checkpointing`
            also requires `num_checkpoints` or `deepspeed_config`.
    """
    contiguous = words.get("contiguous_checkpointing") and words.get("num_checkpoints") is None
    if contiguous and deepspeed_config is None:
        raise UsageError(
            "Must specify the number of layers with contiguous memory checkpointing",
            "DeepSpeed allocates memory for this number.",
            "pass num_checkpoints=the number of layers, or leave contiguous_checkpointing out.",
        )
    if deepspeed_config is not None and not isinstance(deepspeed_config, Config):
        deepspeed_config = load(deepspeed_config, unknown="warn").config
    checkpointing.configure(mpu_, deepspeed_config, **words)
