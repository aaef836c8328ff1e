"""DeepSpeed's words that clients ask for by path and that are no more than words here.

Reached through the drop-in (`_dropin/deepspeed/`).
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import reduce
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import UsageError
from ..optim.sharded import ShardedOptimizer
from ..sharding.access import GatheredParameters

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


class OffloadDeviceEnum(StrEnum):
    """Where states may rest; DeepSpeed's words in a configuration."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


@dataclass
class FragmentAddress:
    """Where a piece of a parameter lies in DeepSpeed's flat buffers; pickles of its checkpoints name this class."""

    numel: int
    start: int


fragment_address = FragmentAddress
ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER = "adagrad", "adam", "adamw"
LAMB_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER = "lamb", "lion", "muon"
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
HAS_TRITON = False  # DeepSpeed's switch for kernels that are not here


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


@contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """The engine with all its weights gathered once, for many forwards.  Collective; the weights may be read only."""
    with GatheredParameters(model):
        yield model


def move_to_device(
    item: Any, device: torch.device | str, criterion_func: Callable[[Tensor], bool] | None = None
) -> Any:
    """Nested dicts, lists and tuples with their tensors (those that meet the criterion) on a device."""
    if isinstance(item, Tensor):
        return item.to(device) if criterion_func is None or criterion_func(item) else item
    if isinstance(item, Mapping):
        return type(item)((key, move_to_device(value, device, criterion_func)) for key, value in item.items())  # type: ignore[call-arg]
    if isinstance(item, (list, tuple)):
        return type(item)(move_to_device(value, device, criterion_func) for value in item)
    return item


def noop_decorator(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself."""
    return func


instrument_w_nvtx = noop_decorator  # DeepSpeed marks a function in NVIDIA's profiler; torch.profiler sees ours unmarked


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
    """`model.a.b` from "a.b"."""
    return reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Assign `model.a.b` from "a.b"."""
    *path, last = module_name.split(".")
    setattr(reduce(getattr, path, model), last, module)


def required_torch_version(min_version: float | None = None, max_version: float | None = None) -> bool:
    """Whether torch's version lies within these bounds, as DeepSpeed asks: 2.1 is below 2.13."""
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
        found += range(int(first), int(last or first) + 1)
    if found != sorted(set(found)):
        raise UsageError(f"the list {range_str!r} does not rise.", fix="write it as in 0,2-4.")
    return found
