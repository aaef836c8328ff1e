"""Whole weights that follow their main weights by quantized differences.

This is used at stages 1 and 2 with compressed weights. Each rank sends the difference between its
main weights and the weight. Quantization errors stay in the main weights, so later differences
correct them. The weight is an independent state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm.pending import DONE, Pending
from ..planner.layout import Slot
from ..precision.policy import cast_master
from ..sharding.buffer import FlatBuffer
from ..sharding.coded_message import CodedMessage
from ..sharding.comm_context import CommContext
from ..sharding.group import Group
from ..sharding.param_ranges import owned_range, owned_view
from ..sharding.weight_gather import WeightGather


class WeightDifferences(WeightGather):
    """Updates a replicated weight from sharded main weights by quantized differences.

    After a step, each rank quantizes the difference between its slice of the main weight and the
    same slice of the weight. The rank sends this difference to all ranks, which add it to the
    weight. The class is used for compressed weights at ZeRO stages 1 and 2.

    Args:
        group: The parameter group whose weight is updated.
    """

    computes = True

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._is_written = False

    def refresh(self, what: str, *, is_update: bool) -> Pending:
        """Start to update the replicated weight on all ranks from their main weights.

        After an optimizer step, each rank sends the quantized difference between its slice of the
        main weight and the same slice of the weight. Every rank adds the differences to its weight.
        If a program has written values instead, each rank sends its whole slice of the weight,
        without quantization. Unless `write` has written the slice, the main weight is first cast
        into it.

        Args:
            what: The name of the unit, used in error messages.
            is_update: True if an optimizer step has changed the main weights; False if a program
                has written values.

        Returns:
            A handle. The weight may be read after its `wait()` has returned. `wait()` raises
            `PeerError` if another rank failed.

        Raises:
            UsageError: `engine.offload_states` has moved a state of the parameter group.

        Note:
            Collective: every rank of the shard group must call it.
        """
        group = self.group
        master = group.master
        assert master is not None
        group.guard.before_write()
        if is_update:
            return send_differences(master.buffer, group.weight, group.comm_ctx, what)
        if not self._is_written:
            values = master.read(0, group.layout.slice_numel)
            cast_master(values.to(group.weight.memory.device), group.own_weight)
        self._is_written = False
        return super().refresh(what, is_update=is_update)

    def write(self, slot: Slot, values: Tensor | None, low: int = 0) -> None:
        """Write values into this rank's part of one parameter's weight.

        The main weight is not changed. The next call of `refresh` with ``is_update=False`` sends
        this rank's slice of the weight to all ranks.

        Args:
            slot: The position of the parameter in the flat buffers of the group.
            values: The new values, flat. None writes the values of the main weight, cast to the
                dtype of the weight.
            low: The first element to write, relative to this rank's part of the parameter. `low` is
                not used if `values` is None.
        """
        group = self.group
        assert group.master is not None
        self._is_written = True
        view = owned_view(group.weight, slot, group.comm_ctx.comm.rank)
        if values is None:
            place, end = owned_range(group.master.buffer, slot, group.comm_ctx.comm.rank)
            cast_master(group.master.read(place, end).to(view.device), view)
        else:
            view[low : low + values.numel()].copy_(values)


def send_differences(
    source: FlatBuffer, target: FlatBuffer, comm_ctx: CommContext, what: str
) -> Pending:
    """Start to add the quantized differences of all ranks to a replicated weight.

    Args:
        source: This rank's slice of the main weight, fp32, on any device. It is not changed.
        target: The replicated weight, updated in place. Its spec selects the quantization.
        comm_ctx: The context of the ranks over which the main weight is sharded.
        what: The name of the unit, used in error messages.

    Returns:
        A handle. `target` may be read after its `wait()` has returned.

    Note:
        Collective: every rank of the shard group must call it in the same order.
    """
    comm = comm_ctx.comm
    pool = comm_ctx.pool
    numel = target.layout.slice_numel
    if not numel:
        return DONE
    assert target.spec.wire is not None
    message = CodedMessage.of(target.memory, target.spec.wire, pool)
    lacking = pool.take(numel, torch.float32)
    lacking.copy_(source.read(0, numel)).sub_(target.slice_of(comm.rank))
    message.encode(lacking, comm.rank * numel)
    pool.give(lacking)
    pending = comm_ctx.route.all_gather(message.memory, "gather", comm_ctx, what)

    def add() -> None:
        for rank in range(comm.size):
            message.add(rank * numel, target.slice_of(rank))
        message.arrived()

    return pending.then(add)
