"""The numbers every rank must agree on before a step: the global gradient norm, and whether it is finite.

Norms are sums of squares per (group, slice) in float64, exchanged as one small table and added in one order, so that
every stage and every rank computes the same bits. The same table carries one number of each rank's
(engine/preemption.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import torch

from ..sharding.param_group import ParamGroup
from ..sharding.runtime import Runtime


@dataclass(frozen=True)
class Verdict:
    """The facts about a step that all ranks agree on. norm: of the gradient as it is held (still multiplied by the loss
    scale).

    any_late: a rank holds gradients that came after their sum. any_edited: the program has changed some on a rank.
    is_idle: no rank has a gradient at all. any_graphless: a rank was given a loss without a graph. absences: of each
    rank, a number that tells which parameters have none. words: each rank's own number, empty where ranks have none.
    """

    norm: float
    by_group: tuple[float, ...]
    any_late: bool = False
    any_edited: bool = False
    is_idle: bool = False
    any_graphless: bool = False
    absences: tuple[int, ...] = ()
    words: tuple[float, ...] = ()

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.norm)


def agree_on_norm(runtime: Runtime, word: float | None = None) -> Verdict:
    """Return the verdict: the global norm of the reduced gradients, and what each rank has to say of them. Collective.

    The norm is the same float64 on every rank. word: a number that travels along; on every rank, or on none.
    """
    groups, comm = runtime.trained_groups, runtime.comm
    edited = any(group.gradient.state.is_edited for group in groups)
    absent = crc32("\n".join(absent_among(groups)).encode())
    # This rank's flags in one number, which float64 holds exactly.
    said = (bool(runtime.executor.late), edited, runtime.is_idle, runtime.is_graphless)
    fact = float(sum(each << place for place, each in enumerate(said)) + (absent << len(said)))
    row = [fact, *(square for group in groups for square in group.gradient.squares())]
    row += [] if word is None else [word]
    rows = (
        comm.all_gather_rows(torch.tensor(row, dtype=torch.float64), "gradient norm").tolist()
        if comm.size > 1
        else [row]
    )
    # A slice's sum is for its first owner to tell; a replicated gradient is the same on all, so that is enough.
    owners = comm.owners
    sums = [
        sum(rows[ranks[0]][1 + number * len(owners) + place] for place, ranks in enumerate(owners))
        for number in range(len(groups))
    ]
    total = sum(sums)
    words = [each for row in rows for each in row[1 + len(groups) * len(owners) :]]
    norm = math.sqrt(total) if total >= 0 else math.nan
    facts = [int(row[0]) for row in rows]
    # Where several ranks hold a slice, a program that treats it differently on two of them shows here.
    differ = any(
        len({str(rows[rank][1 + number * len(owners) + place]) for rank in (comm.ranks if is_whole else ranks)}) > 1
        for number, is_whole in enumerate(group.gradient.is_whole for group in groups)
        for place, ranks in enumerate(owners)
    )
    any_late = any(each & 1 for each in facts)
    return Verdict(
        norm,
        tuple(sums),
        any_late=any_late,
        # A rank that holds late gradients has no sum of theirs until they are reduced; the verdict comes again then.
        any_edited=(differ and not any_late) or any(each & 2 for each in facts),
        is_idle=all(each & 4 for each in facts),
        any_graphless=any(each & 8 for each in facts),
        absences=tuple(each >> len(said) for each in facts),
        words=tuple(words),
    )


def absent_among(groups: Sequence[ParamGroup]) -> list[str]:
    """Return the names of parameters without a gradient (dropped or frozen): they are not updated."""
    return [group.members[number].name for group in groups for number in sorted(group.gradient.state.absent or ())]


def clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor of gradients that bounds their norm by max_norm; 1.0 if clipping is off (0) or not needed."""
    if max_norm <= 0.0:
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))
