"""Table of DeepSpeed's public names that are missing here, with reasons.

Errors are raised from this table: when a name of the package (`deepseek_zero.X`) or of the engine
(`engine.x`) is read, and when a name of the drop-in (`deepspeed.y.X`) is called.
docs/reference/deepspeed-names.md shows the table. DeepSpeed's internal functions are not in it;
inventory.json has them.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import Enum

from ...base.errors import UnknownNameError


class When(Enum):
    """Whether a name of DeepSpeed that is missing here is planned or excluded by design."""

    LATER = "later"
    NEVER = "by design not"


@dataclass(frozen=True)
class MissingName:
    """Why a public name of DeepSpeed has no counterpart here, and whether one is planned.

    Attributes:
        when: Whether it is planned.
        reason: Why it is missing, or what replaces it.
    """

    when: When
    reason: str


ENGINE = "DeepSpeedEngine"  # key of the engine's attributes
PAGE = "docs/reference/deepspeed-names.md"

PIPELINE = "it is planned as a later part of pipeline parallelism"
SEQUENCE = "it is planned as a later part of sequence parallelism"
TILES = "one kernel does both products and the softmax (`deepseek_zero.attention`)"
MOE = "every rank has all experts, and their states are sharded as those of other layers"
INFERENCE = "inference engines are not planned; a stage 3 engine's eval() and generate() serve"
KERNELS = "compiled kernels are not planned: nothing here needs a compiler"
GATHERS = "the engine gathers parameters; use zero.GatheredParameters"
COMPRESSED = "use zero_quantized_weights and zero_quantized_gradients"
ONE_BIT = "use `optimizer.type` OneBitAdam; DeepSpeed has removed the other two"
UNIVERSAL = (
    "every checkpoint loads at any number of ranks and any stage, so there is nothing to convert"
)
OLD_DATA = "DeepSpeed has removed the key; data_efficiency has its curricula"
ANALYSIS = "MMapIndexedDatasetBuilder writes the index files that a curriculum reads"
ROUTING = "dropping tokens at random is not planned: every layer computes all of them"
DYNAMIC = (
    "batches by tokens are not planned; DeepSpeed's engine leaves the key to this function, too"
)
OLD_DATASETS = "a curriculum reads MMapIndexedDataset"
TIERS = (
    "engine.offload_states and reload_states serve; the functions below them are DeepSpeed's own"
)
REPORT = "`ds_report` and `deepseek-zero doctor` look at the machine"
LOGGED = "engine.explain() and the records show the messages"
SHED = "`offload_*` and `vertical_micro_batches` serve"
LOW_LEVEL = "it links DeepSpeed's inner tensors; safe_get_* and safe_set_* serve"

L = When.LATER
N = When.NEVER
Rows = tuple[tuple[When, str, str], ...]

# module -> (whether it is planned, reason, names)
MISSING: dict[str, Rows] = {
    "deepspeed": (
        (
            N,
            "DualPipe is not planned; interleaved has small bubbles",
            "DualPipeVEngine DualPipeVModule",
        ),
        (N, "engine.deepspeed_io makes loaders", "DeepSpeedDataLoader"),
        (N, "it always is: engine.compile()", "is_compile_supported"),
        (
            N,
            INFERENCE,
            "init_inference default_inference_config InferenceEngine DeepSpeedInferenceConfig "
            "inference DeepSpeedHybridEngine module_inject replace_transformer_layer "
            "revert_transformer_layer",
        ),
        (N, KERNELS, "DeepSpeedTransformerLayer DeepSpeedTransformerConfig"),
        (N, "Domino is not planned", "domino"),
        (N, "compression training is not planned", "compression"),
        (N, "autotuning is not planned", "autotuning"),
        (N, "Nebula is not planned", "nebula"),
        (N, "its quantised and low-rank layers are not planned; PEFT's train sharded", "linear"),
        (N, "DeepCompile is not planned; engine.compile() compiles unit by unit", "compile"),
        (N, REPORT, "env_report"),
    ),
    "deepspeed.accelerator": (
        (N, "only CUDA GPUs and CPUs are supported", "cuda_accelerator cpu_accelerator"),
    ),
    "deepspeed.checkpoint": (
        (
            N,
            UNIVERSAL,
            "universal_checkpoint enable_universal_checkpoint SubparamShape merge_state",
        ),
    ),
    "deepspeed.checkpointing": (
        (N, "torch's own checkpoint does the work", "CheckpointFunction set_num_layers"),
    ),
    "deepspeed.comm": (
        (N, "ranks are found in the variables that every launcher sets", "mpi_discovery"),
        (N, "torch.distributed's backends serve", "init_deepspeed_backend set_backend"),
        (N, "same-host ranks share memory already", "enable_symm_mem_for_group"),
    ),
    "deepspeed.elasticity": (
        (
            N,
            "`deepseek-zero run --max-restarts` starts ranks again",
            "DSElasticAgent elastic_agent",
        ),
        (N, "the batch is computed only from the section", "ensure_immutable_elastic_config"),
    ),
    "deepspeed.ops": (
        (N, KERNELS, "transformer fp_quantizer quantizer random_ltd deepspeed4science compile gds"),
    ),
    "deepspeed.ops.sparse_attention": ((N, TILES, "Softmax MatMul matmul softmax trsrc"),),
    "deepspeed.ops.adam": (
        (
            N,
            "ZenFlow is not planned; " + SHED,
            "ZenFlowCPUAdam ZenFlowSelectiveAdamW ZenFlowSelectiveAdamW_stage3",
        ),
    ),
    "deepspeed.runtime": (
        (N, COMPRESSED, "comm compression"),
        (N, "the disk tier serves (offload device nvme)", "swap_tensor"),
        (N, INFERENCE, "hybrid_engine"),
        (N, OLD_DATA, "progressive_layer_drop"),
        (N, "super_offload in the configuration serves", "superoffload"),
        (N, "ZenFlow is not planned; " + SHED, "zenflow"),
        (N, "Domino is not planned", "domino"),
        (
            N,
            "on-policy rollouts are not planned; zero.unwrap_model_for_generation gathers once",
            "rollout",
        ),
        (N, "quantised training is not planned", "quantize weight_quantizer eigenvalue"),
    ),
    "deepspeed.runtime.activation_checkpointing": (
        (N, "activation_checkpointing.device parks them", "offload_activations"),
    ),
    "deepspeed.runtime.dataloader": (
        (N, "engine.deepspeed_io makes loaders", "DeepSpeedDataLoader"),
    ),
    "deepspeed.runtime.data_pipeline": ((N, ROUTING, "data_routing"),),
    "deepspeed.runtime.data_pipeline.data_sampling": (
        (N, ANALYSIS, "data_analyzer"),
        (N, DYNAMIC, "variable_batch_size_and_lr"),
    ),
    "deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset": (
        (N, OLD_DATASETS, "IndexedDataset IndexedCachedDataset IndexedDatasetBuilder"),
    ),
    "deepspeed.runtime.fp16": ((N, ONE_BIT, "onebit"),),
    "deepspeed.runtime.pipe": ((N, "stages exchange messages of the engine's own", "p2p"),),
    "deepspeed.sequence": (
        (L, SEQUENCE, "cross_entropy"),
        (N, "offloaded activations and checkpointing serve", "fpdt_layer"),
    ),
    "deepspeed.sequence.layer": (
        (
            N,
            "DistributedAttention exchanges; deepseek_zero.parallel.sequence has its parts",
            "single_all_to_all",
        ),
    ),
    "deepspeed.runtime.zero": (
        (
            N,
            "the key zero_optimization.mics_shard_size serves, and zero.Init builds",
            "mics MiCS_Init",
        ),
        (N, GATHERS, "DeepSpeedZeRoOffload DeepSpeedTensorOverride parameter_offload"),
        (
            N,
            "a layer that returns its bias with its output is not tiled",
            "TiledLinearReturnBias",
        ),
        (N, TIERS, "offload_states"),
    ),
    "deepspeed.runtime.zero.partition_parameters": (
        (
            N,
            GATHERS,
            "AllGatherHandle AllGatherCoalescedHandle free_param shutdown_init_context "
            "restore_init_context",
        ),
        (N, GATHERS, "InsertPostInitMethodToModuleSubClasses DeepSpeedTensorOverride"),
    ),
    "deepspeed.utils": (
        (
            N,
            LOW_LEVEL,
            "get_full_hp_param get_full_hp_grad set_full_hp_param set_full_hp_grad link_hp_params",
        ),
        (N, LOW_LEVEL, "get_hp_fragment_mapping map_to_flat_opt_states"),
        (N, "DeepSpeed's debugging prints are not planned", "debug print_rank print_rank0"),
        (N, "ranks are bound to cores by their affinity", "get_numactl_cmd"),
    ),
    "deepspeed.utils.groups": (
        (N, "the mesh is stated to initialize()", "set_tensor_model_parallel_world_size"),
        (N, "the mesh is stated to initialize()", "set_tensor_model_parallel_rank"),
        (
            N,
            MOE,
            "_get_expert_parallel_group _get_expert_data_parallel_group "
            "_get_expert_parallel_world_size",
        ),
        (
            N,
            MOE,
            "_get_expert_parallel_rank _get_expert_data_parallel_rank "
            "_get_expert_data_parallel_world_size",
        ),
    ),
    "deepspeed.utils.tensor_fragment": (
        (N, LOW_LEVEL, "get_full_hp_param get_full_hp_grad set_full_hp_param set_full_hp_grad"),
    ),
    ENGINE: (
        (L, PIPELINE, "set_dataiterator set_dataloader is_first_stage is_last_stage"),
        (L, PIPELINE, "is_pipe_partitioned"),
        (N, OLD_DATA, "curriculum_params_legacy pld_params pld_theta"),
        (
            N,
            "DeepCompile's passes are not planned; compile() compiles unit by unit",
            "register_compile_pass",
        ),
        (N, "quantised training is not planned", "quantize_training eigenvalue_params"),
        (
            N,
            "the configuration's flops_profiler, or deepspeed.profiling's FlopsProfiler",
            "start_profile",
        ),
        (N, "compute_elastic_config does the arithmetic", "elasticity_config"),
        (N, "checkpoints have one writer; see save_checkpoint", "checkpoint_engine"),
        (N, "use save_checkpoint, which works at any number of ranks", "optimizer_state_dict"),
        (N, "super_offload in the configuration serves", "superoffload"),
        (N, "ZenFlow is not planned; " + SHED, "zenflow"),
    ),
}
SAME = {  # modules with two paths
    "deepspeed.zero": "deepspeed.runtime.zero",
    "deepspeed.runtime.activation_checkpointing.checkpointing": "deepspeed.checkpointing",
    "deepspeed.elasticity.elasticity": "deepspeed.elasticity",
}


def missing_names(module: str) -> dict[str, MissingName]:
    """Return the missing names of one of DeepSpeed's modules."""
    rows = MISSING.get(SAME.get(module, module), ())
    return {
        name: MissingName(when, reason) for when, reason, names in rows for name in names.split()
    }


def why_missing(module: str, name: str) -> str:
    """Return the reason why this library does not provide one of DeepSpeed's names.

    Args:
        module: Dotted path of DeepSpeed's module.
        name: Name in the module.

    Returns:
        The reason as a sentence, or "" if the table has none.
    """
    while True:
        found = missing_names(module).get(name)
        if found is not None:
            return f"{found.reason[:1].upper()}{found.reason[1:]}."
        if "." not in module:
            return ""
        module, name = module.rsplit(".", 1)


def module_name_missing(module: str, name: str, public: list[str]) -> UnknownNameError:
    """Return the error for a name that a module of the drop-in does not have.

    Args:
        module: Path of the module.
        name: Name that the program looked up.
        public: Names of the module, from which similar ones are suggested.

    Returns:
        The error, whose text contains the reason and similar names. It is not raised here.
    """
    near = difflib.get_close_matches(name, public, n=8, cutoff=0.5) or public[:40]
    return UnknownNameError(
        f"{module}.{name} is not provided by deepseek_zero, which stands in for DeepSpeed here.",
        why_missing(module, name),
        f"what {module} has: {', '.join(near)} ({PAGE}).",
    )


# Top-level names of the drop-in that this package does not have
IN_THE_DROPIN = frozenset(
    "accelerator constants elasticity get_accelerator launcher moe monitor OnDevice ops pipe "
    "PipelineEngine PipelineModule profiling runtime sequence ADAGRAD_OPTIMIZER ADAM_OPTIMIZER "
    "ADAMW_OPTIMIZER LAMB_OPTIMIZER LION_OPTIMIZER MUON_OPTIMIZER HAS_TRITON add_tuning_arguments "
    "tp_model_init DeepSpeedOptimizer ZeROOptimizer TORCH_DISTRIBUTED_DEFAULT_PORT".split()
)
CLIENTS = (
    "it is there in the package `deepspeed` that install_as_deepspeed() puts on the path "
    "(docs/how-to/clients.md)"
)


def package_name_missing(name: str) -> UnknownNameError | None:
    """Return the error for `deepseek_zero.name`; None if DeepSpeed lacks the name."""
    found = missing_names("deepspeed").get(name)
    reason = CLIENTS if name in IN_THE_DROPIN else found.reason if found else None
    if reason is None:
        return None
    return UnknownNameError(
        f"deepseek_zero.{name} is DeepSpeed's and is not built: {reason}.",
        fix="use a name in dir(deepseek_zero), or in its modules zero, utils, comm, checkpointing.",
    )


def engine_name_missing(name: str, there: list[str]) -> UnknownNameError:
    """Return the error for an attribute that the engine does not have.

    Args:
        name: Attribute that the program looked up.
        there: Names of the engine, from which similar ones are suggested.

    Returns:
        The error, whose text contains the reason and similar names. It is not raised here.
    """
    near = difflib.get_close_matches(name, there, n=4, cutoff=0.5)
    return UnknownNameError(
        f"engine.{name} is DeepSpeed's and is not built: {missing_names(ENGINE)[name].reason}.",
        fix=f"use one of: {', '.join(near or there[:20])} ({PAGE} lists every name).",
    )
