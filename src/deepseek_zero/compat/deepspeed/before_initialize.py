"""DeepSpeed's `tp_model_init`: records that layers are to be split, and `initialize` of the same
model does it.
"""

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
    """What `tp_model_init` was given.  ranks: of tp_group; None without one."""

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
    """Ask for tensor parallelism of a model over so many ranks; returns the model as it is.  Local.

    `initialize` splits it: its layers are whole until then.  dtype: compared with the
    configuration's.  config: not
    read: the one given to `initialize` is.  tp_group: the ranks that share a layer, compared with
    the mesh's.
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
    """Return what `tp_model_init` was given for a model, 0 where it was not called."""
    asked = _asked.get(model)
    return asked.tp_size if asked is not None else 0


def tensor_parallel_statement(model: Any, raw: RawConfig, has_mpu: bool) -> MeshStatement | None:
    """Return what `tp_model_init` recorded of a model, None where it did not; ConfigError in
    DeepSpeed's words where the configuration says otherwise.
    """
    asked = _asked.get(model) if isinstance(model, nn.Module) else None  # else `Request` refuses it
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
    return MeshStatement(
        "tp_model_init", {"tp": asked.tp_size}, groups={"tp": asked.ranks} if asked.ranks else {}
    )
