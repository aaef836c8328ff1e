"""DeepSpeed's `deepspeed.utils`, in addition to `deepseek_zero.utils`."""

from __future__ import annotations

import logging
import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...api.utils import get_log_level_from_string, log_dist
from ...base.log import logger
from ...base.nested import map_inputs
from ...extensions.gathered_parameters import GatheredParameters

_SAID: set[str] = set()


def log_dist_once(
    message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO
) -> None:
    """Log a message as `log_dist` does, but only once.

    Args:
        message: Text to log.
        ranks: Ranks that log; None for all.
        level: Log level.
    """
    if message not in _SAID:
        _SAID.add(message)
        log_dist(message, ranks, level)


def warning_once(message: str) -> None:
    """Log a warning, but only once."""
    log_dist_once(message, level=logging.WARNING)


def get_current_level() -> int:
    """Return the level of the library's logger."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Return whether the logger's level is at most the given one."""
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


@dataclass(eq=False)
class OnDevice:
    """Build modules on a device and in a dtype inside a `with` block.

    The device "meta" creates shapes without values. To train a model that does not fit into memory,
    use zero.Init, which gives each rank its shards.

    Args:
        dtype: Default dtype of floating-point tensors.
        device: Device on which tensors are created.
        enabled: If False, the block does nothing.
    """

    dtype: torch.dtype
    device: str | torch.device = "meta"
    enabled: bool = True

    def __post_init__(self) -> None:
        self._inside = ExitStack()

    def __enter__(self) -> OnDevice:
        if self.enabled:
            device = torch.device(self.device)  # raises before the dtype changes
            before = torch.get_default_dtype()
            self._inside.callback(torch.set_default_dtype, before)
            torch.set_default_dtype(self.dtype)
            self._inside.enter_context(device)
        return self

    def __exit__(self, *error: object) -> None:
        self._inside.close()


def zero_wrapper_for_fp_tensor_constructor(
    constructor: Callable[..., Any], *_: Any, **__: Any
) -> Callable[..., Any]:
    """Return the constructor itself.

    DeepSpeed's zero.Init wraps torch's constructors, and transformers temporarily replaces the
    wrapper. This library does not wrap them.
    """
    return constructor


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Copy the tensors in nested dicts, lists and tuples.

    Otherwise torch.save would write the whole storage of a tensor that is a view.

    Args:
        item: Tensor, or nested dicts, lists and tuples of tensors.
        device: Device of the copies.

    Returns:
        The same structure with the copies.
    """
    return map_inputs(item, lambda tensor: tensor.detach().to(device, copy=True))


@contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """Gather all weights of an engine for several forward passes.

    Yields the engine. The weights are read-only.

    Note:
        Collective: every rank must call it.
    """
    offload = getattr(getattr(model, "optimizer", None), "parameter_offload", None)
    if offload is not None:
        offload.forward_hooks = []
    try:
        with GatheredParameters(model):
            yield model
    finally:
        if offload is not None:
            offload._register_deepspeed_module(model)


def move_to_device(
    item: Any, device: torch.device | str, criterion_func: Callable[[Tensor], bool] | None = None
) -> Any:
    """Move the tensors in nested dicts, lists and tuples to a device.

    Args:
        item: Tensor, or nested dicts, lists and tuples of tensors.
        device: Device to which tensors are moved.
        criterion_func: Function that returns whether a tensor is moved; None for all.

    Returns:
        The same structure with the moved tensors.
    """

    def moved(tensor: Tensor) -> Tensor:
        is_moved = criterion_func is None or criterion_func(tensor)
        return tensor.to(device) if is_moved else tensor

    return map_inputs(item, moved)


def noop_decorator(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function itself."""
    return func


# DeepSpeed adds ranges for NVIDIA's profiler. torch.profiler does not need them.
instrument_w_nvtx = noop_decorator


def ensure_directory_exists(filename: str | os.PathLike[str]) -> None:
    """Create the parent directory of a file."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def set_random_seed(seed: int) -> None:
    """Seed the random generators of Python, numpy (if installed) and torch."""
    random.seed(seed)
    torch.manual_seed(seed)
    if find_spec("numpy") is not None:
        import_module("numpy").random.seed(seed % 2**32)


def recursive_getattr(model: Any, module_name: str) -> Any:
    """Return a nested attribute: `model.a.b` for "a.b".

    Args:
        model: Object at which the lookup starts.
        module_name: Dotted name.

    Returns:
        The value of the last attribute of the path.
    """
    return reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Set a nested attribute: `model.a.b` for "a.b".

    Args:
        model: Object at which the lookup starts.
        module_name: Dotted name.
        module: Value to set.
    """
    *path, last = module_name.split(".")
    setattr(reduce(getattr, path, model), last, module)


def required_torch_version(
    min_version: float | None = None, max_version: float | None = None
) -> bool:
    """Return whether torch's version is in a range. 2.1 is lower than 2.13.

    Args:
        min_version: Lowest version; None for no bound.
        max_version: Highest version; None for no bound.

    Returns:
        True if the version is in the range, including its ends.
    """
    found, lowest, highest = (
        tuple(map(int, re.findall(r"\d+", str(version))[:2]))
        for version in (torch.__version__, min_version, max_version)
    )
    return found >= lowest and (not highest or found <= highest)


def parse_range_list(range_str: str) -> list[int]:
    """Return the cores of an ascending list of ranges, for example [0, 2, 3, 4] for "0,2-4".

    Raises:
        ValueError: The list is not ascending.
    """
    found: list[int] = []
    for part in range_str.split(","):
        first, _, last = part.strip().partition("-")
        numbers = range(int(first), int(last or first) + 1)
        found += numbers or [-1]  # a descending range
    if found != sorted(set(found)) or found[:1] == [-1]:
        raise ValueError(f"the list {range_str!r} does not rise; write it as in 0,2-4.")
    return found


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """Return the path of DeepSpeed's model file.

    Args:
        base_folder: Folder of the checkpoint.
        mp_rank_str: Model-parallel rank, with two digits.

    Returns:
        The path of the file in `base_folder`.
    """
    return os.path.join(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt")


def get_zero_ckpt_name_for_rank(base_folder: str, dp_rank: int, mp_rank: int) -> str:
    """Return the path of DeepSpeed's optimizer file of one rank.

    Args:
        base_folder: Folder of the checkpoint.
        dp_rank: Data-parallel rank.
        mp_rank: Model-parallel rank.

    Returns:
        The path of the file in `base_folder`.
    """
    name = f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt"
    return os.path.join(base_folder, name)


def get_layer_ckpt_name_for_rank(base_folder: str, layer_id: str, tp_rank: int) -> str:
    """Return the path of DeepSpeed's file of one layer of a pipeline.

    Args:
        base_folder: Folder of the checkpoint.
        layer_id: Name of the layer.
        tp_rank: Tensor-parallel rank.

    Returns:
        The path of the file in `base_folder`.
    """
    return os.path.join(base_folder, f"{layer_id}-model_{tp_rank:02d}_model_states.pt")
