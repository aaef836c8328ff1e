"""Translate a configuration into the settings of the packages below.

Only this module and optimizer.py read configuration keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from .. import attention, parallel
from ..activations.recompute import RecomputeSettings
from ..activations.tiles import TileSettings
from ..base.errors import UsageError
from ..base.mesh import Mesh
from ..comm.agreement import values_in
from ..config.layer_specs import layer_rules
from ..extensions.policies import PolicySettings
from ..extensions.tuning import KEYS as TUNED
from ..optim.step_settings import KERNEL_TILE_NUMEL, TILE_ALIGNMENT, TILE_NUMEL, StepSettings
from ..optim.tile_memory import PrefetchSettings
from ..planner.plan_settings import Compression, PlanSettings
from ..planner.unit_tiers import PlacementSettings
from ..precision.codecs import EXACT_SCALE_BITS, Blocks, Cast
from ..precision.feedback import Feedback
from ..precision.loss_scale import LossScaler, LossScaleSettings
from ..precision.policy import Policy
from ..tiers.budget import NO_LIMIT
from ..tiers.disk import DiskSettings
from ..tiers.tier import Tier

if TYPE_CHECKING:  # as in engine.py
    from ..config import Config

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME, "auto": Tier.DEVICE}


@dataclass(frozen=True)
class PipelineSettings:
    """How a model is cut into pipeline stages and which schedule runs them.

    Attributes:
        partition: How layers are distributed over stages (pipeline/partition.py).
        schedule: The name of the schedule, for example "1f1b".
        virtual: The number of stages per rank (virtual pipeline stages).
        group: The number of micro-batches that a rank runs in one stage before its next stage
            ("breadth_first"); None for all.
        micro_batches: The micro-batches of a step.
        parts: The number of parts into which `engine(batch)` cuts a batch; None if it is not set.
        has_own_rows: Whether each rank of a pipeline loads different rows of a batch.
        recomputed: Recompute this many layers of a list at a time; 0 leaves it to the list.
    """

    partition: str = "best"
    schedule: str = "1f1b"
    virtual: int = 1
    group: int | None = None
    micro_batches: int = 1
    parts: int | None = None
    has_own_rows: bool = False
    recomputed: int = 0


# Ranks may differ in these: each may write, report and offload to a place of its own.
OF_ONE_RANK = (
    "tensorboard csv_monitor wandb comet records flops_profiler comms_logger network memory_budget "
    "aio timers steps_per_print log_level wall_clock_breakdown memory_breakdown dump_state"
).split()


def shared_values(config: Config) -> dict[str, Any]:
    """Return the configured values that must be equal on every rank, by key."""
    from ..config.fields import Section, Status, rows  # noqa: PLC0415  # it imports pydantic

    found: dict[str, Any] = {}
    for row in rows(type(config)):
        if row.status is not Status.EFFECTIVE or row.path.partition(".")[0] in OF_ONE_RANK:
            continue
        value: Any = config
        for name in row.path.split("."):
            value = getattr(value, name, None)  # None if the section is missing
        is_section = isinstance(value, Section | Mapping)
        found |= values_in(value, row.path) if is_section else {row.path: value}
    return {
        key: value
        for key, value in found.items()
        if not key.endswith("path") or key.startswith("checkpoint.")
    }


def policy_of(config: Config) -> Policy:
    """Return the number formats: fp16, bf16, autocast, and the dtypes of sums."""
    bf16 = config.bf16
    compute = None
    if bf16.enabled or config.fp16.enabled:
        compute = torch.bfloat16 if bf16.enabled else torch.float16
    autocast = None
    if config.torch_autocast.enabled:
        autocast = DTYPES[config.torch_autocast.dtype or "bf16"]
    reduce = None
    if config.communication_data_type:
        reduce = DTYPES[config.communication_data_type]
    return Policy(
        compute=compute,
        reduce=reduce,
        accumulate=DTYPES[config.data_types.grad_accum_dtype or "fp32"],
        master="none" if bf16.bf16_master_weights_and_grads else bf16.master,
        moments="bf16" if bf16.bf16_optimizer_states else config.optimizer.moments,
        autocast=autocast,
        auto_cast=config.fp16.auto_cast if config.fp16.enabled else config.auto_cast,
    )


# for zero_quantized_weights and zero_quantized_gradients
WEIGHT_BITS = 8
GRADIENT_BITS = 4
GRADIENT_BLOCK = {8: 256, 4: 128}
KEPT_ERRORS: dict[str, Cast | Blocks] = {"bf16": Cast(torch.bfloat16), "int8": Blocks(8, 256)}
EXACT_INSIDE = 16  # inside_bits that select no codes for any dtype of gradients


def compression_of(config: Config) -> Compression:
    """Return how matrices are compressed in messages between ranks.

    The library's own section takes precedence over DeepSpeed's keys.
    """
    zero = config.zero_optimization
    weights = zero.compression.weights
    gradients = zero.compression.gradients
    weight_bits = weights.bits or (WEIGHT_BITS if zero.zero_quantized_weights else None)
    if weight_bits == 4 and zero.stage == 3:
        raise UsageError(
            "zero_optimization.compression.weights.bits is 4 at stage 3.",
            "4 bits are too few for weights: the loss becomes worse immediately.",
            "use 8 bits, or stage 1 or 2, which send the changes of weights.",
        )
    if weight_bits and zero.stage in (1, 2) and policy_of(config).master == "none":
        raise UsageError(
            f"weights are sent in {weight_bits} bits at stage {zero.stage} "
            "(zero_quantized_weights), but bf16.master is none.",
            "The quantization error of a weight is kept in its main weight.",
            "set another bf16.master, or send weights unquantized.",
        )
    grad_bits = gradients.bits or (GRADIENT_BITS if zero.zero_quantized_gradients else None)
    codes_inside = gradients.inside_bits != EXACT_INSIDE
    if codes_inside and not grad_bits and not zero.compression.auto:
        raise UsageError(
            f"zero_optimization.compression.gradients.inside_bits is {gradients.inside_bits}, but "
            "gradients are not quantized.",
            "Gradients in few bits inside a host must have few bits between hosts too, where the "
            "link "
            "is slower.",
            "also set gradients.bits, zero_quantized_gradients or compression.auto.",
        )
    weight_codec = grad_codec = inside = feedback = None
    if weight_bits:
        weight_codec = Blocks(weight_bits, weights.block)
    if grad_bits:
        grad_codec = Blocks(grad_bits, gradients.block or GRADIENT_BLOCK[grad_bits])
        feedback = _feedback(config)
    if codes_inside:
        inside = Blocks(gradients.inside_bits, GRADIENT_BLOCK[gradients.inside_bits])
    return Compression(
        weights=weight_codec,
        gradients=grad_codec,
        frozen=_frozen_codec(config),
        inside=inside,
        min_numel=zero.compression.min_numel,
        feedback=feedback,
        left_open=_left_open(config, weight_bits, grad_bits),
    )


def _feedback(config: Config) -> Feedback | None:
    """Return how ranks keep the errors of quantized gradients, or None if they do not."""
    loco = config.zero_optimization.zeropp_loco_param
    asked = config.zero_optimization.compression.gradients.error_feedback
    if loco is not None:
        codec = "bf16" if asked == "off" else asked
        return Feedback(KEPT_ERRORS[codec], loco.err_beta, loco.reset_T)
    return None if asked == "off" else Feedback(KEPT_ERRORS[asked])


def _left_open(config: Config, weight_bits: int | None, grad_bits: int | None) -> tuple[str, ...]:
    """Return the states whose codec `compression.auto` chooses.

    Weights are only among them at stage 3, where no state depends on their codec.
    """
    zero = config.zero_optimization
    if not zero.compression.auto:
        return ()
    found = ("weights",) if zero.stage == 3 and not weight_bits else ()
    if grad_bits:
        return found
    if _feedback(config) is not None:
        raise UsageError(
            "compression.auto cannot choose the bits of gradients with error feedback "
            "(error_feedback, zeropp_loco_param).",
            "The quantization error is a state that checkpoints contain, and its format depends on "
            "the bits.",
            "set compression.gradients.bits, or remove error feedback.",
        )
    return (*found, "gradients")


def choices_of(config: Config) -> dict[str, tuple[Blocks, ...]]:
    """Return the codecs that `compression.auto` chooses among, by state.

    The codecs use the configured blocks.
    """
    codes = config.zero_optimization.compression
    gradients = tuple(
        Blocks(bits, codes.gradients.block or block) for bits, block in GRADIENT_BLOCK.items()
    )
    return {"weights": (Blocks(WEIGHT_BITS, codes.weights.block),), "gradients": gradients}


def _frozen_codec(config: Config) -> Blocks | None:
    """Return the codec of frozen matrices, or None without one."""
    zero = config.zero_optimization
    if not zero.zero_quantized_nontrainable_weights:
        return None
    if zero.offload_param.device != "none":
        raise UsageError(
            "zero_quantized_nontrainable_weights with offload_param.device "
            f"{zero.offload_param.device!r} is not built.",
            "Quantized weights must be on the training device; offloaded weights are not "
            "quantized.",
            "remove one of the two: quantized weights need a quarter of fp32 or half of bf16 "
            "there, "
            "offloaded ones nothing.",
        )
    return Blocks(WEIGHT_BITS, zero.compression.weights.block, EXACT_SCALE_BITS)


def is_open(config: Config, key: str) -> bool:
    """Return whether a key of `zero_optimization` is missing or "auto".

    Args:
        config: The run's configuration, from which the settings are read.
        key: A key of the section `zero_optimization`.

    Returns:
        True if the library may choose the value of the key.
    """
    decided = {decision.key for decision in config.decisions}
    return (
        key not in config.zero_optimization.model_fields_set
        or f"zero_optimization.{key}" in decided
    )


def plan_settings_of(
    config: Config, leaf_modules: tuple[str, ...] = (), stages: int = 1
) -> PlanSettings:
    """Return the settings of sharding and its schedule.

    Args:
        config: The run's configuration, from which the settings are read.
        leaf_modules: The full names of modules that are not divided into units, in addition to
            those of the configuration.
        stages: The number of stages along "pp".

    Returns:
        The settings that the planner reads.
    """
    zero = config.zero_optimization
    row_parts = 1
    if stages > 1:
        each_has_rows = config.pipeline.rows == "own"
        row_parts = (config.pipeline.micro_batches or 1) * (stages if each_has_rows else 1)
    device_bytes = config.memory_budget.device
    if device_bytes is None:
        device_bytes = NO_LIMIT
    return PlanSettings(
        stage=zero.stage,
        policy=policy_of(config),
        accumulation=config.gradient_accumulation_steps,
        persistence_numel=zero.stage3_param_persistence_threshold,
        persistence_total_numel=zero.stage3_model_persistence_threshold,
        window_numel=zero.stage3_max_live_parameters,
        keep_numel=zero.stage3_max_reuse_distance,
        ahead_numel=zero.stage3_prefetch_bucket_size,
        bucket_numel=zero.reduce_bucket_size,
        reduces_once=stages > 1,
        row_parts=row_parts,
        overlap=bool(zero.overlap_comm),
        mean=config.gradient_allreduce_op == "mean",
        prescale=config.prescale_gradients,
        predivide=config.gradient_predivide_factor,
        transport=config.transport,
        weight_tier=TIERS[zero.offload_param.device],
        state_tier=TIERS[zero.offload_optimizer.device],
        device_bytes=device_bytes,
        delayed_update=zero.offload_optimizer.delayed_update_after is not None,
        layerwise_micro_batches=zero.vertical_micro_batches,
        secondary_ranks=zero.zero_hpz_partition_size,
        compression=compression_of(config),
        ranks_per_host=config.ranks_per_host,
        unused_is_error=not zero.ignore_unused_parameters,
        tunes=tuple(name for name, key in TUNED.items() if is_open(config, key)),
        unit_names=tuple(config.units),
        leaf_classes=tuple(str(name).rpartition(".")[2] for name in zero.leaf_module.classes),
        leaf_names=(*zero.leaf_module.names, *leaf_modules),
        leaf_suffixes=tuple(zero.leaf_module.name_suffixes),
        fuse_numel=zero.stage3_module_granularity_threshold,
    )


def updates_ahead(config: Config) -> bool:
    """Return whether some units are updated in backward, before their step."""
    offload = config.zero_optimization.offload_optimizer
    return offload.super_offload or offload.delayed_update_after is not None


def scaler_of(
    config: Config, adjusted: Callable[[LossScaleSettings], LossScaleSettings]
) -> LossScaler | None:
    """Return the loss scaler of fp16; None for other number formats.

    Args:
        config: The run's configuration, from which the settings are read.
        adjusted: A function that returns the settings of the loss scale with the changes of the
            API.
    """
    fp16 = config.fp16
    if not fp16.enabled:
        return None
    settings = LossScaleSettings(
        loss_scale=fp16.loss_scale,
        initial_scale_power=fp16.initial_scale_power,
        loss_scale_window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        min_loss_scale=fp16.min_loss_scale,
    )
    return LossScaler(adjusted(settings))


def step_settings_of(
    config: Config, granularity: tuple[str, ...], device: torch.device
) -> StepSettings:
    """Return the settings of the optimizer step: clipping, tile sizes and kernels.

    Args:
        config: The run's configuration, from which the settings are read.
        granularity: For each parameter group, "element" or "tensor": where its state may be cut.
        device: The training device, which decides whether kernels can be used.

    Returns:
        The settings that the optimizer reads.
    """
    zero = config.zero_optimization
    offload = zero.offload_optimizer

    def at_most(numel: int) -> int:
        return max(1, min(zero.sub_group_size, numel) // TILE_ALIGNMENT) * TILE_ALIGNMENT

    check_finite = config.check_grad_overflow
    if config.bf16.enabled:
        check_finite = config.bf16.check_grad_overflow
    ahead = offload.buffer_count if offload.pipeline_read else 0
    behind = offload.buffer_count if offload.pipeline_write else 0
    return StepSettings(
        max_norm=config.gradient_clipping,
        tile_numel=at_most(TILE_NUMEL.on(device)),
        host_tile_numel=at_most(TILE_NUMEL.cpu),
        kernel_tile_numel=at_most(KERNEL_TILE_NUMEL),
        can_defer=offload.pipeline and config.precision != "auto",
        by_unit=updates_ahead(config),
        on_accelerator=device.type != "cpu",
        undo_bytes=offload.undo_bytes,
        flow=PrefetchSettings(ahead=ahead, behind=behind),
        granularity=granularity,
        check_finite=check_finite,
        kernels=config.optimizer.kernels,
    )


def disk_settings_of(config: Config) -> DiskSettings:
    """Return the settings of reads and writes of offloaded states on a disk."""
    return DiskSettings(config.aio.queue_depth, config.aio.block_size)


def state_folder(config: Config) -> str | None:
    """Return the configured directory on a disk for states, or None."""
    zero = config.zero_optimization
    return zero.offload_optimizer.nvme_path or zero.offload_param.nvme_path


def placement_settings_of(config: Config) -> PlacementSettings:
    """Return which states may be placed in which memories, and the budgets of these."""
    zero = config.zero_optimization
    budget = config.memory_budget
    undo_bytes = zero.offload_optimizer.undo_bytes if updates_ahead(config) else 0
    folder = state_folder(config)
    return PlacementSettings(
        chooses_weights=zero.offload_param.device == "auto",
        chooses_states=zero.offload_optimizer.device == "auto",
        device=budget.device,
        host=budget.host,
        disk=budget.disk,
        path=Path(folder) if folder else None,
        ratio=zero.offload_optimizer.ratio,
        undo_bytes=undo_bytes,
    )


def policy_settings_of(config: Config) -> PolicySettings:
    """Return the settings of delayed and early updates and of adaptive precision."""
    offload = config.zero_optimization.offload_optimizer
    precision_window = config.precision_window if config.precision == "auto" else None
    return PolicySettings(
        speculates=offload.super_offload,
        delay_after=offload.delayed_update_after,
        precision_window=precision_window,
    )


def recompute_settings_of(config: Config) -> RecomputeSettings:
    """Return the settings of activation checkpointing: where checkpoint inputs are kept.

    Defaults are returned if the configuration has no setting.
    """
    section = config.activation_checkpointing
    plain = RecomputeSettings()
    tier = Tier.DEVICE if section.contiguous_memory_optimization else None
    if section.device != "none" or section.cpu_checkpointing:
        tier = TIERS[section.device] if section.device != "none" else Tier.HOST
    path = None
    disk = plain.disk
    if tier is Tier.NVME:
        path = Path(section.nvme_path or "")
        disk = disk_settings_of(config)
    return RecomputeSettings(
        tier,
        path,
        disk,
        section.number_checkpoints,
        section.profile,
        section.policy,
        section.partition_activations,
    )


def tile_settings_of(config: Config) -> TileSettings:
    """Return the settings of layers that process the tokens of a sequence in parts."""
    return TileSettings(
        config.activation_checkpointing.tiled_loss, config.activation_checkpointing.tiled_mlp
    )


def tensor_settings_of(config: Config) -> parallel.ParallelSettings:
    """Return the settings of tensor parallelism that a configuration describes."""
    section = config.tensor_parallel
    summed = tuple(
        (rf".*{re.escape(name)}\.weight$", "row", 1, ())
        for name in section.injection_policy_tuple or ()
    )
    given = section.partition_config or {}
    loss: Literal["split", "gathered", "tiled"] = section.loss
    if config.activation_checkpointing.tiled_loss is not None:
        loss = "tiled"
    return parallel.ParallelSettings(
        loss=loss,
        layers=(*layer_rules(given), *summed),
        uses_other_rules=given.get("use_default_specs", True),
        needs_a_split=not given.get("layer_specs"),
        is_strict=given.get("strict_mode", False),
        preset=section.preset_model,
        sequence=section.sequence or False,
        grain=max(section.tp.tp_grain_size, section.tensor_parallel.tp_grain_size),
    )


def sequence_settings_of(
    config: Config, stated: parallel.SequenceSettings | None = None
) -> parallel.SequenceSettings:
    """Return the settings of sequence parallelism.

    Args:
        config: The run's configuration, from which the settings are read.
        stated: The settings that follow from the caller's `mpu`; None without one.

    Returns:
        The method and size of sequence parallelism.
    """
    asked = config.sequence_parallel.attention
    if stated is None:
        return parallel.SequenceSettings(asked)
    if asked not in ("auto", stated.attention):
        raise UsageError(
            f"sequence_parallel.attention is {asked}, but the mpu's ranks share sequences by "
            f"{stated.attention}.",
            "Its loader splits sequences in order, and the program weights its loss.",
            "remove the key; or do not pass the mpu, and pass mesh={'sp': ...}.",
        )
    return stated


def sparse_attention_of(config: Config, mesh: Mesh) -> attention.SparseAttention | None:
    """Return sparse attention for one rank of a mesh, or None if it is not configured.

    A resolved configuration may contain arguments of other layouts, at their defaults.

    Args:
        config: The run's configuration, from which the settings are read.
        mesh: The device mesh: the size of each axis and this rank's coordinates.

    Returns:
        The attention object that replaces the model's attention, or None.

    Raises:
        ConfigError: Two settings of the section exclude each other.
    """
    section = config.sparse_attention
    if section is None:
        return None
    own = attention.fields_of(section.mode)
    kinds = type(section).model_fields
    said = {name: getattr(section, name) for name in kinds if name != "mode"}
    given = {
        name: value for name, value in said.items() if name in own or value != kinds[name].default
    }
    ranks = mesh.tp * mesh.sp
    place = mesh.coordinates
    layout = attention.layout_of(section.mode, given)
    return attention.SparseAttention(layout, ranks, place["tp"] * mesh.sp + place["sp"])


def pipeline_settings_of(config: Config) -> PipelineSettings:
    """Return the settings of pipeline parallelism that a configuration describes."""
    section = config.pipeline
    return PipelineSettings(
        partition=section.partition,
        schedule=section.schedule,
        virtual=section.virtual,
        group=section.group,
        micro_batches=section.micro_batches or config.gradient_accumulation_steps,
        parts=section.micro_batches,
        has_own_rows=section.rows == "own",
        recomputed=section.activation_checkpoint_interval,
    )
