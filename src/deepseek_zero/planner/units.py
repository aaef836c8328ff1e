"""The units of a plan and their parameter groups.

Only `plan_group` decides the specs and the layout of a group. `plan_units` calls it for a whole
model, and sharding/regroup.py for a group that is divided during a run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from ..base.errors import NotBuiltError, UsageError
from ..base.mesh import Mesh
from ..precision.codecs import CODED, Blocks, Cast, Codec
from .auto_wrap_policy import ModelShape, UnitShape
from .by_host import hop_wires
from .describe import describe_states
from .extras import ErrorsKept, feedback_of, momenta_codec_of, second_copy_of
from .layout import BLOCK, GRAIN, FlatLayout, Shape, Slot, even_layout
from .plan_settings import PlanSettings
from .row_of_group import gradient_wires, plan_for, predivide_of
from .spec import R, S, ShardPlan


def whole_layout(names: Sequence[str], shapes: Sequence[Shape], ranks: int) -> FlatLayout:
    """Lay out parameters so that none is cut between ranks.

    Some optimizers need whole matrices or norms. The largest parameter goes to the rank with the
    fewest elements so far. Slices are padded to the fullest rank.

    Args:
        names: The full names of the parameters, in the order of the layout.
        shapes: The shape of each parameter, in the order of `names`.
        ranks: The number of slices, one for each rank of the shard group.

    Returns:
        The layout, in which each parameter is in the slice of one rank.
    """
    loads = [0] * ranks
    place: dict[int, tuple[int, int]] = {}
    order = sorted(range(len(names)), key=lambda index: (-prod(shapes[index]), index))
    for index in order:
        rank = min(range(ranks), key=lambda candidate: (loads[candidate], candidate))
        place[index] = (rank, loads[rank])
        loads[rank] += prod(shapes[index])
    slice_numel = -(-max(loads, default=0) // BLOCK) * BLOCK
    slots = [
        Slot(name, tuple(shape), place[index][0] * slice_numel + place[index][1])
        for index, (name, shape) in enumerate(zip(names, shapes, strict=True))
    ]
    return FlatLayout(tuple(slots), slice_numel, ranks)


LAYOUTS = {"element": even_layout, "tensor": whole_layout}


@dataclass(frozen=True)
class GroupKey:
    """The properties that the parameters of one group have in common.

    These parameters share a flat buffer and the specs of its states.

    Attributes:
        dtype: The dtype with which the parameters were built.
        trainable: Whether the parameters require gradients.
        persistent: Whether the parameters stay gathered at stage 3, because they are small.
        full_precision: Whether the parameters stay in fp32 if the run computes in 16 bits.
        split: How the parameters are split along "tp"; empty without that axis.
        is_counted: Whether this rank contributes the parameters to norms and checkpoints. It does
            not if another rank along "tp" holds the same elements and contributes them.
        sharers: The coordinates along "tp" whose partial gradients are added.
        is_coded: Whether the parameters are compressed in messages between ranks.
    """

    dtype: torch.dtype
    trainable: bool
    persistent: bool
    full_precision: bool
    split: str = ""
    is_counted: bool = True
    sharers: tuple[int, ...] = ()
    is_coded: bool = False


@dataclass(frozen=True)
class GroupPlan:
    """The plan of one parameter group: its specs, layout and messages.

    Attributes:
        key: The properties that all parameters share; None if only sizes matter.
        predivide: The number by which gradients are divided before they are sent.
        replicas: The number of replicas over which reduced gradients are summed once per step.
        secondary_ranks: The number of ranks that hold the slices of a second copy of the weight.
        near: The number of ranks per host if gradients are summed within each host first; else 1.
        low: The 16-bit plan of a group that currently computes in fp32 (precision "auto"); else
            None.
        plan: The placement, dtype and memory of weight, gradient, main weight and moments.
        layout: The positions of the parameters in the flat buffers.
    """

    plan: ShardPlan
    layout: FlatLayout
    key: GroupKey | None = None
    predivide: float = 1.0
    replicas: int = 1
    secondary_ranks: int = 1
    near: int = 1
    low: ShardPlan | None = None

    @classmethod
    def of_size(cls, plan: ShardPlan, padded_numel: int, ranks: int) -> GroupPlan:
        """Create a group without named parameters, to compute its bytes.

        Args:
            plan: The placement, dtype and memory of each state of the group.
            padded_numel: The elements of the flat buffer, padding included.
            ranks: The number of ranks over which states are sharded.
        """
        return cls(plan, FlatLayout((), padded_numel // ranks, ranks))

    @property
    def is_counted(self) -> bool:
        """Whether this rank counts the elements in norms and checkpoints (`GroupKey`)."""
        return self.key is None or self.key.is_counted

    @property
    def padded_numel(self) -> int:
        """The number of elements of the flat buffer, including padding."""
        return self.layout.padded_numel

    @property
    def ranks(self) -> int:
        """The number of ranks of the shard group."""
        return self.layout.ranks

    @property
    def secondary_layout(self) -> FlatLayout:
        """The layout of the second copy: the same flat buffer, sharded over fewer ranks.

        A slice of it consists of several slices of `layout`.
        """
        return replace(
            self.layout,
            slice_numel=self.padded_numel // self.secondary_ranks,
            ranks=self.secondary_ranks,
        )

    @property
    def names(self) -> list[str]:
        """The full names of the parameters, in the order of the layout."""
        return [slot.name for slot in self.layout.slots]

    @property
    def exchange_length(self) -> int:
        """The bytes of one message of momenta, for one slice; 0 if gradients are reduced."""
        codec = momenta_codec_of(self.plan)
        return 0 if codec is None else codec.length(self.layout.slice_numel)

    @property
    def exchange_bytes(self) -> int:
        """The bytes that a rank keeps for an exchange of momenta.

        These are the two error-feedback buffers, and the buffers in which signs are sent and
        received.
        """
        if momenta_codec_of(self.plan) is None:
            return 0
        kept = (self.padded_numel + self.layout.slice_numel) * torch.float32.itemsize
        return kept + 2 * self.ranks * self.exchange_length

    @property
    def errors_numel(self) -> int:
        """The elements of the error-feedback buffer of a rank.

        There is one error for each element of the rank's own gradient, or, if gradients are summed
        within each host first, of its part of these sums.
        """
        return self.padded_numel // self.near if feedback_of(self.plan) is not None else 0

    @property
    def hop_wires(self) -> tuple[Codec, Codec]:
        """The codecs of gradients inside a host and between hosts.

        If gradients are not summed within each host first, only the first codec is used.
        """
        assert self.plan.grad is not None
        return hop_wires(
            self.plan.grad_wire, self.plan.summands.dtype, self.near, self.plan.grad.wire_inside
        )

    @property
    def weight_wire(self) -> Codec:
        """The codec of weights in messages."""
        return self.plan.weight.wire or Cast(self.plan.weight.dtype)

    @property
    def may_be_cut(self) -> bool:
        """Whether the main weight is sharded, so the layout decides which tensors are cut."""
        return self.plan.master is not None and self.plan.master.placement is not R

    @property
    def is_coded(self) -> bool:
        """Whether weights or gradients are sent quantized."""
        return any(
            spec is not None and isinstance(spec.wire, Blocks)
            for spec in (self.plan.weight, self.plan.grad)
        )

    def uncoded(self) -> GroupPlan:
        """Return the same group without codecs for messages."""
        grad = (
            replace(self.plan.grad, wire=None, wire_inside=None)
            if self.plan.grad is not None
            else None
        )
        weight = replace(self.plan.weight, wire=None, stored_as=None)
        extras = tuple(each for each in self.plan.extras if not isinstance(each, ErrorsKept))
        return replace(self, plan=replace(self.plan, weight=weight, grad=grad, extras=extras))

    def sent_as(self, settings: PlanSettings) -> GroupPlan:
        """Return the same group with the codecs of other settings.

        Args:
            settings: The settings with the new compression.
        """
        weight = self.plan.weight
        grad = self.plan.grad
        is_coded = self.key is not None and self.key.is_coded
        if weight.placement is S and weight.stored_as is None:
            codec = settings.compression.weights if is_coded else None
            weight = replace(weight, wire=codec)
        if grad is not None:
            wire, inside = gradient_wires(settings, is_coded=is_coded, near=self.near)
            grad = replace(grad, wire=wire, wire_inside=inside)
        return replace(self, plan=replace(self.plan, weight=weight, grad=grad))

    def relayout(self, granularity: str) -> GroupPlan:
        """Return the same group with another layout.

        Args:
            granularity: "element" to cut parameters anywhere between ranks, "tensor" to keep each
                whole.
        """
        shapes = [slot.shape for slot in self.layout.slots]
        return replace(self, layout=LAYOUTS[granularity](self.names, shapes, self.ranks))

    def describe(self) -> str:
        """Return the memory and dtype of the four states as text."""
        return " | ".join(f"{state} {row}" for state, row in describe_states(self.plan).items())

    def promoted(self) -> GroupPlan:
        """Return a copy of the plan with an fp32 weight and gradient (precision "auto")."""
        return replace(self, plan=promoted_plan(self.plan), low=self.plan)

    def demoted(self) -> GroupPlan:
        """Return the 16-bit plan from which `promoted` was called."""
        return self if self.low is None else replace(self, plan=self.low, low=None)

    def with_grad_dtype(self, dtype: torch.dtype) -> GroupPlan:
        """Return the same group with gradients of this dtype."""
        assert self.plan.grad is not None
        return replace(self, plan=replace(self.plan, grad=replace(self.plan.grad, dtype=dtype)))


@dataclass(frozen=True)
class UnitPlan:
    """A unit: the groups that are gathered, released and reduced together.

    Attributes:
        name: The name of its module; "root" for the first unit, which is the model.
        groups: The parameter groups of the unit.
        is_layer_tile: Whether the unit is a part of a large layer, which is cut to save memory.
    """

    name: str
    groups: tuple[GroupPlan, ...]
    is_layer_tile: bool = False

    @property
    def sharded(self) -> list[GroupPlan]:
        """The groups whose weight must be gathered before use."""
        return [group for group in self.groups if group.plan.weight.placement is S]

    @property
    def trained(self) -> list[GroupPlan]:
        """The groups that have a gradient."""
        return [group for group in self.groups if group.plan.grad is not None]

    @property
    def is_promoted(self) -> bool:
        """Whether precision "auto" has switched the unit from 16 bits to fp32."""
        return any(group.low is not None for group in self.groups)

    @property
    def gathered_numel(self) -> int:
        """The elements that a gather adds to this rank; the schedule depends on them."""
        return sum(group.padded_numel for group in self.sharded)

    def uncoded(self) -> UnitPlan:
        """Return the same unit without codecs for messages."""
        groups = [group.uncoded() if group.is_coded else group for group in self.groups]
        return replace(self, groups=tuple(groups))

    def explain(self, number: int) -> list[str]:
        """Return one line per group.

        Args:
            number: The number of the unit in its plan.
        """
        return [
            f"  {number:>3} {self.name:<28} {group.layout.numel:>12,} elements  {group.describe()}"
            for group in self.groups
        ]


def all_groups(units: Iterable[UnitPlan]) -> list[GroupPlan]:
    """Return the groups of all units, unit by unit."""
    return [group for unit in units for group in unit.groups]


def trained_groups(units: Iterable[UnitPlan]) -> list[GroupPlan]:
    """Return the groups of all units that have a gradient, unit by unit."""
    return [group for unit in units for group in unit.trained]


def coded_names(
    unit: UnitShape, persistent: frozenset[str], settings: PlanSettings, ranks: int
) -> frozenset[str]:
    """Return the names of a unit's parameters that are compressed between ranks.

    Only matrices are compressed. A norm's weight of 1 in a block of small weights would make their
    quantization too coarse. A single rank sends nothing, but stores frozen weights quantized.

    Args:
        unit: The unit whose parameters are grouped.
        persistent: The names of parameters that stay gathered.
        settings: The ZeRO stage, dtypes, sizes and memories of the run.
        ranks: The number of ranks over which states are sharded.
    """
    compression = settings.compression
    found = {
        name: param
        for name, param in unit.params.items()
        if len(param.shape) >= 2
        and name not in persistent
        and (
            (
                compression.codes_weights
                and (settings.stage == 3 or (settings.stage > 0 and param.trainable))
            )
            or (compression.codes_gradients and param.trainable)
            or (compression.frozen is not None and settings.stage == 3 and not param.trainable)
        )
        and settings.policy.weight_dtype(param.dtype) in CODED
    }
    if sum(param.numel for param in found.values()) < compression.min_numel:
        return frozenset()
    rests = {
        name
        for name, param in found.items()
        if compression.frozen is not None and not param.trainable
    }
    return frozenset(found) if ranks > 1 else frozenset(rests)


def group_params(
    unit: UnitShape, persistent: frozenset[str], settings: PlanSettings, mesh: Mesh
) -> dict[GroupKey, list[str]]:
    """Return a unit's parameter names by group, in the order of the model.

    Args:
        unit: The unit whose parameters are grouped.
        persistent: The names of parameters that stay gathered.
        settings: The ZeRO stage, dtypes, sizes and memories of the run.
        mesh: The device mesh: the size of each axis and this rank's coordinates.
    """
    groups: dict[GroupKey, list[str]] = {}
    coded = coded_names(unit, persistent, settings, mesh.shard_size)
    for name, param in unit.params.items():
        key = GroupKey(
            param.dtype,
            param.trainable,
            name in persistent,
            param.full_precision,
            is_coded=name in coded,
        )
        if (split := param.split) is not None:
            if not split.shares_evenly(mesh.tp):
                raise NotBuiltError(
                    f"parameter '{name}': its parts are not shared evenly by {mesh.tp} "
                    "tensor-parallel ranks.",
                    "Ranks that hold the same key and value heads sum their gradients, in "
                    "groups of one size.",
                    "choose a number of ranks that divides the number of heads, or is a multiple "
                    "of it.",
                )
            place = mesh.coordinates["tp"]
            counted = split.is_counted_at(place)
            summands = split.summands(place, mesh.tp)
            key = replace(key, split=split.kind, is_counted=counted, sharers=summands)
        if param.is_copy:
            key = replace(key, is_counted=False)
        groups.setdefault(key, []).append(name)
    return groups


def persistent_names(model: ModelShape, settings: PlanSettings) -> frozenset[str]:
    """Return the names of small parameters that stay gathered at ZeRO stage 3.

    A gather would cost more time than their memory is worth. The smallest parameters are chosen
    first, up to the total size that the settings allow. At other stages the result is empty.

    Args:
        model: The shape of the model.
        settings: The ZeRO stage, dtypes, sizes and memories of the run.
    """
    if settings.stage < 3 or settings.persistence_numel <= 0:
        return frozenset()
    sizes = sorted((param.numel, name) for name, param in model.params.items())
    names = set()
    total = 0
    for numel, name in sizes:
        total += numel
        if numel > settings.persistence_numel or total > settings.persistence_total_numel:
            break
        names.add(name)
    return frozenset(names)


def plan_group(
    unit: str,
    key: GroupKey,
    names: Sequence[str],
    shapes: Sequence[Shape],
    settings: PlanSettings,
    mesh: Mesh,
    uncut: Collection[str] = (),
    grain: int = GRAIN,
) -> GroupPlan:
    """Return the plan of the parameters of one unit that have the same key.

    Args:
        unit: The name of the unit's module.
        key: The properties that all parameters of the group share.
        names: The full names of the parameters, in the order of the layout.
        shapes: The shape of each parameter, in the order of `names`.
        settings: The ZeRO stage, dtypes, sizes and memories of the run.
        mesh: The device mesh: the size of each axis and this rank's coordinates.
        uncut: The names of parameters that must not be cut between ranks.
        grain: Each parameter begins at a multiple of this many elements.

    Returns:
        The group's layout and the specs of its four states.
    """
    settings = settings.for_unit(unit, full_precision=key.full_precision)
    near = mesh.near_size(settings.ranks_per_host or 1)
    plan = plan_for(
        settings,
        key.dtype,
        trainable=key.trainable,
        persistent=key.persistent,
        ranks=mesh.shard_size,
        is_coded=key.is_coded,
        near=near,
    )
    if feedback_of(plan) is not None:
        # Checkpoints, including old ones, store error feedback by its offset in this layout
        grain = 1
    if plan.weight.stored_as is not None:
        # A block of codes must not contain elements of two parameters
        grain = max(grain, plan.weight.stored_as.granule)
    layout = even_layout(names, shapes, mesh.shard_size, grain=grain)
    replicas = mesh.dp_replicate * max(1, len(key.sharers))
    secondary_ranks = settings.secondary_ranks if second_copy_of(plan) is not None else 1
    group = GroupPlan(
        plan, layout, key, predivide_of(settings, mesh.reduce_size), replicas, secondary_ranks, near
    )
    return (
        group.relayout("tensor")
        if group.may_be_cut and any(name in uncut for name in names)
        else group
    )


def plan_units(
    model: ModelShape,
    settings: PlanSettings,
    mesh: Mesh,
    uncut: Collection[str] = (),
    grain: int = GRAIN,
) -> tuple[UnitPlan, ...]:
    """Return the units of a model, the root first.

    Args:
        model: The shape of the model. Parameters that are split along "tp" have the shape of this
            rank's part (planner/split.py).
        settings: The ZeRO stage, dtypes, sizes and memories of the run.
        mesh: The device mesh: the size of each axis and this rank's coordinates.
        uncut: The names of parameters that must not be cut between ranks.
        grain: Each parameter begins at a multiple of this many elements.

    Raises:
        UsageError: The ranks of the shard group cannot be divided into second copies or hosts.
    """
    if settings.secondary_ranks < mesh.shard_size and mesh.shard_size % settings.secondary_ranks:
        raise UsageError(
            f"a second copy of the weights for {settings.secondary_ranks} ranks "
            f"(zero_hpz_partition_size): {mesh.shard_size} is not divisible by "
            f"{settings.secondary_ranks}.",
            f"{mesh.shard_size} ranks shard a state, and each of them is in one "
            "group of neighbours.",
            "choose a divisor, usually the ranks of one host, or 1 for no copy.",
        )
    persistent = persistent_names(model, settings)
    return tuple(
        UnitPlan(
            unit.name or "root",
            tuple(
                plan_group(
                    unit.name or "root",
                    key,
                    names,
                    [unit.params[name].shape for name in names],
                    settings,
                    mesh,
                    uncut,
                    grain,
                )
                for key, names in group_params(unit, persistent, settings, mesh).items()
            ),
            unit.is_layer_tile,
        )
        for unit in model.units
    )


def promoted_plan(plan: ShardPlan) -> ShardPlan:
    """Return a plan with an fp32 weight, gradient and main weight, and the same moments.

    Precision "auto" uses it for units that 16 bits are not enough for.
    """
    grad = replace(plan.grad, dtype=torch.float32) if plan.grad is not None else None
    weight = replace(plan.weight, dtype=torch.float32)
    extras = tuple(extra.promoted() for extra in plan.extras)
    return replace(plan, weight=weight, grad=grad, master=plan.moments, extras=extras)
