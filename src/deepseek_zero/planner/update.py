"""The shards of main weights that each rank updates, their tiles, and their bytes.

A rank's part of a group's main weight is cut into shards, which the inner optimizer treats as
parameters. Shards of together about `tile_numel` elements are a tile: one call of that optimizer
(DeepSpeed's sub-group).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..base.device import CPU
from ..kernels import cuda
from ..kernels.rules import NAMES, rule_of
from ..precision.compact import BLOCK, storage_dtype
from ..precision.policy import LOW_PRECISION, scratch_numel
from ..tiers.staging import ALIGNMENT
from ..tiers.tier import Tier
from .layout import GRAIN
from .memory import StateCounts, group_bytes, moments_for
from .spec import R, S, ShardPlan
from .units import GroupPlan, UnitPlan, all_groups, trained_groups

EVERY_UNIT = -1
# Minimum elements of a rank's updates for compiled kernels. Compiling takes a second, and saves
# about 2 ns an element in each step.
WORTH_COMPILING = 1 << 20


@dataclass(frozen=True)
class ParamGroupPlan:
    """One of the optimizer's parameter groups.

    Attributes:
        options: The hyper-parameters of the group, by name.
        names: The names of its parameters.
        is_uncut: Whether its update needs whole tensors.
    """

    options: Mapping[str, Any]
    names: frozenset[str]
    is_uncut: bool = False


@dataclass(frozen=True)
class UpdateSettings:
    """The properties of an optimizer that a plan depends on.

    Attributes:
        optimizer: The name of its class (`moments_for` has its states).
        groups: The optimizer's parameter groups.
        tile_numel: The elements of one optimizer call on the training device.
        scales_grads: Whether gradients may be clipped or unscaled.
        can_defer: Whether updates may run in the next forward.
        by_unit: Whether no tile (list of shards that are updated together) contains parts of two
            units, because some units are updated in backward.
        on_accelerator: Whether the training device is not a CPU.
        undo_bytes: The size in bytes of the log that undoes updates made in backward.
        crosses_hosts: Whether the ranks of the shard group are on several hosts.
        kernels: The implementation of updates on a CPU: "auto", "compiled" or "torch".
        host_tile_numel: The elements of one call if the host updates.
        kernel_tile_numel: The elements of one call if a kernel updates states in memory.
        gpu_kernels: Whether kernels that NVRTC compiles update on NVIDIA GPUs.
    """

    optimizer: str
    groups: tuple[ParamGroupPlan, ...]
    tile_numel: int = 1 << 20
    scales_grads: bool = False
    can_defer: bool = True
    by_unit: bool = False
    on_accelerator: bool = False
    undo_bytes: int = 0
    crosses_hosts: bool = False
    kernels: str = "torch"
    host_tile_numel: int = 1 << 20
    kernel_tile_numel: int = 1 << 20
    gpu_kernels: bool = False

    def call_numel(self, plan: ShardPlan) -> int:
        """Return the largest number of elements of small shards that one optimizer call updates.

        Args:
            plan: The placement, dtype and memory of each state of the group.
        """
        return self.host_tile_numel if plan.is_updated_on_host else self.tile_numel

    def tile_numel_of(self, plan: ShardPlan) -> int:
        """Return the largest number of elements of one shard of a group.

        It is larger for groups that a fused kernel updates, because the kernel needs no scratch
        memory and each call costs about 0.2 ms.

        Args:
            plan: The placements, dtypes and memories of the group's states.
        """
        numel = self.call_numel(plan)
        if _uses_disk(plan) or self.kernels == "torch" or not _is_plain(plan):
            return numel
        is_ruled = all(rule_of(self.optimizer, group.options) for group in self.groups)
        return max(numel, self.kernel_tile_numel) if is_ruled else numel

    def defers(self, plan: ShardPlan) -> bool:
        """Return whether the update of a parameter group may run during the next forward.

        Transfers of offloaded states, updates on the host, and gathers between hosts then overlap
        with the forward. The weight must be sharded or offloaded, so that every read goes through a
        gather or a fetch, which can run the update first. No gradient may stay in the device's
        memory until then.

        Args:
            plan: The placement, dtype and memory of each state of the group.
        """
        if not self.can_defer:
            return False
        tiers = [spec.tier for spec in (plan.weight, plan.moments) if spec is not None]
        if Tier.DEVICE not in tiers:
            # On a CPU, the host's memory needs no transfer that could overlap.
            has_transfers = self.on_accelerator or self.crosses_hosts or Tier.NVME in tiers
            return has_transfers or self.by_unit
        if plan.weight.placement is not S:
            return False
        if plan.is_updated_on_host and plan.grad is not None and plan.grad.tier is not Tier.DEVICE:
            # Ranks of one host read each other's weights in place in CPU memory.
            return self.on_accelerator
        updates_late = any(extra.updates_late for extra in plan.extras)
        is_on_device = not plan.is_offloaded and not updates_late
        return self.crosses_hosts and not self.by_unit and is_on_device

    @property
    def grain(self) -> int:
        """The alignment of parameters in a layout, in elements.

        It is above 1 for fused updates.
        """
        return GRAIN if self.optimizer in NAMES else 1

    @property
    def uncut_names(self) -> frozenset[str]:
        """The names of the parameters that the optimizer needs as whole tensors."""
        return frozenset(name for group in self.groups if group.is_uncut for name in group.names)


@dataclass(frozen=True)
class ShardRange:
    """A range [start, stop) of a group's main weight that the optimizer treats as one parameter.

    Attributes:
        group: The planned parameter group.
        start: The first element, as an index into this rank's part of the main weight.
        stop: The end of the range.
        names: The names of the model's parameters that the range covers.
        shape: The shape that the optimizer sees.
    """

    group: GroupPlan
    start: int
    stop: int
    names: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements of the shard."""
        return self.stop - self.start


Tile = list[tuple[int, ShardRange]]  # (number of the optimizer's parameter group, shard)


def shard_ranges(
    group: GroupPlan, rank: int, names: frozenset[str], tile_numel: int, uncut: bool
) -> list[ShardRange]:
    """Return the shards of some parameters of a group on one rank.

    Neighbouring parameters are joined and cut into tiles. If the optimizer needs whole tensors,
    each tensor is a shard.

    Args:
        group: The plan of the parameter group.
        rank: The rank whose shards are returned.
        names: The full names of the parameters whose shards are returned.
        tile_numel: The largest number of elements of a shard.
        uncut: Whether the optimizer needs whole tensors.
    """
    runs: list[tuple[int, int, list[tuple[str, int, int]]]] = []
    found: list[ShardRange] = []
    master = group.plan.master
    whole = master is not None and master.placement is R
    low, high = (0, group.padded_numel) if whole else group.layout.bounds(rank)
    for slot in group.layout.slots:
        start = max(slot.start, low) - low
        stop = min(slot.stop, high) - low
        if start >= stop or slot.name not in names:
            continue
        if uncut:
            found.append(ShardRange(group, start, stop, (slot.name,), tuple(slot.shape)))
        elif runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], stop, [*runs[-1][2], (slot.name, start, stop)])
        else:
            runs.append((start, stop, [(slot.name, start, stop)]))
    for start, stop, held in runs:
        for first, last in _cuts(group.layout.slice_numel, start, stop, tile_numel):
            covered = tuple(name for name, begin, end in held if begin < last and first < end)
            found.append(ShardRange(group, first, last, covered, (last - first,)))
    return found


def _cuts(slice_numel: int, start: int, stop: int, tile_numel: int) -> Iterator[tuple[int, int]]:
    """Cut a flat range at slice boundaries and every `tile_numel` elements of a slice.

    A fused kernel processes the last few elements of a tensor with other instructions, which may
    round differently. The cuts therefore depend only on the layout, and not on the stage (a
    replicated main weight is cut like a sharded one), the memory or the parameter groups.
    """
    while start < stop:
        low = start // slice_numel * slice_numel
        next_tile = low + ((start - low) // tile_numel + 1) * tile_numel
        end = min(stop, low + slice_numel, next_tile)
        yield start, end
        start = end


@dataclass(frozen=True)
class TileOrder:
    """The lists of shards that are updated together (tiles), by the time of their update.

    Attributes:
        now: The tiles that are updated before a step is over.
        later: The tiles that may be updated early or after the step, by unit number. All are under
            the key EVERY_UNIT if a tile may have shards of two units.
    """

    now: list[Tile]
    later: dict[int, list[Tile]]

    @property
    def tiles(self) -> list[Tile]:
        """All tiles, those of `now` first."""
        return [*self.now, *(tile for tiles in self.later.values() for tile in tiles)]


def tile_order(
    shards: Sequence[Sequence[ShardRange]], units: Sequence[UnitPlan], settings: UpdateSettings
) -> TileOrder:
    """Combine shards into lists that are updated together (tiles), in the order of units.

    Shards that are in one chunk of a group's memory stay together, so that the chunk is fetched and
    stored once.

    Args:
        shards: This rank's shards, by parameter group.
        units: The planned units of the model, the root first.
        settings: The optimizer's class, its parameter groups, and how many elements one call
            updates.
    """
    unit_of = {id(group): number for number, unit in enumerate(units) for group in unit.groups}
    order = {id(group): number for number, group in enumerate(all_groups(units))}
    flat = [(number, shard) for number, of_group in enumerate(shards) for shard in of_group]
    flat.sort(key=lambda item: (order[id(item[1].group)], item[1].start))
    now = list[Tile]()
    later = dict[int, list[Tile]]()

    def chunk_of(item: tuple[int, ShardRange]) -> tuple[int, int]:
        group = item[1].group
        return id(group), item[1].start // settings.tile_numel_of(group.plan)

    for _, chunk in itertools.groupby(flat, key=chunk_of):
        bundle = list(chunk)
        group = bundle[0][1].group
        if settings.defers(group.plan):
            key = unit_of[id(group)] if settings.by_unit else EVERY_UNIT
            later.setdefault(key, []).append(bundle)
        else:
            now.append(bundle)
    return TileOrder(
        _tiles_of(now, settings), {unit: _tiles_of(mine, settings) for unit, mine in later.items()}
    )


def _tiles_of(bundles: Sequence[Tile], settings: UpdateSettings) -> list[Tile]:
    """Join bundles into tiles, each for one optimizer call on one device."""
    tiles: list[Tile] = []
    filled = 0
    is_on_host = False
    for bundle in bundles:
        plan = bundle[0][1].group.plan
        numel = sum(shard.numel for _, shard in bundle)
        is_full = filled + numel > settings.call_numel(plan)
        if not tiles or is_full or plan.is_updated_on_host != is_on_host:
            tiles.append([])
            filled = 0
            is_on_host = plan.is_updated_on_host
        tiles[-1] += bundle
        filled += numel
    return tiles


@dataclass(frozen=True)
class UpdatePlan:
    """The parts of main weights (shards) that one rank updates, and in which order.

    Attributes:
        settings: The optimizer's class, its parameter groups, and how many elements one call
            updates.
        shards: This rank's shards, by parameter group.
        device: The device on which the ranks train.
        order: The tiles into which the shards are combined, in the order of their updates.
    """

    settings: UpdateSettings
    shards: tuple[tuple[ShardRange, ...], ...]
    order: TileOrder
    device: torch.device = CPU

    @classmethod
    def of(
        cls,
        settings: UpdateSettings,
        shards: Sequence[Sequence[ShardRange]],
        units: Sequence[UnitPlan],
        device: torch.device,
    ) -> UpdatePlan:
        """Build the plan of shards that were already cut; `plan_update` cuts them from groups.

        Args:
            settings: The optimizer's class, its parameter groups, and how many elements one call
                updates.
            shards: This rank's shards, by parameter group.
            units: The planned units of the model, the root first.
            device: The device on which the ranks train.
        """
        return cls(settings, tuple(map(tuple, shards)), tile_order(shards, units, settings), device)

    @property
    def speculative(self) -> dict[int, list[Tile]]:
        """The tiles that may be updated in backward, by unit.

        The root has none, since its gradient is complete only at the end of backward.
        """
        return {unit: tiles for unit, tiles in self.order.later.items() if unit > 0}

    @cached_property
    def kernels(self) -> str:
        """The implementation of updates with a kernel on a CPU: "compiled" or "torch"."""
        if self.settings.kernels != "auto":
            return self.settings.kernels
        numel = sum(shard.numel for shards in self.shards for shard in shards)
        return "compiled" if numel >= WORTH_COMPILING else "torch"

    def has_kernel(self, number: int, shard: ShardRange) -> bool:
        """Return whether a kernel updates a shard in one pass over memory.

        Args:
            number: The index of the shard's parameter group.
            shard: The shard to update.
        """
        if not self._compiles_for(self._home(shard)):
            return False
        plan = shard.group.plan
        options = self.settings.groups[number].options
        return rule_of(self.settings.optimizer, options) is not None and _is_plain(plan)

    def _compiles_for(self, home: torch.device) -> bool:
        """Return whether kernels are compiled for a device.

        On a GPU that does not depend on the number of elements, so that all stages and ranks
        compute the same bits.
        """
        if home == CPU:
            return self.kernels != "torch"
        return self.settings.gpu_kernels and cuda.why_not(home) is None

    # -- bytes

    @property
    def moments_bytes(self) -> int:
        """Return the bytes of the optimizer on the device.

        Only counters and block scales count if the moments are in another memory.
        """
        total = 0
        for options, row, shard in self._rows():
            kept_by_optimizer = 0 if shard.group.plan.moments_external else shard.numel
            total += row.bytes_of(kept_by_optimizer, options)
            if shard.group.plan.moments_format == "8bit":
                total += row.count(options) * -(-shard.numel // BLOCK)
        return total

    def external_bytes(self) -> Counter[str]:
        """Return the bytes of moments that this library stores outside the optimizer, by memory.

        Sizes are rounded up to whole pages.
        """
        found = Counter[str]()
        for group, count in self.moments_per_group():
            if group.plan.moments_external:
                found.update(group_bytes(group, count, ("moments",)))
        return found

    def moments_per_group(self) -> list[tuple[GroupPlan, int]]:
        """Return the groups that this rank updates, with their stored moments per element."""
        counts = {
            id(shard.group): (shard.group, row.count(options))
            for options, row, shard in self._rows()
        }
        return list(counts.values())

    @property
    def undo_bytes(self) -> int:
        """Return the bytes of the log that undoes updates in backward.

        It has the size of the states of as many of the first units as fit the configured limit.
        """
        total = 0
        for tiles in self.speculative.values() if self.settings.undo_bytes else ():
            nbytes = sum(
                self._written_bytes(number, shard) for tile in tiles for number, shard in tile
            )
            total += nbytes if total + nbytes <= self.settings.undo_bytes else 0
        return total

    @property
    def fullest_tiles(self) -> dict[torch.device, int]:
        """The elements of the fullest tile, for each device that updates tiles."""
        found: dict[torch.device, int] = {}
        for tile in self.order.tiles:
            home = self._home(tile[0][1])
            numel = sum(shard.numel for _, shard in tile)
            found[home] = max(found.get(home, 0), numel)
        return found

    def staging_bytes(self, tiles: int) -> int:
        """Return the bytes of the buffers through which shards are copied between device and host.

        Args:
            tiles: The number of tiles that may be in transfer at the same time.
        """
        most = 0
        for tile in self.order.tiles:
            nbytes = sum(_staged_bytes(shard) for _, shard in tile)
            most = max(most, nbytes)
        return most * tiles

    @property
    def scratch_bytes(self) -> int:
        """Return the bytes of the buffers for a step.

        Each device has buffers of the length of its largest tile.
        """
        return sum(
            self._scratch_bytes(home, fullest) for home, fullest in self.fullest_tiles.items()
        )

    def _scratch_bytes(self, home: torch.device, fullest: int) -> int:
        here = [(number, shard) for number, shard in self._numbered() if self._home(shard) == home]
        groups = {id(shard.group) for _, shard in here}
        plans = [shard.group.plan for _, shard in here]
        counts = [
            (each.plan, count) for each, count in self.moments_per_group() if id(each) in groups
        ]
        narrow = [
            count
            for plan, count in counts
            if plan.moments_external and plan.moments_format != "fp32"
        ]
        on_disk = any(
            plan.moments_external and plan.moments and plan.moments.tier is Tier.NVME
            for plan, _ in counts
        )
        splits = any(plan.master_is_split for plan in plans)
        widens = any(self._master_is_copied(shard) for _, shard in here)
        # The NaN of placeholders for values that are stored elsewhere between steps
        elements = 1 if splits or widens or narrow or on_disk else 0
        by_torch = [shard for number, shard in here if not self.has_kernel(number, shard)]
        if by_torch:
            casts = self.settings.scales_grads or any(
                grad_is_cast(shard.group.plan) for shard in by_torch
            )
            joins = any(shard.group.plan.master_is_split for shard in by_torch)
            copies = joins or any(map(self._master_is_copied, by_torch))
            elements += fullest * (casts + copies + max(narrow, default=0))
            elements += scratch_numel(home, fullest) if joins else 0
        return elements * torch.float32.itemsize

    def _numbered(self) -> Iterator[tuple[int, ShardRange]]:
        """Each shard, with the number of its parameter group."""
        for number, shards in enumerate(self.shards):
            yield from ((number, shard) for shard in shards)

    def _rows(self) -> Iterator[tuple[Mapping[str, Any], StateCounts, ShardRange]]:
        """Each shard, with its hyper-parameters and the state that the optimizer keeps."""
        for group, shards in zip(self.settings.groups, self.shards, strict=True):
            row = moments_for(self.settings.optimizer, group.options)
            yield from ((group.options, row, shard) for shard in shards)

    def _written_bytes(self, number: int, shard: ShardRange) -> int:
        """The bytes that an update of one shard writes: weight, main weight and moments."""
        plan = shard.group.plan
        options = self.settings.groups[number].options
        assert plan.master is not None and plan.moments is not None
        count = moments_for(self.settings.optimizer, options).count(options)
        own = 0 if plan.master_is_weight else plan.master.dtype.itemsize
        weight = 0 if plan.weight_is_independent else plan.weight.dtype.itemsize
        moments = storage_dtype(plan.moments_format, plan.moments.dtype).itemsize * count
        scales = count * -(-shard.numel // BLOCK) if plan.moments_format == "8bit" else 0
        return shard.numel * (weight + own + moments) + scales

    def _home(self, shard: ShardRange) -> torch.device:
        """Return the device that updates a shard.

        It is the host if the moments are in another memory.
        """
        return CPU if shard.group.plan.is_updated_on_host else self.device

    def _master_is_copied(self, shard: ShardRange) -> bool:
        """Return whether an optimizer works on a copy of a main weight that is not split.

        The copy has a wider dtype, or is on the device of the moments.
        """
        plan = shard.group.plan
        near = self.device if plan.master is not None and plan.master.tier is Tier.DEVICE else CPU
        return not plan.master_is_split and (plan.master_is_rounded or near != self._home(shard))


def _is_plain(plan: ShardPlan) -> bool:
    """Return whether a kernel can read the states as they are stored.

    These are main weight, moments and gradient (`kernels.rules.Layout`).
    """
    if plan.master is None or plan.moments is None or plan.grad is None:
        return False
    if plan.moments_format not in ("fp32", "bf16") or plan.moments.dtype != torch.float32:
        return False
    if plan.grad.dtype not in (torch.float32, *LOW_PRECISION):
        return False
    main = torch.int16 if plan.master_is_split else torch.float32
    return plan.master.dtype == (torch.bfloat16 if plan.master_is_rounded else main)


def _uses_disk(plan: ShardPlan) -> bool:
    specs = (plan.weight, plan.grad, plan.master, plan.moments)
    return any(spec is not None and spec.tier is Tier.NVME for spec in specs)


def _staged_bytes(shard: ShardRange) -> int:
    """Return the staging bytes of a shard on the device that the host updates.

    They are rounded as in a `StagingRing`.
    """
    plan = shard.group.plan
    if not plan.is_updated_on_host:
        return 0
    specs = [
        spec for spec in (plan.weight, plan.grad) if spec is not None and spec.tier is Tier.DEVICE
    ]
    return sum(-(-shard.numel * spec.dtype.itemsize // ALIGNMENT) * ALIGNMENT for spec in specs)


def grad_is_cast(plan: ShardPlan) -> bool:
    """Return whether a gradient must be cast before the optimizer can read it."""
    return (
        plan.grad is not None and plan.moments is not None and plan.grad.dtype != plan.moments.dtype
    )


def plan_update(
    units: Sequence[UnitPlan], settings: UpdateSettings, rank: int, device: torch.device = CPU
) -> UpdatePlan:
    """Cut the main weights of one rank into the shards that its optimizer updates.

    Args:
        units: The planned units of the model, the root first.
        settings: The optimizer's class, its parameter groups, and how many elements one call
            updates.
        rank: The rank, which owns slice `rank` of every sharded group.
        device: The device on which the ranks train.
    """
    shards = [
        [
            shard
            for group in trained_groups(units)
            for shard in shard_ranges(
                group, rank, each.names, settings.tile_numel_of(group.plan), each.is_uncut
            )
        ]
        for each in settings.groups
    ]
    return UpdatePlan.of(settings, shards, units, device)
