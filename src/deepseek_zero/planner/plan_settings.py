"""The settings of a plan, independent of any configuration file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..precision.codecs import Blocks
from ..precision.feedback import Feedback
from ..precision.policy import Policy
from ..tiers.budget import NO_LIMIT
from ..tiers.tier import Tier


@dataclass(frozen=True)
class UnitTiers:
    """The memories in which one unit's weights and states are kept.

    Attributes:
        unit: The name of the unit's module.
        weights: The memory of the sharded weights between uses.
        states: The memory of moments, gradients, and main weights with their own storage.
    """

    unit: str
    weights: Tier
    states: Tier


@dataclass(frozen=True)
class Compression:
    """How matrices are compressed in messages between ranks.

    Attributes:
        weights: The codec of weights; None sends them unchanged.
        gradients: The codec of gradients; None sends them unchanged.
        frozen: The codec in which sharded frozen weights are kept and sent; None treats them like
            other weights.
        inside: The codec of gradients inside a host, if gradients are quantized; None sends them
            unchanged.
        min_numel: Units whose matrices have fewer elements are not quantized.
        feedback: How ranks keep the rounding errors of quantized gradients; None drops them.
        left_open: Which of "weights" and "gradients" were chosen by measurement, since nothing was
            configured.
        why: The measurements from which these were chosen, as text.
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
        """Whether the layout of matrices allows quantized weights, now or after a load."""
        return self.weights is not None or "weights" in self.left_open

    @property
    def codes_gradients(self) -> bool:
        """Whether the layout of matrices allows quantized gradients, now or after a load."""
        return self.gradients is not None or "gradients" in self.left_open


@dataclass(frozen=True)
class PlanSettings:
    """The settings of a plan. Sizes count elements, except `device_bytes`.

    Attributes:
        persistence_numel: Parameters of at most this size stay gathered.
        persistence_total_numel: The largest number of elements of all such parameters together.
        window_numel: The largest number of gathered elements at a time
            (stage3_max_live_parameters).
        keep_numel: A gathered unit stays if it is used again within this many elements
            (stage3_max_reuse_distance).
        ahead_numel: The elements gathered before they are needed.
        bucket_numel: The elements of a reduction message.
        overlap: Whether to reduce while backward runs.
        mean: Whether to divide gradient sums by the number of data-parallel ranks.
        tunes: The names of the sizes that were not configured and may be adjusted during the run.
        weight_tier: The memory of sharded weights.
        state_tier: The memory of moments, gradient shards, and main weights with their own storage.
        unit_tiers: The memories of units for which they differ.
        device_bytes: The largest number of bytes of states and buffers on the training device.
        delayed_update: Whether each update runs one step late.
        reduces_once: Whether to accumulate the gradients of micro-batches locally, and reduce them
            once per step, also at ZeRO stages 2 and 3. Pipelines need this, because their stages
            would otherwise wait for each other.
        row_parts: The number of parts into which a micro-batch is cut by rows; their gradients are
            accumulated.
        layerwise_micro_batches: The number of micro-batches that each unit processes one after the
            other, with one gather.
        secondary_ranks: The number of neighbouring ranks that share a second copy of sharded
            weights (hpZ). There is none if it is 1, or the number of ranks of the shard group.
        compression: The compression of matrices between the ranks of the shard group.
        ranks_per_host: The number of consecutive ranks on one host, over which gradients are summed
            first, before the sums of hosts are added. 1 adds the gradients in rank order. None
            means that the number is set when the hosts are known.
        stage: The ZeRO stage, 0 to 3.
        policy: The dtypes of weights, gradients, sums and moments.
        accumulation: The number of micro-batches of a step.
        prescale: Whether to divide gradients before they are summed, not after it.
        predivide: The part of the divisor of the mean that is applied before the sum.
        transport: The name of the transport between ranks.
        unused_is_error: Whether to raise an error if a trainable parameter gets no gradient.
        unit_names: The classes or names of the modules that are units; empty to search for them.
        leaf_classes: The classes of modules that are not divided into units.
        leaf_names: The full names of modules that are not divided into units.
        leaf_suffixes: The last parts of names of modules that are not divided into units.
        fuse_numel: Blocks whose layers have on average at most this many elements are not divided
            into units.
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
        """Whether weights of some unit are fetched from another memory for each use."""
        return any(
            tier is not Tier.DEVICE
            for tier in (self.weight_tier, *(unit.weights for unit in self.unit_tiers))
        )

    def for_unit(self, name: str, *, full_precision: bool = False) -> PlanSettings:
        """Return the settings of one unit.

        Args:
            name: The name of the unit's module.
            full_precision: Whether to return the settings of the unit's parameters that always stay
                in fp32.
        """
        usual = UnitTiers(name, self.weight_tier, self.state_tier)
        tiers = next((unit for unit in self.unit_tiers if unit.unit == name), usual)
        policy = self.policy.lifted() if full_precision else self.policy
        return replace(self, policy=policy, weight_tier=tiers.weights, state_tier=tiers.states)


@dataclass(frozen=True)
class Machine:
    """The assumptions of a plan about the machine.

    Attributes:
        reads_in_place: Whether the ranks of the shard group are on one host and read each other's
            memory, so a gather needs no buffer.
        replicas_read_in_place: As `reads_in_place`, for the ranks that hold the same slices.
        near_read_in_place: As `reads_in_place`, for the ranks of one host, if gradients are summed
            within each host first.
        far_read_in_place: As `reads_in_place`, for the ranks with the same position on different
            hosts.
        budgets: For each memory, the bytes for states and buffers of one rank; used if the settings
            leave the choice of memory open.
        spans_hosts: Whether the ranks of the shard group are on several hosts.
    """

    reads_in_place: bool = False
    budgets: Mapping[Tier, int] = field(default_factory=dict)
    replicas_read_in_place: bool = False
    near_read_in_place: bool = False
    far_read_in_place: bool = False
    spans_hosts: bool = False

    @property
    def most_reductions(self) -> int:
        """The number of units whose gradients are reduced at the same time.

        Between hosts it is more than one: the link would be idle while one sum is formed and the
        next gradient is collected and coded.
        """
        return 2 if self.spans_hosts else 1
