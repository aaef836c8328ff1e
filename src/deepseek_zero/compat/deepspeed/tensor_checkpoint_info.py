"""What DeepSpeed's converter of checkpoints asks of a model that is split along tp: where each
parameter was cut.

A parameter carries how it lies over the ranks (`ds_autotp_universal_checkpoint_meta`), a model a
summary by patterns of names (`universal_checkpoint_info`).  Checkpoints of this library need
neither: they load at any number of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

META = "ds_autotp_universal_checkpoint_meta"
INFO = "universal_checkpoint_info"  # of a model
VERSION = 0.4
_SHAPES = (
    "logical_shape",
    "output_shape",
    "sub_param_shape",
    "sub_param_sizes",
    "partition_sizes",
    "target_partition_shape",
    "original_shape",
)
_CONVERSION = (
    "partition_type",
    "partition_dim",
    "sub_param_shape",
    "sub_param_shard_widths",
    "original_shape",
)


def _build_param_uc_restore_meta(
    *,
    partition_type: str,
    partition_dim: int | None = None,
    sub_param_shard_widths: Sequence[Sequence[int]] | None = None,
    is_bias: bool = False,
    replicated: bool = False,
    unsupported_reason: str | None = None,
    **shapes: Sequence[Any] | None,
) -> dict[str, Any]:
    """Return what is said of one parameter; "conversion" repeats what a model's summary is made
    of.
    """
    found: dict[str, Any] = {"partition_type": partition_type, "partition_dim": partition_dim}
    for name in _SHAPES:
        given = shapes.pop(name, None)
        found[name] = tuple(given) if given is not None else None
    if shapes:
        raise TypeError(f"unexpected keywords {sorted(shapes)}")
    found["sub_param_shard_widths"] = (
        None if sub_param_shard_widths is None else [list(each) for each in sub_param_shard_widths]
    )
    told = {"is_bias": is_bias, "replicated": replicated}
    conversion = (
        {name: found[name] for name in _CONVERSION}
        | told
        | {"unsupported_reason": unsupported_reason}
    )
    return found | told | {"conversion": conversion}


def _get_param_uc_conversion_meta(param: Tensor) -> dict[str, Any] | None:
    """Return what a model's summary is made of; None for a parameter that was not cut."""
    meta = getattr(param, META, None)
    return meta.get("conversion") if meta else None


def mark(
    param: Tensor,
    kind: str,
    whole: Sequence[int],
    outputs: int,
    dim: int | None,
    parts: Sequence[Sequence[int]],
    spec: Sequence[Any] | None = None,
) -> None:
    """Say on a parameter how it was cut.

    kind: "column" or "row".  whole: its shape in the whole model.  dim: that was cut, None for one
    that every rank has.
    parts: the widths, by rank, of each part in that dimension.  spec: of a fused projection, the
    shape that names them.
    """
    told: dict[str, Any] = {
        "logical_shape": whole,
        "output_shape": (outputs,),
        "original_shape": whole,
    }
    if dim is None:
        told |= {"replicated": True, "output_shape": whole}
    elif spec is None:
        told |= {"partition_sizes": parts[0], "target_partition_shape": param.shape}
    else:
        sizes = tuple(map(sum, parts))
        told |= {"sub_param_shape": spec, "sub_param_sizes": sizes, "sub_param_shard_widths": parts}
        told |= {"target_partition_shape": param.shape}
    meta = _build_param_uc_restore_meta(
        partition_type=kind, partition_dim=dim, is_bias=len(whole) == 1, **told
    )
    setattr(param, META, meta)


def collect_autotp_universal_checkpoint_info(model: nn.Module) -> dict[str, Any]:
    """Return a model's summary: patterns of the names of its parameters, by how they were cut.
    Local.

    What was not cut is replicated; of tied parameters the first name counts.
    """
    rows = list[str]()
    replicated = list[str]()
    words = list[str]()
    fused = list[dict[str, Any]]()
    widths = dict[str, Any]()
    unsupported = dict[str, str]()
    vocabulary = None
    for name, param in model.named_parameters():
        pattern = f"^{re.escape(name)}$"
        told = _get_param_uc_conversion_meta(param)
        if told is None:
            replicated.append(pattern)
            continue
        if told["unsupported_reason"]:
            unsupported[pattern] = told["unsupported_reason"]
            continue
        if told["replicated"]:
            replicated.append(pattern)
        if told["partition_type"] == "row" and not told["is_bias"]:
            rows.append(pattern)
        shape = told["original_shape"]
        dim = told["partition_dim"]
        if dim == 0 and len(shape) == 2 and ("embed" in name or "lm_head" in name):
            words.append(pattern)
            vocabulary = vocabulary or shape[0]
        if told["sub_param_shape"] is not None:
            published = list(told["sub_param_shape"])
            published[dim] = tuple(map(sum, told["sub_param_shard_widths"]))
            fused.append({"patterns": [pattern], "shape": published, "partition_dim": dim})
            widths[pattern] = told["sub_param_shard_widths"]
    found = {
        "universal_checkpoint_version": VERSION,
        "parameter_with_row_parallelism_patterns": sorted(rows),
        "tp_replicated_parameter_patterns": sorted(replicated),
        "vocabulary_parameter_patterns": sorted(words),
        "parameter_with_sub_params": fused,
        "autotp_unsupported_parameter_patterns": unsupported,
    }
    if widths:
        found["sub_param_shard_widths"] = widths
    return found if vocabulary is None else found | {"original_vocab_size": vocabulary}
