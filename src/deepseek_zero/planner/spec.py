r"""ZeRO as a table: the placement, dtype and memory of each state.

A placement says which elements of a state each rank holds. `move` in sharding/move.py changes one
placement into another with these collectives:

    from \ to    REPLICATE            SHARD
    SHARD        all-gather           (same)
    PARTIAL      all-reduce           reduce-scatter
    REPLICATE    (same)               local slice

There are four kinds of state, each with a placement, a dtype and a tier (memory):

            Z0   Z1   Z2   Z3
 weight      R    R    R    S
 grad        P    P    S    S      (Z0 is reduced to R, Z1 to this rank's slice of P)
 master      R    S    S    S
 moments     R    S    S    S

A stage chooses a column. At stage 3, tiny parameters (`persistent`) use column Z2. Frozen
parameters have only a weight.

A state is sharded over the ranks along the mesh axes `SHARD_AXES`; the other ranks hold the same
slices. planner/row_of_group.py makes rows from settings, and planner/extras.py has the additions of
extensions to a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Self, TypeVar

import torch

from ..precision.codecs import Blocks, Cast, Codec
from ..tiers.tier import Tier


class Placement(Enum):
    """Kinds of placement: each rank holds all elements, a slice, or a partial sum."""

    REPLICATE = "R"  # every rank holds every element
    SHARD = "S"  # rank r holds slice r
    PARTIAL = "P"  # every rank holds a summand of every element


class Movement(Enum):
    """The collectives with which `move` changes a placement, named as in torch.distributed."""

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
    """The placement, dtype and memory of one state of a parameter group.

    Attributes:
        placement: Which elements each rank holds.
        dtype: The dtype of the elements; if `stored_as` is set, of the decoded elements.
        tier: The memory that holds them.
        wire: The codec of messages between ranks; None sends the elements unchanged.
        wire_inside: The codec of partial gradients inside a host, if gradients are summed within
            each host first; None sends them unchanged.
        stored_as: The codec of a rank's slice between uses; None stores the elements unchanged.
    """

    placement: Placement
    dtype: torch.dtype
    tier: Tier = Tier.DEVICE
    wire: Codec | None = None
    wire_inside: Codec | None = None
    stored_as: Blocks | None = None

    def numel(self, padded_numel: int, ranks: int) -> int:
        """Return how many elements of a flat buffer one of `ranks` ranks holds."""
        return padded_numel // ranks if self.placement is S else padded_numel

    def gathered(self) -> Spec:
        """Return the spec of the state after an all-gather: replicated and decoded."""
        return replace(self, placement=R, stored_as=None)


class Extra:
    """An addition of an extension to the plan of one state, such as a second weight copy.

    Attributes:
        state: The name of the state that the addition belongs to: "weight" or "grad".
        updates_late: Updates run in a later step.
    """

    state = ""
    updates_late = False

    def promoted(self) -> Self:
        """Return the same addition for a group whose weight and gradient are switched to fp32."""
        return self

    def words(self, plan: ShardPlan) -> str:
        """Return the text that is appended to the description of `state` in reports."""
        return ""


Kind = TypeVar("Kind", bound=Extra)


@dataclass(frozen=True)
class ShardPlan:
    """The placement, dtype and memory of the four states of one parameter group.

    `grad`, `master` and `moments` are None for frozen parameters. Moments have the dtype in which
    the optimizer computes. If `master_is_split`, the main weight is split into the weight and its
    remaining bits. If `master_is_rounded`, it is the weight itself, in a narrower dtype.

    Attributes:
        weight: The weight that the model computes with.
        grad: The gradient, between backward and update.
        master: The main weight, which the optimizer updates.
        moments: The element-wise states of the optimizer.
        master_is_weight: Whether the main weight is the storage of the weight (its slice at stages
            1 and 2), as in fp32 training.
        moments_format: The format in which moments are kept (precision/compact.py).
        extras: The additional states that extensions keep for the group (planner/extras.py).
    """

    weight: Spec
    grad: Spec | None = None
    master: Spec | None = None
    moments: Spec | None = None
    master_is_weight: bool = False
    moments_format: str = "fp32"
    extras: tuple[Extra, ...] = ()

    def extra(self, kind: type[Kind]) -> Kind | None:
        """Return the additional state of a given class, or None if the group has none."""
        return next((extra for extra in self.extras if isinstance(extra, kind)), None)

    @property
    def master_is_rounded(self) -> bool:
        """Whether the main weight is the weight, in a narrower dtype than the update."""
        return (
            self.master_is_weight
            and self.moments is not None
            and self.moments.dtype != self.weight.dtype
        )

    @property
    def master_is_split(self) -> bool:
        """Whether the main weight is stored in two halves.

        These are the bf16 weight and a buffer of 16 more bits per element (precision/policy.py).
        """
        return self.master is not None and self.master.dtype == torch.int16

    @cached_property
    def summands(self) -> Spec:
        """The placement, dtype and memory of a rank's own gradient before the reduction."""
        assert self.grad is not None
        dtype = self.grad.dtype
        if self.grad.placement is S:
            wire = self.grad.wire
            dtype = wire.dtype if isinstance(wire, Cast) else self.weight.dtype
        return replace(self.grad, placement=P, dtype=dtype)

    @property
    def grad_wire(self) -> Codec:
        """The codec in which gradients are sent."""
        assert self.grad is not None
        return self.grad.wire or Cast(self.summands.dtype)

    @cached_property
    def weight_is_independent(self) -> bool:
        """Whether the weight is an independent state instead of a cast of the main weight.

        Ranks that all hold the weight then send each other quantized changes of it.
        """
        return self.weight.placement is R and self.weight.wire is not None

    @property
    def sums_to_all(self) -> bool:
        """Whether every rank needs the whole sum of gradients, as at stage 0."""
        return self.master is not None and self.master.placement is R

    @cached_property
    def is_offloaded(self) -> bool:
        """Whether a state is kept in another memory than the training device's."""
        specs = (self.weight, self.grad, self.master, self.moments)
        return any(spec is not None and spec.tier is not Tier.DEVICE for spec in specs)

    @cached_property
    def moments_external(self) -> bool:
        """Whether this library stores the moments instead of the optimizer."""
        return self.moments is not None and (
            self.moments.tier is not Tier.DEVICE or self.moments_format != "fp32"
        )

    @property
    def is_updated_on_host(self) -> bool:
        """Whether the host updates the group, as its moments are not on the device."""
        return self.moments is not None and self.moments.tier is not Tier.DEVICE


COLUMNS: dict[int, tuple[Placement, Placement, Placement]] = {
    #   weight grad master and moments
    0: (R, P, R),
    1: (R, P, S),
    2: (R, S, S),
    3: (S, S, S),
}
