"""DeepSpeed's classes of AutoTP's configuration, and its reading of transformers' plans, for programs that build them.

No engine reads them: `tensor_parallel.partition_config` is the way in (config/layer_specs.py), and transformers' own
plans are read by parallel/plans.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class PartitionType(Enum):
    """How a layer is split over the ranks along tp."""

    COLUMN = "column"
    ROW = "row"
    SKIP = "skip"


@dataclass
class TPLayerSpec:
    """Which parameters, by regular expressions on their names, are split how.

    shape: the logical shape of a fused parameter, -1 inferred, a tuple at partition_dim for unequal parts.
    """

    patterns: list[str]
    partition_type: PartitionType = PartitionType.COLUMN
    shape: tuple[Any, ...] | None = None
    partition_dim: int | None = None
    model_types: list[str] | None = None
    gather_output: bool = False
    grad_allreduce: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.partition_type, str):
            self.partition_type = PartitionType(self.partition_type.lower())
        if self.shape is None:
            return
        self.shape = tuple(tuple(size) if isinstance(size, list) else size for size in self.shape)
        dim = self.get_partition_dim()
        if not 0 <= dim < len(self.shape):
            raise ValueError(f"AutoTP partition_dim {dim} is out of range for shape length {len(self.shape)}.")
        for place, size in enumerate(self.shape):
            nested = size if isinstance(size, tuple) else ()
            if isinstance(size, tuple) and place != dim:
                raise ValueError(f"AutoTP shape nested tuple only allowed at partition_dim={dim}, got at {place}.")
            if isinstance(size, tuple) and not nested:
                raise ValueError("AutoTP shape nested tuple cannot be empty.")
            if not all(isinstance(each, int) and each > 0 for each in nested):
                raise ValueError("AutoTP nested sub-parameter sizes must be positive integers.")
            if not isinstance(size, tuple) and (not isinstance(size, int) or size == 0 or size < -1):
                raise ValueError("AutoTP shape dimensions must be positive integers or -1.")

    def get_partition_dim(self) -> int:
        """Return the dimension that is split: 0 of a column layer, 1 of a row layer, unless stated."""
        if self.partition_dim is not None:
            return self.partition_dim
        return 0 if self.partition_type is PartitionType.COLUMN else 1

    def matches(self, param_name: str, model_type: str | None = None) -> bool:
        """Return whether it speaks of a parameter."""
        kinds = {str(kind).lower() for kind in self.model_types or ()}
        fits = not kinds or str(model_type).lower() in kinds
        return fits and any(re.match(pattern, param_name) for pattern in self.patterns)


@dataclass
class AutoTPConfig:
    """Layers and what is done with them."""

    tp_size: int = 1
    layer_specs: list[TPLayerSpec] = field(default_factory=list)
    embedding_partition_dim: int = 1
    lm_head_patterns: list[str] = field(default_factory=lambda: ["lm_head", "embed_out"])
    use_default_specs: bool = True
    strict_mode: bool = False

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any]) -> AutoTPConfig:
        """Return the configuration of a dict of its fields; layer_specs: dicts of theirs."""
        given = {name: value for name, value in config_dict.items() if name in cls.__dataclass_fields__}
        return cls(**{**given, "layer_specs": [TPLayerSpec(**spec) for spec in config_dict.get("layer_specs", [])]})

    def find_matching_spec(self, param_name: str, model_type: str | None = None) -> TPLayerSpec | None:
        """Return the first specification of a parameter."""
        return next((spec for spec in self.layer_specs if spec.matches(param_name, model_type)), None)


# style of transformers -> what a specification says of it
STYLES: dict[str, dict[str, Any]] = {
    "colwise": {"partition_type": PartitionType.COLUMN},
    "colwise_rep": {"partition_type": PartitionType.COLUMN, "gather_output": True},
    "colwise_gather_output": {"partition_type": PartitionType.COLUMN, "gather_output": True},
    "rowwise": {"partition_type": PartitionType.ROW},
    "embedding_rowwise": {"partition_type": PartitionType.SKIP},
    "replicated_with_grad_allreduce": {"partition_type": PartitionType.SKIP, "grad_allreduce": True},
}


class TPPlanConverter:
    """Reads transformers' `tp_plan`: module pattern with "*" -> style."""

    @staticmethod
    def convert(hf_tp_plan: Mapping[str, str]) -> list[TPLayerSpec] | None:
        """Return the specifications of a plan, None for an empty one; a ValueError names styles that are not known,
        because half of a pair of layers must not be split alone.
        """
        if unknown := sorted({style for style in hf_tp_plan.values() if style.lower() not in STYLES}):
            raise ValueError(
                f"HuggingFace tp_plan contains unsupported partition style(s): {unknown}.  State "
                "tensor_parallel.partition_config for this model instead."
            )
        return [
            TPLayerSpec([_of_weights(TPPlanConverter._wildcard_to_regex(pattern))], **STYLES[style.lower()])
            for pattern, style in hf_tp_plan.items()
        ] or None

    @staticmethod
    def _wildcard_to_regex(pattern: str) -> str:
        return ".*" + pattern.replace(".", r"\.").replace("*", ".*")


def _of_weights(regex: str) -> str:
    return regex.removesuffix(r"\.weight") + r"\.weight$"
