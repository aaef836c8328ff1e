"""DeepSpeed's `deepspeed.runtime.torch_autocast`: marks of autocast layers.

In DeepSpeed, `comm_dtype` of a parameter is the dtype in which its gradient is reduced. Here
gradients are reduced in their own dtype. The mark only shows programs whether autocast uses a lower
precision for the parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

LOWER_PRECISION_SAFE_MODULES: list[type[nn.Module]] = [nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d]
PARAM_COMM_DTYPE_ATTR_NAME = "comm_dtype"

# dtype of the last engine with autocast
_dtype: list[torch.dtype] = []


def get_default_autocast_lower_precision_modules() -> list[str]:
    """Return the full names of the layer classes that get `comm_dtype` by default."""
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in LOWER_PRECISION_SAFE_MODULES]


def init_autocast_params(engine: Any, dtype: torch.dtype, modules: Iterable[str] | None) -> None:
    """Set `comm_dtype` of the parameters of an engine's layers to the autocast dtype.

    Args:
        engine: Engine whose model is searched for such layers.
        dtype: Dtype in which autocast runs these layers.
        modules: Full names of the layer classes; None for `LOWER_PRECISION_SAFE_MODULES`.
    """
    names = set(modules or get_default_autocast_lower_precision_modules())
    _dtype[:] = [dtype]
    for module in engine.module.modules():
        if names & _full_names(type(module)):
            for param in module.parameters(recurse=False):
                setattr(param, PARAM_COMM_DTYPE_ATTR_NAME, dtype)


def _full_names(kind: type) -> set[str]:
    """Return a class's full name.

    For torch's layers, the result includes the usual name ("torch.nn.Linear").
    """
    short = {f"torch.nn.{kind.__name__}"} if getattr(nn, kind.__name__, None) is kind else set()
    return {f"{kind.__module__}.{kind.__qualname__}", *short}


def is_autocast_initialized() -> bool:
    """Return whether an engine with autocast was created in this process."""
    return bool(_dtype)


def get_autocast_dtype() -> torch.dtype | None:
    """Return the autocast dtype of the last engine with autocast, or None."""
    return _dtype[0] if _dtype else None


def has_comm_dtype(param: Tensor) -> bool:
    """Return whether a parameter has a `comm_dtype`."""
    return hasattr(param, PARAM_COMM_DTYPE_ATTR_NAME)


def get_comm_dtype(param: Tensor) -> torch.dtype:
    """Return a parameter's `comm_dtype`, or its dtype if it has none."""
    found: torch.dtype = getattr(param, PARAM_COMM_DTYPE_ATTR_NAME, param.dtype)
    return found


def get_all_comm_dtypes(params: Iterable[Tensor]) -> set[torch.dtype]:
    """Return the set of `get_comm_dtype` of the parameters."""
    return {get_comm_dtype(param) for param in params}


def sort_dtypes(dtypes: Iterable[torch.dtype]) -> list[torch.dtype]:
    """Return the dtypes sorted by name."""
    return sorted(dtypes, key=str)


@contextmanager
def autocast_if_enabled(engine: Any) -> Iterator[None]:
    """Run a block with the autocast that the engine's configuration enables, if any."""
    dtype = engine.torch_autocast_dtype()
    with torch.autocast(
        engine.device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None
    ):
        yield
