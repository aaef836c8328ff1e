"""`Config`: the keys of DeepSpeed's configuration that are implemented, and this library's own.

It is one typed, frozen model, which `auto.resolve` builds from a `RawConfig`. Each key has a unit,
a sentence and a status (fields.py). docs/reference/config.md and keywords.pyi are generated from
this module. The section of ZeRO is first, followed by those of ordinary runs and the others.
`Config` with the top-level keys is last.
"""

from __future__ import annotations

import sys
from typing import Any, Literal

from pydantic import PrivateAttr

from .batch import Batch
from .fields import Section, accepted, effective, section
from .problems import AutoDecision

Device = Literal["none", "cpu", "nvme", "auto"]

_WINDOW = "stage3_prefetch_bucket_size limits the prefetched gathers"
# DeepSpeed's own list. A class whose package is not installed never occurs.
MOE_BLOCKS = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)


class OffloadParam(Section):
    """Offload of weights (section `zero_optimization.offload_param`)."""

    device: Device = effective(
        "none",
        "Memory of sharded weights between uses (stage 3); auto: the fastest one with space in "
        "memory_budget.",
        example="cpu",
        auto_is_value=True,
    )
    nvme_path: str | None = effective(
        None,
        "Directory of the weights with device nvme, for an unnamed file of each rank. If it is "
        "missing, it is created with mode 0700.",
        example="states",
    )
    buffer_count: int = accepted(5, "Buffers between disk and host memory.", _WINDOW, ge=1)
    buffer_size: int = accepted(
        100_000_000, "Size of one such buffer.", _WINDOW, unit="elements", ge=1
    )
    max_in_cpu: int = accepted(
        1_000_000_000,
        "Weights kept in host memory in addition to the disk.",
        _WINDOW,
        unit="elements",
        ge=0,
        inf=sys.maxsize,
    )
    pin_memory: bool = effective(
        True,
        "With a GPU, page-lock the host memory of offloaded weights. Both offload sections share "
        "that memory, so it is enough to set the key in one of them (DeepSpeed's default: "
        "false).",
    )


class OffloadOptimizer(Section):
    """Offload of optimizer states (section `zero_optimization.offload_optimizer`)."""

    device: Device = effective(
        "none",
        "Memory of moments, separate main weights and gradient shards (stage 1 and above); auto: "
        "the fastest one with space in memory_budget.",
        example="cpu",
        auto_is_value=True,
    )
    nvme_path: str | None = effective(
        None,
        "Directory of the optimizer states with device nvme, for an unnamed file of each rank. "
        "If it is missing, it is created with mode 0700.",
        example="states",
    )
    buffer_count: int = effective(
        4,
        "Tiles of optimizer state that may be read from the disk at once, in addition to the "
        "tile that is updated; the same number may be written.",
        ge=1,
        example=2,
    )
    pin_memory: bool = effective(
        True,
        "With a GPU, page-lock the host memory of offloaded states. Both offload sections share "
        "that memory, so it is enough to set the key in one of them (DeepSpeed's default: "
        "false).",
    )
    pipeline: bool = effective(
        True,
        "Update sharded weights when the next forward gathers them: offloaded ones, those of an "
        "accelerator that the host updates, and those that several hosts share. Results are "
        "bitwise equal.",
    )
    pipeline_read: bool = effective(
        True,
        "Read the next tiles while one is updated (DeepSpeed's default: false).",
    )
    pipeline_write: bool = effective(
        True,
        "Write the last tiles while one is updated (DeepSpeed's default: false).",
    )
    fast_init: bool = accepted(
        False, "Write the first states to disk in large pieces.", "they always are"
    )
    ratio: float = effective(
        1.0,
        "Share of the states that is offloaded (Twin-Flow); those of the first units stay on the "
        "device.",
        example=0.5,
        ge=0,
        le=1,
    )
    super_offload: bool = effective(
        False,
        "Update units in backward, before the norm is known, and undo wrong updates. Results are "
        "bitwise equal.",
    )
    undo_bytes: int = effective(
        1 << 30,
        "Ours. Memory of a rank for the values that such updates overwrite; units that exceed it "
        "are updated in the next forward.",
        unit="bytes",
        example=1_000_000,
        ge=0,
    )
    delayed_update_after: int | None = effective(
        None,
        "Ours. From this step on, apply each gradient one step late (ZeRO-Offload's delayed "
        "update). Results differ.",
        unit="steps",
        example=2,
        ge=0,
    )
    cpuadam_cores_perc: float = accepted(
        0.8,
        "Share of the cores that update on the host.",
        "torch's number of threads is used",
        gt=0,
        le=1,
    )


class LeafModule(Section):
    """Modules that are units as a whole (section `zero_optimization.leaf_module`)."""

    classes: tuple[str, ...] = effective(
        MOE_BLOCKS,
        "Module classes gathered whole, never split into smaller units.",
        example=["TinyMoeBlock"],
    )
    names: tuple[str, ...] = effective(
        (),
        "Module names gathered whole, as in named_modules().",
        example=["blocks.0"],
    )
    name_suffixes: tuple[str, ...] = effective(
        (), "Endings of module names gathered whole.", example=[".mlp"]
    )


class LocoParam(Section):
    """Error feedback of gradients (section `zero_optimization.zeropp_loco_param`)."""

    err_beta: float = effective(
        0.8,
        "Weight of the old error in the running mean of errors.",
        example=0.5,
        ge=0,
        le=1,
    )
    reset_T: int = effective(
        1024,
        "Number of optimizer steps after which errors are reset.",
        unit="steps",
        example=16,
        ge=1,
    )


Block = Literal[32, 64, 128, 256, 512]


class WeightCodes(Section):
    """Compression of weights (section `zero_optimization.compression.weights`)."""

    bits: Literal[8, 4] | None = effective(
        None,
        "Send matrices as blocks of integers with this number of bits; zero_quantized_weights "
        "means 8. Stages 1 and 2 send the changes of an update. Stage 3 sends the weights, for "
        "which 4 bits are not enough.",
        unit="bits",
        example=8,
    )
    block: Block = effective(256, "Weights that share a scale.", unit="elements", example=128)
    difference: bool | None = accepted(
        None,
        "Send the differences of weights from a copy that all ranks have.",
        "stages 1 and 2 always do; at stage 3 ranks have no such copy, or a second copy (hpZ) "
        "that each update invalidates",
    )


class GradientCodes(Section):
    """Compression of gradients (section `zero_optimization.compression.gradients`)."""

    bits: Literal[8, 4] | None = effective(
        None,
        "Reduce gradients of matrices as blocks of integers with this number of bits; "
        "zero_quantized_gradients means 4.",
        unit="bits",
        example=8,
    )
    block: Block | None = effective(
        None,
        "Number of gradients that share a scale; by default 256 for 8 bits and 128 for 4 bits.",
        unit="elements",
        example=64,
    )
    inside_bits: Literal[16, 8] = effective(
        16,
        "If sums are formed by host: 8 sends the gradients of matrices as int8 blocks within a "
        "host too; 16 sends them unquantized.",
        unit="bits",
        example=8,
    )
    error_feedback: Literal["off", "bf16", "int8"] = effective(
        "off",
        "Error feedback: store a rank's quantization error in this format and add it to its next "
        "gradients.",
        example="bf16",
    )


class CompressionSection(Section):
    """Compression of messages (section `zero_optimization.compression`)."""

    weights: WeightCodes = section(WeightCodes, "How weights are coded between ranks.")
    gradients: GradientCodes = section(GradientCodes, "How gradients are coded between ranks.")
    min_numel: int = effective(
        16_384,
        "A unit whose matrices have fewer elements in total is not quantized.",
        unit="elements",
        example=0,
        ge=0,
    )
    auto: bool = effective(
        False,
        "On several hosts, choose the bits that are not stated from measured times of the link "
        "and the codecs: those of gradients, and at stage 3 of weights. Checkpoints contain the "
        "choice, and a resumed run repeats it.",
    )


class ZeroOptimization(Section):
    """Settings for ZeRO (section `zero_optimization`)."""

    stage: Literal[0, 1, 2, 3] = effective(
        0,
        "ZeRO stage. 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also weights.",
        example=3,
    )
    contiguous_gradients: bool = accepted(
        True,
        "Copy gradients into one buffer as they arrive.",
        "always on: a unit has one flat gradient buffer",
    )
    reduce_scatter: bool = accepted(
        True,
        "Reduce by reduce-scatter instead of all-reduce.",
        "stages 1 to 3 need only their shard, and stage 0's all-reduce is the same sum in the "
        "same order",
    )
    reduce_bucket_size: int = effective(
        500_000_000,
        "Largest number of gradient elements in one collective.",
        unit="elements",
        example=1000,
        gt=0,
        inf=sys.maxsize,
    )
    use_multi_rank_bucket_allreduce: bool = accepted(
        True,
        "Merge the buckets of several ranks.",
        "one reduce-scatter already contains the shards of all ranks",
    )
    allgather_partitions: bool = accepted(
        True,
        "Refresh updated weights by all-gather instead of broadcasts.",
        "always on: one all-gather per unit",
    )
    allgather_bucket_size: int = accepted(
        500_000_000,
        "Largest number of updated weights in one collective.",
        "one all-gather fills the buffer of one unit in place; there is no other buffer to limit",
        unit="elements",
        gt=0,
        inf=sys.maxsize,
    )
    overlap_comm: bool = effective(
        True,
        "Gather and reduce during the computation, at every stage; needs memory for the "
        "gradients of one more unit.",
    )
    elastic_checkpoint: bool = accepted(
        False,
        "Save so that another number of ranks can load.",
        "a legacy key; the checkpoint's format alone decides who can load it",
    )
    offload_param: OffloadParam = section(OffloadParam, "The tier of weights (stage 3).")
    offload_optimizer: OffloadOptimizer = section(
        OffloadOptimizer, "The tier of master weights and moments."
    )
    vertical_micro_batches: int = effective(
        1,
        "Ours. Number of micro-batches into which the batch of one forward is split. Each unit "
        "processes all of them with one load of its weights (stage 3).",
        unit="micro-batches",
        example=2,
        ge=1,
    )
    sub_group_size: int = effective(
        1_000_000_000,
        "Elements that the optimizer updates in one tile, a multiple of 4,096. On a CPU at most "
        "2^24, without a kernel or with states on a disk 2^20. 0: auto.",
        unit="elements",
        means_auto=(0,),
        example=1000,
        gt=0,
        inf=sys.maxsize,
    )
    stage3_max_live_parameters: int = effective(
        1_000_000_000,
        "Largest number of gathered weight elements at a time; nothing is prefetched beyond it.",
        unit="elements",
        example=1000,
        ge=0,
        inf=sys.maxsize,
    )
    stage3_max_reuse_distance: int = effective(
        1_000_000_000,
        "Keep a unit gathered if it is used again within this number of elements.",
        unit="elements",
        example=1000,
        ge=0,
        inf=sys.maxsize,
    )
    stage3_prefetch_bucket_size: int = effective(
        50_000_000,
        "Largest number of prefetched weight elements. The next unit is always prefetched, "
        "unless it is 0.",
        unit="elements",
        example=1000,
        ge=0,
        inf=sys.maxsize,
    )
    stage3_param_persistence_threshold: int = effective(
        100_000,
        "Parameters up to this size stay replicated.",
        unit="elements",
        example=0,
        ge=0,
        inf=sys.maxsize,
    )
    stage3_model_persistence_threshold: int = effective(
        sys.maxsize,
        "Largest total size of the parameters that stay replicated.",
        unit="elements",
        example=0,
        ge=0,
        inf=sys.maxsize,
    )
    stage3_gather_16bit_weights_on_model_save: bool = effective(
        False,
        "Allow save_16bit_model and programs to gather full 16-bit weights.",
    )
    stage3_module_granularity_threshold: int = effective(
        0,
        "A module whose submodules have at most this number of elements on average is one unit "
        "with one message.",
        unit="elements",
        example=100,
        ge=0,
    )
    stage3_use_all_reduce_for_fetch_params: bool = accepted(
        False,
        "Fetch weights by all-reduce of zero-padded buffers.",
        "one all-gather fills the unit in place",
    )
    stage3_allgather_sequential: bool = accepted(
        False,
        "Fetch one parameter at a time, without a flat buffer.",
        "the gathered unit is its own flat buffer, so there is no second one to save",
    )
    ignore_unused_parameters: bool = effective(
        True,
        "Use zeros for parameters without a gradient; if false, a missing gradient is an error.",
    )
    legacy_stage1: bool = accepted(
        False, "Use DeepSpeed's first stage 1.", "there is one mechanism for every stage"
    )
    round_robin_gradients: bool = accepted(
        False,
        "Spread gradient copies over ranks in turn.",
        "every unit is split evenly over all ranks",
    )
    zero_hpz_partition_size: int = effective(
        1,
        "Neighboring ranks, usually those of one host, that share a second copy of the weights "
        "(hpZ): only the first gather after an update uses all ranks.",
        example=2,
        unit="ranks",
        ge=1,
    )
    zero_quantized_weights: bool = effective(
        False,
        "Send matrices as int8 blocks (qwZ): gathered weights at stage 3, changes of weights at "
        "stages 1 and 2. `compression.weights` has the details.",
    )
    zero_quantized_nontrainable_weights: bool = effective(
        False,
        "Store and gather sharded frozen matrices as int8 blocks; they are dequantized for each "
        "use.",
    )
    zero_quantized_gradients: bool = effective(
        False,
        "Reduce gradients of matrices as int4 blocks (qgZ). `compression.gradients` has the "
        "details.",
    )
    compression: CompressionSection = section(
        CompressionSection, "Matrices that are sent between ranks in fewer bits."
    )
    zeropp_loco_param: LocoParam | None = effective(
        None,
        "Error feedback for quantized gradients with a running mean of errors (LoCo); in bf16 "
        "unless `compression.gradients.error_feedback` is int8.",
        example={"err_beta": 0.5, "reset_T": 1024},
    )
    mics_shard_size: int = effective(
        -1,
        "Shard within groups of this number of ranks and replicate across them (MiCS), like "
        "`mesh` with that dp_shard.",
        unit="ranks",
        example=2,
    )
    mics_hierarchical_params_gather: bool = accepted(
        False,
        "Gather across MiCS groups in two steps.",
        "ranks of one host read each other's shards in place",
    )
    memory_efficient_linear: bool = accepted(
        True,
        "Replace torch's linear by one that keeps no gathered weight.",
        "gathered storage is released by the unit",
    )
    override_module_apply: bool = accepted(
        True,
        "Gather parameters inside Module.apply.",
        "apply on a sharded parameter raises an error with advice instead",
    )
    pipeline_loading_checkpoint: bool = accepted(
        False,
        "Overlap reading and copying of a checkpoint.",
        "speed of a load only; no value depends on it",
    )
    log_trace_cache_warnings: bool = accepted(
        False,
        "Warn when the recorded order is discarded.",
        "the order is a hint and is never discarded",
    )
    enable_sanity_checks: bool = accepted(
        False, "Check invariants at run time.", "our checks are always on"
    )
    save_muon_momentum_buffer_in_memory: bool = accepted(
        False,
        "Keep Muon's momentum in memory instead of on disk.",
        "without a disk tier it is in memory",
    )
    leaf_module: LeafModule = section(
        LeafModule, "Modules that are never split into smaller units."
    )
    tile_above: int | None = effective(
        None,
        "Ours. Split linear layers and embeddings with a larger weight (in the dtype it computes "
        "in) into tiles of rows of at most this size. Each tile is a unit.",
        unit="bytes",
        example=200,
        ge=1,
    )


Dtype = Literal["fp32", "fp16", "bf16"]


class Optimizer(Section):
    """The optimizer and its arguments (section `optimizer`)."""

    type: str | None = effective(
        None,
        "Name of the optimizer: one of this library, or any class of torch.optim. Omit it if the "
        "program passes an optimizer.",
        example="SGD",
    )
    params: dict[str, Any] = effective(
        {},
        "Arguments of the optimizer, for example lr, betas, eps, weight_decay.",
        example={"lr": 5e-4},
    )
    moments: Literal["fp32", "bf16", "8bit"] = effective(
        "fp32",
        "Ours. Format in which fp32 moments are stored between steps; bf16 and 8bit use "
        "stochastic rounding and are not exact.",
        example="bf16",
    )
    kernels: Literal["auto", "compiled", "numba", "torch"] = effective(
        "auto",
        "Ours. Implementation of updates. On a CPU, compiled: kernels that llvmlite compiles, in "
        "one pass over memory, if the optimizer has one; torch: PyTorch's operations, with bitwise "
        "equal results; auto: compiled, if a rank updates a million elements or more. On NVIDIA "
        "GPUs, kernels are compiled with NVRTC, unless it is torch. numba is the old name of "
        "compiled.",
        example="torch",
    )
    legacy_fusion: bool = accepted(
        False,
        "Use the old fusion of DeepSpeed's LAMB.",
        "there is one implementation of each optimizer",
    )


class Scheduler(Section):
    """The learning-rate schedule and its arguments (section `scheduler`)."""

    type: str | None = effective(
        None,
        "Name of the learning-rate schedule: DeepSpeed's five, or any class of "
        "torch.optim.lr_scheduler.",
        example="WarmupLR",
    )
    params: dict[str, Any] = effective(
        {},
        "Arguments of the schedule.",
        example={"warmup_num_steps": 7},
    )


class Fp16(Section):
    """Settings for fp16 training and loss scaling (section `fp16`)."""

    enabled: bool = effective(
        False,
        'Compute in fp16 with fp32 main weights and loss scaling; "auto": on a GPU without bf16.',
    )
    auto_cast: bool = effective(
        True,
        "Cast floating-point inputs to fp16.",
        auto="the top-level auto_cast",
    )
    loss_scale: float = effective(
        0.0, "Constant loss scale; 0 means a dynamic one.", example=128.0, ge=0
    )
    initial_scale_power: int = effective(
        16,
        "Initial dynamic loss scale, as a power of 2.",
        example=8,
        ge=0,
        le=127,
    )
    loss_scale_window: int = effective(
        1000,
        "Number of steps without overflow after which the dynamic scale doubles.",
        unit="steps",
        example=50,
    )
    hysteresis: int = effective(
        2,
        "Number of overflows before the dynamic scale is halved.",
        unit="steps",
        example=4,
        ge=1,
    )
    consecutive_hysteresis: bool = effective(
        False, "Reset the hysteresis after every step without overflow."
    )
    min_loss_scale: float = effective(1.0, "Smallest dynamic loss scale.", example=4.0)


class Bf16(Section):
    """Settings for bf16 training (section `bf16`)."""

    enabled: bool = effective(
        False,
        'Compute in bf16 with fp32 main weights; "auto": if the hardware has it.',
    )
    check_grad_overflow: bool = effective(True, "Skip a step whose gradients are not finite.")
    master: Literal["split", "fp32", "none"] = effective(
        "split",
        "How the fp32 main weight is stored. split: as the bf16 weight and 16 more bits, exact. "
        "fp32: whole, 2 bytes more. none: not stored; weights use stochastic rounding, 2 bytes "
        "less, not exact.",
        example="fp32",
    )
    immediate_grad_update: bool = accepted(
        False,
        "Add gradients to the fp32 buffer from the hook.",
        "always so: gradients are accumulated as they arrive",
    )
    bf16_master_weights_and_grads: bool = effective(
        False,
        'DeepSpeed\'s name for master = "none" (with one micro-batch per step, gradients are bf16 '
        "anyway).",
    )
    bf16_optimizer_states: bool = effective(
        False, 'DeepSpeed\'s name for optimizer.moments = "bf16".'
    )


class IntegritySection(Section):
    """Checks of states for flipped bits (section `integrity`)."""

    mode: Literal["off", "warn", "end"] = effective(
        "off",
        "Ours. Verify memory by checksums: copies are compared between ranks, and states that "
        "are not in use with earlier checksums. warn logs what differs and on which rank, end "
        "also ends the run.",
        example="end",
    )
    every: int = effective(
        100,
        "Ours. Steps between two checks. A trained state that only one rank holds is checked "
        "over one of these steps.",
        unit="steps",
        example=1,
        ge=1,
    )


class MemoryBudget(Section):
    """Limits of the memory for each tier (section `memory_budget`)."""

    device: int | None = effective(
        None,
        "Memory of the training device; exceeding it is an error. null: no limit, and with "
        'device "auto" the free memory.',
        unit="bytes",
        example=1_000_000_000,
        inf=None,
        ge=0,
    )
    host: int | None = effective(
        None,
        'Host memory, with device "auto"; null: none on a CPU, because the device is the host.',
        unit="bytes",
        example=1_000_000_000,
        inf=None,
        ge=0,
    )
    disk: int | None = effective(
        None,
        'Space on the disk of nvme_path, with device "auto"; null: the free space.',
        unit="bytes",
        example=1_000_000_000,
        inf=None,
        ge=0,
    )


class Network(Section):
    """Settings for connections between hosts (section `network`)."""

    interface: str | None = effective(
        None,
        "Ours. Network interface or address of the host at which ranks listen, like the "
        "launcher's --interface; an environment variable takes precedence.",
        example="lo",
    )
    ports: str | None = effective(
        None,
        "Ours. Ports at which ranks listen, like the launcher's --ports; an environment variable "
        "takes precedence.",
        example="29600-29700",
    )


class MeshSizes(Section):
    """Sizes of the mesh axes (section `mesh`)."""

    pp: int = effective(1, "Ours. Pipeline stages.", unit="ranks", example=2, ge=1)
    dp_replicate: int = effective(
        1,
        "Ours. Ranks that hold the same shards (hybrid sharding); gradients are summed over them "
        "once per step.",
        unit="ranks",
        example=2,
        ge=1,
    )
    dp_shard: int = effective(
        -1,
        "Ours. Ranks that shard the states; -1: all ranks that the other axes leave.",
        unit="ranks",
        example=2,
        ge=-1,
    )
    sp: int = effective(1, "Ours. Ranks that share one sequence.", unit="ranks", example=2, ge=1)
    tp: int = effective(1, "Ours. Ranks that share one layer.", unit="ranks", example=2, ge=1)


class TorchAutocast(Section):
    """Settings for torch.autocast (section `torch_autocast`)."""

    enabled: bool = effective(False, "Run the forward under torch.autocast.")
    dtype: Literal["fp16", "bf16"] = effective(
        "bf16",
        "The autocast dtype.",
        auto="bf16 if the hardware has it, else fp16",
        example="fp16",
    )


class DataTypes(Section):
    """Dtypes of accumulation (section `data_types`)."""

    grad_accum_dtype: Dtype | None = effective(
        None,
        "Dtype in which gradients are accumulated; null: the plan's choice, which is fp32 with "
        "several micro-batches.",
        example="bf16",
    )


class TensorBoard(Section):
    """Settings for TensorBoard files (section `tensorboard`)."""

    enabled: bool = effective(False, "Write TensorBoard files on rank 0.")
    output_path: str = effective(
        "",
        "Directory of the files.",
        example="tb",
    )
    job_name: str = effective(
        "DeepSpeedJobName",
        "Sub-directory of the run.",
        example="trial",
    )


class CsvMonitor(Section):
    """Settings for CSV files (section `csv_monitor`)."""

    enabled: bool = effective(False, "Write one CSV file per quantity on rank 0.")
    output_path: str = effective("", "Directory of the files.", example="csv")
    job_name: str = effective(
        "DeepSpeedJobName",
        "Sub-directory of the run.",
        example="trial",
    )


class Wandb(Section):
    """Settings for Weights & Biases (section `wandb`)."""

    enabled: bool = effective(False, "Send records to Weights & Biases from rank 0.")
    group: str | None = effective(None, "Group of the run.", example="trials")
    team: str | None = effective(None, "Team (entity) that owns the run.", example="us")
    project: str = effective("deepspeed", "Project of the run.", example="zero")


class Comet(Section):
    """Settings for Comet (section `comet`)."""

    enabled: bool = effective(False, "Send records to Comet from rank 0.")
    samples_log_interval: int = effective(
        100, "Samples between two records.", unit="samples", example=10, ge=1
    )
    project: str | None = effective(None, "Project of the run.", example="zero")
    workspace: str | None = effective(None, "Workspace of the project.", example="us")
    api_key: str | None = effective(
        None, "Key of the account; better given by environment.", example="key", repr=False
    )
    experiment_name: str | None = effective(None, "Name shown for the run.", example="trial")
    experiment_key: str | None = effective(
        None, "Key of an experiment to continue.", example="a" * 32
    )
    online: bool | None = effective(
        None, "Send at once, or keep an offline archive.", example=False
    )
    mode: str | None = effective(
        None, "Get, create, or get_or_create the experiment.", example="create"
    )


class SaveOnSignal(Section):
    """The checkpoint that is saved after a signal (section `checkpoint.save_on_signal`)."""

    path: str | None = effective(
        None,
        "Ours. If a rank receives one of the signals, the job saves to this directory after the "
        "current or the next step, and ends with exit code 85. null: signals are not handled.",
        example="checkpoints",
    )
    signals: tuple[Literal["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP"], ...] = effective(
        ("SIGTERM", "SIGUSR1"),
        "Ours. The signals. Existing handlers are called as well.",
        example=["SIGUSR2"],
    )


class Checkpoint(Section):
    """Settings for checkpoints (section `checkpoint`)."""

    tag_validation: Literal["Ignore", "Warn", "Fail"] = effective(
        "Warn", "What to do when ranks save under different tags.", example="Fail"
    )
    layout: Literal["auto", "slices", "deepspeed"] = effective(
        "auto",
        "Ours. Format of save_checkpoint: our own slices, which any number of ranks can load, or "
        "DeepSpeed's files. auto: DeepSpeed's files in a program that imports deepspeed and gets "
        "this library, above stage 0, if they can contain the state and none of wait=False, "
        "keep_last and save_on_signal is used; else slices.",
        example="deepspeed",
    )
    snapshot_bytes: int = effective(
        1 << 30,
        "Bytes that each rank may copy, of states that a step is about to change, while a "
        "checkpoint is written in the background.",
        example=1 << 20,
        ge=0,
    )
    keep_last: int | None = effective(
        None,
        "Ours. Number of complete checkpoints to keep: after a save, older ones in the same "
        "directory are removed. null keeps all.",
        example=3,
        ge=1,
    )
    keep_every: int | None = effective(
        None,
        "Ours. With keep_last: checkpoints at multiples of this number of steps are never removed.",
        unit="steps",
        example=1000,
        ge=1,
    )
    save_on_signal: SaveOnSignal = section(
        SaveOnSignal, "Saving when the job receives a signal to end."
    )
    load_universal: bool = accepted(
        False,
        "Load from DeepSpeed's universal format.",
        "every checkpoint loads at any number of ranks",
    )
    checkpoint_serialization: bool = accepted(
        True,
        "Serialise through torch.save's zip format.",
        "our shards are written without pickle in either case",
    )


class Throughput(Section):
    """Settings for the throughput timer (section `timers.throughput`)."""

    enabled: bool = accepted(
        True, "Measure samples per second.", "always measured; it costs one clock reading"
    )
    synchronized: bool = accepted(
        True,
        "Wait for the device before reading the clock.",
        "the device is waited for once per printed line only",
    )


class TimersSection(Section):
    """Settings for timers (section `timers`)."""

    throughput: Throughput = section(Throughput, "The samples-per-second timer.")


class FlopsProfilerSection(Section):
    """Settings for the FLOPS profiler (section `flops_profiler`)."""

    enabled: bool = effective(False, "Count a forward's operations by module, once, on rank 0.")
    profile_step: int = effective(
        1,
        "Steps taken before the forward that is counted.",
        unit="steps",
        example=3,
        ge=0,
    )
    recompute_fwd_factor: float = effective(
        0.0,
        "Share of the forward that backward repeats, for the printed step.",
        example=1.0,
        ge=0,
    )
    module_depth: int = effective(-1, "Depth of the table; -1 is the deepest.", example=2)
    top_modules: int = accepted(1, "Modules listed per level.", "every module is listed", ge=1)
    detailed: bool = effective(True, "Print every module.")
    output_file: str | None = effective(
        None, "File for the table; null logs it.", example="flops.txt"
    )


class Records(Section):
    """Files with the metrics of each step (section `records`)."""

    path: str | None = effective(
        None,
        "Directory for metrics.jsonl, metrics.csv and plan.txt; null writes none.",
        example="runs/demo",
    )
    every: int = effective(
        1,
        "Steps between two records.",
        unit="steps",
        example=5,
        ge=1,
    )


class ActivationCheckpointing(Section):
    """Settings for activation checkpointing (section `activation_checkpointing`)."""

    partition_activations: bool = effective(
        False,
        "Each tensor-parallel rank stores only its share of the inputs of each checkpoint; "
        "backward gathers them. Without such ranks it has no effect.",
    )
    cpu_checkpointing: bool = effective(
        False,
        'Store inputs of checkpoints in host memory: DeepSpeed\'s name for device "cpu".',
    )
    contiguous_memory_optimization: bool = effective(
        False,
        "Store inputs of checkpoints in one preallocated arena of device memory.",
    )
    number_checkpoints: int | None = effective(
        None,
        "Number of checkpoints that fit the arena; null: measured in the first forward.",
        example=4,
        ge=1,
    )
    synchronize_checkpoint_boundary: bool = accepted(
        False,
        "Wait for the device at every checkpoint.",
        "it orders nothing that events do not order already",
    )
    profile: bool = effective(
        False,
        "Time forward and backward of each checkpoint of the first step, and log them once.",
    )
    device: Literal["none", "cpu", "nvme"] = effective(
        "none",
        "Ours. Memory of the inputs of checkpoints between forward and backward, in one arena.",
        example="cpu",
    )
    nvme_path: str | None = effective(
        None,
        "Ours. Directory for them with device nvme. If it is missing, it is created with mode "
        "0700.",
        example="parked",
    )
    policy: tuple[str, ...] | None = effective(
        None,
        "Ours. Results that checkpoints store in addition to their inputs instead of recomputing "
        "them: full (nothing), attention, matmul (attention and matrix products), or names of "
        "operators. With it, models of transformers recompute each layer.",
        example=["attention"],
    )
    tiled_loss: int | None = effective(
        None,
        "Ours. Tokens for which causal models of transformers compute logits, loss and gradients "
        "at a time in training; the outputs then have no logits. null: all tokens at once.",
        unit="tokens",
        example=512,
        ge=1,
    )
    tiled_mlp: int | None = effective(
        None,
        "Ours. Tokens that feed-forward layers of transformers models compute at a time, with "
        "recomputation in backward. null: all tokens at once.",
        unit="tokens",
        example=512,
        ge=1,
    )


class Aio(Section):
    """Settings for transfers to disks (section `aio`)."""

    block_size: int = effective(
        1_048_576,
        "Largest single request to a disk.",
        unit="bytes",
        example=65536,
        ge=4096,
    )
    queue_depth: int = effective(
        8,
        "Number of concurrent transfers, each in its own thread.",
        example=2,
        ge=1,
    )
    intra_op_parallelism: int = accepted(
        1, "Threads per transfer.", "a transfer has one; queue_depth sets the number of transfers"
    )
    thread_count: int = accepted(
        1, "Older name of intra_op_parallelism.", "a transfer has one thread"
    )
    single_submit: bool = accepted(False, "One request at a time.", "each thread has one request")
    overlap_events: bool = accepted(True, "Submit while waiting.", "requests always overlap")


class TpSize(Section):
    """Size of the axis (sections `tensor_parallel.tp` and `tensor_parallel.tensor_parallel`)."""

    tp_size: int = effective(
        1,
        "Ranks that share one layer, like `mesh.tp`.",
        unit="ranks",
        example=2,
        ge=1,
    )
    tp_grain_size: int = effective(
        1,
        "Split feed-forward layers and vocabularies at multiples of it, if every rank receives "
        "one.",
        unit="elements",
        example=64,
        ge=1,
    )


class TensorParallel(Section):
    """Settings for tensor parallelism (section `tensor_parallel`)."""

    autotp_size: int = effective(
        0,
        "Ranks that share one layer, like `mesh.tp`; 0: not stated.",
        unit="ranks",
        example=2,
        ge=0,
    )
    dtype: Any = accepted(
        "fp16", "Dtype of the sharded layers.", "the run's precision decides it, for every layer"
    )
    tp_overlap_comm: bool = accepted(
        False,
        "Overlap its sums with computation.",
        "always on: a sum runs while the weight's gradient is computed",
    )
    tp: TpSize = section(TpSize, "Sizes of the tensor-parallel group.")
    tensor_parallel: TpSize = section(TpSize, "The same under its longer name.")
    injection_policy_tuple: tuple[str, ...] | None = effective(
        None,
        "Suffixes of names of layers whose products are summed over the ranks (row). They take "
        "precedence over every other rule.",
        example=["out_proj"],
    )
    partition_config: dict[str, Any] | None = effective(
        None,
        "Rules by parameter name, which take precedence. layer_specs: patterns (re.match), "
        "partition_type (row, column or skip), shape of a fused projection, model_types; "
        "use_default_specs: whether other rules apply too; strict_mode: whether a layer that no "
        "rule splits is an error.",
        example={"layer_specs": [{"patterns": [".*o_proj.weight$"], "partition_type": "row"}]},
    )
    preset_model: str | None = effective(
        None,
        "Use the rules of a known model family, whatever the model's type.",
        example="llama",
    )
    keep_module_on_host: bool = accepted(
        False,
        "Leave layers in host memory until they are split.",
        "always so: layers are split in place, and only a rank's parts are moved to the training "
        "device",
    )
    sequence: bool | Literal["auto"] | None = effective(
        None,
        "Ours. Shard activations over tokens between the split layers of a block in training "
        "(Megatron's sequence parallelism). The number of ranks must divide the tokens. auto: if "
        "the model is known to support it; else the log names the layer that does not. null: "
        "false.",
        example=True,
        auto_is_value=True,
    )
    loss: Literal["split", "gathered"] = effective(
        "split",
        "Ours. How the loss of a split head is computed. split: from split logits, which "
        "training then does not return; gathered: from whole logits.",
        example="gathered",
    )


class SequenceParallel(Section):
    """Settings for sequence parallelism (section `sequence_parallel`)."""

    attention: Literal["auto", "ulysses", "all_gather"] = effective(
        "auto",
        "Ours. How attention accesses the tokens of other ranks along `mesh.sp`: ulysses "
        "exchanges tokens for heads, all_gather gathers keys and values (and a rank's tokens are "
        "in zig-zag order). auto: ulysses if the number of ranks divides the heads, else "
        "all_gather.",
        example="all_gather",
    )


class PipelineSection(Section):
    """Settings for pipeline parallelism (section `pipeline`)."""

    stages: int | None = effective(
        None, "Pipeline stages, like `mesh.pp`.", unit="ranks", example=2, ge=1
    )
    partition: str = effective(
        "best",
        "How layers are assigned to stages: best (by work, then memory), uniform, parameters (by "
        "trained parameters), type:REGEX (by class name).",
        example="uniform",
    )
    schedule: Literal["1f1b", "interleaved", "breadth_first"] = effective(
        "1f1b",
        "Ours. The order of forwards and backwards. Results are bitwise equal.",
        example="breadth_first",
    )
    virtual: int = effective(
        1,
        "Ours. Stages on each rank, not next to each other (interleaved, breadth_first).",
        unit="stages",
        example=2,
        ge=1,
    )
    group: int | None = effective(
        None,
        "Ours. Number of micro-batches that a stage processes with one gather of its weights "
        "(breadth_first); null: all.",
        unit="micro-batches",
        example=4,
        ge=1,
    )
    micro_batches: int | None = effective(
        None,
        "Ours. Number of equal parts into which engine(batch) splits a batch by rows to fill the "
        "pipeline; null: one. train_batch uses the gradient_accumulation_steps micro-batches of "
        "its step instead.",
        unit="micro-batches",
        example=8,
        ge=1,
    )
    rows: Literal["shared", "own"] = effective(
        "shared",
        "Ours. The rows that engine(batch) receives on the ranks of a pipeline: shared, the same "
        "rows on all ranks; own, different rows on each rank, as with the Trainer and "
        "accelerate. Own rows are sent to all ranks, computed one rank after the other, and "
        "count as those of data-parallel ranks.",
        example="own",
    )
    seed_layers: bool = accepted(
        False,
        "Seed every layer separately.",
        "PipelineModule's argument of this name decides, as in DeepSpeed",
    )
    activation_checkpoint_interval: int = effective(
        0,
        "Number of layers of a PipelineModule that backward recomputes at a time; 0: the "
        "module's own argument.",
        unit="layers",
        example=1,
        ge=0,
    )
    use_reentrant: bool | None = accepted(
        None,
        "Recompute layers reentrantly.",
        "recomputation is never reentrant, and gives the same bits",
    )
    pipe_partitioned: bool = accepted(
        True,
        "Send activations partitioned over tensor-parallel ranks.",
        "the same bits are sent in both cases",
    )
    grad_partitioned: bool = accepted(
        True,
        "Send gradients partitioned over tensor-parallel ranks.",
        "the same bits are sent in both cases",
    )


class SparseAttentionSection(Section):
    """Settings for sparse attention (section `sparse_attention`)."""

    mode: Literal["dense", "fixed", "variable", "bigbird", "bslongformer", "localslidingwindow"] = (
        effective(
            "fixed",
            "The layout of blocks. dense contains all blocks, so that a model's own window is "
            "computed without a mask of all pairs.",
            example="bigbird",
        )
    )
    block: int = effective(16, "Side of a block.", unit="tokens", example=32, ge=1)
    different_layout_per_head: bool = effective(
        False,
        "Heads may differ: in random blocks, or by num_different_global_patterns.",
    )
    num_local_blocks: int = effective(
        4, "Number of blocks in a window.", unit="blocks", example=2, ge=1
    )
    num_global_blocks: int = effective(
        1,
        "Number of global blocks, which every query sees: of each window (fixed), or the first "
        "ones (bigbird).",
        unit="blocks",
        example=2,
        ge=1,
    )
    attention: Literal["unidirectional", "bidirectional"] = effective(
        "bidirectional",
        "Direction of attention; unidirectional: no token sees a later one. Causal models are "
        "causal with both values.",
        example="unidirectional",
    )
    horizontal_global_attention: bool = effective(False, "Queries of global blocks see all blocks.")
    num_different_global_patterns: int = effective(
        1,
        "Number of choices of global blocks in a window, which alternate between heads.",
        example=2,
        ge=1,
    )
    num_random_blocks: int = effective(
        0,
        "Number of random blocks that each row of blocks sees.",
        unit="blocks",
        example=1,
        ge=0,
    )
    local_window_blocks: tuple[int, ...] = effective(
        (4,),
        "Sizes of the windows, one after another; the last repeats.",
        example=[2],
    )
    global_block_indices: tuple[int, ...] = effective(
        (0,),
        "First indices of ranges of global blocks.",
        example=[1],
    )
    global_block_end_indices: tuple[int, ...] | None = effective(
        None,
        "End indices of these ranges; null: one block each.",
        example=[2],
    )
    num_sliding_window_blocks: int = effective(
        3,
        "Number of blocks in the sliding window, with the query's own block in the middle.",
        unit="blocks",
        example=5,
        ge=1,
    )
    seed: int = effective(
        0,
        "Ours. Seed of the random blocks, which are the same on every rank.",
        example=1,
        ge=0,
    )


_METRIC = {
    "difficulty_type": "value",
    "clustering_type": "single_cluster",
    "min_difficulty": 1,
    "max_difficulty": 4,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 1},
}
_CURRICULUM = {"curriculum_learning": {"enabled": True, "curriculum_metrics": {"length": _METRIC}}}


class DataEfficiency(Section):
    """Settings for curriculum learning (section `data_efficiency`)."""

    enabled: bool = accepted(
        False,
        "Sample and route data by difficulty.",
        "the switches of its subsections decide, as in DeepSpeed",
    )
    seed: int = effective(
        1234,
        "Seed of the order of a curriculum's samples.",
        example=1,
    )
    data_sampling: dict[str, Any] = effective(
        {},
        "Curricula (curriculum_learning), and their number of epochs (num_epochs).",
        example=_CURRICULUM,
    )


class Config(Section):
    """The keys of a configuration, with their types.

    In the configuration that `resolve` returns, each key that was "auto" has a chosen or default
    value. Only keys such as `precision`, for which "auto" is itself a value, may still have it.
    Keys of `optimizer.params` and `scheduler.params` are omitted if no value was chosen for them.
    `decisions` lists the values that the library chose, with the reason for each.
    """

    # Batch
    train_batch_size: int = effective(
        1,
        "Samples per optimizer step, over all ranks.",
        unit="samples",
        auto="micro-batch x accumulation x data-parallel ranks",
        example=8,
    )
    train_micro_batch_size_per_gpu: int = effective(
        1,
        "Samples per forward on one rank.",
        unit="samples",
        auto="from the other two, else the data loader's, else 1",
        example=2,
    )
    gradient_accumulation_steps: int = effective(
        1,
        "Micro-batches per optimizer step.",
        unit="micro-batches",
        auto="from the other two, else 1",
        example=2,
    )
    managed_gradient_accumulation: bool = effective(
        True,
        "If false, the caller sets the boundary: every step() updates, after any number of "
        "backwards.",
    )
    sequence_parallel_size: int = effective(
        1,
        "Ranks that share one sequence (Ulysses), like `mesh.sp`.",
        unit="ranks",
        example=2,
        ge=1,
    )
    data_parallel_size: int | None = effective(
        None,
        "Number of data-parallel ranks that the run must have, like `dp_degree`.",
        unit="ranks",
        example=2,
        ge=1,
    )
    # Optimizer and schedule
    optimizer: Optimizer = section(Optimizer, "The optimizer, where the program passes none.")
    scheduler: Scheduler = section(
        Scheduler, "The learning-rate schedule, where the program passes none."
    )
    zero_allow_untested_optimizer: bool = accepted(
        False,
        "Allow any optimizer class with ZeRO.",
        "any torch optimizer runs over slices; with the name deepspeed a stated false rejects "
        "other classes",
    )
    zero_force_ds_cpu_optimizer: bool = accepted(
        True,
        "Require DeepSpeedCPUAdam with offload.",
        "torch's fused CPU Adam is used; there is no other",
    )
    gradient_clipping: float = effective(
        0.0,
        "Largest norm of the gradients of all parameters that the optimizer updates; 0 is off "
        "(DeepSpeed's default changed to 1.0 in 2026).",
        example=1.0,
        ge=0,
    )
    check_grad_overflow: bool = effective(
        True,
        "Skip a step whose gradients are not finite, in fp32. bf16 has bf16.check_grad_overflow, "
        "and fp16 always skips.",
    )
    # Communication
    communication_data_type: Dtype | None = effective(
        None,
        "Dtype in which gradients are reduced; null: the plan's choice. It does not apply to "
        "quantized matrices, to messages between hosts if sums are formed by host (fp32), or to "
        "sums over replicas (the gradient's own dtype).",
        example="bf16",
    )
    gradient_allreduce_op: Literal["mean", "sum"] = effective(
        "mean", "Average or add the gradients of the ranks.", example="sum"
    )
    prescale_gradients: bool = effective(
        False,
        "Divide gradients by the number of ranks before the reduction instead of after.",
    )
    gradient_predivide_factor: float = effective(
        1.0,
        "Divide gradients by this factor before the reduction and by the remaining factor after "
        "it; not used with prescale_gradients.",
        example=2.0,
        gt=0,
    )
    disable_allgather: bool = accepted(
        False, "Refresh weights by broadcasts.", "a legacy key; it has no reader"
    )
    # Precision
    fp16: Fp16 = section(Fp16, "fp16 with loss scaling.")
    bf16: Bf16 = section(Bf16, "bf16 with fp32 master weights (also spelled bfloat16).")
    torch_autocast: TorchAutocast = section(TorchAutocast, "torch.autocast around the forward.")
    data_types: DataTypes = section(DataTypes, "Single dtypes.")
    precision: Literal["auto", "fp32", "fp16", "bf16"] | None = effective(
        None,
        "Ours. auto: bf16 if the hardware has it, else fp16, with units in fp32 while 16 bits "
        "are not enough for them; a dtype: enables that section; null: the sections decide.",
        example="auto",
        auto_is_value=True,
    )
    precision_window: int = effective(
        16,
        "Ours. Steps between two decisions of precision auto about its units.",
        unit="steps",
        example=2,
        ge=1,
    )
    auto_cast: bool = effective(True, "Ours. Cast floating-point inputs to the compute dtype.")
    # ZeRO
    zero_optimization: ZeroOptimization = section(ZeroOptimization, "ZeRO itself.")
    memory_budget: MemoryBudget = section(
        MemoryBudget, "Ours. Bytes of one rank that states and buffers may take of each memory."
    )
    units: tuple[str, ...] = effective(
        (),
        "Ours. Class or module names of the units; empty chooses blocks automatically.",
        example=["Linear"],
    )
    deterministic: bool = effective(
        False,
        "Ours. Results are bitwise equal in every run, also on CUDA: use torch's deterministic "
        "algorithms while the engine exists. An operation without one raises.",
    )
    transport: Literal["fastest", "gloo", "tcp", "measured"] = effective(
        "measured",
        "Ours. Transport between CPU ranks: shared memory on one host and gloo between hosts; "
        "only gloo; shared memory on one host and our own sockets between hosts; or the first or "
        "the third, whichever is faster between hosts in a measurement at the start. Results are "
        "bitwise equal.",
        example="gloo",
    )
    integrity: IntegritySection = section(
        IntegritySection, "Ours. Detection of bits that changed in memory or in transfers."
    )
    network: Network = section(Network, "Ours. Where the ranks of a host listen.")
    ranks_per_host: int | None = effective(
        None,
        "Ours. Sum gradients within groups of this number of consecutive ranks first, then over "
        "the groups. Results differ in rounding, and each byte crosses between hosts once "
        "instead of once per rank. 1: in the order of ranks; null: the ranks of each host if "
        "there are several hosts, else 1.",
        unit="ranks",
        example=2,
        ge=1,
    )
    # Parallel degrees
    mesh: MeshSizes = section(
        MeshSizes, "Ours. Named axes over the ranks; also `initialize(mesh=...)`."
    )
    dp_degree: int = effective(
        1,
        "Ours. Number of data-parallel ranks that the run must have: those that see different "
        "batches.",
        unit="ranks",
        auto="the ranks that the other axes leave",
        example=2,
        ge=1,
    )
    pp_degree: int = effective(
        1,
        "Ours. Pipeline stages, like `mesh.pp`.",
        unit="ranks",
        auto="of the mesh",
        example=2,
        ge=1,
    )
    mp_degree: int = effective(
        1,
        "Ours. Tensor-parallel ranks, like `mesh.tp`.",
        unit="ranks",
        auto="of the mesh",
        example=2,
        ge=1,
    )
    tensor_parallel: TensorParallel = section(TensorParallel, "Tensor parallelism (AutoTP).")
    pipeline: PipelineSection = section(PipelineSection, "Pipeline parallelism.")
    sequence_parallel: SequenceParallel = section(SequenceParallel, "Sequence parallelism.")
    # Logging and records
    steps_per_print: int | None = effective(
        10,
        "Steps between two summary lines; null or inf prints none.",
        unit="steps",
        example=5,
        inf=None,
        ge=1,
    )
    wall_clock_breakdown: bool = effective(
        False, "Measure the times of forward, backward and step separately."
    )
    memory_breakdown: bool = effective(False, "Log the memory in use with each summary line.")
    dump_state: bool = effective(False, "Log the parts of the engine once at the start.")
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = effective(
        None, "Level of the deepseek_zero logger; null leaves it.", example="debug"
    )
    timers: TimersSection = section(TimersSection, "Timers.")
    dataloader_drop_last: bool = effective(
        False,
        "Drop the last samples of an epoch if they do not fill a step. If false, the epoch's "
        "first samples fill it.",
    )
    vocabulary_size: int | None = accepted(
        None, "Size of the vocabulary.", "DeepSpeed only warns about its alignment"
    )
    records: Records = section(Records, "Ours. The run's own records.")
    tensorboard: TensorBoard = section(TensorBoard, "TensorBoard.")
    csv_monitor: CsvMonitor = section(CsvMonitor, "CSV files.")
    wandb: Wandb = section(Wandb, "Weights & Biases.")
    comet: Comet = section(Comet, "Comet.")
    flops_profiler: FlopsProfilerSection = section(FlopsProfilerSection, "A profile of operations.")
    # Checkpoints
    checkpoint: Checkpoint = section(Checkpoint, "Saving and loading.")
    # Sections without another group
    aio: Aio = section(Aio, "Disk requests.")
    activation_checkpointing: ActivationCheckpointing = section(
        ActivationCheckpointing, "Where recomputation keeps its inputs."
    )
    sparse_attention: SparseAttentionSection | None = effective(
        None,
        "Attention over blocks of keys: automatically in models of transformers, in others as "
        "`engine.sparse_attention`.",
        example={"mode": "fixed"},
    )
    data_efficiency: DataEfficiency = section(DataEfficiency, "Curricula and token dropping.")
    graph_harvesting: bool = accepted(
        False, "Replay steps as a CUDA graph.", "speed only; no value depends on it"
    )

    _decisions: tuple[AutoDecision, ...] = PrivateAttr(default=())

    @property
    def batch(self) -> Batch:
        """Return a `Batch` with the three batch sizes of this configuration.

        Its `data_size` is the number of ranks that receive different samples. Before `resolve`, a
        number that is not set is 1.
        """
        return Batch(
            train=self.train_batch_size,
            micro=self.train_micro_batch_size_per_gpu,
            accumulation=self.gradient_accumulation_steps,
            data_size=self.dp_degree * (self.pp_degree if self.pipeline.rows == "own" else 1),
        )

    @property
    def decisions(self) -> tuple[AutoDecision, ...]:
        """Return the values that the library chose for keys, with the reason for each.

        The tuple is empty before `resolve`.
        """
        return self._decisions

    def with_decisions(self, decisions: tuple[AutoDecision, ...]) -> Config:
        """Record which values the library chose, and return this configuration.

        The values of the keys are not changed.

        Args:
            decisions: The chosen values with their reasons. Afterwards the property `decisions`
                returns them.
        """
        self._decisions = decisions
        return self
