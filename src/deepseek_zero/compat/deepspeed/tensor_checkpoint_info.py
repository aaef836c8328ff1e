"""Metadata for DeepSpeed's checkpoint converter about tensor-parallel parameters.

Each parameter has an attribute `ds_autotp_universal_checkpoint_meta` with its split. The model has
a summary `universal_checkpoint_info` of patterns of names. Checkpoints of this library load at any
number of ranks without them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

Facts = dict[str, Any]  # about a parameter, or about all of them

META = "ds_autotp_universal_checkpoint_meta"
INFO = "universal_checkpoint_info"  # attribute of the model
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
) -> Facts:
    """Return the metadata of a parameter.

    The entry "conversion" contains the values that the model's summary needs.
    """
    found: Facts = {"partition_type": partition_type, "partition_dim": partition_dim}
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


def _get_param_uc_conversion_meta(param: Tensor) -> Facts | None:
    """Return a parameter's values for the summary; None if it is not split."""
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
    """Store on a parameter how it is split.

    Args:
        param: Parameter on which the attribute is set.
        kind: "column" or "row".
        whole: Shape of the parameter in the whole model.
        outputs: Number of outputs of the layer.
        dim: Split dimension; None for a replicated parameter.
        parts: For each part of that dimension, its width on each rank.
        spec: Shape that describes the parts of a fused projection.
    """
    told: Facts = {
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


def collect_autotp_universal_checkpoint_info(model: nn.Module) -> Facts:
    """Return the summary of a model: patterns of names by how parameters are split.

    Parameters that are not split are replicated. Tied parameters have their first name.
    """
    rows = list[str]()
    replicated = list[str]()
    words = list[str]()
    fused = list[Facts]()
    widths = Facts()
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
