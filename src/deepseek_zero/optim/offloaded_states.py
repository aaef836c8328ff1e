"""The states of shards that an update finds in other memories than those of its device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from ..planner.spec import S
from ..sharding.grad_sum import GradSum
from ..tiers.tier import COMPLETED, CopyEvent, StagedTile
from .inner_step import Decision
from .master_shard import GradSource, MasterShard, Tile, collected
from .moments import Moments
from .tile_memory import PrefetchSettings, StorageRange, TilePrefetcher
from .updater import Update


def update_offloaded(
    tiles: Sequence[Tile],
    decision: Decision,
    update: Update,
    moments: Moments,
    settings: PrefetchSettings,
) -> Iterator[Tile]:
    """Update tiles one after another while the states of other tiles are fetched and stored.

    Args:
        tiles: The tiles, in the order of their updates.
        decision: The decision of the step.
        update: Updates one tile.
        moments: The states of the inner optimizer.
        settings: How many tiles may be in transfer between memories at the same time.

    Yields:
        Each tile after its update; its states may still be in transfer.
    """
    flow = prefetch(tiles, decision.source, moments, settings)
    try:
        while (tile := flow.next()) is not None:
            update(tile, decision)
            flow.release(tile)
            yield tile
    except (Exception, GeneratorExit):  # GeneratorExit: the caller failed between two tiles
        evict_staged(tiles, decision.source)
        raise


def prefetch(
    tiles: Sequence[Tile], source: GradSource, moments: Moments, settings: PrefetchSettings
) -> TilePrefetcher[Tile]:
    """Return a prefetcher for the states that the updates of tiles use.

    Work that is given to the training device after this call must not change these states.

    Args:
        tiles: The tiles, in the order of their updates.
        source: A function that returns the reduced gradient of a parameter group.
        moments: The states of the inner optimizer.
        settings: How many tiles may be in transfer between memories at the same time.
    """
    after: CopyEvent = COMPLETED
    if tiles:
        after = tiles[0][0][1].group.comm_ctx.copy_engine.now()
    ranges = partial(_ranges_of_tile, moments=moments, source=source, after=after)
    return TilePrefetcher(tiles, ranges, settings)


def _ranges_of_tile(
    tile: Tile, moments: Moments, source: GradSource, after: CopyEvent
) -> Iterator[StorageRange]:
    """Yield the ranges that are fetched before the update of a tile, and stored after it."""
    for _, shard in tile:
        if shard.group.plan.is_offloaded and not shard.is_absent(source):
            yield from storage_ranges(shard, source)
            yield from staged_ranges(shard, source, after)
            yield from moments.storage_ranges(shard)


def storage_ranges(shard: MasterShard, source: GradSource = collected) -> Iterator[StorageRange]:
    """Yield the storage ranges that the update of a shard reads or writes.

    They belong to main weights, weights and gradients outside the training device.

    Args:
        shard: The shard that is updated.
        source: A function that returns the reduced gradient of a parameter group.
    """
    for storage in shard.master.offloaded():
        yield StorageRange(storage, shard.start, shard.stop)
    buffer = source(shard.group).buffer
    if buffer is not None and not buffer.storage.on_device:
        yield StorageRange(buffer.storage, shard.start, shard.stop, changes=False)


def staged_ranges(
    shard: MasterShard, source: GradSource = collected, after: CopyEvent = COMPLETED
) -> Iterator[StorageRange]:
    """Yield the ranges on the training device that the host updates or reads.

    Args:
        shard: The shard that is updated.
        source: A function that returns the reduced gradient of a parameter group.
        after: Event of the device after which it does not change the ranges.
    """
    main = shard.master.on_device.staged
    if main is not None:
        yield StorageRange(main, shard.start, shard.stop, after=after)
    staged = staged_gradient(source(shard.group))
    if staged is not None:
        yield StorageRange(staged, shard.start, shard.stop, changes=False, after=after)


def staged_gradient(total: GradSum) -> StagedTile | None:
    """Return the object that copies ranges of this rank's gradient to the host for the update.

    Args:
        total: The reduced gradient of a parameter group.

    Returns:
        None if the gradient is not on the training device, or is not updated on the host.
    """
    buffer = total.buffer
    group = total.group
    if buffer is None or not buffer.storage.on_device or not group.plan.is_updated_on_host:
        return None
    memory = buffer.memory
    if buffer.spec.placement is not S and memory.numel() != group.layout.slice_numel:
        first, last = group.layout.bounds(group.comm_ctx.comm.rank)
        memory = memory[first:last]
    known = buffer.staged
    if known is None or known.on_device.data_ptr() != memory.data_ptr():
        buffer.staged = group.comm_ctx.copy_engine.staged_tile(memory, is_read=True)
    return buffer.staged


def evict_staged(tiles: Iterable[Tile], source: GradSource) -> None:
    """Discard the copies on the host of states of the training device.

    Args:
        tiles: The tiles that an update was given.
        source: A function that returns the reduced gradient of a parameter group.
    """
    for tile in tiles:
        for _, shard in tile:
            for staged in staged_ranges(shard, source):
                staged.storage.evict(staged.low, staged.high)
