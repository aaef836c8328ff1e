"""DeepSpeed's words that clients ask for by path and that are no more than words here.

Reached through the drop-in (`_dropin/deepspeed/`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum, IntEnum
from typing import Any

import torch
from torch import Tensor

from ..optim.sharded import ShardedOptimizer

# One optimizer serves every stage; clients ask isinstance() of DeepSpeed's two base classes.
DeepSpeedOptimizer = ZeROOptimizer = ShardedOptimizer

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"  # where accelerate leaves variables for other hosts; `run` reads none


class ZeroStageEnum(IntEnum):
    """The stages by DeepSpeed's names."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class ZeroParamStatus(Enum):
    """Whether a parameter is whole on this rank."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def zero_wrapper_for_fp_tensor_constructor(constructor: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
    """DeepSpeed's zero.Init wraps torch's constructors and transformers replaces the wrapper for a while.  Ours wraps
    none, so nothing calls this.
    """
    return constructor


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """A copy of nested dicts, lists and tuples in which each tensor has bytes of its own, so that no buffer around a
    view is saved with it.
    """
    if isinstance(item, Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, Mapping):
        return type(item)((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())  # type: ignore[call-arg]
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    return item
