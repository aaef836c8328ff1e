"""What a plan is made from, free of any configuration file."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from ..precision.codecs import Blocks
from ..precision.feedback import Feedback
from ..precision.policy import Policy
from ..tiers.budget import NO_LIMIT
from ..tiers.tier import Tier


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
