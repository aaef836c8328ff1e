"""DeepSpeed's AutoTP classes and functions, for programs that use them directly.

No engine reads them. An engine reads `tensor_parallel.partition_config` (config/layer_specs.py) and
transformers' plans (parallel/plans.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

import torch.distributed as dist


class AUTOTP_MODE(Enum):
    """DeepSpeed's two modes of tensor parallelism: layers are split for training or inference."""

    TRAINING = "TRAINING"
    INFERENCE = "INFERENCE"


class _Mode:
    now: ClassVar[AUTOTP_MODE] = AUTOTP_MODE.INFERENCE


def set_autotp_mode(training: bool = False) -> None:
    """Set the mode that `get_auto_tp_mode` returns.

    It changes no layer: split layers have gradients in both modes.
    """
    _Mode.now = AUTOTP_MODE.TRAINING if training else AUTOTP_MODE.INFERENCE


def get_auto_tp_mode() -> AUTOTP_MODE:
    """Return the mode that `set_autotp_mode` set: splitting for training or for inference."""
    return _Mode.now


def is_autotp_training_mode() -> bool:
    """Return whether the current mode is `AUTOTP_MODE.TRAINING`."""
    return _Mode.now is AUTOTP_MODE.TRAINING


@dataclass(frozen=True)
class AutoTPMeta:
    """Number of heads and width of a model, which determine how its layers are split.

    Attributes:
        num_kv_heads: Number of key and value heads.
        num_attention_heads: Number of query heads.
        n_embd: Hidden size.
        tp_grain_size: Dimensions that are not split by heads are split at multiples of this size.
    """

    num_kv_heads: int | None = None
    num_attention_heads: int | None = None
    n_embd: int | None = None
    tp_grain_size: int = 1

    @classmethod
    def from_model_config(cls, model_config: Any, tp_grain_size: int = 1) -> AutoTPMeta:
        """Read the number of heads and the width from a model's configuration.

        Args:
            model_config: Configuration object, for example that of a transformers model.
            tp_grain_size: Dimensions that are not split by heads are split at multiples of this
                size.

        Returns:
            The sizes. A size that the configuration does not define is None.
        """
        found = {field: _first_of(model_config, names) for field, names in _COUNTS.items()}
        return cls(**found, tp_grain_size=tp_grain_size)


# Field of AutoTPMeta -> attributes of a model's configuration, in order of precedence
_COUNTS: dict[str, tuple[str, ...]] = {
    "num_kv_heads": (
        "multi_query_group_num",
        "num_kv_heads",
        "num_key_value_heads",
        "num_attention_heads",
        "n_heads",
        "attention_heads",
    ),
    "num_attention_heads": (
        "num_attention_heads",
        "num_heads",
        "n_heads",
        "n_head",
        "attention_heads",
    ),
    "n_embd": ("n_embd", "hidden_size"),
}
# Parts of the names of layers without heads
_OF_NO_HEADS = ("mlp", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
_HEADS_OF_WORDS = ("lm_head", "embed_out")


def _first_of(config: Any, names: tuple[str, ...]) -> int | None:
    return next(
        (value for name in names if (value := getattr(config, name, None)) is not None), None
    )


def get_shard_size_list(
    total_size: int, mp_size: int, meta: AutoTPMeta | str | None = None, name: str | None = None
) -> list[int]:
    """Return how many elements of a dimension each rank holds.

    The first ranks hold more.

    Args:
        total_size: Number of elements of the dimension.
        mp_size: Number of ranks.
        meta: Split by its key and value heads if they divide the dimension, else by its grain size.
            Older programs pass the name here.
        name: Name of the layer. Layers of an MLP and output embeddings are not split by heads.

    Returns:
        One number of elements per rank, in rank order. The numbers add up to `total_size`.
    """
    if isinstance(meta, str):
        meta, name = None, meta
    counts = meta or AutoTPMeta()
    told = str(name)
    heads = counts.num_kv_heads
    if (
        heads
        and total_size % heads == 0
        and told not in _HEADS_OF_WORDS
        and not any(s in told for s in _OF_NO_HEADS)
    ):
        return [total_size // heads * share for share in _even(heads, mp_size)]
    grain = counts.tp_grain_size if total_size >= counts.tp_grain_size else 1
    found = [grain * share for share in _even(total_size // grain, mp_size)]
    found[-1] += total_size % grain
    return found


def get_shard_size(
    total_size: int,
    mp_size: int,
    meta: AutoTPMeta | str | None = None,
    name: str | None = None,
    rank: int | None = None,
    mp_group: Any = None,
) -> int:
    """Return how many elements of a dimension one rank holds.

    Args:
        total_size: Number of elements of the dimension.
        mp_size: Number of ranks.
        meta: Heads and grain size of the model, or None for an even split; as for
            `get_shard_size_list`.
        name: Name of the layer, which decides whether it is split by heads.
        rank: Rank in the group; None for this process.
        mp_group: Process group that determines the rank if `rank` is None.

    Returns:
        The number of elements that the rank holds.

    Raises:
        ValueError: Neither `rank` nor `mp_group` is given and `mp_size` is not the world size.
    """
    if rank is None:
        if mp_group is None and dist.get_world_size() != mp_size:
            raise ValueError(
                "get_shard_size requires a group-local rank or process group when mp_size "
                f"({mp_size}) differs from the distributed world size ({dist.get_world_size()})."
            )
        rank = dist.get_rank(mp_group)
    return get_shard_size_list(total_size, mp_size, meta, name)[rank]


def _even(whole: int, ranks: int) -> list[int]:
    part, more = divmod(whole, ranks)
    return [part + (rank < more) for rank in range(ranks)]


class PartitionType(Enum):
    """Dimension along which a layer is split over the tensor-parallel ranks, or no split."""

    COLUMN = "column"
    ROW = "row"
    SKIP = "skip"


@dataclass
class TPLayerSpec:
    """Specification of how the parameters whose names match its patterns are split.

    Attributes:
        patterns: Regular expressions that are matched from the start of a parameter's name.
        partition_type: Direction of the split, or SKIP.
        shape: Logical shape of a fused parameter. -1 is inferred; a tuple at `partition_dim` gives
            the sizes of unequal parts.
        partition_dim: Dimension to split; None for the default of `partition_type`.
        model_types: Model types that the specification applies to; None for all.
        gather_output: Whether to gather the output.
        grad_allreduce: Whether to all-reduce the gradient of a replicated parameter.
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
            raise ValueError(
                f"AutoTP partition_dim {dim} is out of range for shape length {len(self.shape)}."
            )
        for place, size in enumerate(self.shape):
            if not isinstance(size, tuple):
                if not isinstance(size, int) or size == 0 or size < -1:
                    raise ValueError("AutoTP shape dimensions must be positive integers or -1.")
                continue
            if place != dim:
                raise ValueError(
                    f"AutoTP shape nested tuple only allowed at partition_dim={dim}, got at "
                    f"{place}."
                )
            if not size:
                raise ValueError("AutoTP shape nested tuple cannot be empty.")
            if not all(isinstance(each, int) and each > 0 for each in size):
                raise ValueError("AutoTP nested sub-parameter sizes must be positive integers.")

    def get_partition_dim(self) -> int:
        """Return `partition_dim`, or its default: 0 for column and 1 for other layers."""
        if self.partition_dim is not None:
            return self.partition_dim
        return 0 if self.partition_type is PartitionType.COLUMN else 1

    def matches(self, param_name: str, model_type: str | None = None) -> bool:
        """Return whether the specification applies to a parameter.

        Args:
            param_name: Name of the parameter.
            model_type: Type of the model, compared without case.

        Returns:
            True if a pattern matches the name and the specification is valid for the model type.
        """
        kinds = {str(kind).lower() for kind in self.model_types or ()}
        fits = not kinds or str(model_type).lower() in kinds
        return fits and any(re.match(pattern, param_name) for pattern in self.patterns)


@dataclass
class AutoTPConfig:
    """Configuration of automatic tensor parallelism: one `TPLayerSpec` per kind of layer.

    Its other fields are the defaults for layers without a specification.
    """

    tp_size: int = 1
    layer_specs: list[TPLayerSpec] = field(default_factory=list)
    embedding_partition_dim: int = 1
    lm_head_patterns: list[str] = field(default_factory=lambda: ["lm_head", "embed_out"])
    use_default_specs: bool = True
    strict_mode: bool = False

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any]) -> AutoTPConfig:
        """Return the configuration that a dictionary of fields describes.

        `layer_specs` is a list of dictionaries of the fields of `TPLayerSpec`. Other keys than
        fields are ignored.
        """
        given = {
            name: value for name, value in config_dict.items() if name in cls.__dataclass_fields__
        }
        return cls(
            **{
                **given,
                "layer_specs": [TPLayerSpec(**spec) for spec in config_dict.get("layer_specs", [])],
            }
        )

    def find_matching_spec(
        self, param_name: str, model_type: str | None = None
    ) -> TPLayerSpec | None:
        """Return the first specification that applies to a parameter, or None.

        Args:
            param_name: Name of the parameter.
            model_type: Type of the model, compared without case.

        Returns:
            The specification, or None if none applies.
        """
        return next(
            (spec for spec in self.layer_specs if spec.matches(param_name, model_type)), None
        )


# transformers' style -> fields of TPLayerSpec
STYLES: dict[str, dict[str, Any]] = {
    "colwise": {"partition_type": PartitionType.COLUMN},
    "colwise_rep": {"partition_type": PartitionType.COLUMN, "gather_output": True},
    "colwise_gather_output": {"partition_type": PartitionType.COLUMN, "gather_output": True},
    "rowwise": {"partition_type": PartitionType.ROW},
    "embedding_rowwise": {"partition_type": PartitionType.SKIP},
    "replicated_with_grad_allreduce": {
        "partition_type": PartitionType.SKIP,
        "grad_allreduce": True,
    },
}


class TPPlanConverter:
    """Convert transformers' `tp_plan`, which maps module patterns to styles."""

    @staticmethod
    def convert(hf_tp_plan: Mapping[str, str]) -> list[TPLayerSpec] | None:
        """Return the specifications of a plan, or None if the plan is empty.

        Raises:
            ValueError: The plan has an unknown style. Splitting only one layer of a pair would be
                wrong.
        """
        if unknown := sorted(
            {style for style in hf_tp_plan.values() if style.lower() not in STYLES}
        ):
            raise ValueError(
                f"HuggingFace tp_plan contains unsupported partition style(s): {unknown}.  State "
                "tensor_parallel.partition_config for this model instead."
            )
        specs = []
        for pattern, style in hf_tp_plan.items():
            weight = TPPlanConverter._wildcard_to_regex(f"{pattern.removesuffix('.weight')}.weight")
            specs.append(TPLayerSpec([f"{weight}$"], **STYLES[style.lower()]))
        return specs or None

    @staticmethod
    def _wildcard_to_regex(pattern: str) -> str:
        return ".*" + pattern.replace(".", r"\.").replace("*", ".*")


def _get_hf_tp_plan(model: Any) -> dict[str, str] | None:
    """Return a transformers model's plan: of its base model, class and instance.

    A pattern that repeats another one with the prefix of the base model is left out.
    """
    found: dict[str, str] = dict(
        getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    )
    for plan in (getattr(type(model), "_tp_plan", None), getattr(model, "_tp_plan", None)):
        for pattern, style in (plan or {}).items():
            if not any(pattern == known or pattern.endswith(f".{known}") for known in found):
                found[pattern] = style
    return found or None
