"""The plan of a run, for any rank of any world.

It has units, groups, specs, layouts, memories, the schedule, the update, bytes and volume.
`plan_shape` computes it from settings and the result of `read_model`: names, shapes, dtypes. A
model on the meta device is enough, and no process group is needed. A run is built from its plan
(sharding/wrap.py, optim/sharded.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from torch import nn

from ..base.mesh import Mesh
from ..base.quantities import format_bytes, format_count
from ..tiers.host import HostPiece
from ..tiers.tier import Tier
from .auto_wrap_policy import ModelShape, read_model
from .extras import can_be_shared, second_copy_of
from .make_schedule import schedule_units
from .memory import STATES, group_bytes, host_pieces, is_known, moments_for, total_bytes
from .pieces import LOSS_BYTES, VERDICT_BYTES, PipelinePlan, SequencePlan, TensorPlan
from .plan_settings import Machine, PlanSettings
from .pool_estimate import Size, buffer_bytes, pool_buffers
from .schedule import Schedule
from .unit_tiers import PlacementSettings, TierChoices, assign_tiers, split_by_ratio
from .units import GroupPlan, UnitPlan, all_groups, plan_units, trained_groups
from .update import ParamGroupPlan, UpdatePlan, UpdateSettings, plan_update
from .volume import StepVolume, step_volume


@dataclass(frozen=True)
class Plan:
    """The plan of one rank: its states, schedule and messages.

    Attributes:
        settings: The settings from which the plan was made.
        mesh: The device mesh, at the coordinates of this rank.
        machine: The assumed properties of the machine.
        units: The units of the model and their parameter groups, the root first.
        schedule: The gathers, computations, releases and reductions of a step.
        update: The parts of main weights that this rank updates; None without an optimizer.
        module_buffer_bytes: The bytes of the model's buffers.
        pipeline: The plan along "pp"; None without stages.
        tensor: The plan along "tp"; None without that axis.
        sequence: The plan along "sp"; None without that axis.
    """

    settings: PlanSettings
    mesh: Mesh
    machine: Machine
    units: tuple[UnitPlan, ...]
    schedule: Schedule
    update: UpdatePlan | None = None
    module_buffer_bytes: int = 0
    pipeline: PipelinePlan | None = None
    tensor: TensorPlan | None = None
    sequence: SequencePlan | None = None

    @property
    def groups(self) -> list[GroupPlan]:
        """The parameter groups of all units, unit by unit."""
        return all_groups(self.units)

    # -- bytes

    def bytes_by_state(self) -> dict[str, int]:
        """Return the exact bytes of this rank between training steps.

        Keys:
            "weight", "grad", "master", "moments": On the training device, with the small tensors:
                one element per group that parameters expand between uses, and the optimizer's
                counters.
            "secondary": The second copy of weights.
            "errors": The error feedback of quantized gradients.
            "host", "nvme": All states in that memory, in whole pages.
            "buffers": The buffers of the pool, the optimizer's scratch, and the log that undoes
                early updates.
            "module_buffers": The buffers of the model, whole on each rank.
            "boundaries": The send slots of pipeline stages, and the buffers that sum shared layers.
        """
        total = total_bytes(self.groups, moments_per_element=0)
        total["weight"] += sum(group.plan.weight.dtype.itemsize for group in self.groups)
        total["buffers"] = buffer_bytes(self.pool_buffers())
        if self.update is not None:
            total["moments"] += self.update.moments_bytes
            for state, nbytes in self.update.external_bytes().items():
                total[state] = total.get(state, 0) + nbytes
            total["buffers"] += self.update.scratch_bytes + self.update.undo_bytes
        if self.module_buffer_bytes:
            total["module_buffers"] = self.module_buffer_bytes
        if self.pipeline is not None or self.tensor is not None or self.sequence is not None:
            total["boundaries"] = self.pipeline.slot_bytes if self.pipeline is not None else 0
            sums = (self.tensor, self.sequence)
            total["boundaries"] += sum(each.scratch_bytes for each in sums if each is not None)
        return total

    def bytes_by_tier(self) -> dict[Tier, int]:
        """Return the bytes of this rank between training steps, by memory."""
        states = self.bytes_by_state()
        found = {tier: states.pop(tier.value, 0) for tier in (Tier.HOST, Tier.NVME)}
        return {Tier.DEVICE: sum(states.values()), **found}

    def host_pieces(self) -> list[HostPiece]:
        """Return the host memory that this rank reserves, in the order of units.

        Moments of an unknown optimizer class are left out, since its first step reserves them.
        """
        counts: dict[int, int] = {}
        if self.update is not None and is_known(self.update.settings.optimizer):
            counts = {id(group): count for group, count in self.update.moments_per_group()}
        found: list[HostPiece] = []
        for group in self.groups:
            is_shared = self.machine.reads_in_place or group.ranks == 1
            is_shared = is_shared and can_be_shared(group.plan, self.mesh.device)
            per_element = counts.get(id(group), 0)
            found += host_pieces(group, per_element, is_weight_shared=is_shared)
        return found

    def bytes_of_unit(self, number: int) -> dict[tuple[str, Tier], int]:
        """Return the bytes of one unit's states on this rank, by state and memory."""
        counts = (
            {id(group): count for group, count in self.update.moments_per_group()}
            if self.update
            else {}
        )
        found: Counter[tuple[str, Tier]] = Counter()
        for group in self.units[number].groups:
            for state in STATES:
                if (spec := getattr(group.plan, state)) is not None:
                    found[state, spec.tier] += sum(
                        group_bytes(group, counts.get(id(group), 0), (state,)).values()
                    )
        return {key: nbytes for key, nbytes in found.items() if nbytes}

    def pool_buffers(self) -> Counter[Size]:
        """The buffers of the pool, by dtype and number of elements."""
        return pool_buffers(
            self.units, self.settings, self.schedule, self.mesh.device, self.machine
        )

    def volume(self) -> StepVolume:
        """The bytes that this rank sends in a step."""
        mesh = self.mesh
        pipeline = self.pipeline
        tensor = self.tensor
        sequence = self.sequence
        found = step_volume(self.units, self.schedule, self.settings, mesh.dp_replicate, pipeline)
        rows = VERDICT_BYTES * (mesh.world_size - 1) if mesh.world_size > mesh.reduce_size else 0
        is_last = pipeline is None or pipeline.placement[-1] == pipeline.rank
        rows += sequence.sent_rows if sequence is not None and is_last else 0
        rows += tensor.sent_rows if tensor is not None else 0
        sequence_bytes = sequence.sent_bytes if sequence is not None else 0
        tensor_bytes = tensor.sent_bytes if tensor is not None else 0
        found = replace(found, tensor=tensor_bytes, sequence=sequence_bytes)
        if pipeline is None:
            return replace(found, rows=found.rows + rows)
        rows += LOSS_BYTES * ((mesh.pp - 1) + (mesh.reduce_size - 1 if is_last else 0))
        return replace(
            found,
            rows=found.rows + rows,
            boundaries=pipeline.sent_bytes,
            ties=pipeline.tie_bytes(self.units),
            first_step_headers=pipeline.header_bytes,
        )

    # -- text

    @property
    def numel(self) -> int:
        """The number of elements of all parameters."""
        return sum(group.layout.numel for group in self.groups)

    def explain(self) -> list[str]:
        """Return a line for each group of each unit, and the schedule."""
        lines = [
            f"stage {self.settings.stage}, {self.mesh.world_size} rank(s), device "
            f"{self.mesh.device}"
        ]
        lines += [line for number, unit in enumerate(self.units) for line in unit.explain(number)]
        return [*lines, *self._message_lines(), f"schedule: {self.schedule}", *self._piece_lines()]

    def uncoded(self) -> Plan:
        """Return this plan without quantization, to compare the sent bytes."""
        return replace(self, units=tuple(unit.uncoded() for unit in self.units))

    def _message_lines(self) -> list[str]:
        """Return the lines about messages that differ from those of a plain run."""
        return [*self._secondary_line(), *self._hosts_line(), *self._coded_line()]

    def _coded_line(self) -> list[str]:
        """Return the bytes of a step with and without codes, if some matrices are coded."""
        groups = [group for group in self.groups if group.is_coded]
        resting = self._resting_line(
            [group for group in groups if group.plan.weight.stored_as is not None]
        )
        if why := self.settings.compression.why:
            resting.append(f"bits chosen by measurement: {why}")
        sent = self.volume().state_bytes
        exact = self.uncoded().volume().state_bytes
        if not groups or not sent:
            return resting
        return [
            *resting,
            f"quantized messages: {sum(group.layout.numel for group in groups):,} elements in "
            f"{len(groups)} groups; a step sends {format_bytes(sent)} of states instead of "
            f"{format_bytes(exact)} ({exact / sent:.2f} x less)",
        ]

    def _resting_line(self, groups: list[GroupPlan]) -> list[str]:
        """Return a line about groups that are kept as codes, if there are any.

        It has their bytes on this rank as codes and as numbers.
        """
        if not groups:
            return []
        kept, exact = (
            sum(group_bytes(each, 0, ("weight",))["weight"] for each in every)
            for every in (groups, [group.uncoded() for group in groups])
        )
        return [
            f"quantized storage: {sum(group.layout.numel for group in groups):,} frozen elements "
            "need "
            f"{format_bytes(kept)} on this rank instead of {format_bytes(exact)}"
        ]

    def _secondary_line(self) -> list[str]:
        """Return a line about the ranks that gathers use.

        It is empty unless groups have a second copy of their weights or are configured to have one.
        """
        if self.settings.secondary_ranks == 1:
            return []
        away = [
            each
            for each in self.units
            if any(one.plan.weight.tier is not Tier.DEVICE for one in each.sharded)
        ]
        told = [
            f"no second copy of the weights of {len(away)} of {len(self.units)} units "
            "(zero_hpz_partition_size): they are in another memory (offload_param, "
            "memory_budget), but a copy would be on the device"
        ]
        groups = [
            group
            for unit in self.units
            for group in unit.sharded
            if second_copy_of(group.plan) is not None
        ]
        if not groups:
            return told if away else []
        inside = groups[0].secondary_ranks
        world = self.mesh.shard_size
        return [
            *(told if away else []),
            f"second copy of the weights, sharded over {inside} of {world} ranks (hpZ): a unit's "
            f"first gather after an update uses all {world} ranks, the others use these {inside}",
        ]

    def _hosts_line(self) -> list[str]:
        """Return the order in which sums are formed, if it is not the order of ranks."""
        near = max((group.near for group in self.groups), default=1)
        if near == 1:
            return []
        volume = self.volume()
        hosts = self.mesh.shard_size // near
        return [
            f"sums by host: over {near} ranks of each of {hosts} hosts first, then over the hosts; "
            f"of {format_bytes(volume.state_bytes)} that a rank sends in a step "
            f"{format_bytes(volume.inside_hosts)} remain on its host"
        ]

    def _piece_lines(self) -> list[str]:
        """Return the lines about the axes that cut the model."""
        pieces = (self.tensor, self.sequence, self.pipeline)
        return [line for each in pieces if each is not None for line in each.explain()]

    def table(self) -> list[str]:
        """Return the plan as lines of a text table, with one line for equal units."""
        mesh = self.mesh
        states = self.bytes_by_state()
        tiers = {tier: nbytes for tier, nbytes in self.bytes_by_tier().items() if nbytes}
        lines = [
            f"stage {self.settings.stage} over {mesh.world_size} ranks ({mesh}), as rank "
            f"{mesh.rank}: {format_count(self.numel)} parameters in {len(self.units)} units",
            "",
            f"{'units':<32} {'elements':>14}  states",
        ]
        lines += self._unit_lines()
        if messages := self._message_lines():
            lines += ["", *messages]
        lines += ["", "bytes of this rank between steps"]
        lines += [
            f"  {state:<16} {format_bytes(nbytes):>12}"
            for state, nbytes in states.items()
            if nbytes
        ]
        lines += [
            f"  total on {tier.value:<7} {format_bytes(nbytes):>12}"
            for tier, nbytes in tiers.items()
        ]
        volume = self.volume()
        sent = {"gathers": volume.gathers, "reduces": volume.reduces, "refresh": volume.refresh}
        if volume.inner_gathers:
            sent["of which inside"] = volume.inner_gathers
        if self.tensor is not None:
            sent["sums of layers"] = volume.tensor
        if self.sequence is not None:
            sent["shared tokens"] = volume.sequence
        if self.pipeline is not None:
            sent |= {"to other stages": volume.boundaries, "tied gradients": volume.ties}
        if mesh.world_size > mesh.reduce_size:
            sent["gradient norm"] = volume.rows
        lines += ["", "bytes this rank sends in a step"]
        lines += [f"  {name:<16} {format_bytes(nbytes):>12}" for name, nbytes in sent.items()]
        if pieces := self._piece_lines():
            lines += ["", *pieces]
        return lines

    def _unit_lines(self) -> list[str]:
        rows: list[tuple[list[str], tuple[str, ...]]] = []
        for unit in self.units:
            text = tuple(f"{group.layout.numel:>14,}  {group.describe()}" for group in unit.groups)
            if rows and rows[-1][1] == text:
                rows[-1][0].append(unit.name)
            else:
                rows.append(([unit.name], text))
        found = []
        for names, text in rows:
            label = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)})"
            found += [
                f"{label if number == 0 else '':<32} {line}"
                for number, line in enumerate(text or ("",))
            ]
        return found

    def __str__(self) -> str:
        return "\n".join(self.table())


def plan_model(
    model: nn.Module,
    settings: PlanSettings,
    mesh: Mesh | None = None,
    machine: Machine | None = None,
    update: UpdateSettings | None = None,
    placement: PlacementSettings | None = None,
) -> Plan:
    """Compute the plan of one rank for a model, whose parameter values are not read.

    Args:
        model: The model, which may be on the meta device.
        settings: The ZeRO stage, dtypes, sizes and memories of the run.
        mesh: The device mesh, at the coordinates of the planned rank; None for one rank.
        machine: Which ranks are on one host, and the memory budgets.
        update: The settings of the optimizer; None if nothing is updated.
        placement: Which states may be placed in which memories; None if the settings name the
            memories.
    """
    return plan_shape(read_model(model, settings), settings, mesh, machine, update, placement)


def plan_shape(
    shape: ModelShape,
    settings: PlanSettings,
    mesh: Mesh | None = None,
    machine: Machine | None = None,
    update: UpdateSettings | None = None,
    placement: PlacementSettings | None = None,
) -> Plan:
    """Compute the plan of one rank from the shapes of a model.

    Equal arguments give equal plans on every machine.

    Args:
        shape: The shape of the model, read with the same settings.
        settings: The ZeRO stage, dtypes, sizes and memories of the run.
        mesh: The mesh of ranks, at the coordinates of this rank, with its device; the device need
            not exist here.
        machine: Which ranks are on one host, and the memory budgets.
        update: The settings of the optimizer; None if nothing is updated.
        placement: Which states may be placed in which memories. `machine.budgets` decides.

    Returns:
        The units, the schedule, the bytes and the messages of the rank.

    Raises:
        OutOfMemoryError: The states do not fit the budgets.
    """
    mesh = mesh or Mesh(dp_shard=1)
    machine = machine or Machine()
    if placement is not None:
        settings = _with_unit_tiers(shape, settings, mesh, machine, update, placement)
    return _plan(shape, settings, mesh, machine, update)


def _plan(
    shape: ModelShape,
    settings: PlanSettings,
    mesh: Mesh,
    machine: Machine,
    update: UpdateSettings | None,
) -> Plan:
    planned = None
    if update is None:
        units = plan_units(shape, settings, mesh)
    else:
        units = plan_units(shape, settings, mesh, update.uncut_names, update.grain)
        update = replace(update, crosses_hosts=machine.spans_hosts)
        planned = plan_update(units, update, mesh.shard_index, mesh.device)
    schedule = declared_schedule(units, settings, update)
    return Plan(settings, mesh, machine, units, schedule, planned, shape.buffer_bytes)


def declared_schedule(
    units: tuple[UnitPlan, ...], settings: PlanSettings, update: UpdateSettings | None = None
) -> Schedule:
    """Return the schedule of units that are used in the order of their declaration.

    Args:
        units: The planned units of the model, the root first.
        settings: The ZeRO stage, dtypes, sizes and memories of the run.
        update: The settings of the optimizer; None if nothing is updated.
    """
    if update is None:
        return schedule_units(units, settings)
    deferred = [
        number
        for number, unit in enumerate(units)
        if any(update.defers(group.plan) for group in unit.trained)
    ]
    ahead = [number for number in deferred if update.by_unit and number]
    return schedule_units(units, settings, updates_in_forward=deferred, ahead=ahead)


def _with_unit_tiers(
    shape: ModelShape,
    settings: PlanSettings,
    mesh: Mesh,
    machine: Machine,
    update: UpdateSettings | None,
    placement: PlacementSettings,
) -> PlanSettings:
    """Return the settings with a memory for every unit, if that choice is left open."""
    choices = TierChoices.of(settings, placement, mesh.device)
    if choices.are_open:
        plans = {
            tier: _plan(
                shape, replace(settings, weight_tier=tier, state_tier=tier), mesh, machine, update
            )
            for tier in {*choices.weights, *choices.states}
        }
        slowest = plans[max(plans, key=list(Tier).index)]
        budgets = dict(machine.budgets)
        budgets[Tier.DEVICE] -= _working_bytes(slowest, update) + placement.undo_bytes
        per_element = moments_for(update.optimizer, {}).per_element if update is not None else 0
        units = {tier: plan.units for tier, plan in plans.items()}
        return replace(settings, unit_tiers=assign_tiers(units, choices, budgets, per_element))
    if placement.ratio < 1.0 and settings.state_tier is not Tier.DEVICE:
        units_now = plan_units(shape, settings, mesh)
        return replace(
            settings, unit_tiers=split_by_ratio(units_now, settings.weight_tier, placement.ratio)
        )
    return settings


def _working_bytes(plan: Plan, update: UpdateSettings | None) -> int:
    """Return the bytes of pool buffers and of a step, with few states on the device.

    As many states as possible are in other memories. The bytes are counted for rank 0, which has
    the fullest slices, so that all ranks decide alike. Gradients count as scaled, because a step
    may clip.
    """
    if update is None:  # an optimizer may be added later
        names = frozenset(name for group in trained_groups(plan.units) for name in group.names)
        update = UpdateSettings("SGD", (ParamGroupPlan({}, names),))
    step = plan_update(plan.units, replace(update, scales_grads=True), 0, plan.mesh.device)
    return buffer_bytes(plan.pool_buffers()) + step.scratch_bytes
