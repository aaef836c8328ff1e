"""Reductions of gradients that arrive after their unit was reduced.

This happens, for example, if two reentrant checkpoints share a block.
"""

from __future__ import annotations

import torch

from .reduce_lane import ReduceLane


def reduce_late(lane: ReduceLane) -> None:
    """Reduce the gradients that arrived too late on any rank, before a step.

    Args:
        lane: The reduce lane of the model.

    Note:
        Collective: every rank must call it if any rank has late gradients.
    """
    mask = torch.zeros(len(lane.units), dtype=torch.uint8)
    mask[list(lane.late)] = 1
    agreed = lane.comm.all_gather_rows(mask, "late gradients").amax(dim=0)
    for unit in lane.order:
        if agreed[unit.number]:
            lane.reduce(unit)
    lane.wait()
    lane.late.clear()
    lane.complete_sums()
