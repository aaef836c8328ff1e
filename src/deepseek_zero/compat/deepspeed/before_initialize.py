"""DeepSpeed's `tp_model_init`, which records a request for `initialize`."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...api.precision import DTYPES
from ...base.errors import ConfigError, UsageError
from ...base.given import refuse, whole_number
from ...config import RawConfig
from ...engine.mesh_statements import MeshStatement
from .autotp import set_autotp_mode

_SIZE = "tensor_parallel.autotp_size"


@dataclass(frozen=True)
class TensorParallelRequest:
    """Arguments of `tp_model_init`, which `initialize` reads.

    Attributes:
        tp_size: Number of tensor-parallel ranks.
        dtype: Expected dtype of the weights; None for any.
        ranks: Global ranks of `tp_group`; None if no group was given.
    """

    tp_size: int
    dtype: torch.dtype | None = None
    ranks: tuple[int, ...] | None = None


_asked: weakref.WeakKeyDictionary[nn.Module, TensorParallelRequest] = weakref.WeakKeyDictionary()


def tp_model_init(
    model: nn.Module,
    tp_size: int,
    dtype: torch.dtype | None,
    config: Any = None,
    tp_group: Any = None,
    **kwargs: Any,
) -> nn.Module:
    """Request tensor parallelism for a model and return the unchanged model.

    `initialize` splits the layers. Until then they are whole.

    Args:
        model: The model that will be passed to `initialize`.
        tp_size: Number of tensor-parallel ranks.
        dtype: Compared with the configuration's dtype.
        config: Ignored; `initialize` reads its own configuration.
        tp_group: Process group of the ranks over which each layer is split, compared with the mesh.
        **kwargs: Ignored.

    Returns:
        `model` itself, unchanged.

    Raises:
        UsageError: An argument has the wrong type, or `tp_group` does not have `tp_size` ranks.
    """
    if not isinstance(model, nn.Module):
        raise refuse(
            "tp_model_init",
            "model",
            model,
            "the model that initialize() will get",
            "pass a torch.nn.Module.",
        )
    whole_number("tp_model_init", "tp_size", tp_size, 1)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise refuse(
            "tp_model_init", "dtype", dtype, "a torch.dtype", "pass for example torch.bfloat16."
        )
    ranks = None
    if tp_group is not None:
        ranks = tuple(dist.get_process_group_ranks(tp_group))
        if len(ranks) != tp_size:
            raise UsageError(
                f"tp_model_init(tp_size={tp_size}) was given a tp_group of {len(ranks)} ranks.",
                "They are the same ranks.",
                "leave tp_group out.",
            )
    _asked[model] = TensorParallelRequest(tp_size, dtype, ranks)
    set_autotp_mode(training=True)
    return model


def asked_tp_size(model: nn.Module) -> int:
    """Return the `tp_size` that `tp_model_init` recorded for a model, or 0."""
    asked = _asked.get(model)
    return asked.tp_size if asked is not None else 0


def tensor_parallel_statement(model: Any, raw: RawConfig, has_mpu: bool) -> MeshStatement | None:
    """Return the mesh axis that `tp_model_init` requested for a model, or None.

    Args:
        model: The model that was passed to `initialize`.
        raw: The configuration of `initialize`, whose tensor-parallel size must equal the request.
        has_mpu: Whether `initialize` was given an `mpu`.

    Returns:
        The requested size of the axis "tp" and its process group, or None if `tp_model_init` was
        not called for the model.

    Raises:
        ConfigError: The configuration or the `mpu` contradicts the request. The text is
            DeepSpeed's.
    """
    # `Request` refuses anything but a module.
    asked = _asked.get(model) if isinstance(model, nn.Module) else None
    if asked is None:
        return None
    if asked.ranks is not None and has_mpu:
        raise ConfigError("tp_model_init provided tp_group; initialize must not receive mpu.")
    stated = raw.get(_SIZE, 0)
    if stated not in (0, asked.tp_size):
        raise ConfigError(
            f"Conflicting {_SIZE} in config ({stated}) and tp_model_init ({asked.tp_size})."
        )
    for name, dtype in DTYPES.items():
        if raw.get(f"{name}.enabled") is True and asked.dtype not in (None, dtype):
            raise ConfigError(
                f"Conflicting dtype in config ({dtype}) and tp_model_init ({asked.dtype})."
            )
    groups = {"tp": asked.ranks} if asked.ranks else {}
    return MeshStatement("tp_model_init", {"tp": asked.tp_size}, groups=groups)
