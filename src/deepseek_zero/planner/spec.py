r"""ZeRO as data.  Where a state's elements are over the ranks that share it, and what changes one
placement into another:

    from \ to    REPLICATE            SHARD
    SHARD        all-gather           (same)
    PARTIAL      all-reduce           reduce-scatter
    REPLICATE    (same)               local slice

Carried out by `move` in sharding/buffer.py.

Four kinds of state, each with a placement, a dtype and a tier:

            Z0   Z1   Z2   Z3
 weight      R    R    R    S
 grad        P    P    S    S      (Z0 is reduced to R, Z1 to this rank's slice of P)
 master      R    S    S    S
 moments     R    S    S    S

A stage chooses a column; tiny parameters (`persistent`) use column Z2 at stage 3; frozen ones have
a weight row only.

Which ranks a state is cut among is a set of axes, one per state: `SHARD_AXES`. Ranks outside it
hold the same slices. What extensions add to a row is in planner/extras.py, how rows are made from
settings in planner/row_of_group.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Self, TypeVar

import torch

from ..base.mesh import SHARD_AXES
from ..precision.codecs import Blocks, Cast, Codec
from ..tiers.tier import Tier


class Placement(Enum):
    """One letter each in tables: R, S, P."""

    REPLICATE = "R"  # every rank holds every element
    SHARD = "S"  # rank r holds slice r
    PARTIAL = "P"  # every rank holds a summand of every element


class Movement(Enum):
    """What `move` does; the names of torch.distributed."""

    NOTHING = "nothing"
    ALL_GATHER = "all-gather"
    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    LOCAL_SLICE = "local slice"


R = Placement.REPLICATE
S = Placement.SHARD
P = Placement.PARTIAL

TRANSITIONS: dict[tuple[Placement, Placement], Movement] = {
    (S, R): Movement.ALL_GATHER,
    (S, S): Movement.NOTHING,
    (P, R): Movement.ALL_REDUCE,
    (P, S): Movement.REDUCE_SCATTER,
    (R, R): Movement.NOTHING,
    (R, S): Movement.LOCAL_SLICE,
}


@dataclass(frozen=True)
class Spec:
    """How one state of one group of parameters is kept.

    wire: how it is written for its way between ranks, None: as it is.  axes: over whose ranks it is
    cut, where it is.
    wire_inside: of summands, how they are written for their way inside a host, where sums are
    formed by host; None: as
    they are collected.  rests_as: codes that a rank keeps in place of a slice's elements, which are
    decoded for every use; the dtype is then that of the decoded.
    """

    placement: Placement
    dtype: torch.dtype
    tier: Tier = Tier.DEVICE
    wire: Codec | None = None
    axes: tuple[str, ...] = SHARD_AXES
    wire_inside: Codec | None = None
    rests_as: Blocks | None = None

    def numel(self, padded_numel: int, ranks: int) -> int:
        """Elements of a flat buffer of `padded_numel` that one rank holds.  ranks: along the
        axes.
        """
        return padded_numel // ranks if self.placement is S else padded_numel

    def gathered(self) -> Spec:
        """Return the spec of all elements on every rank: themselves, whatever they rest as where
        they are cut.
        """
        return replace(self, placement=R, rests_as=None)

    @property
    def resting(self) -> Codec:
        """As what the elements rest: codes, or numbers of the dtype."""
        return self.rests_as or Cast(self.dtype)

    def __str__(self) -> str:
        among = "" if self.axes == SHARD_AXES else f" {'+'.join(self.axes)}"
        coded = f" kept as {self.rests_as}" if self.rests_as is not None else ""
        coded += f" sent as {self.wire}" if isinstance(self.wire, Blocks) else ""
        coded += f", inside a host as {self.wire_inside}" if self.wire_inside is not None else ""
        return (
            f"{self.placement.value} {str(self.dtype).removeprefix('torch.')} "
            f"{self.tier.value}{among}{coded}"
        )


class Extra:
    """What an extension adds to a row of the table: a state of its own, or a rule for one."""

    #: The state of the table that it belongs to.
    state = ""
    #: Updates come later than their step.
    updates_late = False

    def promoted(self) -> Self:
        """Return the same extra of a row with an fp32 weight and gradient."""
        return self

    def words(self, plan: ShardPlan) -> str:
        """Return what reports append to the words of its state."""
        return ""


Kind = TypeVar("Kind", bound=Extra)


@dataclass(frozen=True)
class ShardPlan:
    """The row of one group of parameters.  `grad`, `master`, `moments` are None for frozen
    parameters.

    The moments have the dtype that the optimizer works in. The main weight may be stored otherwise
    (`master_is_split`, or rounded to the weight at random, `master_is_rounded`).

    Attributes:
        master_is_weight: fp32 training: the main weight is the weight's own storage (its slice at
            stages 1 and 2).
        moments_format: The bits in which moments are kept (precision/compact.py).
        extras: What extensions add (planner/extras.py).
    """

    weight: Spec
    grad: Spec | None = None
    master: Spec | None = None
    moments: Spec | None = None
    master_is_weight: bool = False
    moments_format: str = "fp32"
    extras: tuple[Extra, ...] = ()

    def extra(self, kind: type[Kind]) -> Kind | None:
        """Return the extra of this class; None without one."""
        return next((extra for extra in self.extras if isinstance(extra, kind)), None)

    @property
    def master_is_rounded(self) -> bool:
        """Whether there is no master but the weight, in fewer bits than the optimizer works in."""
        return (
            self.master_is_weight
            and self.moments is not None
            and self.moments.dtype != self.weight.dtype
        )

    @property
    def master_is_split(self) -> bool:
        """Whether the master is the live bf16 weight and, in its own storage, 16 more bits
        (precision/policy.py).
        """
        return self.master is not None and self.master.dtype == torch.int16

    @cached_property
    def summand_dtype(self) -> torch.dtype:
        """The dtype in which a rank collects what it adds to the sum of gradients."""
        assert self.grad is not None
        if self.grad.placement is not S:
            return self.grad.dtype
        return self.grad.wire.dtype if isinstance(self.grad.wire, Cast) else self.weight.dtype

    @property
    def grad_wire(self) -> Codec:
        """How gradients are sent."""
        assert self.grad is not None
        return self.grad.wire or Cast(self.summand_dtype)

    @cached_property
    def weight_is_independent(self) -> bool:
        """Whether the weight is not the main weight's cast, but a state of its own: ranks that all
        hold it send each other coded changes.
        """
        return self.weight.placement is R and self.weight.wire is not None

    @property
    def sums_to_all(self) -> bool:
        """Whether every rank needs the whole sum of gradients (stage 0)."""
        return self.master is not None and self.master.placement is R

    @cached_property
    def is_offloaded(self) -> bool:
        """Whether any state rests in another memory than the training device's."""
        specs = (self.weight, self.grad, self.master, self.moments)
        return any(spec is not None and spec.tier is not Tier.DEVICE for spec in specs)

    @property
    def uses_disk(self) -> bool:
        """Whether any state rests on a disk."""
        specs = (self.weight, self.grad, self.master, self.moments)
        return any(spec is not None and spec.tier is Tier.NVME for spec in specs)

    @cached_property
    def moments_external(self) -> bool:
        """Whether moments are kept for the optimizer instead of by it."""
        return self.moments is not None and (
            self.moments.tier is not Tier.DEVICE or self.moments_format != "fp32"
        )

    @property
    def is_updated_on_host(self) -> bool:
        """Whether the host updates the group: its moments are not in the training device's
        memory.
        """
        return self.moments is not None and self.moments.tier is not Tier.DEVICE

    @property
    def rests_elsewhere(self) -> bool:
        """Whether weights and moments rest in another memory, so that nobody sees a weight without
        asking for it.
        """
        tiers = [spec.tier for spec in (self.weight, self.moments) if spec is not None]
        return Tier.DEVICE not in tiers

    @property
    def rests_in_slices(self) -> bool:
        """Whether a rank has slices of every state, on the training device, so that nobody sees a
        weight without asking for it.
        """
        updates_late = any(extra.updates_late for extra in self.extras)
        return self.weight.placement is S and not self.is_offloaded and not updates_late

    def promoted(self) -> ShardPlan:
        """The same row with an fp32 weight and gradient, and a whole fp32 master.  Moments stay
        where they are.
        """
        grad = replace(self.grad, dtype=torch.float32) if self.grad is not None else None
        weight = replace(self.weight, dtype=torch.float32)
        extras = tuple(extra.promoted() for extra in self.extras)
        return replace(self, weight=weight, grad=grad, master=self.moments, extras=extras)


COLUMNS: dict[int, tuple[Placement, Placement, Placement]] = {
    #   weight grad master and moments
    0: (R, P, R),
    1: (R, P, S),
    2: (R, S, S),
    3: (S, S, S),
}
