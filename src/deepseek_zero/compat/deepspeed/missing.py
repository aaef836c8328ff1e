"""Table of DeepSpeed's public names that are missing here, with reasons.

Errors are raised from this table: when a name of the package (`deepseek_zero.X`) or of the engine
(`engine.x`) is read, and when a name of the drop-in (`deepspeed.y.X`) is called.
docs/reference/deepspeed-names.md shows the table. DeepSpeed's internal functions are not in it;
inventory.json has them.
"""

from __future__ import annotations

import difflib

from ...base.errors import UnknownNameError

ENGINE = "DeepSpeedEngine"  # key of the engine's attributes
PAGE = "docs/reference/deepspeed-names.md"

PIPELINE = "it is planned as a later part of pipeline parallelism"
SEQUENCE = "it is planned as a later part of sequence parallelism"
PLANNED = (PIPELINE, SEQUENCE)  # the reasons of names that are planned; all others are not

DOMINO = "Domino is not planned"
GATHERS = "the engine gathers parameters; use zero.GatheredParameters"
INFERENCE = "inference kernels are not planned; a stage 3 engine's eval() and generate() serve"
KERNELS = "compiled kernels are not planned: nothing here needs a compiler"
LOADERS = "engine.deepspeed_io makes loaders"
LOW_LEVEL = "it links DeepSpeed's inner tensors; safe_get_* and safe_set_* serve"
OLD_DATA = "DeepSpeed has removed the key; data_efficiency has its curricula"
QUANTISED = "quantised training is not planned"
SUPER_OFFLOAD = "super_offload in the configuration serves"
ZENFLOW = "ZenFlow is not planned; `offload_*` and `vertical_micro_batches` serve"

# module -> reason -> names
MISSING: dict[str, dict[str, str]] = {
    "deepspeed": {
        "DualPipe is not planned; interleaved has small bubbles": "DualPipeVEngine DualPipeVModule",
        LOADERS: "DeepSpeedDataLoader",
        "it always is: engine.compile()": "is_compile_supported",
        INFERENCE: (
            "default_inference_config DeepSpeedInferenceConfig inference DeepSpeedHybridEngine "
            "module_inject replace_transformer_layer revert_transformer_layer"
        ),
        KERNELS: "DeepSpeedTransformerLayer DeepSpeedTransformerConfig",
        DOMINO: "domino",
        "compression training is not planned": "compression",
        "autotuning is not planned": "autotuning",
        "Nebula is not planned": "nebula",
        "its quantised and low-rank layers are not planned; PEFT's train sharded": "linear",
        "DeepCompile is not planned; engine.compile() compiles unit by unit": "compile",
        "`ds_report` and `deepseek-zero doctor` look at the machine": "env_report",
    },
    "deepspeed.accelerator": {
        "only CUDA GPUs and CPUs are supported": "cuda_accelerator cpu_accelerator",
    },
    "deepspeed.checkpoint": {
        (
            "every checkpoint loads at any number of ranks and any stage, so there is nothing to "
            "convert"
        ): "universal_checkpoint enable_universal_checkpoint SubparamShape merge_state",
    },
    "deepspeed.checkpointing": {
        "torch's own checkpoint does the work": "CheckpointFunction set_num_layers",
    },
    "deepspeed.comm": {
        "ranks are found in the variables that every launcher sets": "mpi_discovery",
        "torch.distributed's backends serve": "init_deepspeed_backend set_backend",
        "same-host ranks share memory already": "enable_symm_mem_for_group",
    },
    "deepspeed.elasticity": {
        "`deepseek-zero run --max-restarts` starts ranks again": "DSElasticAgent elastic_agent",
        "the batch is computed only from the section": "ensure_immutable_elastic_config",
    },
    "deepspeed.ops": {
        KERNELS: "transformer fp_quantizer quantizer random_ltd deepspeed4science compile gds",
    },
    "deepspeed.ops.sparse_attention": {
        "one kernel does both products and the softmax (`deepseek_zero.attention`)": (
            "Softmax MatMul matmul softmax trsrc"
        ),
    },
    "deepspeed.ops.adam": {
        ZENFLOW: "ZenFlowCPUAdam ZenFlowSelectiveAdamW ZenFlowSelectiveAdamW_stage3",
    },
    "deepspeed.runtime": {
        "use zero_quantized_weights and zero_quantized_gradients": "comm compression",
        "the disk tier serves (offload device nvme)": "swap_tensor",
        INFERENCE: "hybrid_engine",
        OLD_DATA: "progressive_layer_drop",
        SUPER_OFFLOAD: "superoffload",
        ZENFLOW: "zenflow",
        DOMINO: "domino",
        "on-policy rollouts are not planned; zero.unwrap_model_for_generation gathers once": (
            "rollout"
        ),
        QUANTISED: "quantize weight_quantizer eigenvalue",
    },
    "deepspeed.runtime.activation_checkpointing": {
        "activation_checkpointing.device parks them": "offload_activations",
    },
    "deepspeed.runtime.dataloader": {LOADERS: "DeepSpeedDataLoader"},
    "deepspeed.runtime.data_pipeline": {
        "dropping tokens at random is not planned: every layer computes all of them": (
            "data_routing"
        ),
    },
    "deepspeed.runtime.data_pipeline.data_sampling": {
        "MMapIndexedDatasetBuilder writes the index files that a curriculum reads": "data_analyzer",
        (
            "batches by tokens are not planned; DeepSpeed's engine leaves the key to this "
            "function, too"
        ): "variable_batch_size_and_lr",
    },
    "deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset": {
        "a curriculum reads MMapIndexedDataset": (
            "IndexedDataset IndexedCachedDataset IndexedDatasetBuilder"
        ),
    },
    "deepspeed.runtime.fp16": {
        "use `optimizer.type` OneBitAdam; DeepSpeed has removed the other two": "onebit",
    },
    "deepspeed.runtime.pipe": {"stages exchange messages of the engine's own": "p2p"},
    "deepspeed.sequence": {
        SEQUENCE: "cross_entropy",
        "offloaded activations and checkpointing serve": "fpdt_layer",
    },
    "deepspeed.sequence.layer": {
        "DistributedAttention exchanges; deepseek_zero.parallel.sequence has its parts": (
            "single_all_to_all"
        ),
    },
    "deepspeed.runtime.zero": {
        "the key zero_optimization.mics_shard_size serves, and zero.Init builds": "mics MiCS_Init",
        GATHERS: "DeepSpeedZeRoOffload DeepSpeedTensorOverride parameter_offload",
        "a layer that returns its bias with its output is not tiled": "TiledLinearReturnBias",
        (
            "engine.offload_states and reload_states serve; the functions below them are "
            "DeepSpeed's own"
        ): "offload_states",
    },
    "deepspeed.runtime.zero.partition_parameters": {
        GATHERS: (
            "AllGatherHandle AllGatherCoalescedHandle free_param shutdown_init_context "
            "restore_init_context InsertPostInitMethodToModuleSubClasses DeepSpeedTensorOverride"
        ),
    },
    "deepspeed.utils": {
        LOW_LEVEL: (
            "get_full_hp_param get_full_hp_grad set_full_hp_param set_full_hp_grad link_hp_params "
            "get_hp_fragment_mapping map_to_flat_opt_states"
        ),
        "DeepSpeed's debugging prints are not planned": "debug print_rank print_rank0",
        "ranks are bound to cores by their affinity": "get_numactl_cmd",
    },
    "deepspeed.utils.groups": {
        "the mesh is stated to initialize()": (
            "set_tensor_model_parallel_world_size set_tensor_model_parallel_rank"
        ),
        "every rank has all experts, and their states are sharded as those of other layers": (
            "_get_expert_parallel_group _get_expert_data_parallel_group "
            "_get_expert_parallel_world_size _get_expert_parallel_rank "
            "_get_expert_data_parallel_rank _get_expert_data_parallel_world_size"
        ),
    },
    "deepspeed.utils.tensor_fragment": {
        LOW_LEVEL: "get_full_hp_param get_full_hp_grad set_full_hp_param set_full_hp_grad",
    },
    ENGINE: {
        PIPELINE: (
            "set_dataiterator set_dataloader is_first_stage is_last_stage is_pipe_partitioned"
        ),
        OLD_DATA: "curriculum_params_legacy pld_params pld_theta",
        "DeepCompile's passes are not planned; compile() compiles unit by unit": (
            "register_compile_pass"
        ),
        QUANTISED: "quantize_training eigenvalue_params",
        "the configuration's flops_profiler, or deepspeed.profiling's FlopsProfiler": (
            "start_profile"
        ),
        "compute_elastic_config does the arithmetic": "elasticity_config",
        "checkpoints have one writer; see save_checkpoint": "checkpoint_engine",
        "use save_checkpoint, which works at any number of ranks": "optimizer_state_dict",
        SUPER_OFFLOAD: "superoffload",
        ZENFLOW: "zenflow",
    },
}
SAME = {  # modules with two paths
    "deepspeed.zero": "deepspeed.runtime.zero",
    "deepspeed.runtime.activation_checkpointing.checkpointing": "deepspeed.checkpointing",
    "deepspeed.elasticity.elasticity": "deepspeed.elasticity",
}


def missing_names(module: str) -> dict[str, str]:
    """Return the missing names of one of DeepSpeed's modules, with reasons."""
    rows = MISSING.get(SAME.get(module, module), {})
    return {name: reason for reason, names in rows.items() for name in names.split()}


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
            return f"{found[:1].upper()}{found[1:]}."
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
    reason = missing_names("deepspeed").get(name)
    if name in IN_THE_DROPIN:
        reason = CLIENTS
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
        f"engine.{name} is DeepSpeed's and is not built: {missing_names(ENGINE)[name]}.",
        fix=f"use one of: {', '.join(near or there[:20])} ({PAGE} lists every name).",
    )
