"""DeepSpeed's rules for tensor parallelism, by parameter name.

    "partition_config": {
        "use_default_specs": true, "strict_mode": false,
        "layer_specs": [
            {"patterns": [".*qkv.weight$"], "partition_type": "column", "shape": [3, -1]}]}

The type column splits the outputs of a layer (dimension 0 of its weight), row its inputs (dimension
1), and skip leaves it whole. For a fused projection, `shape` is the number of equal parts in the
split dimension, or the width of each. `gather_output` makes the outputs of a column layer whole on
every rank. `grad_allreduce` is for a skipped layer that reads a rank's own heads: the gradient of
every rank is a summand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .problems import Problem, Problems

_SPEC_KEYS = (
    "patterns",
    "partition_type",
    "shape",
    "partition_dim",
    "model_types",
    "gather_output",
    "grad_allreduce",
)
_PARTITION_KEYS = ("use_default_specs", "strict_mode", "layer_specs")
_DIMS = {"column": 0, "row": 1}


def check_layer_specs(found: Mapping[str, Any], problems: Problems) -> None:
    """Check the keys of a `partition_config`, and that its rules are built.

    Args:
        found: Value of the key `partition_config`.
        problems: The object to which found problems are added.
    """
    key = "tensor_parallel.partition_config"
    for name in found.keys() - set(_PARTITION_KEYS):
        problems.add(
            f"{key}.{name}", "no such key", f"use {', '.join(_PARTITION_KEYS)}", found[name]
        )
    specs = found.get("layer_specs", [])
    if not isinstance(specs, list | tuple) or not all(isinstance(spec, Mapping) for spec in specs):
        problems.add(
            f"{key}.layer_specs",
            "must be a list of objects",
            'write [{"patterns": [...], ...}]',
            specs,
        )
        return
    for number, spec in enumerate(specs):
        _layer_spec(f"{key}.layer_specs[{number}]", spec, problems)


def _layer_spec(key: str, spec: Mapping[str, Any], problems: Problems) -> None:
    for name in spec.keys() - set(_SPEC_KEYS):
        problems.add(f"{key}.{name}", "no such key", f"use {', '.join(_SPEC_KEYS)}", spec[name])
    patterns = spec.get("patterns")
    kind = str(spec.get("partition_type", "column")).lower()
    if not isinstance(patterns, list | tuple) or not all(map(_is_pattern, patterns)):
        problems.add(
            f"{key}.patterns",
            "must be a list of regular expressions",
            'write for example [".*o_proj.weight$"]',
            patterns,
        )
    if kind not in (*_DIMS, "skip"):
        problems.add(
            f"{key}.partition_type", "must be row, column or skip", "write one of them", kind
        )
        return
    dim = spec.get("partition_dim")
    if dim not in (None, _DIMS.get(kind)):
        fix = (
            f"remove it: {kind} splits dimension {_DIMS.get(kind)}"
            if kind in _DIMS
            else "remove it: skip splits nothing"
        )
        problems.found.append(
            Problem(f"{key}.partition_dim", "is not built", fix, dim, not_built=True)
        )
    if kind in _DIMS and (shape := spec.get("shape")) is not None and _parts(shape, kind) is None:
        fix = (
            "write the number of equal parts or the width of each, and -1: [3, -1] or [[8, 2, 2], "
            "-1] for q, k and v"
        )
        problems.found.append(Problem(f"{key}.shape", "is not built", fix, shape, not_built=True))
    if spec.get("grad_allreduce") and kind != "skip":
        problems.add(
            f"{key}.grad_allreduce",
            f"applies only to layers that are skipped, and this one is {kind}",
            "remove it: the gradient of a split layer belongs to one rank",
            True,
        )


def _is_pattern(text: Any) -> bool:
    try:
        return isinstance(text, str) and re.compile(text) is not None
    except re.error:
        return False


def _parts(shape: Any, kind: str) -> int | tuple[int, ...] | None:
    """Return the number of equal parts of a fused projection, or the width of each.

    None for another shape.
    """
    dim = _DIMS.get(kind)
    if dim is None or not isinstance(shape, list | tuple) or len(shape) != 2:
        return None
    parts = shape[dim]
    rest = shape[1 - dim]
    if not isinstance(rest, int) or rest == 0 or rest < -1:
        return None
    widths = parts if isinstance(parts, list | tuple) and parts else (parts,)
    if not all(type(each) is int and each > 0 for each in widths):
        return None
    return parts if isinstance(parts, int) else tuple(parts)


LayerRule = tuple[str, str, int | tuple[int, ...], tuple[str, ...]]


def layer_rules(found: Mapping[str, Any] | None) -> tuple[LayerRule, ...]:
    """Return the rules of a checked `partition_config`.

    Returns:
        Tuples (pattern, style, parts, model types); without model types a rule is for all models.
    """
    rules = []
    for spec in (found or {}).get("layer_specs", []):
        kinds = spec.get("model_types")
        kind = str(spec.get("partition_type", "column")).lower()
        types = (kinds,) if isinstance(kinds, str) else tuple(kinds or ())
        parts = _parts(spec["shape"], kind) if spec.get("shape") is not None else 1
        if kind == "column" and spec.get("gather_output"):
            kind = "column_gather"
        elif kind == "skip" and spec.get("grad_allreduce"):
            kind = "partial"
        rules += [(pattern, kind, parts or 1, types) for pattern in spec["patterns"]]
    return tuple(rules)
