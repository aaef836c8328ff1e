"""Sections of an ordinary run: optimizer, schedule, precision, records, monitors, checkpoint policy, recomputation."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from deepseek_zero.config.fields import Part, Section, accepted, effective, later, section

Dtype = Literal["fp32", "fp16", "bf16"]

_ADAMW = {"optimizer.type": "AdamW"}
_FP16 = {"fp16.enabled": True}
_PLACED = {"zero_optimization.offload_optimizer.device": "auto", "zero_optimization.stage": 3}
_BF16 = {"bf16.enabled": True}
_AUTOCAST = {"torch_autocast.enabled": True}


class Optimizer(Section):
    type: str | None = effective(
        None,
        "Name of the optimizer: ours, or any class of torch.optim; none where the program passes one.",
        example="SGD",
    )
    params: dict[str, Any] = effective(
        {}, "Arguments of the optimizer, for example lr, betas, eps, weight_decay.", example={"lr": 5e-4}, needs=_ADAMW
    )
    moments: Literal["fp32", "bf16", "8bit"] = effective(
        "fp32",
        "Ours. Bits that fp32 moments are kept in between steps; bf16 and 8bit are rounded up or down by chance, not "
        "exact.",
        example="bf16",
    )
    legacy_fusion: bool = accepted(
        False, "Use the old fusion of DeepSpeed's LAMB.", "there is one implementation of each optimizer"
    )


class Scheduler(Section):
    type: str | None = effective(
        None,
        "Name of the learning-rate schedule: DeepSpeed's five, or any class of torch.optim.lr_scheduler.",
        example="WarmupLR",
        needs=_ADAMW,
    )
    params: dict[str, Any] = effective(
        {},
        "Arguments of the schedule.",
        example={"warmup_num_steps": 7},
        needs={**_ADAMW, "scheduler.type": "WarmupLR"},
    )


class Fp16(Section):
    enabled: bool = effective(
        False, 'Compute in fp16 with fp32 master weights and loss scaling; "auto": on a GPU without bf16.', example=True
    )
    auto_cast: bool = effective(
        True, "Cast floating inputs to fp16.", auto="the top-level auto_cast", example=False, needs=_FP16
    )
    loss_scale: float = effective(0.0, "Fixed loss scale; 0 scales dynamically.", example=128.0, needs=_FP16, ge=0)
    initial_scale_power: int = effective(
        16, "The dynamic loss scale starts at 2 to this power.", example=8, needs=_FP16, ge=0, le=127
    )
    loss_scale_window: int = effective(
        1000, "Good steps after which the dynamic scale doubles.", unit="steps", example=50, needs=_FP16
    )
    hysteresis: int = effective(
        2, "Overflows endured before the dynamic scale halves.", unit="steps", example=4, needs=_FP16, ge=1
    )
    consecutive_hysteresis: bool = effective(
        False, "Refill the hysteresis after every good step.", example=True, needs=_FP16
    )
    min_loss_scale: float = effective(1.0, "The dynamic scale never falls below this.", example=4.0, needs=_FP16)
    fp16_master_weights_and_grads: bool = later(
        False, "Keep master weights and gradients in fp16.", Part.TIERS, example=True
    )


class Bf16(Section):
    enabled: bool = effective(
        False, 'Compute in bf16 with fp32 master weights; "auto": where the hardware has it.', example=True
    )
    check_grad_overflow: bool = effective(
        True, "Skip a step whose gradients are not finite.", example=False, needs=_BF16
    )
    master: Literal["split", "fp32", "none"] = effective(
        "split",
        "How an fp32 master is kept: split = as the bf16 weight and 16 more bits, exact; fp32 = whole, 2 bytes more; "
        "none = not at all: weights are rounded up or down by chance, 2 bytes less, not exact.",
        example="fp32",
        needs=_BF16,
    )
    immediate_grad_update: bool = accepted(
        False, "Add gradients to the fp32 buffer from the hook.", "always so: gradients are accumulated as they arrive"
    )
    bf16_master_weights_and_grads: bool = effective(
        False,
        'DeepSpeed\'s word for master = "none" (gradients are bf16 at one micro-batch per step anyway).',
        example=True,
        needs=_BF16,
    )
    bf16_optimizer_states: bool = effective(
        False, 'DeepSpeed\'s word for optimizer.moments = "bf16".', example=True, needs=_BF16
    )


class MemoryBudget(Section):
    device: int | None = effective(
        None,
        'Of the training device; more is an error. null: no limit, and with device "auto" what is free.',
        unit="bytes",
        example=1_000_000_000,
        inf=None,
        ge=0,
    )
    host: int | None = effective(
        None,
        'Of host memory, with device "auto"; null: none on a CPU, where the device is the host.',
        unit="bytes",
        example=1_000_000_000,
        needs=_PLACED,
        inf=None,
        ge=0,
    )
    disk: int | None = effective(
        None,
        'Of the disk under nvme_path, with device "auto"; null: what is free.',
        unit="bytes",
        example=1_000_000_000,
        needs={**_PLACED, "zero_optimization.offload_optimizer.nvme_path": "states"},
        inf=None,
        ge=0,
    )


class TorchAutocast(Section):
    enabled: bool = effective(False, "Run the forward under torch.autocast.", example=True)
    dtype: Literal["fp16", "bf16"] = effective(
        "bf16", "The autocast dtype.", auto="bf16 where the hardware has it, else fp16", example="fp16", needs=_AUTOCAST
    )
    lower_precision_safe_modules: tuple[str, ...] = later(
        (), "Module classes whose gradients travel in the autocast dtype.", Part.SPEED, example=["torch.nn.Linear"]
    )


class DataTypes(Section):
    grad_accum_dtype: Dtype | None = effective(
        None,
        "Dtype gradients are accumulated in; null: the plan's choice, fp32 above one micro-batch.",
        example="bf16",
        needs=_BF16,
    )
    param_dtype: Dtype | None = later(None, "Dtype of the weights in computation.", Part.CLIENTS, example="bf16")
    buffer_dtype: Dtype | None = later(None, "Dtype of the buffers; they keep their own.", Part.CLIENTS, example="fp32")


class Amp(Section):
    gate: ClassVar[tuple[str, ...]] = ("enabled",)
    part: ClassVar[Part | None] = Part.UNPLANNED
    enabled: bool = later(False, "Use NVIDIA Apex AMP; torch_autocast is its successor.", example=True)
    opt_level: str = later("O1", "Apex optimization level.", example="O2")


class TensorBoard(Section):
    enabled: bool = effective(False, "Write TensorBoard files on rank 0.", example=True, requires="tensorboard")
    output_path: str = effective(
        "", "Directory of the files.", example="tb", needs={"tensorboard.enabled": True}, requires="tensorboard"
    )
    job_name: str = effective(
        "DeepSpeedJobName",
        "Sub-directory of the run.",
        example="trial",
        needs={"tensorboard.enabled": True},
        requires="tensorboard",
    )


class CsvMonitor(Section):
    enabled: bool = effective(False, "Write one CSV file per quantity on rank 0.", example=True)
    output_path: str = effective("", "Directory of the files.", example="csv", needs={"csv_monitor.enabled": True})
    job_name: str = effective(
        "DeepSpeedJobName", "Sub-directory of the run.", example="trial", needs={"csv_monitor.enabled": True}
    )


_WANDB: dict[str, Any] = {"needs": {"wandb.enabled": True}, "requires": "wandb"}
_COMET: dict[str, Any] = {"needs": {"comet.enabled": True}, "requires": "comet_ml"}


class Wandb(Section):
    enabled: bool = effective(False, "Send records to Weights & Biases from rank 0.", example=True, requires="wandb")
    group: str | None = effective(None, "Group of the run.", example="trials", **_WANDB)
    team: str | None = effective(None, "Team (entity) that owns the run.", example="us", **_WANDB)
    project: str = effective("deepspeed", "Project of the run.", example="zero", **_WANDB)


class Comet(Section):
    enabled: bool = effective(False, "Send records to Comet from rank 0.", example=True, requires="comet_ml")
    samples_log_interval: int = effective(
        100, "Send a record every so many samples.", unit="samples", example=10, ge=1, **_COMET
    )
    project: str | None = effective(None, "Project of the run.", example="zero", **_COMET)
    workspace: str | None = effective(None, "Workspace of the project.", example="us", **_COMET)
    api_key: str | None = effective(None, "Key of the account; better given by environment.", example="key", **_COMET)
    experiment_name: str | None = effective(None, "Name shown for the run.", example="trial", **_COMET)
    experiment_key: str | None = effective(None, "Key of an experiment to continue.", example="a" * 32, **_COMET)
    online: bool | None = effective(None, "Send at once, or keep an offline archive.", example=False, **_COMET)
    mode: str | None = effective(None, "Get, create, or get_or_create the experiment.", example="create", **_COMET)


class ParallelWrite(Section):
    pipeline_stage: bool = later(
        False, "Write the layers of a pipeline stage from all its ranks.", Part.CHECKPOINTS, example=True
    )


class Writer(Section):
    part: ClassVar[Part | None] = Part.CHECKPOINTS
    type: str = later("FAST", "Which writer: MOCK, PYTHON or FAST.", example="PYTHON")
    decoupled: bool = later(False, "Write behind the training.", example=True)
    io_buffer_size: int = later(64 * 1024 * 1024, "Size of the write buffer.", unit="bytes", example=1024, ge=1)
    io_buffer_double: bool = later(True, "Use two buffers in turn.", example=False)
    io_multiplier: int = later(1, "Write threads per buffer.", example=2, ge=1)
    show_statistics: bool = later(False, "Log the bandwidth of each write.", example=True)
    data_parallel: str | None = later(None, "Spread writing over replica, socket or machine.", example="replica")


class SaveOnSignal(Section):
    path: str | None = effective(
        None,
        "Ours. Directory to save to at the next step boundary when a rank gets one of the signals; the job then ends "
        "with exit code 85. null: signals are left alone.",
        example="checkpoints",
    )
    signals: tuple[Literal["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP"], ...] = effective(
        ("SIGTERM", "SIGUSR1"),
        "Ours. Which signals; handlers that were there before are called as well.",
        example=["SIGUSR2"],
        needs={"checkpoint.save_on_signal.path": "checkpoints"},
    )


class Checkpoint(Section):
    tag_validation: Literal["Ignore", "Warn", "Fail"] = effective(
        "Warn", "What to do when ranks save under different tags.", example="Fail"
    )
    layout: Literal["auto", "slices", "deepspeed"] = effective(
        "auto",
        "Ours. The files of save_checkpoint: our own slices, which any number of ranks loads, or DeepSpeed's. auto: "
        "DeepSpeed's in a program that imports deepspeed and gets this library, above stage 0, where they hold what is "
        "saved and neither wait=False, keep_last nor save_on_signal asks for slices; else slices.",
        example="deepspeed",
    )
    snapshot_bytes: int = effective(
        1 << 30,
        "Bytes each rank may copy, of states that a step is about to change, while a checkpoint is written behind.",
        example=1 << 20,
        ge=0,
    )
    keep_last: int | None = effective(
        None,
        "Ours. After a save, remove checkpoints of the same directory but so many of the newest complete ones; null "
        "keeps all.",
        example=3,
        ge=1,
    )
    keep_every: int | None = effective(
        None,
        "Ours. With keep_last: checkpoints of every so many steps stay for good.",
        unit="steps",
        example=1000,
        ge=1,
        needs={"checkpoint.keep_last": 3},
    )
    save_on_signal: SaveOnSignal = section(SaveOnSignal, "Saving when somebody asks the job to end.")
    load_universal: bool = later(False, "Load from DeepSpeed's universal format.", Part.CHECKPOINTS, example=True)
    use_node_local_storage: bool = later(
        False, "Every node writes to a disk of its own.", Part.CHECKPOINTS, example=True
    )
    parallel_write: ParallelWrite = section(ParallelWrite, "How ranks share the writing.")
    checkpoint_serialization: bool = accepted(
        True, "Serialise through torch.save's zip format.", "our shards are written without pickle in either case"
    )
    writer: Writer | None = later(None, "DeepSpeed's own file writer.", Part.CHECKPOINTS, example={"type": "PYTHON"})


class Throughput(Section):
    enabled: bool = accepted(True, "Measure samples per second.", "always measured; it costs one clock reading")
    synchronized: bool = accepted(
        True, "Wait for the device before reading the clock.", "the device is waited for once per printed line only"
    )


class Timers(Section):
    throughput: Throughput = section(Throughput, "The samples-per-second timer.")


_FLOPS: dict[str, Any] = {"needs": {"flops_profiler.enabled": True}}


class FlopsProfiler(Section):
    enabled: bool = effective(False, "Count a forward's operations by module, once, on rank 0.", example=True)
    profile_step: int = effective(
        1, "Steps taken before the forward that is counted.", unit="steps", example=3, ge=0, **_FLOPS
    )
    recompute_fwd_factor: float = effective(
        0.0, "Share of the forward that backward repeats, for the printed step.", example=1.0, ge=0, **_FLOPS
    )
    module_depth: int = effective(-1, "Depth of the table; -1 is the deepest.", example=2, **_FLOPS)
    top_modules: int = accepted(1, "Modules listed per level.", "every module is listed", ge=1)
    detailed: bool = effective(True, "Print every module.", example=False, **_FLOPS)
    output_file: str | None = effective(None, "File for the table; null logs it.", example="flops.txt", **_FLOPS)


class Records(Section):
    path: str | None = effective(
        None, "Directory for metrics.jsonl, metrics.csv and plan.txt; null writes none.", example="runs/demo"
    )
    every: int = effective(
        1, "Write a record every so many steps.", unit="steps", example=5, needs={"records.path": "runs/demo"}, ge=1
    )


class ActivationCheckpointing(Section):
    partition_activations: bool = later(
        False, "Spread kept activations over tensor-parallel ranks.", Part.PARALLEL, example=True
    )
    cpu_checkpointing: bool = effective(
        False, 'Park inputs of checkpoints in host memory: DeepSpeed\'s word for device "cpu".', example=True
    )
    contiguous_memory_optimization: bool = effective(
        False, "Park inputs of checkpoints in one preallocated slab of the device's own memory.", example=True
    )
    number_checkpoints: int | None = effective(
        None,
        "Checkpoints the slab must hold; null: learned from the first forward.",
        example=4,
        ge=1,
        needs={"activation_checkpointing.contiguous_memory_optimization": True},
    )
    synchronize_checkpoint_boundary: bool = accepted(
        False, "Wait for the device at every checkpoint.", "it orders nothing that events do not order already"
    )
    profile: bool = effective(
        False, "Time forward and backward of each checkpoint of the first step, and log them once.", example=True
    )
    device: Literal["none", "cpu", "nvme"] = effective(
        "none", "Ours. Where inputs of checkpoints are parked between forward and backward, in one slab.", example="cpu"
    )
    nvme_path: str | None = effective(
        None,
        "Ours. Directory that holds them with device nvme; made, for its owner alone (0700), where it is missing.",
        example="parked",
        needs={"activation_checkpointing.device": "nvme"},
    )
