"""Gathers of slices that are in another memory between uses."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..base.memory import parts_in_lock_ranges
from ..comm.pending import Pending
from ..tiers.tier import Storage
from .buffer import FlatBuffer
from .comm_context import CommContext


def fetch_into(
    storage: Storage, target: FlatBuffer, comm_ctx: CommContext, gather: Callable[[Tensor], Pending]
) -> Pending:
    """Fetch this rank's slice, copy it into `target`, gather it in its turn, and evict it.

    `comm_ctx.issue_queue` issues the gather after the fetch, and after the gathers that were added
    before, so that all ranks issue their gathers in the same order.

    Args:
        storage: The memory of the slice.
        target: The output of the gather, with all elements.
        comm_ctx: The communicator of the shard group, with the queue and the copy engine.
        gather: Starts the all-gather of this rank's slice of `target`.

    Returns:
        A handle. The result may be read after its `wait()` has returned.

    Note:
        Collective: every rank of the shard group must call it in the same order.
    """
    numel = storage.memory.numel()

    def start() -> Pending:
        here = storage.read(0, numel)
        own = target.slice_of(comm_ctx.comm.rank)
        pending = None
        with comm_ctx.copy_engine.h2d(storage) as copy_event:  # copies to the device
            for part in parts_in_lock_ranges(here):
                own[part].copy_(here[part], non_blocking=True)
            if target.coded_as is None:
                pending = gather(own)
        if pending is None:
            # The stream that computes encodes the slice, because it shares scratch memory
            copy_event.wait_stream()
            pending = gather(own)

        def leave() -> None:
            copy_event.wait_stream()
            storage.evict(0, numel)

        if not copy_event.is_done():
            return pending.then(leave)
        leave()
        return pending

    return comm_ctx.issue_queue.add(storage.fetch(0, numel), start)
