"""`Config`: the whole DeepSpeed JSON grammar and our few additions, as one typed, frozen model.

Built by `auto.resolve` from a `RawConfig`; read by engine/assemble and report, and by nothing below them.  Each key
carries its unit, its sentence and its status (`fields`); docs/reference/config.md is generated from here.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import PrivateAttr

from deepseek_zero.config import schema_later as behind
from deepseek_zero.config import schema_training as train
from deepseek_zero.config.batch import Batch
from deepseek_zero.config.fields import Part, Section, accepted, effective, later, section
from deepseek_zero.config.raw import Decision
from deepseek_zero.config.schema_zero import ZeroOptimization
from deepseek_zero.config.table import FieldRow, rows
from deepseek_zero.config.table import off_default_config as example_config
from deepseek_zero.config.table import off_default_example as example_of


class Config(Section):
    """Every key with a concrete value; `decisions` tells how the ones nobody stated were found."""

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
        1, "Micro-batches per optimizer step.", unit="micro-batches", auto="from the other two, else 1", example=2
    )
    managed_gradient_accumulation: bool = later(
        True, "False leaves the boundary to the caller: every step() updates.", Part.CLIENTS, example=False
    )
    sequence_parallel_size: int = later(
        1, "Ranks that share one sequence (Ulysses).", Part.PARALLEL, unit="ranks", example=2, ge=1
    )
    data_parallel_size: int | None = later(
        None, "Data-parallel ranks beside sequence parallelism.", Part.PARALLEL, unit="ranks", example=2, ge=1
    )
    # Optimizer and schedule
    optimizer: train.Optimizer = section(train.Optimizer, "The optimizer, where the program passes none.")
    scheduler: train.Scheduler = section(train.Scheduler, "The learning-rate schedule, where the program passes none.")
    zero_allow_untested_optimizer: bool = accepted(
        False, "Allow any optimizer class with ZeRO.", "any torch optimizer runs over slices; none is refused by name"
    )
    zero_force_ds_cpu_optimizer: bool = accepted(
        True, "Insist on DeepSpeedCPUAdam with offload.", "torch's fused CPU Adam is used; there is no other"
    )
    gradient_clipping: float = effective(
        0.0, "Largest global gradient norm; 0 is off (DeepSpeed's default changed to 1.0 in 2026).", example=1.0, ge=0
    )
    check_grad_overflow: bool = effective(
        True,
        "Skip a step whose gradients are not finite, in fp32; bf16.check_grad_overflow is its like, fp16 always does.",
        example=False,
    )
    # Communication
    communication_data_type: train.Dtype | None = effective(
        None, "Dtype gradients are reduced in; null: the plan's choice.", example="bf16"
    )
    seq_parallel_communication_data_type: train.Dtype = later(
        "fp32", "Dtype gradients are reduced in across sequence-parallel ranks.", Part.PARALLEL, example="bf16"
    )
    gradient_allreduce_op: Literal["mean", "sum"] = effective(
        "mean", "Average or add the gradients of the ranks.", example="sum"
    )
    prescale_gradients: bool = effective(
        False, "Divide gradients by the number of ranks before the reduction instead of after.", example=True
    )
    gradient_predivide_factor: float = effective(
        1.0,
        "Divide gradients by this before the reduction and by the rest after; not read with prescale_gradients.",
        example=2.0,
        gt=0,
    )
    sparse_gradients: bool = later(False, "Send embedding gradients as sparse rows.", Part.SPEED, example=True)
    disable_allgather: bool = accepted(False, "Refresh weights by broadcasts.", "a legacy key; it has no reader")
    # Precision
    fp16: train.Fp16 = section(train.Fp16, "fp16 with loss scaling.")
    bf16: train.Bf16 = section(train.Bf16, "bf16 with fp32 master weights (also spelled bfloat16).")
    torch_autocast: train.TorchAutocast = section(train.TorchAutocast, "torch.autocast around the forward.")
    data_types: train.DataTypes = section(train.DataTypes, "Single dtypes.")
    amp: train.Amp = section(train.Amp, "NVIDIA Apex.")
    precision: Literal["auto", "fp32", "fp16", "bf16"] | None = effective(
        None,
        "Ours. auto: bf16 where the hardware has it, else fp16, units lifted to fp32 when they overflow; a dtype: "
        "switches that section on; null: the sections decide.",
        example="auto",
        auto_is_value=True,
    )
    auto_cast: bool = effective(True, "Ours. Cast floating inputs to the compute dtype.", example=False)
    # ZeRO
    zero_optimization: ZeroOptimization = section(ZeroOptimization, "ZeRO itself.")
    memory_budget: train.MemoryBudget = section(
        train.MemoryBudget, "Ours. Bytes of one rank that states and buffers may take of each memory."
    )
    units: tuple[str, ...] = effective(
        (),
        "Ours. Class or module names of the units; empty chooses blocks automatically.",
        example=["Linear"],
        needs={"zero_optimization.stage": 3},
    )
    deterministic: bool = effective(
        False,
        "Ours. The same bits on every run, also on CUDA: torch's deterministic algorithms while the engine lives; an "
        "operation that has none raises.",
        example=True,
    )
    transport: Literal["fastest", "gloo"] = effective(
        "fastest",
        "Ours. How CPU ranks exchange: through shared memory on one host and gloo between hosts, or gloo only.",
        example="gloo",
    )
    # Parallel degrees
    dp_degree: int = effective(
        1,
        "Ours. Data-parallel ranks the run must have.",
        unit="ranks",
        auto="every rank of the run",
        example=2,
        effect="check",
        ge=1,
    )
    pp_degree: int = later(1, "Ours. Pipeline stages.", Part.PARALLEL, unit="ranks", example=2, ge=1)
    mp_degree: int = later(1, "Ours. Tensor-parallel ranks.", Part.PARALLEL, unit="ranks", example=2, ge=1)
    tensor_parallel: behind.TensorParallel = section(behind.TensorParallel, "Tensor parallelism (AutoTP).")
    expert_parallel: behind.ExpertParallel = section(behind.ExpertParallel, "Expert parallelism (AutoEP).")
    use_data_before_expert_parallelism: bool = later(
        False, "Order of the axes with experts.", Part.PARALLEL, example=True
    )
    pipeline: behind.Pipeline = section(behind.Pipeline, "Pipeline parallelism.")
    # Logging and records
    steps_per_print: int | None = effective(
        10, "Steps between two summary lines; null or inf prints none.", unit="steps", example=5, inf=None, ge=1
    )
    wall_clock_breakdown: bool = effective(False, "Time forward, backward and step, each on its own.", example=True)
    memory_breakdown: bool = effective(False, "Log the memory in use beside each summary line.", example=True)
    dump_state: bool = effective(False, "Log the assembled parts once at the start.", example=True)
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = effective(
        None, "Level of the deepseek_zero logger; null leaves it.", example="debug"
    )
    timers: train.Timers = section(train.Timers, "Timers.")
    dataloader_drop_last: bool = effective(False, "Drop the last, smaller batch of an epoch.", example=True)
    vocabulary_size: int | None = accepted(None, "Size of the vocabulary.", "DeepSpeed only warns about its alignment")
    records: train.Records = section(train.Records, "Ours. The run's own records.")
    tensorboard: train.TensorBoard = section(train.TensorBoard, "TensorBoard.")
    csv_monitor: train.CsvMonitor = section(train.CsvMonitor, "CSV files.")
    wandb: train.Wandb = section(train.Wandb, "Weights & Biases.")
    comet: train.Comet = section(train.Comet, "Comet.")
    comms_logger: behind.CommsLogger = section(behind.CommsLogger, "A log of collectives.")
    flops_profiler: train.FlopsProfiler = section(train.FlopsProfiler, "A profile of operations.")
    # Checkpoints
    checkpoint: train.Checkpoint = section(train.Checkpoint, "Saving and loading.")
    nebula: behind.Nebula = section(behind.Nebula, "Azure Nebula.")
    datastates_ckpt: dict[str, Any] | None = later(
        None, "The DataStates checkpoint engine.", Part.UNPLANNED, example={"host_cache_size": 1}
    )
    # The rest of the grammar
    aio: behind.Aio = section(behind.Aio, "Disk requests.")
    activation_checkpointing: train.ActivationCheckpointing = section(
        train.ActivationCheckpointing, "Where recomputation keeps its inputs."
    )
    compile: behind.Compile = section(behind.Compile, "DeepCompile.")
    sparse_attention: behind.SparseAttention | None = later(
        None, "Block-sparse attention.", Part.ATTENTION, example={"mode": "fixed"}
    )
    autotuning: behind.Autotuning = section(behind.Autotuning, "Search for a configuration.")
    elasticity: behind.Elasticity = section(behind.Elasticity, "Batch sizes for many numbers of ranks.")
    hybrid_engine: behind.HybridEngine = section(behind.HybridEngine, "Training and inference in one engine.")
    progressive_layer_drop: behind.ProgressiveLayerDrop = section(behind.ProgressiveLayerDrop, "Layer dropping.")
    curriculum_learning: behind.CurriculumLearning = section(behind.CurriculumLearning, "Curricula, the old key.")
    data_efficiency: behind.DataEfficiency = section(behind.DataEfficiency, "Curricula and token dropping.")
    compression_training: dict[str, Any] = later(
        {},
        "Quantisation and pruning while training.",
        Part.UNPLANNED,
        off_when="nothing_enabled",
        example={"weight_quantization": {"shared_parameters": {"enabled": True}}},
    )
    weight_quantization: dict[str, Any] | None = later(
        None, "Quantised weights for inference.", Part.UNPLANNED, example={"num_bits": 4}
    )
    quantize_training: dict[str, Any] = later(
        {}, "Quantisation schedule.", Part.UNPLANNED, off_when="nothing_enabled", example={"enabled": True}
    )
    graph_harvesting: bool = accepted(False, "Replay steps as a CUDA graph.", "speed only; no value depends on it")

    _decisions: tuple[Decision, ...] = PrivateAttr(default=())

    @property
    def batch(self) -> Batch:
        """The solved batch-size triangle."""
        return Batch(
            train=self.train_batch_size,
            micro=self.train_micro_batch_size_per_gpu,
            accumulation=self.gradient_accumulation_steps,
            dp_size=self.dp_degree,
        )

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What the resolver decided, in order."""
        return self._decisions

    def with_decisions(self, decisions: tuple[Decision, ...]) -> Config:
        """Attach the resolver's record; called by it alone."""
        self._decisions = decisions
        return self

    @classmethod
    def field_table(cls) -> tuple[FieldRow, ...]:
        """One row per key: path, type, default, unit, status, sentence, reason, example."""
        return rows(cls)


def off_default_example(path: str) -> Any:
    """A valid value for a key that is not its default."""
    return example_of(Config, path)


def off_default_config(path: str) -> dict[str, Any]:
    """A configuration that moves one key off its default and sets what the key needs beside it."""
    return example_config(Config, path)
