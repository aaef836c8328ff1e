"""Gathers a slice that is kept in another memory than the training device's."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..base.memory import parts_in_lock_ranges
from ..comm.pending import OrderedIssueQueue, Pending
from ..tiers.tier import CopyEngine, Storage


def fetch_and_gather(
    storage: Storage,
    place: Callable[[], Tensor],
    gather: Callable[[Tensor], Pending],
    issue_queue: OrderedIssueQueue,
    copy_engine: CopyEngine,
) -> Pending:
    """Fetch this rank's slice, gather it in its turn, and evict it after it was copied.

    Args:
        storage: The memory of the slice.
        place: Returns the place of the slice on the training device. No view of it may be kept.
        gather: Starts to gather the slices, of which this rank's is in its place. Collective within
            the gather lane.
        issue_queue: The gathers that wait for another memory, in the order of the lane.
        copy_engine: Copies between the memory and the training device.
    """
    numel = storage.memory.numel()

    def start() -> Pending:
        here = storage.read(0, numel)
        own = place()
        with copy_engine.h2d(storage) as copy_event:
            for part in parts_in_lock_ranges(here):
                own[part].copy_(here[part], non_blocking=True)
            pending = gather(own)

        def leave() -> None:
            copy_event.wait_stream()
            storage.evict(0, numel)

        if not copy_event.is_done():
            return pending.then(leave)
        leave()
        return pending

    return issue_queue.add(storage.fetch(0, numel), start)
