"""DeepSpeed's rules by parameter name: which layers tensor parallelism cuts, and how.

    "partition_config": {
        "use_default_specs": true, "strict_mode": false,
        "layer_specs": [{"patterns": [".*qkv.weight$"], "partition_type": "column", "shape": [3, -1]}]}

column cuts the outputs of a layer (dimension 0 of its weight), row its inputs (dimension 1), skip leaves it whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .raw_config import Problem, Problems

_SPEC_KEYS = ("patterns", "partition_type", "shape", "partition_dim", "model_types", "gather_output", "grad_allreduce")
_PARTITION_KEYS = ("use_default_specs", "strict_mode", "layer_specs")
_DIMS = {"column": 0, "row": 1}


def check_layer_specs(found: Mapping[str, Any], problems: Problems) -> None:
    """Check a `partition_config`: its keys, and that it says what is built."""
    key = "tensor_parallel.partition_config"
    for name in found.keys() - set(_PARTITION_KEYS):
        problems.add(f"{key}.{name}", "no such key", f"use {', '.join(_PARTITION_KEYS)}", found[name])
    specs = found.get("layer_specs", [])
    if not isinstance(specs, list | tuple) or not all(isinstance(spec, Mapping) for spec in specs):
        problems.add(f"{key}.layer_specs", "must be a list of objects", 'write [{"patterns": [...], ...}]', specs)
        return
    for number, spec in enumerate(specs):
        _layer_spec(f"{key}.layer_specs[{number}]", spec, problems)


def _layer_spec(key: str, spec: Mapping[str, Any], problems: Problems) -> None:
    for name in spec.keys() - set(_SPEC_KEYS):
        problems.add(f"{key}.{name}", "no such key", f"use {', '.join(_SPEC_KEYS)}", spec[name])
    patterns, kind = spec.get("patterns"), str(spec.get("partition_type", "column")).lower()
    if not isinstance(patterns, list | tuple) or not all(map(_is_pattern, patterns)):
        fix = 'write for example [".*o_proj.weight$"]'
        problems.add(f"{key}.patterns", "must be a list of regular expressions", fix, patterns)
    if kind not in (*_DIMS, "skip"):
        problems.add(f"{key}.partition_type", "must be row, column or skip", "write one of them", kind)
        return
    dim = spec.get("partition_dim")
    if dim not in (None, _DIMS.get(kind)):
        fix = f"remove it: {kind} cuts dimension {_DIMS.get(kind)}" if kind in _DIMS else "remove it: skip cuts nothing"
        problems.found.append(Problem(f"{key}.partition_dim", "is not built", fix, dim, not_built=True))
    if (shape := spec.get("shape")) is not None and _parts(shape, kind) is None:
        fix = "write the number of equal blocks and -1, for example [3, -1] for a fused q, k, v"
        problems.found.append(Problem(f"{key}.shape", "is not built", fix, shape, not_built=True))
    for name in ("gather_output", "grad_allreduce"):
        if spec.get(name):
            problems.found.append(
                Problem(
                    f"{key}.{name}", "is not built", "remove it, or name the style in the model's tp_plan", True, True
                )
            )


def _is_pattern(text: Any) -> bool:
    try:
        return isinstance(text, str) and re.compile(text) is not None
    except re.error:
        return False


def _parts(shape: Any, kind: str) -> int | None:
    """Return how many equal blocks lie side by side in the cut dimension of a fused projection; None: another shape."""
    dim = _DIMS.get(kind)
    if dim is None or not isinstance(shape, list | tuple) or len(shape) != 2:
        return None
    blocks, rest = shape[dim], shape[1 - dim]
    return blocks if type(blocks) is int and blocks > 0 and rest == -1 else None


def layer_rules(found: Mapping[str, Any] | None) -> tuple[tuple[str, str, int, tuple[str, ...]], ...]:
    """Return the rules of a `partition_config` that was checked: pattern, row, column or skip, blocks, and the
    `model_type` of each model that it is for (none: of all).
    """
    rules = []
    for spec in (found or {}).get("layer_specs", []):
        kinds, kind = spec.get("model_types"), str(spec.get("partition_type", "column")).lower()
        types = (kinds,) if isinstance(kinds, str) else tuple(kinds or ())
        parts = _parts(spec["shape"], kind) if spec.get("shape") is not None else 1
        rules += [(pattern, kind, parts or 1, types) for pattern in spec["patterns"]]
    return tuple(rules)
