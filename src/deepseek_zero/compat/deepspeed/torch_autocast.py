"""DeepSpeed's `deepspeed.runtime.torch_autocast`: which parameters belong to layers that autocast
computes in 16 bits.

There, such a parameter's `comm_dtype` is the dtype in which its gradient travels.  Here gradients
travel in their own dtype, and the mark says what a program asks: whether autocast computes with the
parameter in fewer bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

LOWER_PRECISION_SAFE_MODULES: list[type[nn.Module]] = [nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d]
PARAM_COMM_DTYPE_ATTR_NAME = "comm_dtype"

_dtype: list[torch.dtype] = []  # of the autocast that an engine was asked for last


def get_default_autocast_lower_precision_modules() -> list[str]:
    """Return the layers that are marked where the configuration names none, by their full names."""
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in LOWER_PRECISION_SAFE_MODULES]


def init_autocast_params(engine: Any, dtype: torch.dtype, modules: Iterable[str] | None) -> None:
    """Mark the parameters of an engine's layers with the dtype of autocast.  Local.

    modules: the classes of these layers by their full names; None: `LOWER_PRECISION_SAFE_MODULES`.
    """
    names = set(modules or get_default_autocast_lower_precision_modules())
    _dtype[:] = [dtype]
    for module in engine.module.modules():
        if names & _full_names(type(module)):
            for param in module.parameters(recurse=False):
                setattr(param, PARAM_COMM_DTYPE_ATTR_NAME, dtype)


def _full_names(kind: type) -> set[str]:
    """Return a class's full name; for a layer of torch's also the one that users write
    ("torch.nn.Linear").
    """
    short = {f"torch.nn.{kind.__name__}"} if getattr(nn, kind.__name__, None) is kind else set()
    return {f"{kind.__module__}.{kind.__qualname__}", *short}


def is_autocast_initialized() -> bool:
    """Return whether an engine of this process was asked for autocast."""
    return bool(_dtype)


def get_autocast_dtype() -> torch.dtype | None:
    """Return the dtype of that autocast; None without one."""
    return _dtype[0] if _dtype else None


def has_comm_dtype(param: Tensor) -> bool:
    """Return whether a parameter is marked."""
    return hasattr(param, PARAM_COMM_DTYPE_ATTR_NAME)


def get_comm_dtype(param: Tensor) -> torch.dtype:
    """Return the mark of a parameter; its own dtype without one."""
    found: torch.dtype = getattr(param, PARAM_COMM_DTYPE_ATTR_NAME, param.dtype)
    return found


def get_all_comm_dtypes(params: Iterable[Tensor]) -> set[torch.dtype]:
    """Return the different dtypes of parameters (`get_comm_dtype`)."""
    return {get_comm_dtype(param) for param in params}


def sort_dtypes(dtypes: Iterable[torch.dtype]) -> list[torch.dtype]:
    """Return dtypes in one order."""
    return sorted(dtypes, key=str)


@contextmanager
def autocast_if_enabled(engine: Any) -> Iterator[None]:
    """Open a block under the autocast that an engine was configured with; without one the block
    runs as it is.
    """
    dtype = engine.torch_autocast_dtype()
    with torch.autocast(
        engine.device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None
    ):
        yield
