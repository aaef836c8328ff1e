"""Agreement of all ranks on a step before its update, such as the gradient norm.

The ranks all-gather float64 sums of squares and add them in one order, so every rank at every
stage computes the same bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from zlib import crc32

import torch

from ..comm.collectives import Comm
from ..sharding.grad_sum import squares_of
from ..sharding.param_group import ParamGroup
from ..sharding.runtime import Runtime
from .step_message import Fields, StepMessage


class StepFlags(NamedTuple):
    """Facts about a step that each rank knows of itself, and then of all ranks.

    Attributes:
        any_late: On some rank, gradients arrived after their unit had been reduced.
        any_edited: The program changed gradients on a rank.
        is_idle: No rank has a gradient, so nothing can be updated.
        any_graphless: On some rank, `backward` was called with a loss that requires no gradient.
    """

    any_late: bool
    any_edited: bool
    is_idle: bool
    any_graphless: bool

    @classmethod
    def of_ranks(cls, rows: Sequence[Sequence[float]]) -> StepFlags:
        """Return the flags of all ranks together.

        Args:
            rows: The flags of each rank, as numbers.
        """
        late, edited, idle, graphless = zip(*rows, strict=True)
        return cls(any(late), any(edited), all(idle), any(graphless))


NO_FLAGS = StepFlags(any_late=False, any_edited=False, is_idle=False, any_graphless=False)


@dataclass(frozen=True)
class Verdict:
    """The gradient norm and other facts about a step, equal on all ranks.

    Attributes:
        norm: The norm of the gradient, still multiplied by the loss scale.
        by_group: The sum of squares of each trained group.
        flags: What happened on any rank.
        absences: For each rank, a checksum of the names of parameters without a gradient.
        fields: The fields sent with the norm, by name; each has one entry per rank of the world.
    """

    norm: float
    by_group: tuple[float, ...]
    flags: StepFlags = NO_FLAGS
    absences: tuple[int, ...] = ()
    fields: Fields = field(default_factory=dict)

    @property
    def is_finite(self) -> bool:
        """Whether the gradient norm is neither infinite nor NaN."""
        return math.isfinite(self.norm)

    @property
    def is_contradictory(self) -> bool:
        """Whether the ranks changed their gradients in contradictory ways."""
        return len(set(self.absences)) > 1 or (self.flags.any_edited and self.flags.any_late)


@dataclass(frozen=True)
class StepResult:
    """The result of one step.

    Attributes:
        norm: The global gradient norm, unscaled.
        skipped: Whether no state has changed, because gradients were not finite or there were none.
        verdict: The facts that the ranks agreed on.
        overflow: Whether no state has changed because gradients were not finite.
        number: The number of the step.
    """

    norm: float
    skipped: bool
    verdict: Verdict
    overflow: bool = False
    number: int = 0


def agree_on_norm(runtime: Runtime, extra: StepMessage | None = None) -> Verdict:
    """Compute the global gradient norm, and exchange the other facts about the step.

    The norm is the same float64 on every rank of the world. The squares of all slices are added in
    a fixed order.

    Args:
        runtime: The runtime of the wrapped model, whose gradients are measured.
        extra: Fields that are sent with the norm; the same fields on every rank.

    Returns:
        The norm and the facts, equal on every rank.

    Note:
        Collective over the world.
    """
    extra = extra or StepMessage()
    verdict = _agree_on_piece(runtime, extra)
    comm = runtime.comm
    if comm.whole is comm:
        return verdict
    counted = zip(runtime.trained_groups, verdict.by_group, strict=True)
    message = StepMessage()
    message.add("flags", verdict.flags)
    message.add("square", [sum(square for group, square in counted if group.planned.is_counted)])
    message.add_all(extra)
    fields = _exchange(comm.whole, message, "gradient norm of all pieces")
    # `pieces` has the first rank of each model piece.
    total = sum(fields["square"][first][0] for first in comm.pieces)
    return replace(
        verdict,
        norm=_root(total),
        flags=StepFlags.of_ranks(fields["flags"]),
        fields={name: fields[name] for name in extra.names},
    )


def _agree_on_piece(runtime: Runtime, extra: StepMessage) -> Verdict:
    """Return the verdict of the ranks with one model piece. Collective among them."""
    groups = runtime.trained_groups
    comm = runtime.comm
    absent = crc32("\n".join(absent_among(groups)).encode())
    is_edited = any(group.gradient.is_edited for group in groups)
    own_flags = StepFlags(
        any_late=bool(runtime.executor.reductions.late),
        any_edited=is_edited,
        # No backward has produced a gradient, and the program has set none.
        is_idle=not runtime.step.has_gradients and not is_edited,
        any_graphless=runtime.step.is_graphless,
    )
    message = StepMessage()
    message.add("flags", own_flags)
    message.add("absent parameters", [absent])
    own_squares = squares_of([group.gradient.sum for group in groups])
    message.add("squares", itertools.chain.from_iterable(own_squares))
    message.add_all(extra)
    fields = _exchange(comm, message, "gradient norm")
    # For each group and rank, the sums of squares of all slices
    stops = list(itertools.accumulate(map(len, own_squares)))
    squares_by_group = [
        [row[stop - len(own) : stop] for row in fields["squares"]]
        for own, stop in zip(own_squares, stops, strict=True)
    ]
    owners = comm.owners  # for each slice, the ranks that hold it
    # The first owner of a slice provides its sum. A replicated gradient is equal on all ranks.
    sums = [
        sum(squares[ranks[0]][place] for place, ranks in enumerate(owners))
        for squares in squares_by_group
    ]
    flags = StepFlags.of_ranks(fields["flags"])
    # Late gradients are in no sum until they are reduced; the ranks agree again after that.
    if not flags.any_late and _differs_on_owners(groups, squares_by_group, comm):
        flags = flags._replace(any_edited=True)
    return Verdict(
        _root(sum(sums)),
        tuple(sums),
        flags,
        absences=tuple(int(value) for (value,) in fields["absent parameters"]),
        fields={name: fields[name] for name in extra.names},
    )


def _exchange(comm: Comm, message: StepMessage, what: str) -> dict[str, list[tuple[float, ...]]]:
    """Return the fields of all ranks. Collective if the communicator has several."""
    row = message.pack()
    if comm.size == 1:
        return message.unpack([row])
    rows = comm.all_gather_rows(torch.tensor(row, dtype=torch.float64), what)
    return message.unpack(rows.tolist())


def _root(square: float) -> float:
    """Return the square root, or NaN if the number is NaN."""
    return math.sqrt(square) if square >= 0 else math.nan


def _differs_on_owners(
    groups: Sequence[ParamGroup], squares_by_group: Sequence[Sequence[Sequence[float]]], comm: Comm
) -> bool:
    """Return whether ranks with the same gradient slice differ in its sum of squares.

    This happens if the program changed the gradient differently on two of them.
    """
    if comm.size == 1:
        return False
    everybody = range(comm.size)
    owners = comm.owners
    for group, squares in zip(groups, squares_by_group, strict=True):
        for place, owners_of_slice in enumerate(owners):
            holders = everybody if group.plan.sums_to_all else owners_of_slice
            # Compare as text, because NaN is not equal to itself
            if len({str(squares[rank][place]) for rank in holders}) > 1:
                return True
    return False


def absent_among(groups: Sequence[ParamGroup]) -> list[str]:
    """Return the names of the parameters that have no gradient, so they are not updated.

    They are frozen, or the program has set their `.grad` to None.

    Args:
        groups: The parameter groups to search.
    """
    return [
        group.members[number].name
        for group in groups
        for number in sorted(group.gradient.sum.absent or ())
    ]


def clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor by which gradients are multiplied to bound their norm.

    Args:
        norm: The global norm of the gradients.
        max_norm: The largest allowed norm; 0 switches clipping off.
    """
    if max_norm <= 0.0:
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))


def gradients_are_scaled(runtime: Runtime) -> bool:
    """Return whether the gradient buffers are multiplied by the loss scale.

    They are not if the optimizer exchanges momenta in place of gradients.
    """
    return all(group.gradient.reduction.is_scaled for group in runtime.trained_groups)
