"""The `zero_optimization` section: the ZeRO stage, its sizes and its tiers."""

from __future__ import annotations

import sys
from typing import ClassVar, Literal

from deepseek_zero.config.fields import Part, Section, accepted, effective, later, section

Device = Literal["none", "cpu", "nvme", "auto"]

_STAGE_3 = {"zero_optimization.stage": 3}
_STAGE_2 = {"zero_optimization.stage": 2}
_AHEAD = {
    "zero_optimization.stage": 3,
    "zero_optimization.offload_optimizer.device": "cpu",
    "zero_optimization.offload_param.device": "cpu",
}
_WINDOW = "gathers come ahead within stage3_prefetch_bucket_size"
# DeepSpeed's own list; a class whose package is not installed is never met and costs nothing.
MOE_BLOCKS = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)


class OffloadParam(Section):
    device: Device = effective(
        "none",
        "Where sharded weights rest between uses (stage 3); auto: where memory_budget has room, fastest first.",
        example="cpu",
        auto_is_value=True,
        needs={"zero_optimization.stage": 3},
    )
    nvme_path: str | None = effective(
        None,
        "Directory of the weights with device nvme, for each rank's unnamed file; made, for its owner alone (0700), "
        "where it is missing.",
        example="states",
        needs={"zero_optimization.stage": 3, "zero_optimization.offload_param.device": "nvme"},
    )
    buffer_count: int = accepted(5, "Buffers between disk and host memory.", _WINDOW, ge=1)
    buffer_size: int = accepted(100_000_000, "Size of one such buffer.", _WINDOW, unit="elements", ge=1)
    max_in_cpu: int = accepted(
        1_000_000_000, "Weights kept in host memory beside the disk.", _WINDOW, unit="elements", ge=0, inf=sys.maxsize
    )
    pin_memory: bool = effective(
        True,
        "Beside a GPU, page-lock the host memory of offloaded weights; both sections share it, either may ask "
        "(DeepSpeed's default: false).",
        example=False,
        needs={"zero_optimization.stage": 3, "zero_optimization.offload_param.device": "cpu"},
    )


class OffloadOptimizer(Section):
    part: ClassVar[Part | None] = Part.TIERS
    device: Device = effective(
        "none",
        "Where moments, masters of their own and gradient shards rest (stage 1 and above); auto: where memory_budget "
        "has room, fastest first.",
        example="cpu",
        auto_is_value=True,
        needs={"zero_optimization.stage": 3},
    )
    nvme_path: str | None = effective(
        None,
        "Directory of the optimizer states with device nvme, for each rank's unnamed file; made, for its owner alone "
        "(0700), where it is missing.",
        example="states",
        needs={"zero_optimization.stage": 3, "zero_optimization.offload_optimizer.device": "nvme"},
    )
    buffer_count: int = effective(
        4,
        "Tiles of optimizer state that may be on their way from the disk, and as many to it, besides the one that is "
        "updated.",
        ge=1,
        example=2,
    )
    pin_memory: bool = effective(
        True,
        "Beside a GPU, page-lock the host memory of offloaded states; both sections share it, either may ask "
        "(DeepSpeed's default: false).",
        example=False,
        needs={"zero_optimization.stage": 3, "zero_optimization.offload_optimizer.device": "cpu"},
    )
    pipeline: bool = effective(
        True, "Update weights that are offloaded too when the next forward comes to them; the same bits.", example=False
    )
    pipeline_read: bool = effective(
        True, "Read the next tiles while one is updated (DeepSpeed's default: false).", example=False
    )
    pipeline_write: bool = effective(
        True, "Write the last tiles while one is updated (DeepSpeed's default: false).", example=False
    )
    fast_init: bool = accepted(False, "Write the first states to disk in large pieces.", "they always are")
    ratio: float = effective(
        1.0,
        "Share of the states that is offloaded (Twin-Flow); those of the first units stay on the device.",
        example=0.5,
        needs={"zero_optimization.offload_optimizer.device": "cpu", "zero_optimization.stage": 3},
        ge=0,
        le=1,
    )
    super_offload: bool = effective(
        False,
        "Update units in backward, before the norm is known, and undo that where it was wrong; the same bits.",
        example=True,
        needs=_AHEAD,
    )
    undo_bytes: int = effective(
        1 << 30,
        "Ours. Memory of a rank for what such updates have overwritten; units beyond it wait for the next forward.",
        unit="bytes",
        example=1_000_000,
        needs={**_AHEAD, "zero_optimization.offload_optimizer.super_offload": True},
        ge=0,
    )
    delayed_update_after: int | None = effective(
        None,
        "Ours. From this step on apply each gradient one step late (ZeRO-Offload's delayed update); other bits.",
        unit="steps",
        example=2,
        needs={"zero_optimization.offload_optimizer.device": "cpu", "zero_optimization.stage": 3},
        ge=0,
    )
    cpuadam_cores_perc: float = accepted(
        0.8, "Share of the cores that update on the host.", "torch's own number of threads holds", gt=0, le=1
    )


class LeafModule(Section):
    classes: tuple[str, ...] = effective(
        MOE_BLOCKS,
        "Module classes gathered whole, never split into smaller units.",
        example=["TinyMoeBlock"],
        needs=_STAGE_3,
    )
    names: tuple[str, ...] = effective(
        (), "Module names gathered whole, as in named_modules().", example=["blocks.0"], needs=_STAGE_3
    )
    name_suffixes: tuple[str, ...] = effective(
        (), "Endings of module names gathered whole.", example=[".mlp"], needs=_STAGE_3
    )


class LocoParam(Section):
    part: ClassVar[Part | None] = Part.SPEED
    err_beta: float = later(0.8, "Weight of the old error in the error feedback.", example=0.5, ge=0, le=1)
    reset_T: int = later(1024, "Steps after which the error is forgotten.", unit="steps", example=16, ge=1)


class Zenflow(Section):
    part: ClassVar[Part | None] = Part.TIERS
    topk_ratio: float = later(
        0.1, "Share of gradient columns updated on the device every step.", example=0.2, ge=0, le=1
    )
    select_strategy: Literal["auto", "step", "epoch"] = later(
        "auto", "When the important columns are chosen again.", example="step", auto_is_value=True
    )
    select_interval: int | None = later(None, "Steps or epochs between two choices.", example=4, ge=1)
    update_interval: int | None = later(None, "Steps between two host updates.", unit="steps", example=4, ge=1)
    overlap_step: bool = later(False, "Let the host update run behind the next steps.", example=True)
    offload: bool = later(False, "Keep the selected states in host memory too.", example=True)
    auto_ratio: float = later(0.99, "Share of the gradient norm the selection must cover.", example=0.9, ge=0, le=1)
    full_warm_up_rounds: int = later(0, "Rounds of full updates at the start.", example=2, ge=0)
    pt_reserved_cores_perc: float = later(0.5, "Share of the cores kept for PyTorch.", example=0.4, ge=0, le=1)


class ZeroOptimization(Section):
    stage: Literal[0, 1, 2, 3] = effective(
        0, "What is sharded: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too.", example=3
    )
    contiguous_gradients: bool = accepted(
        True, "Copy gradients into one buffer as they arrive.", "always on: a unit has one flat gradient buffer"
    )
    reduce_scatter: bool = accepted(
        True,
        "Reduce by reduce-scatter instead of all-reduce.",
        "stages 1 to 3 need only their slice, and stage 0's all-reduce is the same sum in the same order",
    )
    reduce_bucket_size: int = effective(
        500_000_000,
        "Gradients reduced in one collective, at most.",
        unit="elements",
        example=1000,
        needs=_STAGE_2,
        gt=0,
        inf=sys.maxsize,
    )
    use_multi_rank_bucket_allreduce: bool = accepted(
        True, "Merge the buckets of several ranks.", "the slices of all ranks already travel in one reduce-scatter"
    )
    allgather_partitions: bool = accepted(
        True, "Refresh updated weights by all-gather instead of broadcasts.", "always on: one all-gather per unit"
    )
    allgather_bucket_size: int = accepted(
        500_000_000,
        "Weights refreshed in one collective, at most.",
        "one all-gather carries one unit, straight into its buffer; there is no other buffer to bound",
        unit="elements",
        gt=0,
        inf=sys.maxsize,
    )
    overlap_comm: bool = effective(
        True,
        "Gather and reduce beside the computation, at every stage; costs one more unit's gradients.",
        example=False,
    )
    load_from_fp32_weights: bool = later(
        True, "Take master weights from the checkpoint instead of the loaded weights.", Part.CHECKPOINTS, example=False
    )
    elastic_checkpoint: bool = accepted(
        False,
        "Save so that another number of ranks can load.",
        "a legacy key; the checkpoint's format alone decides who can load it",
    )
    offload_param: OffloadParam = section(OffloadParam, "The tier of weights (stage 3).")
    offload_optimizer: OffloadOptimizer = section(OffloadOptimizer, "The tier of master weights and moments.")
    vertical_micro_batches: int = effective(
        1,
        "Ours. Micro-batches that one forward's batch is cut into; each unit takes all of them in turn, on one load of "
        "its weights (stage 3).",
        unit="micro-batches",
        example=2,
        needs=_STAGE_3,
        ge=1,
    )
    sub_group_size: int = effective(
        1_000_000_000,
        "Elements the optimizer updates in one tile: whole 4,096s, at least one and at most 2^20 on a CPU; 0: auto.",
        unit="elements",
        means_auto=(0,),
        example=1000,
        gt=0,
        inf=sys.maxsize,
        needs=_STAGE_3,
    )
    stage3_max_live_parameters: int = effective(
        1_000_000_000,
        "Window: gathered weights alive at once, beyond which nothing is fetched ahead.",
        unit="elements",
        example=1000,
        needs=_STAGE_3,
        ge=0,
        inf=sys.maxsize,
    )
    stage3_max_reuse_distance: int = effective(
        1_000_000_000,
        "Keep a unit gathered when it is used again within this many elements.",
        unit="elements",
        example=1000,
        needs=_STAGE_3,
        ge=0,
        inf=sys.maxsize,
    )
    stage3_prefetch_bucket_size: int = effective(
        50_000_000,
        "Weights fetched ahead of their use, at most; the next unit in any case, unless 0.",
        unit="elements",
        example=1000,
        needs=_STAGE_3,
        ge=0,
        inf=sys.maxsize,
    )
    stage3_param_persistence_threshold: int = effective(
        100_000,
        "Parameters up to this size stay replicated.",
        unit="elements",
        example=0,
        needs=_STAGE_3,
        ge=0,
        inf=sys.maxsize,
    )
    stage3_model_persistence_threshold: int = effective(
        sys.maxsize,
        "All parameters that stay replicated, together at most.",
        unit="elements",
        example=0,
        needs=_STAGE_3,
        ge=0,
        inf=sys.maxsize,
    )
    stage3_gather_16bit_weights_on_model_save: bool = effective(
        False, "Let save_16bit_model and clients gather full 16-bit weights.", example=True, needs=_STAGE_3
    )
    stage3_module_granularity_threshold: int = effective(
        0,
        "A module whose modules have at most this many elements each, on average, is one unit: one message for all.",
        unit="elements",
        example=100,
        ge=0,
    )
    stage3_use_all_reduce_for_fetch_params: bool = accepted(
        False, "Fetch weights by all-reduce of zero-padded buffers.", "one all-gather fills the unit in place"
    )
    stage3_allgather_sequential: bool = accepted(
        False,
        "Fetch one parameter at a time, without a flat buffer.",
        "the gathered unit is its own flat buffer, so there is no second one to save",
    )
    ignore_unused_parameters: bool = effective(
        True, "Give parameters without a gradient zeros; false makes one an error.", example=False
    )
    legacy_stage1: bool = accepted(False, "Use DeepSpeed's first stage 1.", "there is one mechanism for every stage")
    round_robin_gradients: bool = accepted(
        False, "Spread gradient copies over ranks in turn.", "every unit is split evenly over all ranks"
    )
    zero_hpz_partition_size: int = later(
        1, "Ranks of a node that hold a second copy of the weights (hpZ).", Part.SPEED, example=2, unit="ranks", ge=1
    )
    zero_quantized_weights: bool = later(False, "Gather weights as int8 blocks (qwZ).", Part.SPEED, example=True)
    zero_quantized_nontrainable_weights: bool = later(
        False, "Gather frozen weights as int8 blocks.", Part.SPEED, example=True
    )
    zero_quantized_gradients: bool = later(False, "Reduce gradients as int4 blocks (qgZ).", Part.SPEED, example=True)
    zeropp_loco_param: LocoParam | None = later(
        None, "Error feedback for compressed gradients (LoCo).", Part.SPEED, example={"err_beta": 0.5}
    )
    mics_shard_size: int = later(
        -1, "Shard within groups of this many ranks, replicate across them (MiCS).", Part.SPEED, unit="ranks", example=2
    )
    mics_hierarchical_params_gather: bool = later(
        False, "Gather across MiCS groups in two steps.", Part.SPEED, example=True
    )
    memory_efficient_linear: bool = accepted(
        True, "Replace torch's linear by one that keeps no gathered weight.", "gathered storage is released by the unit"
    )
    override_module_apply: bool = accepted(
        True, "Gather parameters inside Module.apply.", "apply on a parameter at rest raises with advice instead"
    )
    pipeline_loading_checkpoint: bool = accepted(
        False, "Overlap reading and copying of a checkpoint.", "speed of a load only; no value depends on it"
    )
    log_trace_cache_warnings: bool = accepted(
        False, "Warn when the recorded order is discarded.", "the order is a hint and is never discarded"
    )
    enable_sanity_checks: bool = accepted(False, "Check invariants at run time.", "our checks are always on")
    save_muon_momentum_buffer_in_memory: bool = accepted(
        False, "Keep Muon's momentum in memory instead of on disk.", "without a disk tier it is in memory"
    )
    leaf_module: LeafModule = section(LeafModule, "Modules that are never split into smaller units.")
    zenflow: Zenflow | None = later(
        None, "Asynchronous offload by importance of gradient columns.", Part.TIERS, example={"topk_ratio": 0.2}
    )
