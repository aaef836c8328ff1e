"""DeepSpeed's `deepspeed.utils`, beyond `deepseek_zero.utils`: OnDevice and functions that scripts
borrow.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ...api.utils import get_log_level_from_string, log_dist
from ...base.log import logger
from ...extensions.gathered_parameters import GatheredParameters

_SAID: set[str] = set()


def log_dist_once(
    message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO
) -> None:
    """Log as `log_dist` does, unless the message was logged already."""
    if message not in _SAID:
        _SAID.add(message)
        log_dist(message, ranks, level)


def warning_once(message: str) -> None:
    """Log a warning, unless it was logged already."""
    log_dist_once(message, level=logging.WARNING)


def get_current_level() -> int:
    """Return the level of the library's logger."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Return whether the level of the library's logger is at most this one."""
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


class OnDevice:
    """Make what is built inside on `device`, and its floating values in `dtype`.

    "meta": shapes without values.  To train a model larger than memory, build it under zero.Init,
    which gives each rank its slices.
    """

    def __init__(
        self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.enabled = enabled
        self._inside = ExitStack()

    def __enter__(self) -> OnDevice:
        if self.enabled:
            before = torch.get_default_dtype()
            self._inside.callback(torch.set_default_dtype, before)
            torch.set_default_dtype(self.dtype)
            self._inside.enter_context(torch.device(self.device))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._inside.close()


def zero_wrapper_for_fp_tensor_constructor(
    constructor: Callable[..., Any], *_: Any, **__: Any
) -> Callable[..., Any]:
    """Return the constructor itself.

    DeepSpeed's zero.Init wraps torch's constructors, and transformers replaces the wrapper for a
    while.  Ours wraps none.
    """
    return constructor


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Copy nested dicts, lists and tuples so that each tensor has bytes of its own, and no buffer
    around a view is saved with it.
    """
    if isinstance(item, Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, Mapping):
        return type(item)(
            (key, clone_tensors_for_torch_save(value, device)) for key, value in item.items()
        )  # type: ignore[call-arg]
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    return item


@contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the engine with all its weights gathered once, for many forwards.  Collective; the
    weights may be read only.
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
    """Return nested dicts, lists and tuples with their tensors (those that meet the criterion) on a
    device.
    """
    if isinstance(item, Tensor):
        return item.to(device) if criterion_func is None or criterion_func(item) else item
    if isinstance(item, Mapping):
        return type(item)(
            (key, move_to_device(value, device, criterion_func)) for key, value in item.items()
        )  # type: ignore[call-arg]
    if isinstance(item, (list, tuple)):
        return type(item)(move_to_device(value, device, criterion_func) for value in item)
    return item


def noop_decorator(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function itself."""
    return func


# DeepSpeed marks a function in NVIDIA's profiler; torch.profiler sees ours without
instrument_w_nvtx = noop_decorator


def ensure_directory_exists(filename: str | os.PathLike[str]) -> None:
    """Make the folder that a file will lie in."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def set_random_seed(seed: int) -> None:
    """Seed Python's, numpy's (where it is) and torch's generators."""
    random.seed(seed)
    torch.manual_seed(seed)
    if find_spec("numpy") is not None:
        import_module("numpy").random.seed(seed % 2**32)


def recursive_getattr(model: Any, module_name: str) -> Any:
    """Return `model.a.b` for "a.b"."""
    return reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Assign `model.a.b` for "a.b"."""
    *path, last = module_name.split(".")
    setattr(reduce(getattr, path, model), last, module)


def required_torch_version(
    min_version: float | None = None, max_version: float | None = None
) -> bool:
    """Return whether torch's version lies within these bounds; 2.1 is below 2.13."""
    found = _version(torch.__version__)
    above = min_version is None or found >= _version(str(min_version))
    return above and (max_version is None or found <= _version(str(max_version)))


def _version(text: str) -> tuple[int, int]:
    major, _, rest = text.partition(".")
    return int(major), int(rest.partition(".")[0] or 0)


def parse_range_list(range_str: str) -> list[int]:
    """ "0,2-4" -> [0, 2, 3, 4]; rising, as a list of cores is."""
    found: list[int] = []
    for part in range_str.split(","):
        first, _, last = part.strip().partition("-")
        numbers = range(int(first), int(last or first) + 1)
        found += numbers or [-1]  # a range that falls
    if found != sorted(set(found)) or found[:1] == [-1]:
        raise ValueError(f"the list {range_str!r} does not rise; write it as in 0,2-4.")
    return found


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """Return the path of DeepSpeed's file of a model's states."""
    return str(Path(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt"))


def get_zero_ckpt_name_for_rank(base_folder: str, dp_rank: int, mp_rank: int) -> str:
    """Return the path of DeepSpeed's file of one rank's optimizer states."""
    return str(Path(base_folder, f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt"))


def get_layer_ckpt_name_for_rank(base_folder: str, layer_id: str, tp_rank: int) -> str:
    """Return the path of DeepSpeed's file of one layer of a pipeline."""
    return str(Path(base_folder, f"{layer_id}-model_{tp_rank:02d}_model_states.pt"))
