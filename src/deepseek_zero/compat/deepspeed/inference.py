"""DeepSpeed's `init_inference`: a model in one dtype and in evaluation mode, without kernels."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...base.errors import ConfigError, NotBuiltError
from ...base.log import log_once
from .accelerator import get_accelerator

_DTYPES = {
    **dict.fromkeys(("fp16", "float16", "half"), torch.float16),
    **dict.fromkeys(("fp32", "float32", "float"), torch.float32),
    **dict.fromkeys(("bf16", "bfloat16", "bfloat"), torch.bfloat16),
    "int8": torch.int8,
}
# Options that select DeepSpeed's kernels or their memory, but change no result
_WITHOUT_EFFECT = frozenset(
    "replace_with_kernel_inject kernel_inject enable_cuda_graph use_triton triton_autotune zero "
    "max_out_tokens max_tokens min_out_tokens min_tokens injection_policy injection_dict "
    "injection_policy_tuple triangular_masking tm return_tuple transposed_mode base_dir".split()
)
_ACCEPTED = frozenset("dtype keep_module_on_host replace_method config args".split())
_RANKS = frozenset("tensor_parallel tp mp_size moe ep_size moe_experts training_mp_size".split())
_NOT_BUILT = frozenset(
    "mpu quant checkpoint checkpoint_config ckpt_config save_mp_checkpoint_path set_empty_params "
    "ep_group expert_group ep_mp_group expert_mp_group moe_type".split()
)


class InferenceEngine(nn.Module):
    """A model for inference. Attributes that the engine does not have are read from the model.

    Args:
        model: The model, which is changed in place.
        dtype: The dtype of the parameters and floating-point buffers.
        device: The device of the model; None leaves the model where it is.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: str | None = None) -> None:
        super().__init__()
        self.module = model.to(device=device, dtype=dtype)
        self.eval()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model's forward with the same arguments and return its output."""
        return self.module(*inputs, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def init_inference(model: nn.Module, config: Any = None, **kwargs: Any) -> InferenceEngine:
    """Return an engine that runs a model for inference, with a whole copy on each rank.

    Options that only select DeepSpeed's kernels, or the number of ranks that share a model, have no
    effect and cause a warning.

    Args:
        model: The model. It is cast, moved to this rank's device and set to evaluation mode.
        config: The options as a dict, or the path of a JSON file.
        **kwargs: More options. As in DeepSpeed, the default of `dtype` is `torch.float16`.

    Returns:
        The engine.

    Raises:
        ConfigError: An option is unknown, or differs between `config` and `kwargs`.
        NotBuiltError: An option requires quantization or a checkpoint to load.
    """
    if isinstance(config, str | PathLike):
        config = json.loads(Path(config).read_text(encoding="utf-8"))
    options: dict[str, Any] = {**kwargs, **(config or {})}
    for name, value in options.items():
        if kwargs.get(name, value) != value:
            raise ConfigError(f"init_inference got two values of {name}: {value!r} in config.")
        if name not in _WITHOUT_EFFECT | _ACCEPTED | _RANKS | _NOT_BUILT:
            raise ConfigError(f"init_inference has no option {name}.", fix="leave it out.")
        if name in _NOT_BUILT and value:
            raise _not_built(name, value)
    if named := sorted(name for name in options if name in _WITHOUT_EFFECT and options[name]):
        log_once(
            f"init_inference ignores {', '.join(named)}: the model runs as it is, with PyTorch's "
            "kernels.",
            logging.WARNING,
        )
    if split := sorted(name for name in options if name in _RANKS and _size(options[name]) > 1):
        log_once(
            f"init_inference does not split the model ({', '.join(split)}): each rank runs a whole "
            "copy, with the same results.",
            logging.WARNING,
        )
    dtype = options.get("dtype", torch.float16)
    if isinstance(dtype, str):
        dtype = _DTYPES.get(dtype.removeprefix("torch."), dtype)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise _not_built("dtype", dtype)
    device = None
    if not options.get("keep_module_on_host"):
        device = get_accelerator().current_device_name()
    return InferenceEngine(model, dtype, device)


def _size(value: Any) -> int:
    """Return the number of ranks that an option requests, which is 1 by default."""
    if isinstance(value, Mapping):
        value = value.get("tp_size", value.get("ep_size", 1))
    elif isinstance(value, list):
        value = max(value, default=1)
    return int(getattr(value, "tp_size", value) or 1)


def _not_built(name: str, value: Any) -> NotBuiltError:
    return NotBuiltError(
        f"init_inference({name}={value!r}) is not supported.",
        "Each rank runs a whole copy of the model in fp32, bf16 or fp16, with PyTorch's kernels.",
        "leave it out; an engine of initialize() with eval() runs sharded models.",
    )
