"""The engine's memory, predicted from its plan and measured from live storages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..base.device import CPU
from ..optim.sharded import ShardedOptimizer
from ..optim.shards import MasterShard
from ..planner.memory import GroupFacts, StepFacts, UnitFacts, grad_is_cast, moments_for, resident_bytes
from ..planner.pool_estimate import buffer_bytes, pool_buffers
from ..planner.spec import ShardPlan
from ..planner.volume import StepVolume, step_volume
from ..report.measure import MemoryReport, bytes_of, live_storages, moments_of
from ..report.picture import UnitPlace, place_of
from ..sharding.param_group import ParamGroup, offloaded_extents
from ..sharding.runtime import Runtime
from ..tiers.tier import Extent, Tier


def unit_facts(runtime: Runtime) -> list[UnitFacts]:
    """Plans and layouts of an engine's units: what predictions are made of."""
    return [
        UnitFacts(unit.name, tuple(GroupFacts.of(group.plan, group.layout) for group in unit.groups))
        for unit in runtime.units
    ]


def step_facts(optimizer: ShardedOptimizer, home: torch.device | None = None) -> StepFacts:
    """An engine's optimizer as the estimator sees it.  Where gradients may be clipped or unscaled, it counts on it.

    home: what is updated there works in buffers of its own; None: wherever.
    """
    cut = {id(piece.param): 0 if piece.group.plan.moments_external else piece.numel for piece in optimizer.pieces()}
    groups = [(group, [cut[id(param)] for param in group["params"]]) for group in optimizer.param_groups]
    scales = optimizer.scaler is not None or optimizer.settings.max_norm > 0
    here = [piece for piece in optimizer.pieces() if home in (None, piece.master.update_device)]
    plans = [piece.group.plan for piece in here]
    return StepFacts(
        type(optimizer.inner).__name__,
        groups,
        [[sum(piece.numel for _, piece in bundle) for bundle in run] for run in optimizer.work.runs],
        optimizer.settings.tile_numel,
        casts_grads=scales or any(map(grad_is_cast, plans)) or any(map(_grad_crosses, here)),
        joins_masters=any(plan.master_is_split for plan in plans),
        home=home or CPU,
        external=_resting(optimizer, here),
        widens_masters=any(not piece.master.is_updated_in_place and not piece.master.is_split for piece in here),
        blocks=[
            (group, piece.numel)
            for group, pieces in zip(optimizer.param_groups, optimizer.pieces_by_group, strict=True)
            for piece in pieces
            if piece.group.plan.moments_format == "8bit"
        ],
        undoes=_undoes(optimizer),
        undo_budget=optimizer.settings.undo_bytes,
    )


def _undoes(optimizer: ShardedOptimizer) -> list[list[tuple[ShardPlan, dict[str, Any], int]]]:
    """The pieces of each unit that may be updated ahead of its step."""
    units = optimizer.speculative.units.values() if optimizer.speculative is not None else ()
    groups = optimizer.param_groups
    return [[(piece.group.plan, groups[at], piece.numel) for tile in tiles for at, piece in tile] for tiles in units]


def _grad_crosses(piece: MasterShard) -> bool:
    """Whether a gradient is not where the optimizer works on it."""
    grad = piece.group.plan.grad
    near = piece.group.comm_ctx.pool.device if grad is not None and grad.tier is Tier.DEVICE else CPU
    return near != piece.master.update_device


def _resting(optimizer: ShardedOptimizer, here: Sequence[MasterShard]) -> list[tuple[GroupFacts, dict[str, Any]]]:
    """Each group whose moments rest elsewhere, with the hyper-parameters that say how many there are."""
    groups = {id(piece.group) for piece in here}
    return [
        (GroupFacts.of(group.plan, group.layout), options)
        for group, options in _updated(optimizer)
        if group.plan.moments_external and id(group) in groups
    ]


def _updated(optimizer: ShardedOptimizer) -> list[tuple[ParamGroup, dict[str, Any]]]:
    """Each group of which this rank updates something, with its hyper-parameters."""
    owner = {id(param): group for group in optimizer.param_groups for param in group["params"]}
    found = {id(piece.group): (piece.group, owner[id(piece.param)]) for piece in optimizer.pieces()}
    return list(found.values())


def unit_places(runtime: Runtime, optimizer: ShardedOptimizer | None) -> list[UnitPlace]:
    """What of each unit rests where on this rank, as the plan has it."""
    counts = dict[int, int]()
    if optimizer is not None:
        kind = type(optimizer.inner).__name__
        counts = {id(group): moments_for(kind, options).count(options) for group, options in _updated(optimizer)}
    return [
        place_of(facts, [counts.get(id(group), 0) for group in unit.groups])
        for unit, facts in zip(runtime.units, unit_facts(runtime), strict=True)
    ]


def predicted_bytes(runtime: Runtime, optimizer: ShardedOptimizer | None) -> dict[str, int]:
    """Bytes of this rank between training steps, by state, from plans, layouts and schedule alone.

    buffers: what the pool keeps, the optimizer's scratch, and what undoes updates ahead of their step.  module_buffers:
    the model's own, whole on each rank.
    """
    units, step = unit_facts(runtime), step_facts(optimizer) if optimizer is not None else None
    predicted = resident_bytes(units, step)
    in_place = runtime.comm.reads_in_place
    lent = pool_buffers(units, runtime.settings, runtime.gatherer.schedule, runtime.comm_ctx.pool.device, in_place)
    predicted["buffers"] = buffer_bytes(lent) + (step.undo_bytes if step is not None else 0)
    if optimizer is not None:
        homes = {piece.master.update_device for piece in optimizer.pieces()}
        predicted["buffers"] += sum(step_facts(optimizer, home).scratch_bytes for home in homes)
    if registered := sum(buffer.numel() * buffer.element_size() for buffer in runtime.model.buffers()):
        predicted["module_buffers"] = registered
    return predicted


def predicted_volume(runtime: Runtime) -> StepVolume:
    """Bytes this rank will send per optimizer step."""
    return step_volume(unit_facts(runtime), runtime.gatherer.schedule, runtime.settings)


def memory_report(runtime: Runtime, optimizer: ShardedOptimizer | None, parked: Sequence[Extent] = ()) -> MemoryReport:
    """Bytes on this rank by state.  Local.  parked: activations, which belong to no state and are not counted."""
    resting = [extent.memory for extent in [*extents_of(runtime, optimizer), *parked]]
    seen = {tensor.untyped_storage().data_ptr() for tensor in resting}
    measured = {
        state: bytes_of([tensor for tensor in tensors if tensor is not None], seen)
        for state, tensors in _held(runtime, optimizer).items()
    }
    for group in runtime.groups:
        measured |= {tier.value: memory.reserved_bytes for tier, memory in group.comm_ctx.tiers.memories.items()}
    everything = live_storages(runtime.comm_ctx.pool.device.type)
    measured["other"] = sum(count for address, count in everything.items() if address not in seen)
    return MemoryReport(predicted_bytes(runtime, optimizer), measured)


def extents_of(runtime: Runtime, optimizer: ShardedOptimizer | None) -> list[Extent]:
    """What an engine keeps in other memories."""
    found = list(optimizer.moments.extents()) if optimizer is not None else []
    return found + [extent for group in runtime.groups for extent in offloaded_extents(group)]


def _held(runtime: Runtime, optimizer: ShardedOptimizer | None) -> dict[str, list[Tensor | None]]:
    """Every tensor this engine holds, by state; a storage that stands under two states is counted under the first."""
    groups = runtime.groups
    gradients = [buffer for group in groups for buffer in (group.gradient.buffer, group.gradient.delayed.buffer)]
    masters = [group.master for group in groups]
    pools = {id(group.comm_ctx.pool): group.comm_ctx.pool for group in groups}.values()
    lent: list[Tensor | None] = [tensor for pool in pools for tensor in pool.idle()]
    return {
        "weight": [tensor for group in groups for tensor in (group.weight.memory, group.placeholder)],
        "grad": [buffer.memory for buffer in gradients if buffer is not None],
        "master": [master.buffer.memory for master in masters if master is not None],
        "moments": _moments(optimizer) if optimizer is not None else [],
        "buffers": [*lent, *(optimizer.scratch.kept.values() if optimizer is not None else [])],
        "module_buffers": _registered(runtime.model),
    }


def _moments(optimizer: ShardedOptimizer) -> list[Tensor | None]:
    """What the optimizer holds of them; what stands for hidden ones is scratch."""
    held = moments_of(cast("Any", optimizer.inner.state))
    shown = [tensor for tensor in held if not optimizer.scratch.is_placeholder(tensor)]
    return [*shown, *optimizer.moments.on_device()]


def _registered(model: nn.Module) -> list[Tensor | None]:
    return list(model.buffers())
