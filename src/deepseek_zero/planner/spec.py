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

Which ranks a state is cut among is a set of axes, one per state: `SHARD_AXES`; replicas
(dp_replicate) are outside it and hold the same slices.  A sharded weight may have a second copy,
cut along `INNER_AXES` (hpZ).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

import torch

from ..base.mesh import INNER_AXES, SHARD_AXES
from ..precision.codecs import Blocks, Cast, Codec, Signs
from ..precision.feedback import Feedback
from ..precision.policy import Policy
from ..tiers.budget import NO_LIMIT
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


@dataclass(frozen=True)
class ShardPlan:
    """The row of one group of parameters.  `grad`, `master`, `moments` are None for frozen
    parameters.

    master_is_weight: fp32 training, where the master is the weight's own storage (its slice at
    stages 1 and 2).  The moments have the dtype the optimizer works in; the master may be stored
    otherwise (`master_is_split`, or rounded to the weight by chance, `master_is_rounded`).
    moments_kept: bits they are kept in (precision/compact.py).
    is_delayed: updates come one step late.  secondary: the second copy of a sharded weight, from
    which it is gathered
    while it stays as it is.  feedback: how each rank keeps what codes leave out of its gradients;
    None: it does not.
    exchange: momenta travel so, both ways, instead of gradients; None: gradients are reduced.
    """

    weight: Spec
    grad: Spec | None = None
    master: Spec | None = None
    moments: Spec | None = None
    master_is_weight: bool = False
    moments_format: str = "fp32"
    delayed_update: bool = False
    secondary: Spec | None = None
    feedback: Feedback | None = None
    exchange: Signs | None = None

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
    def sends_differences(self) -> bool:
        """Whether ranks that all hold the weight hear what the masters differ from it, as codes;
        what these leave out stays in the masters, and the weight is a state of its own.
        """
        return self.weight.placement is R and self.weight.wire is not None

    @property
    def sums_to_all(self) -> bool:
        """Whether every rank needs the whole sum of gradients (stage 0)."""
        return self.master is not None and self.master.placement is R

    @property
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
        return self.weight.placement is S and not self.is_offloaded and not self.delayed_update

    @property
    def delayed_grad(self) -> Spec | None:
        """The gradient of an earlier step, where its update comes late: this rank's slice, beside
        the one that is collected.
        """
        return (
            replace(self.grad, placement=S)
            if self.delayed_update and self.grad is not None
            else None
        )

    def promoted(self) -> ShardPlan:
        """The same row with an fp32 weight and gradient, and a whole fp32 master.  Moments stay
        where they are.
        """
        grad = replace(self.grad, dtype=torch.float32) if self.grad is not None else None
        secondary = (
            replace(self.secondary, dtype=torch.float32) if self.secondary is not None else None
        )
        weight = replace(self.weight, dtype=torch.float32)
        return replace(self, weight=weight, grad=grad, master=self.moments, secondary=secondary)

    def exchanging(self, codec: Signs | None) -> ShardPlan:
        """The same row with momenta that are exchanged as the codec says, in fp32 where gradients
        are; None: `self`.
        """
        if codec is None or self.grad is None:
            return self
        return replace(self, grad=replace(self.grad, dtype=torch.float32), exchange=codec)

    def rows(self) -> dict[str, str]:
        """State -> its row in words, "-" for none."""
        found = {
            "weight": self.weight,
            "grad": self.grad,
            "master": self.master,
            "moments": self.moments,
        }
        words = {state: str(spec) if spec is not None else "-" for state, spec in found.items()}
        if self.master_is_split:
            words["master"] = words["master"].replace("int16", "weight+int16")
        if self.delayed_grad is not None:
            words["grad"] += f" + {self.delayed_grad}"
        if self.feedback is not None:
            words["grad"] += f" + errors {self.feedback.codec}"
        if self.exchange is not None:
            words["grad"] += f", momenta sent as {self.exchange}"
        if self.secondary is not None:
            words["weight"] += f" + {self.secondary}"
        if self.moments_format != "fp32":
            words["moments"] = words["moments"].replace("float32", self.moments_format)
        return words


COLUMNS: dict[int, tuple[Placement, Placement, Placement]] = {
    #   weight grad master and moments
    0: (R, P, R),
    1: (R, P, S),
    2: (R, S, S),
    3: (S, S, S),
}


@dataclass(frozen=True)
class UnitTiers:
    """The memories of one unit: of its sharded weights between uses, and of its moments, own
    masters and gradients.
    """

    unit: str
    weights: Tier
    states: Tier


@dataclass(frozen=True)
class Compression:
    """How matrices are coded between ranks.

    weights, gradients: None: as they are.  frozen: as what sharded weights that nothing trains rest
    and are sent; None:
    as others.  inside: of coded gradients, the summands inside a host; None: as they are collected.
    min_numel: a unit whose matrices have fewer elements is not coded.  feedback: how ranks keep
    what codes leave out of gradients; None:
    they do not.  left_open: which of "weights" and "gradients" nobody stated, so that they were
    chosen by measurement;
    why: the numbers that decided.
    """

    weights: Blocks | None = None
    gradients: Blocks | None = None
    inside: Blocks | None = None
    frozen: Blocks | None = None
    min_numel: int = 0
    feedback: Feedback | None = None
    left_open: tuple[str, ...] = ()
    why: str = ""

    @property
    def codes_weights(self) -> bool:
        """Return whether matrices are laid out to be coded as weights, if only after a load."""
        return self.weights is not None or "weights" in self.left_open

    @property
    def codes_gradients(self) -> bool:
        """Return whether matrices are laid out to be coded as gradients, if only after a load."""
        return self.gradients is not None or "gradients" in self.left_open


@dataclass(frozen=True)
class PlanSettings:
    """What a plan is made from, free of any configuration file.  Sizes count elements.

    persistence_numel: parameters up to this size stay gathered (per parameter).
    persistence_total_numel: their sum.
    window_numel: gathered elements kept alive (stage3_max_live_parameters). keep_numel: a gathered
    unit stays if it is used again within this many elements (stage3_max_reuse_distance).
    ahead_numel: gathered before they are needed.
    bucket_numel: elements per reduction message. overlap: reduce while backward goes on. mean:
    divide sums by the
    ranks.  tunes: sizes that nobody stated, which may grow while that shortens waiting (tuning.py).
    weight_tier: the memory of sharded weights.  state_tier: of moments, masters of their own and
    gradient shards.  unit_tiers: units
    for which that differs.  device_bytes: states and buffers that the training device may hold;
    more is an error.
    delayed_update: updates come one step late.  reduces_once: gradients of all micro-batches are
    added up where they are made, and reduced once a step, also at stages 2 and 3 (pipelines, whose
    stages would wait for each other).
    row_parts: that a micro-batch is cut into by its rows, whose gradients add up as those of an
    accumulation do.
    layerwise_micro_batches: parts of a batch that each unit takes in turn, on one gather.
    secondary_ranks: neighbours among which a second copy of sharded weights is cut (hpZ); 1, or as
    many as share slices: there is none.
    compression: of matrices on their way between the ranks that share slices.
    ranks_per_host: sums are formed within runs of so many ranks first, then over the runs
    (comm/by_host.py); 1: in the order of ranks; None: left to whoever knows the hosts, and for a
    plan without them 1.
    """

    stage: int = 3
    policy: Policy = field(default_factory=Policy)
    accumulation: int = 1
    persistence_numel: int = 100_000
    persistence_total_numel: int = 2**63 - 1
    window_numel: int = 1_000_000_000
    keep_numel: int = 1_000_000_000
    ahead_numel: int = 50_000_000
    bucket_numel: int = 500_000_000
    overlap: bool = True
    mean: bool = True
    prescale: bool = False
    predivide: float = 1.0
    transport: str = "fastest"
    weight_tier: Tier = Tier.DEVICE
    state_tier: Tier = Tier.DEVICE
    unit_tiers: tuple[UnitTiers, ...] = ()
    device_bytes: int = NO_LIMIT
    delayed_update: bool = False
    reduces_once: bool = False
    row_parts: int = 1
    layerwise_micro_batches: int = 1
    secondary_ranks: int = 1
    compression: Compression = Compression()
    ranks_per_host: int | None = 1
    unused_is_error: bool = False
    tunes: tuple[str, ...] = ()
    unit_names: tuple[str, ...] = ()
    leaf_classes: tuple[str, ...] = ()
    leaf_names: tuple[str, ...] = ()
    leaf_suffixes: tuple[str, ...] = ()
    fuse_numel: int = 0

    @cached_property
    def streams_weights(self) -> bool:
        """Whether weights of some unit come out of another memory for each use."""
        return any(
            tier is not Tier.DEVICE
            for tier in (self.weight_tier, *(unit.weights for unit in self.unit_tiers))
        )

    def for_unit(self, name: str, *, full_precision: bool = False) -> PlanSettings:
        """Return what holds for one unit.  full_precision: for those of its parameters that never
        leave fp32.
        """
        usual = UnitTiers(name, self.weight_tier, self.state_tier)
        tiers = next((unit for unit in self.unit_tiers if unit.unit == name), usual)
        policy = self.policy.lifted() if full_precision else self.policy
        return replace(self, policy=policy, weight_tier=tiers.weights, state_tier=tiers.states)


def predivide_of(settings: PlanSettings, ranks: int) -> float:
    """Return what partial gradients are divided by before they travel; the rest of the mean follows
    the sum.

    ranks: whose gradients are added.
    """
    return float(ranks) if settings.prescale else settings.predivide


def gradient_wires(
    settings: PlanSettings, *, is_coded: bool, near: int
) -> tuple[Codec | None, Codec | None]:
    """Return how gradients are sent, and how inside a host where sums are formed by host; None: as
    they are collected.

    is_coded, near: as `plan_for` takes them.
    """
    compression = settings.compression if is_coded else Compression()
    reduced = Cast(settings.policy.reduce) if settings.policy.reduce is not None else None
    inside = compression.inside if near > 1 and compression.gradients is not None else None
    return compression.gradients or reduced, inside


def plan_for(
    settings: PlanSettings,
    dtype: torch.dtype,
    *,
    trainable: bool,
    persistent: bool,
    ranks: int,
    is_coded: bool = False,
    near: int = 1,
) -> ShardPlan:
    """Return the specs of parameters of one dtype.  dtype: what they were built with.  ranks: that
    share slices.
    is_coded: the compression of the settings is for them.  near: as `GroupPlan` has it.

    On one rank a gradient shard is the whole gradient, so it is accumulated where it lies (P) at
    every stage, unless it lies in another memory.  A master that is the weight itself lies where
    the weight does.  Weights that rest in
    another memory have no second copy: it would be on the device that they were to leave.
    """
    weight_place, grad_place, state_place = COLUMNS[
        2 if persistent and settings.stage == 3 else settings.stage
    ]
    weight_tier = settings.weight_tier if weight_place is S else Tier.DEVICE
    compression = settings.compression if is_coded else Compression()
    sends_differences = (
        trainable and weight_place is R and state_place is S and compression.weights is not None
    )
    coded_as = compression.weights if weight_place is S or sends_differences else None
    weight = Spec(weight_place, settings.policy.weight_dtype(dtype), weight_tier, coded_as)
    if weight_place is S and not trainable and compression.frozen is not None:
        weight = replace(weight, wire=compression.frozen, rests_as=compression.frozen)
    secondary = None
    if weight_place is S and weight_tier is Tier.DEVICE and 1 < settings.secondary_ranks < ranks:
        # It is what was decoded, and stays among neighbours.
        secondary = replace(weight, axes=INNER_AXES, wire=None, rests_as=None)
    if not trainable:
        return ShardPlan(weight, secondary=secondary)
    policy = settings.policy
    tier = settings.state_tier
    moments = Spec(state_place, policy.master_dtype(weight.dtype), tier)
    master = (
        moments if sends_differences else replace(moments, dtype=policy.stored_dtype(weight.dtype))
    )
    is_weight = master.dtype == weight.dtype and not sends_differences
    if is_weight:
        master = replace(master, tier=weight.tier)
    in_place = grad_place is P or settings.reduces_once or (ranks == 1 and tier is Tier.DEVICE)
    grad_dtype = policy.grad_dtype(weight.dtype, settings.accumulation * settings.row_parts)
    wire, inside = gradient_wires(settings, is_coded=is_coded, near=near)
    place, rests_on = (P, Tier.DEVICE) if in_place else (S, tier)
    grad = Spec(place, grad_dtype, rests_on, wire, wire_inside=inside)
    kept = policy.moments if moments.dtype == torch.float32 else "fp32"
    return ShardPlan(
        weight,
        grad,
        master,
        moments,
        is_weight,
        kept,
        settings.delayed_update,
        secondary,
        compression.feedback,
    )
