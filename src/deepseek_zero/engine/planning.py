"""Make the plan of this process from the model, the optimizer and the machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from .. import extensions, optimizers
from ..base.capabilities import Capability
from ..base.device import PerDevice, free_device_bytes, has_fast_bf16, synchronize
from ..base.errors import UsageError
from ..base.log import log_once
from ..base.mesh import Mesh
from ..comm.agreement import AllRanks
from ..comm.collectives import Comm, would_read_in_place
from ..comm.context import ranks_of_this_host
from ..comm.measure import inter_node_rate
from ..optim.step_settings import StepSettings, update_settings_of
from ..planner.auto_wrap_policy import ModelShape
from ..planner.codec_choice import CodecRate, Open, choose_codes, gather_traffic, reduce_traffic
from ..planner.plan import Plan, plan_shape
from ..planner.plan_settings import Compression, Machine, PlanSettings
from ..planner.row_of_group import plan_for
from ..planner.spec import S
from ..planner.unit_tiers import PlacementSettings, TierChoices, describe_tiers
from ..planner.update import UpdateSettings
from ..precision.codecs import Blocks, codec_scratch
from ..precision.policy import Policy
from ..tiers.disk import Disk
from ..tiers.host import free_host_bytes
from ..tiers.tier import Tier
from .optimizer import OptimizerParts
from .settings import choices_of, placement_settings_of

if TYPE_CHECKING:  # as in engine.py
    from ..config import Config

# Elements and repetitions of the measurement of a codec
MEASURED_NUMEL = PerDevice(cpu=1 << 20, accelerator=1 << 24)
MEASURED_TIMES = 5
NEXT_TO_NOTHING = 0.1  # share of a model's parameters that stage 3 shards
WORTH_FILLING = 0.6  # share of the free memory; activations and other programs need the rest


def plan_run(
    config: Config,
    settings: PlanSettings,
    step: StepSettings,
    shape: ModelShape,
    optimizer: OptimizerParts,
    comm: Comm,
    mesh: Mesh,
) -> Plan:
    """Return the plan of this process, and log the choices that were made.

    Args:
        config: The run's configuration, from which the settings are read.
        settings: The settings of sharding and its schedule.
        step: The settings of the optimizer step, such as tile sizes and kernels.
        shape: The names, shapes and dtypes of the model's parameters, by unit.
        optimizer: The optimizer's class and parameter groups, which decide the sizes of its states.
        comm: The communicator of the ranks that call this function.
        mesh: The device mesh: the size of each axis and this rank's coordinates.

    Returns:
        The plan from which the units and parameter groups of this rank are built.

    Note:
        Collective if memories are "auto".
    """
    update = update_of(config, step, optimizer)
    placement = placement_settings_of(config)
    near = comm.outer is not None and comm.outer.reads_in_place
    if settings.secondary_ranks > 1:
        row = torch.tensor([int(comm.shard.reads_in_place)], device="cpu")
        in_place = bool(comm.whole.all_gather_rows(row, "where weights are read").all())
        settings = with_useful_copies(settings, mesh, in_place=in_place)
    settings = with_order_of_sums(settings, mesh, comm.hosts.per_host, optimizer.cls)
    settings = with_chosen_codes(config, settings, comm, mesh)
    log_fixed_bits(config, settings)
    inside, across = mesh.hosts_of(settings.ranks_per_host or 1)
    machine = Machine(
        comm.shard.reads_in_place,
        replicas_read_in_place=near,
        near_read_in_place=would_read_in_place(comm, inside),
        far_read_in_place=would_read_in_place(comm, across),
        spans_hosts=bool(comm.shard.inter_node),
    )
    if not TierChoices.of(settings, placement, mesh.device).are_open:
        found = plan_shape(shape, settings, mesh, machine, update, placement)
    else:
        machine = replace(machine, budgets=free_budgets(placement, comm, mesh.device))
        with AllRanks(comm, "placing states"):
            found = plan_shape(shape, settings, mesh, machine, update, placement)
        log_once(f"placement: {describe_tiers(found.settings.unit_tiers)}")
    log_unquantized(found, among_hosts=not comm.hosts.is_one)
    return found


def with_chosen_codes(
    config: Config, settings: PlanSettings, comm: Comm, mesh: Mesh
) -> PlanSettings:
    """Return the settings with the codecs that `compression.auto` leaves open.

    The reasons are logged. On one host nothing is measured and nothing is coded, because codecs
    would only cost time there.

    Args:
        config: The run's configuration, from which the settings are read.
        settings: The settings in which codecs may still be open.
        comm: The communicator of the ranks that call this function.
        mesh: The device mesh: the size of each axis and this rank's coordinates.

    Returns:
        The settings, in which every codec is set. They are equal on all ranks.

    Note:
        Collective if a codec is left open and there are several hosts.
    """
    asked = settings.compression
    shard = comm.shard
    if not asked.left_open:
        return settings
    if settings.stage in (1, 2) and asked.weights is None:
        log_once(
            f"compression.auto: at stage {settings.stage} it does not choose the bits of weights, "
            "which are sent unquantized, because the main weights depend on them.  "
            "Set them with compression.weights.bits."
        )
    table = comm.whole.all_gather_rows(
        torch.tensor([len(shard.inter_node)], device="cpu"), "ranks on other hosts"
    )
    if not int(table.min()):
        log_once(
            "compression.auto: the ranks that shard a state are on one host, so nothing is "
            "quantized."
        )
        return replace(settings, compression=replace(asked, left_open=()))
    link = inter_node_rate(shard, "the rate of the link")
    choices = {state: choices_of(config)[state] for state in asked.left_open}
    codecs = list(dict.fromkeys(chain.from_iterable(choices.values())))
    own = [measured_rates(codec, mesh.device) for codec in codecs]
    row = torch.tensor(own, dtype=torch.float64, device="cpu").view(-1)
    least = comm.whole.all_gather_rows(row, "rates of codecs").amin(dim=0).view(-1, 2)
    rates = {
        codec: CodecRate(codec, *rate) for codec, rate in zip(codecs, least.tolist(), strict=True)
    }
    here = mesh.shard_size - int(table.max())
    near = mesh.near_size(settings.ranks_per_host or 1)
    uncoded = replace(settings, compression=Compression())
    size = mesh.shard_size
    plan = plan_for(uncoded, torch.float32, trainable=True, persistent=False, ranks=size)
    traffic = {
        "weights": gather_traffic(size, here, near, plan.weight.dtype.itemsize),
        "gradients": reduce_traffic(size, here, near, plan.grad_wire.dtype.itemsize),
    }
    states = {
        state: Open(traffic[state], tuple(rates[codec] for codec in among))
        for state, among in choices.items()
    }
    chosen = choose_codes(asked, link, **states)
    log_once(f"compression.auto: {chosen.why}")
    return replace(settings, compression=chosen)


def log_fixed_bits(config: Config, settings: PlanSettings) -> None:
    """Log that precision "auto" does not adapt the codecs of messages.

    Args:
        config: The run's configuration, from which the settings are read.
        settings: The settings of sharding, which name the codecs.
    """
    asked = settings.compression
    codecs = (asked.weights, asked.gradients, asked.inside, asked.frozen)
    if config.precision == "auto" and any(codecs):
        log_once(
            "precision auto chooses the dtype of units (16 or 32 bits), not the bits of quantized "
            "messages: it does not read their quantization error, and they keep the configured "
            "bits."
        )


def measured_rates(codec: Blocks, device: torch.device) -> tuple[float, float]:
    """Measure how fast this rank encodes and decodes.

    This takes some milliseconds.

    Args:
        codec: The codec whose encoder and decoder are timed.
        device: The device that runs it.

    Returns:
        The elements encoded per second, and the elements decoded per second.
    """
    numel = MEASURED_NUMEL.on(device)
    values = torch.randn(numel, dtype=torch.float32, device=device)
    room = codec_scratch(codec, numel, device)
    message = torch.empty(codec.length(numel), dtype=codec.dtype, device=device)

    def rate(work: Callable[[], None]) -> float:
        seconds = []
        for _ in range(MEASURED_TIMES):
            began = time.perf_counter()
            work()
            synchronize(device)
            seconds.append(time.perf_counter() - began)
        # Exclude the first touch of pages and time that other programs took
        return numel / min(seconds)

    encoding = rate(lambda: codec.encode(values, message, room))
    return encoding, rate(lambda: codec.decode(message, 0, numel, values, room))


def log_unquantized(plan: Plan, *, among_hosts: bool) -> None:
    """Log why weights or gradients are not coded although the settings request it.

    Args:
        plan: The plan whose specs are inspected.
        among_hosts: Whether there are several hosts; also log if no codes are sent between them.
    """
    asked = plan.settings.compression
    groups = [group.plan for group in plan.groups]
    wanted = {
        "weights": asked.weights,
        "gradients": asked.gradients,
        "gradients inside a host": asked.inside,
        "frozen weights": asked.frozen,
    }
    found = {
        "frozen weights": any(row.weight.stored_as is not None for row in groups),
        "gradients inside a host": any(
            row.grad is not None and row.grad.wire_inside is not None for row in groups
        ),
        "weights": any(row.weight.wire is not None for row in groups),
        "gradients": any(
            row.grad is not None and row.grad.wire == asked.gradients for row in groups
        ),
    }
    for state, codec in wanted.items():
        if codec is None or found[state]:
            continue
        why = (
            f"no unit has matrices of {asked.min_numel:,} elements that are sent "
            "(compression.min_numel)"
        )
        if state == "frozen weights":
            why = (
                f"no unit has frozen matrices of {asked.min_numel:,} elements that are sharded "
                "(compression.min_numel, stage 3, stage3_param_persistence_threshold)"
            )
        elif plan.mesh.shard_size == 1:
            why = "no other rank has shards of the same state"
        elif state == "weights" and plan.settings.stage == 0:
            why = "stage 0 updates whole weights on every rank"
        elif found["gradients"] and state != "weights":
            why = "sums are not formed by host (ranks_per_host)"
        done = "kept" if state == "frozen weights" else "sent"
        log_once(f"{state} are {done} unquantized, although {codec} is configured: {why}.")
    is_coded = any(wanted[state] is not None and found[state] for state in ("weights", "gradients"))
    if is_coded and among_hosts and not plan.machine.spans_hosts:
        log_once(
            "quantization saves no bytes between hosts here, and costs time and precision: ranks "
            "that "
            "shard a state are all on one host, and messages to other hosts (sums over replicas, "
            "activations) are sent unquantized."
        )


def log_whole_weights(plan: Plan) -> None:
    """Warn if stage 3 shards almost nothing.

    This happens because the default threshold is meant for large models.
    """
    whole = sum(group.layout.numel for group in plan.groups if group.plan.weight.placement is not S)
    if plan.settings.stage == 3 and whole > (1 - NEXT_TO_NOTHING) * plan.numel:
        told = f"all {whole}" if whole == plan.numel else f"{whole} of {plan.numel}"
        log_once(
            f"stage 3 shards almost nothing: {told} parameters are replicated, in "
            "tensors of at most zero_optimization.stage3_param_persistence_threshold = "
            f"{plan.settings.persistence_numel}; 0 shards all of them."
        )


def number_formats(policy: Policy, device: torch.device) -> list[Capability]:
    """Return whether the device computes in bf16 natively, if the run uses it.

    Args:
        policy: The dtypes of weights, gradients and sums.
        device: The training device, which decides what memory and dtypes are available.

    Returns:
        One entry for the report of capabilities; none if the run does not compute in bf16.
    """
    if policy.compute is not torch.bfloat16:
        return []
    if has_fast_bf16(device):
        return [Capability("bf16 arithmetic", "in hardware")]
    return [
        Capability(
            "bf16 arithmetic", "by conversion", f"this {device.type.upper()} does not compute in it"
        )
    ]


def with_useful_copies(settings: PlanSettings, mesh: Mesh, *, in_place: bool) -> PlanSettings:
    """Return the settings without a second copy of weights if no rank would read it.

    The reason is logged.

    Args:
        settings: The settings of the plan.
        mesh: The device mesh: the size of each axis and this rank's coordinates.
        in_place: Whether the ranks of the shard group read each other's memory.

    Returns:
        The settings, changed only if the second copy is dropped.
    """
    size = settings.secondary_ranks
    why = ""
    if size >= mesh.shard_size:
        why = f"{mesh.shard_size} ranks shard a state, so there is no smaller group for a copy"
    elif settings.stage < 3:
        why = f"stage {settings.stage} keeps whole weights, which are not gathered"
    elif in_place:
        why = "every rank reads the others' weights in place (one host), so a gather copies nothing"
    elif settings.weight_tier is not Tier.DEVICE:
        why = "offload_param moves the weights off the device, where the copy would be"
    if size == 1 or not why:
        return settings
    log_once(f"zero_hpz_partition_size = {size} has no effect here: {why}.")
    return replace(settings, secondary_ranks=1)


def with_order_of_sums(
    settings: PlanSettings, mesh: Mesh, counted: int, optimizer: type[Optimizer] | None
) -> PlanSettings:
    """Return the settings with the order in which gradients of ranks are summed.

    Sums are formed within each host first if this number is above 1. It is configured or counted.

    Args:
        settings: The settings of the plan.
        mesh: The device mesh: the size of each axis and this rank's coordinates.
        counted: The number of ranks of each host; 1 if there is one host, or if hosts differ.
        optimizer: The class of the optimizer, which may require one order; None without one.

    Returns:
        The settings, in which `ranks_per_host` is set.
    """
    if settings.ranks_per_host is not None:
        return settings
    why = ""
    if counted > 1 and optimizer is not None and issubclass(optimizer, optimizers.OneBitAdam):
        why = "OneBitAdam exchanges momenta rank by rank."
    else:
        try:
            mesh.near_size(counted)
        except UsageError as error:
            why = error.what
    if why:
        log_once(f"sums are formed in the order of ranks, not by host: {why}")
    return replace(settings, ranks_per_host=1 if why else counted)


def update_of(
    config: Config, settings: StepSettings, optimizer: OptimizerParts
) -> UpdateSettings | None:
    """Return the optimizer's settings for the planner, or None without an optimizer.

    Args:
        config: The run's configuration, from which the settings are read.
        settings: The settings of the optimizer step, such as tile sizes and kernels.
        optimizer: The optimizer's class and parameter groups, which decide the sizes of its states.

    Returns:
        The settings of the update, or None.
    """
    if optimizer.cls is None:
        return None
    return update_settings_of(
        settings,
        optimizer.cls.__name__,
        optimizer.planned,
        scales_grads=config.fp16.enabled or settings.clips,
        undoes=settings.by_unit and extensions.works_by_shard(optimizer.cls),
    )


def free_budgets(placement: PlacementSettings, comm: Comm, device: torch.device) -> dict[Tier, int]:
    """Return the bytes of each memory for one rank: the minimum over all ranks.

    The bytes are configured or, if they are not, measured as free.

    Args:
        placement: The configured bytes and the path of the disk.
        comm: The communicator of the ranks that call this function.
        device: The training device, which decides what memory and dtypes are available.

    Returns:
        The bytes by memory, equal on all ranks.

    Note:
        Collective: every rank must call it.
    """
    sharers = ranks_of_this_host()
    host = int(WORTH_FILLING * free_host_bytes()) // sharers
    free = free_device_bytes(device)
    measured = {
        Tier.DEVICE: host if free is None else int(WORTH_FILLING * free),
        Tier.HOST: host,
        Tier.NVME: Disk.free_bytes(placement.path) // sharers if placement.path is not None else 0,
    }
    own = list((measured | _stated(placement)).values())
    least = comm.all_gather_rows(torch.tensor(own, device="cpu"), "free memory for states").amin(
        dim=0
    )
    return dict(zip(measured, map(int, least), strict=True))


def _stated(placement: PlacementSettings) -> dict[Tier, int]:
    """Return the configured bytes of the memories that have some."""
    stated = {
        Tier.DEVICE: placement.device,
        Tier.HOST: placement.host,
        Tier.NVME: placement.disk,
    }
    return {tier: nbytes for tier, nbytes in stated.items() if nbytes is not None}


def stated_budgets(
    settings: PlanSettings, placement: PlacementSettings, device: torch.device
) -> dict[Tier, int]:
    """Return the configured bytes for one rank of each memory that may be chosen.

    Args:
        settings: The settings of the plan.
        placement: The configured budget of each memory.
        device: The training device, which decides what memory and dtypes are available.

    Returns:
        The bytes by memory.

    Raises:
        UsageError: A memory may be chosen but has no configured bytes.
    """
    choices = TierChoices.of(settings, placement, device)
    stated = _stated(placement)
    asked = {*choices.weights, *choices.states} if choices.are_open else set[Tier]()
    missing = [tier.value for tier in Tier if tier in asked and tier not in stated]
    if missing:
        raise UsageError(
            'the configuration has device "auto", and there is no budget for '
            f"{', '.join(missing)}.",
            "A plan for another machine cannot measure its free memory.",
            "state memory_budget.device, .host and .disk in bytes of one rank.",
        )
    return stated
