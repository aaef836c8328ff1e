"""Agreement of all ranks on a step before its update, such as the gradient norm."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from zlib import crc32

from torch import Tensor

from ..sharding.grad_sum import squares_of
from ..sharding.param_group import ParamGroup
from ..sharding.runtime import Runtime
from .step_message import Fields, StepMessage

SCHEDULED = ("lr", "weight_decay", "momentum", "betas")  # what schedules of torch change


class StepFlags(NamedTuple):
    """Facts about a step that each rank knows of itself, and then of all ranks.

    Attributes:
        any_late: On some rank, gradients arrived after their unit had been reduced.
        any_edited: The program changed gradients on a rank.
        is_idle: No rank has a gradient, so nothing can be updated.
        any_graphless: On some rank, `backward` was called with a loss that requires no gradient.
    """

    any_late: bool = False
    any_edited: bool = False
    is_idle: bool = False
    any_graphless: bool = False

    @classmethod
    def of_ranks(cls, rows: Sequence[Sequence[float]]) -> StepFlags:
        """Return the flags of all ranks together, from those of each rank as numbers."""
        late, edited, idle, graphless = zip(*rows, strict=True)
        return cls(any(late), any(edited), all(idle), any(graphless))


@dataclass(frozen=True)
class Verdict:
    """The gradient norm and other facts about a step, equal on all ranks.

    Attributes:
        norm: The norm of the gradient, still multiplied by the loss scale.
        by_group: The sum of squares of each trained group.
        flags: What happened on any rank.
        facts_differ: Whether ranks differ in the parameters without gradients, or in the scheduled
            values of their parameter groups.
        fields: The fields of the step message by name; each has one entry per rank of the world.
    """

    norm: float
    by_group: tuple[float, ...]
    flags: StepFlags
    facts_differ: bool
    fields: Fields

    @property
    def is_finite(self) -> bool:
        """Whether the gradient norm is neither infinite nor NaN."""
        return math.isfinite(self.norm)


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
    overflow: bool
    number: int


def agree_on_norm(runtime: Runtime, options: list[dict[str, Any]], extra: StepMessage) -> Verdict:
    """Compute the gradient norm of a model, and exchange the other facts about the step.

    The squares of all slices are added in a fixed order, in float64, so every rank at every stage
    computes the same bits.

    Args:
        runtime: The runtime of the wrapped model, whose gradients are measured.
        options: The parameter groups of the optimizer, whose scheduled values are compared.
        extra: Fields that are sent with the norm; the same fields on every rank.

    Note:
        Collective: every rank with the same parameters must call it.
    """
    groups = runtime.trained_groups
    is_edited = any(group.gradient.is_edited for group in groups)
    message = StepMessage()
    message.add(
        "flags",
        StepFlags(
            any_late=bool(runtime.reductions.late),
            any_edited=is_edited,
            # No backward has produced a gradient, and the program has set none.
            is_idle=not runtime.step.has_gradients and not is_edited,
            any_graphless=runtime.step.is_graphless,
        ),
    )
    facts: list[Any] = list(absent_among(groups))
    for each in options:
        facts += [value for value in map(each.get, SCHEDULED) if not isinstance(value, Tensor)]
    message.add("facts", [crc32(str(facts).encode())])
    sums_of_squares = squares_of([group.gradient.sum for group in groups])
    message.add("squares", itertools.chain.from_iterable(sums_of_squares))
    message.add_all(extra)
    fields = message.exchange(runtime.comm, "gradient norm")
    owners = runtime.comm.owners  # for each slice, the ranks that hold it
    # For each group and rank, the sums of squares of all slices
    squares_by_group = [
        [row[first : first + len(owners)] for row in fields["squares"]]
        for first in range(0, len(groups) * len(owners), len(owners))
    ]
    # The first owner of a slice provides its sum. A replicated gradient is equal on all ranks.
    sums = [
        sum(squares[ranks[0]][place] for place, ranks in enumerate(owners))
        for squares in squares_by_group
    ]
    flags = StepFlags.of_ranks(fields["flags"])
    # Late gradients are in no sum until they are reduced; the ranks agree again after that.
    if not flags.any_late and _differs_on_owners(groups, squares_by_group, owners):
        flags = flags._replace(any_edited=True)
    return Verdict(root_of(sum(sums)), tuple(sums), flags, len(set(fields["facts"])) > 1, fields)


def root_of(square: float) -> float:
    """Return the square root, or NaN if the number is NaN."""
    return math.sqrt(square) if square >= 0 else math.nan


def _differs_on_owners(
    groups: Sequence[ParamGroup],
    squares_by_group: Sequence[Sequence[Sequence[float]]],
    owners: Sequence[Sequence[int]],
) -> bool:
    """Return whether ranks with the same gradient slice differ in its sum of squares."""
    for group, squares in zip(groups, squares_by_group, strict=True):
        for place, owners_of_slice in enumerate(owners):
            holders = range(len(squares)) if group.plan.sums_to_all else owners_of_slice
            # Compare as text, because NaN is not equal to itself
            if len({str(squares[rank][place]) for rank in holders}) > 1:
                return True
    return False


def absent_among(groups: Sequence[ParamGroup]) -> list[str]:
    """Return the names of the parameters that have no gradient, so they are not updated."""
    return [
        group.members[number].name
        for group in groups
        for number in sorted(group.gradient.sum.absent or ())
    ]


def clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor that bounds the norm of gradients; a `max_norm` of 0 does not clip."""
    if max_norm <= 0.0:
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))
