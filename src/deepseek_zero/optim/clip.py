"""The one number every rank must agree on before a step: the global gradient norm, and whether it is finite.

Norms are sums of squares per (group, slice) in float64, exchanged as one small table and added in one order, so that
every stage and every rank computes the same bits.  A rank that has something to say to all (engine/preemption.py) says
it in the same table.  Called by optim/sharded.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..comm.collectives import Comm
from ..sharding.group import FlatGroup


@dataclass(frozen=True)
class Verdict:
    """What all ranks agree on.  norm: of the gradient as it is held (still multiplied by the loss scale).

    words: each rank's own, empty where ranks have none.
    """

    norm: float
    by_group: tuple[float, ...]
    words: tuple[float, ...] = ()

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.norm)

    def first_non_finite(self, groups: Sequence[FlatGroup]) -> str:
        """The first group, in layout order, whose gradient is not finite."""
        for group, square in zip(groups, self.by_group, strict=True):
            if not math.isfinite(square):
                return group.members[0].name.rpartition(".")[0] or group.members[0].name
        return ""


def agree_on_norm(groups: Sequence[FlatGroup], comm: Comm, word: float | None = None) -> Verdict:
    """The global norm of the reduced gradients.  Collective.  word: travels along; on every rank, or on none."""
    mine = torch.tensor([group.gradient.squares() for group in groups], dtype=torch.float64).reshape(
        len(groups), comm.size
    )
    words = [] if word is None else [word]
    if comm.size > 1:
        table = comm.rows(torch.cat([mine.reshape(-1), mine.new_tensor(words)]), "gradient norm")
        rows = table[:, : mine.numel()].reshape(comm.size, len(groups), comm.size)
        # Slice r's sum is rank r's to tell; a replicated gradient is the same on all, so its owner's word is enough.
        mine = torch.stack([rows[rank, :, rank] for rank in range(comm.size)], dim=1)
        words = table[:, rows[0].numel() :].flatten().tolist()
    sums = [float(sum(row.tolist())) for row in mine]
    total = sum(sums)
    return Verdict(math.sqrt(total) if total >= 0 else math.nan, tuple(sums), tuple(words))


def clip_factor(norm: float, max_norm: float) -> float:
    """What gradients are multiplied by so that their norm is at most max_norm; 1.0 where that is off (0) or not
    needed.
    """
    if max_norm <= 0.0:
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))
