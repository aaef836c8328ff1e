"""Who updates what, and in which portions: an optimizer's shards of master weights, their tiles,
and their bytes.

A rank's share of a group's master is cut into shards that the inner optimizer treats as parameters;
shards of about `tile_numel` elements together are a tile, one call of that optimizer (DeepSpeed's
sub-group).
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
from .units import GroupPlan, UnitPlan

EVERY_UNIT = -1
# Elements of a rank's updates from which compiled kernels are worth the second that they take to
# compile: they save about 2 ns an element in each step.
WORTH_COMPILING = 1 << 20


@dataclass(frozen=True)
class ParamGroupPlan:
    """One of the optimizer's parameter groups.  is_uncut: its update needs whole tensors."""

    options: Mapping[str, Any]
    names: frozenset[str]
    is_uncut: bool = False


@dataclass(frozen=True)
class UpdateSettings:
    """An optimizer as a plan needs it.

    optimizer: its class; `moments_for` knows what it keeps.  tile_numel: elements per optimizer
    call on the training device.  host_tile_numel: elements per call where the host updates.
    kernel_tile_numel: the same where a kernel updates states in memory.  scales_grads: gradients
    may be clipped or unscaled.  can_defer: updates may wait for the next forward.  by_unit: tiles
    end where units do, since some units are updated in backward.  early_on_device: these may be
    units whose weights are on the training device.  undo_bytes: for what undoes such
    updates.  crosses_hosts: the ranks that share slices are on several hosts.  kernels: what
    computes updates on a CPU, "auto", "numba" or "torch".
    gpu_kernels: NVIDIA GPUs update by kernels that NVRTC compiles.
    """

    optimizer: str
    groups: tuple[ParamGroupPlan, ...]
    tile_numel: int = 1 << 20
    scales_grads: bool = False
    can_defer: bool = True
    by_unit: bool = False
    early_on_device: bool = False
    undo_bytes: int = 0
    crosses_hosts: bool = False
    kernels: str = "torch"
    host_tile_numel: int = 1 << 20
    kernel_tile_numel: int = 1 << 20
    gpu_kernels: bool = False

    def call_numel(self, plan: ShardPlan) -> int:
        """Return how many elements of small shards one optimizer call updates together."""
        return self.host_tile_numel if plan.is_updated_on_host else self.tile_numel

    def tile_numel_of(self, plan: ShardPlan) -> int:
        """Return the most elements of one shard of a group.

        A kernel keeps nothing for a tile, and each tile costs some 0.2 ms for Python and for giving
        the threads their parts. So its tiles are larger.
        """
        numel = self.call_numel(plan)
        if _uses_disk(plan) or self.kernels == "torch" or not _is_plain(plan):
            return numel
        is_ruled = all(rule_of(self.optimizer, group.options) for group in self.groups)
        return max(numel, self.kernel_tile_numel) if is_ruled else numel

    def defers(self, plan: ShardPlan) -> bool:
        """Return whether a group's update may run in the next forward.

        Transfers between memories, updates on the host, or gathers between hosts then overlap with
        computing. Every read of the weight must go through a gather or a fetch, so it must be
        sharded or outside the device, and no gradient may wait in the device's memory.
        """
        if not self.can_defer:
            return False
        tiers = [spec.tier for spec in (plan.weight, plan.moments) if spec is not None]
        if Tier.DEVICE not in tiers:
            return True
        if plan.weight.placement is not S:
            return False
        if plan.is_updated_on_host and plan.grad is not None and plan.grad.tier is not Tier.DEVICE:
            return self.early_on_device or not self.by_unit
        updates_late = any(extra.updates_late for extra in plan.extras)
        is_on_device = not plan.is_offloaded and not updates_late
        return self.crosses_hosts and not self.by_unit and is_on_device

    @property
    def grain(self) -> int:
        """Elements at a multiple of which each parameter begins in its flat layout: more than 1 for
        fused updates.
        """
        return GRAIN if self.optimizer in NAMES else 1

    @property
    def uncut_names(self) -> frozenset[str]:
        """Names of the parameters that the optimizer needs as whole tensors."""
        return frozenset(name for group in self.groups if group.is_uncut for name in group.names)


@dataclass(frozen=True)
class ShardRange:
    """Elements [start, stop) of one rank's part of a group's master that the optimizer treats as
    one parameter.
    """

    group: GroupPlan
    start: int
    stop: int
    names: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return self.stop - self.start


Tile = list[tuple[int, ShardRange]]  # (number of the optimizer's parameter group, shard)


def shard_ranges(
    group: GroupPlan, rank: int, names: frozenset[str], tile_numel: int, uncut: bool
) -> list[ShardRange]:
    """Return the shards of the named parameters of a group on one rank.

    Neighbours are joined and cut at tiles; where the optimizer needs whole tensors there is a shard
    per tensor.
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
        for first, last in group.layout.cuts(start, stop, tile_numel):
            covered = tuple(name for name, begin, end in held if begin < last and first < end)
            found.append(ShardRange(group, first, last, covered, (last - first,)))
    return found


@dataclass(frozen=True)
class TileOrder:
    """The tiles of an optimizer.  now: updated before a step is over.  later: what may be updated
    at other times, by number of the unit (all under EVERY_UNIT where tiles reach from one unit into
    the next).
    """

    now: list[Tile]
    later: dict[int, list[Tile]]

    @property
    def tiles(self) -> list[Tile]:
        return [*self.now, *(tile for tiles in self.later.values() for tile in tiles)]


def tile_order(
    shards: Sequence[Sequence[ShardRange]], units: Sequence[UnitPlan], settings: UpdateSettings
) -> TileOrder:
    """Return the tiles of these shards (by parameter group), in the order of units.

    Shards in one chunk of their group stay together, so that a chunk is fetched and stored once;
    parameters that the optimizer treats differently alternate there.
    """
    unit_of = {id(group): number for number, unit in enumerate(units) for group in unit.groups}
    order = {
        id(group): number
        for number, group in enumerate(group for unit in units for group in unit.groups)
    }
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
    """Join bundles into tiles, each for one optimizer call. One device updates all shards of a
    tile.
    """
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
    """The shards that one rank updates, and their tiles. shards: by parameter group of the
    optimizer. device: that trains.
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
        """Return the plan of shards that are given; `plan_update` cuts them."""
        return cls(settings, tuple(map(tuple, shards)), tile_order(shards, units, settings), device)

    @property
    def speculative(self) -> dict[int, list[Tile]]:
        """Tiles that may be updated in backward, by unit: of all but the root, whose gradient is
        the last there is.
        """
        return {unit: tiles for unit, tiles in self.order.later.items() if unit > 0}

    @cached_property
    def kernels(self) -> str:
        """What updates shards that have a kernel on a CPU: "numba" or "torch"."""
        if self.settings.kernels != "auto":
            return self.settings.kernels
        numel = sum(shard.numel for shards in self.shards for shard in shards)
        return "numba" if numel >= WORTH_COMPILING else "torch"

    def has_kernel(self, number: int, shard: ShardRange) -> bool:
        """Return whether a shard of the optimizer's parameter group of that number is updated in
        one pass.
        """
        if not self._compiles_for(self._home(shard)):
            return False
        plan = shard.group.plan
        options = self.settings.groups[number].options
        return rule_of(self.settings.optimizer, options) is not None and _is_plain(plan)

    def _compiles_for(self, home: torch.device) -> bool:
        """Return whether kernels are compiled for a device.

        On a GPU it does not depend on the number of elements, so that all stages and ranks have the
        same bits.
        """
        if home == CPU:
            return self.kernels != "torch"
        return self.settings.gpu_kernels and cuda.why_not(home) is None

    # -- bytes

    @property
    def moments_bytes(self) -> int:
        """Bytes the optimizer keeps on the device; of moments that lie elsewhere, counters and
        block scales alone.
        """
        total = 0
        for options, row, shard in self._rows():
            kept_by_optimizer = 0 if shard.group.plan.moments_external else shard.numel
            total += row.bytes_of(kept_by_optimizer, options)
            if shard.group.plan.moments_format == "8bit":
                total += row.count(options) * -(-shard.numel // BLOCK)
        return total

    def external_bytes(self) -> Counter[str]:
        """Bytes of moments that are kept for the optimizer, by where they are: whole slices, in
        whole pages.
        """
        found = Counter[str]()
        for group, count in self.moments_per_group():
            if group.plan.moments_external:
                found.update(group_bytes(group, count, ("moments",)))
        return found

    def moments_per_group(self) -> list[tuple[GroupPlan, int]]:
        """Each group of which this rank updates something, and the values per element that are kept
        for it.
        """
        counts = {
            id(shard.group): (shard.group, row.count(options))
            for options, row, shard in self._rows()
        }
        return list(counts.values())

    @property
    def undo_bytes(self) -> int:
        """Bytes of the log that undoes updates in backward: of the first units, as many as fit the
        budget.
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
        """Elements of the fullest tile of each device that updates some."""
        found: dict[torch.device, int] = {}
        for tile in self.order.tiles:
            home = self._home(tile[0][1])
            numel = sum(shard.numel for _, shard in tile)
            found[home] = max(found.get(home, 0), numel)
        return found

    def staging_bytes(self, tiles: int) -> int:
        """Return the bytes through which so many tiles of the training device's tensors pass to the
        host and back.
        """
        most = 0
        for tile in self.order.tiles:
            nbytes = sum(_staged_bytes(shard) for _, shard in tile)
            most = max(most, nbytes)
        return most * tiles

    @property
    def scratch_bytes(self) -> int:
        """Bytes a step works in: buffers as long as the fullest tile, for each device that shards
        are updated on.
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
        # The NaN that stands for values that are not there between steps.
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
        """Each shard with the number of its parameter group."""
        for number, shards in enumerate(self.shards):
            yield from ((number, shard) for shard in shards)

    def _rows(self) -> Iterator[tuple[Mapping[str, Any], StateCounts, ShardRange]]:
        """Each shard with its hyper-parameters and what the optimizer keeps of it."""
        for group, shards in zip(self.settings.groups, self.shards, strict=True):
            row = moments_for(self.settings.optimizer, group.options)
            yield from ((group.options, row, shard) for shard in shards)

    def _written_bytes(self, number: int, shard: ShardRange) -> int:
        """Bytes that the update of one shard writes: weight, master and moments."""
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
        """The device that a shard is updated on: the host where its moments lie in another
        memory.
        """
        return CPU if shard.group.plan.is_updated_on_host else self.device

    def _master_is_copied(self, shard: ShardRange) -> bool:
        """Return whether an optimizer works on a copy of a master that is not split: a wider one,
        or one near the moments.
        """
        plan = shard.group.plan
        near = self.device if plan.master is not None and plan.master.tier is Tier.DEVICE else CPU
        return not plan.master_is_split and (plan.master_is_rounded or near != self._home(shard))


def _is_plain(plan: ShardPlan) -> bool:
    """Return whether main weight, moments and gradient are stored as a kernel reads them
    (`kernels.rules.Layout`).
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
    """Return the bytes of a shard that the training device has and the host updates, in rooms of a
    `StagingRing`.
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
    """Return what one rank updates of these units.  rank: its slice of every sharded group."""
    shards = [
        [
            shard
            for unit in units
            for group in unit.trained
            for shard in shard_ranges(
                group, rank, each.names, settings.tile_numel_of(group.plan), each.is_uncut
            )
        ]
        for each in settings.groups
    ]
    return UpdatePlan.of(settings, shards, units, device)
