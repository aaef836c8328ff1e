"""Sections of DeepSpeed's grammar of which little is read yet: kept typed, so that a file that leaves them off loads.

Most have a switch (`gate`): while it is off the other keys are not read, as in DeepSpeed; switched on, it is an
error that names the part which brings it.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from deepseek_zero.config.fields import Part, Section, accepted, effective, later, section

_ON: tuple[str, ...] = ("enabled",)
_ON_DISK: dict[str, Any] = {
    "zero_optimization.stage": 3,
    "zero_optimization.offload_optimizer.device": "nvme",
    "zero_optimization.offload_optimizer.nvme_path": "states",
}


class Aio(Section):
    block_size: int = effective(
        1_048_576, "Largest single request to a disk.", unit="bytes", example=65536, needs=_ON_DISK, ge=4096
    )
    queue_depth: int = effective(
        8, "Transfers under way at once, each in a thread of its own.", example=2, needs=_ON_DISK, ge=1
    )
    intra_op_parallelism: int = accepted(1, "Threads per transfer.", "a transfer has one; queue_depth says how many")
    thread_count: int = accepted(1, "Older name of intra_op_parallelism.", "a transfer has one thread")
    single_submit: bool = accepted(False, "One request at a time.", "each thread has one request")
    overlap_events: bool = accepted(True, "Submit while waiting.", "it always does")
    use_gds: bool = later(False, "Disk straight to the GPU.", Part.UNPLANNED, example=True)


class TpSize(Section):
    part: ClassVar[Part | None] = Part.PARALLEL
    tp_size: int = later(1, "Ranks that share one layer.", unit="ranks", example=2, ge=1)
    tp_grain_size: int = later(1, "Smallest piece a dimension is cut into.", unit="elements", example=64, ge=1)
    mpu: Any = later(None, "Object that names the process groups.", example="mpu")
    tp_group: Any = later(None, "Process group of tensor parallelism.", example="group")


class TensorParallel(Section):
    gate: ClassVar[tuple[str, ...]] = ("autotp_size", "tp.tp_size", "tensor_parallel.tp_size")
    part: ClassVar[Part | None] = Part.PARALLEL
    autotp_size: int = later(0, "Ranks that share one layer.", unit="ranks", also=(1,), example=2, ge=0)
    dtype: Any = later("fp16", "Dtype of the sharded layers.", example="bf16")
    tp_overlap_comm: bool = later(False, "Overlap its reductions with computation.", example=True)
    tp: TpSize = section(TpSize, "Sizes of the tensor-parallel group.")
    tensor_parallel: TpSize = section(TpSize, "The same under its longer name.")
    injection_policy_tuple: Any = later(None, "Layers that end in an all-reduce.", example=["out_proj"])
    partition_config: dict[str, Any] | None = later(
        None, "Rules by layer name: row, column or skip.", example={"use_default_specs": True}
    )
    preset_model: str | None = later(None, "Rules of a known model family.", example="llama")
    keep_module_on_host: bool = later(False, "Leave layers in host memory until they are cut.", example=True)
    kernel_inject: bool = later(False, "Replace layers by fused kernels.", Part.UNPLANNED, example=True)


class ExpertParallel(Section):
    gate: ClassVar[tuple[str, ...]] = _ON
    part: ClassVar[Part | None] = Part.PARALLEL
    enabled: bool = later(False, "Spread experts over ranks automatically.", example=True)
    autoep_size: int = later(1, "Ranks that share one set of experts.", unit="ranks", example=2, ge=1)
    expert_tensor_parallel_size: int = later(1, "Ranks that share one expert.", unit="ranks", example=2, ge=1)
    preset_model: str | None = later(None, "Rules of a known model family.", example="mixtral")
    moe_layer_pattern: str | None = later(None, "Names of expert layers.", example=".*moe")
    expert_pattern: str | None = later(None, "Name of the experts inside such a layer.", example="experts")
    router_pattern: str | None = later(None, "Name of the router.", example="gate")
    use_grouped_mm: bool = later(True, "Multiply all experts in one call.", example=False)
    disable_triton_grouped_mm: bool = later(False, "Do not use Triton for it.", example=True)
    route_norm: Any = later(None, "Normalise the routing weights.", example=True)
    route_scale: float = later(1.0, "Factor on the routing weights.", example=2.0)
    score_apply: Any = later(None, "Apply scores before or after the experts.", example="pre")
    score_func: Any = later(None, "Softmax or sigmoid.", example="softmax")
    combine_impl: Any = later(None, "How results are combined.", example="scatter")
    top_k: int | None = later(None, "Experts per token.", example=2, ge=1)
    num_expert_groups: int | None = later(None, "Groups of experts the router knows.", example=2)
    num_limited_groups: int | None = later(None, "Groups a token may use.", example=1)
    routed_scaling_factor: float | None = later(None, "Factor on routed experts.", example=2.0)
    expert_w1: str | None = later(None, "Name of the first weight.", example="w1")
    expert_w2: str | None = later(None, "Name of the second weight.", example="w2")
    expert_w3: str | None = later(None, "Name of the third weight.", example="w3")
    num_experts_attr: str | None = later(None, "Attribute that counts experts.", example="num_experts")
    top_k_attr: str | None = later(None, "Attribute that holds top-k.", example="top_k")
    has_shared_experts: Any = later(None, "The layer has shared experts.", example=True)
    shared_experts_pattern: str | None = later(None, "Name of the shared experts.", example="shared")
    shared_experts_gate_pattern: str | None = later(None, "Name of their gate.", example="shared_gate")
    validate_folding_routing: bool = later(False, "Check routing between tensor and expert groups.", example=True)


class Pipeline(Section):
    gate: ClassVar[tuple[str, ...]] = ("stages",)
    part: ClassVar[Part | None] = Part.PARALLEL
    stages: int | None = later(None, "Pipeline stages.", also=(1,), example=2, ge=1)
    partition: str = later("best", "How layers are divided over stages.", example="uniform")
    seed_layers: bool = later(False, "Seed every layer on its own.", example=True)
    activation_checkpoint_interval: int = later(0, "Layers between two activation checkpoints.", example=1, ge=0)
    pipe_partitioned: bool = later(True, "Send activations partitioned.", example=False)
    grad_partitioned: bool = later(True, "Send gradients partitioned.", example=False)


class Compile(Section):
    gate: ClassVar[tuple[str, ...]] = ("deepcompile",)
    part: ClassVar[Part | None] = Part.SPEED
    deepcompile: bool = later(False, "Insert the collectives into the compiled graph.", example=True)
    passes: tuple[str, ...] | None = later(None, "Compiler passes by name.", example=["z3"])
    offload_parameters: bool = later(False, "Offload weights from the graph.", example=True)
    offload_opt_states: bool = later(False, "Offload optimizer states from the graph.", example=True)
    offload_activation: bool = later(False, "Offload activations from the graph.", example=True)
    offload_activation_pin_memory: bool = later(True, "Pin that memory.", example=False)
    free_activation: bool = later(False, "Free activations early.", example=True)
    free_activation_threshold: int = later(10 * 1024 * 1024, "Only those above this size.", unit="bytes", example=1)
    double_buffer: bool = later(True, "Use two gather buffers.", example=False)
    symmetric_memory: bool = later(False, "Gather through symmetric memory.", example=True)
    debug_log: bool = later(False, "Log the passes.", example=True)
    sync_before_reduce: bool = later(False, "Wait before a reduction.", example=True)
    sync_after_reduce: bool = later(False, "Wait after a reduction.", example=True)
    sync_before_allgather: bool = later(False, "Wait before a gather.", example=True)
    sync_after_allgather: bool = later(False, "Wait after a gather.", example=True)
    keep_int_input_tensors: bool = later(True, "Keep integer inputs alive.", example=False)
    keep_all_input_tensors: bool = later(False, "Keep all inputs alive.", example=True)


class CommsLogger(Section):
    gate: ClassVar[tuple[str, ...]] = _ON
    part: ClassVar[Part | None] = Part.CLIENTS
    enabled: bool = later(False, "Log every collective with size and time.", example=True)
    verbose: bool = later(False, "Print each as it happens.", example=True)
    prof_all: bool = later(True, "Profile all kinds.", example=False)
    debug: bool = later(False, "Name the caller.", example=True)
    prof_ops: tuple[str, ...] = later((), "Kinds to profile.", example=["all_gather"])


class Autotuning(Section):
    gate: ClassVar[tuple[str, ...]] = _ON
    part: ClassVar[Part | None] = Part.UNPLANNED
    enabled: bool = later(False, "Search for a fast configuration by experiments.", example=True)
    fast: bool = later(True, "Tune micro-batch sizes only.", example=False)
    results_dir: str | None = later(None, "Directory of results.", example="results")
    exps_dir: str | None = later(None, "Directory of experiments.", example="experiments")
    overwrite: bool = later(True, "Repeat experiments that are there.", example=False)
    start_profile_step: int = later(3, "First measured step.", unit="steps", example=5)
    end_profile_step: int = later(5, "Last measured step.", unit="steps", example=9)
    metric: str = later("throughput", "throughput, latency or flops.", example="latency")
    metric_path: str | None = later(None, "File the metric is read from.", example="metric.json")
    model_info: dict[str, Any] | None = later(None, "Facts of the model.", example={"num_params": 1})
    model_info_path: str | None = later(None, "File of those facts.", example="model.json")
    mp_size: int = later(1, "Model-parallel ranks.", unit="ranks", example=2)
    max_train_batch_size: int | None = later(None, "Largest batch tried.", unit="samples", example=64)
    min_train_batch_size: int = later(1, "Smallest batch tried.", unit="samples", example=8)
    max_train_micro_batch_size_per_gpu: int = later(1024, "Largest micro-batch tried.", unit="samples", example=64)
    min_train_micro_batch_size_per_gpu: int = later(1, "Smallest micro-batch tried.", unit="samples", example=2)
    num_tuning_micro_batch_sizes: int = later(3, "Micro-batch sizes tried.", example=2)
    tuner_type: Literal["gridsearch", "random", "model_based"] = later(
        "gridsearch", "Order of the search.", example="random"
    )
    tuner_early_stopping: int = later(5, "Stop after so many without gain.", example=3)
    tuner_num_trials: int = later(50, "Experiments at most.", example=10)
    arg_mappings: dict[str, Any] | None = later(None, "Keys and the script's arguments.", example={"a": "b"})


class Elasticity(Section):
    gate: ClassVar[tuple[str, ...]] = _ON
    part: ClassVar[Part | None] = Part.CLIENTS
    enabled: bool = later(False, "Choose a batch size that fits many numbers of ranks.", example=True)
    max_train_batch_size: int = later(2000, "Largest batch.", unit="samples", example=64, ge=1)
    micro_batch_sizes: tuple[int, ...] = later((2, 4, 6), "Micro-batch sizes allowed.", unit="samples", example=[1, 2])
    min_gpus: int = later(1, "Fewest ranks.", unit="ranks", example=2, ge=1)
    max_gpus: int = later(10_000, "Most ranks.", unit="ranks", example=16, ge=1)
    min_time: int = later(0, "Shortest run before a change.", unit="minutes", example=5)
    prefer_larger_batch: bool = later(True, "Of two that fit, the larger.", example=False)
    ignore_non_elastic_batch_info: bool = later(False, "Ignore the plain batch keys.", example=True)
    version: float = later(0.2, "Version of the arithmetic.", example=0.1)
    num_gpus_per_node: int = later(1, "Ranks of one node.", unit="ranks", example=8)
    model_parallel_size: int = later(1, "Model-parallel ranks.", unit="ranks", example=2)


class SparseAttention(Section):
    part: ClassVar[Part | None] = Part.ATTENTION
    mode: Literal["dense", "fixed", "variable", "bigbird", "bslongformer"] = later(
        "fixed", "The pattern of blocks.", example="bigbird"
    )
    block: int = later(16, "Side of a block.", unit="tokens", example=32, ge=1)
    different_layout_per_head: bool = later(False, "A pattern per head.", example=True)
    num_local_blocks: int = later(4, "Blocks of the local window.", example=2, ge=1)
    num_global_blocks: int = later(1, "Blocks everyone sees.", example=2, ge=1)
    attention: Literal["unidirectional", "bidirectional"] = later(
        "bidirectional", "Causal or not.", example="unidirectional"
    )
    horizontal_global_attention: bool = later(False, "Global blocks see everyone.", example=True)
    num_different_global_patterns: int = later(1, "Patterns of global blocks.", example=2, ge=1)
    num_random_blocks: int = later(0, "Random blocks per row.", example=1, ge=0)
    local_window_blocks: tuple[int, ...] = later((4,), "Sizes of the local windows.", example=[2])
    global_block_indices: tuple[int, ...] = later((0,), "Where global blocks begin.", example=[1])
    global_block_end_indices: tuple[int, ...] | None = later(None, "Where they end.", example=[2])
    num_sliding_window_blocks: int = later(3, "Blocks of the sliding window.", example=5, ge=1)


class HybridEngine(Section):
    gate: ClassVar[tuple[str, ...]] = _ON
    part: ClassVar[Part | None] = Part.UNPLANNED
    enabled: bool = later(False, "Switch between training and inference kernels.", example=True)
    max_out_tokens: int = later(512, "Longest generated text.", unit="tokens", example=64)
    inference_tp_size: int = later(1, "Ranks that share a layer in inference.", unit="ranks", example=2)
    release_inference_cache: bool = later(False, "Free the key-value cache after generating.", example=True)
    pin_parameters: bool = later(True, "Keep weights gathered while generating.", example=False)
    tp_gather_partition_size: int = later(8, "Layers gathered at once.", example=4)
    enable_cuda_graph: bool = later(False, "Generate through a CUDA graph.", example=True)


class ProgressiveLayerDrop(Section):
    gate: ClassVar[tuple[str, ...]] = _ON
    part: ClassVar[Part | None] = Part.UNPLANNED
    enabled: bool = later(False, "Drop layers at random, more over time.", example=True)
    theta: float = later(1.0, "Share of layers kept in the end.", example=0.5)
    gamma: float = later(0.001, "Speed of the change.", example=0.01)


class CurriculumLearning(Section):
    gate: ClassVar[tuple[str, ...]] = _ON
    part: ClassVar[Part | None] = Part.UNPLANNED
    enabled: bool = later(False, "Begin with easy (short) samples.", example=True)
    curriculum_type: str = later("seqlen", "What is measured.", example="other")
    min_difficulty: int = later(1, "Difficulty at the start.", example=8)
    max_difficulty: int = later(10, "Difficulty at the end.", example=1024)
    schedule_type: str = later("fixed_linear", "fixed_linear, fixed_root, fixed_discrete or custom.", example="custom")
    schedule_config: dict[str, Any] = later({}, "Arguments of the schedule.", example={"max_step": [1]})


class DataEfficiency(Section):
    gate: ClassVar[tuple[str, ...]] = _ON
    part: ClassVar[Part | None] = Part.UNPLANNED
    enabled: bool = later(False, "Sample and route data by difficulty.", example=True)
    seed: int = later(1234, "Seed of the sampling.", example=1)
    data_routing: dict[str, Any] = later({}, "Random layer-token dropping.", example={"enabled": True})
    data_sampling: dict[str, Any] = later({}, "Curricula and dynamic batches.", example={"enabled": True})


class Nebula(Section):
    gate: ClassVar[tuple[str, ...]] = _ON
    part: ClassVar[Part | None] = Part.UNPLANNED
    enabled: bool = later(False, "Save through the Azure Nebula service.", example=True)
    enable_nebula_load: bool = later(True, "Load through it.", example=False)
    load_path: str | None = later(None, "Older name of nebula_load_path.", example="a")
    nebula_load_path: str | None = later(None, "Where to load from.", example="a")
    persistent_storage_path: str | None = later(None, "Where it keeps checkpoints.", example="a")
    persistent_time_interval: int = later(100, "Time between two.", unit="seconds", example=10)
    num_of_version_in_retention: int = later(2, "How many it keeps.", example=3)
