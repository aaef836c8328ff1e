"""The bytes that a rank sends and keeps for the axes that cut a model.

These are messages between pipeline stages ("pp"), sums of layers ("tp"), and attention over shared
sequences ("sp"). pipeline/planned.py and parallel/volume.py compute the numbers; `Plan` reports
them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..base.quantities import format_bytes
from .units import UnitPlan, trained_groups

HEADER_BYTES = 1024  # describe a message between stages, once for each form of inputs
# Four flags and a sum of squares, sent to all other ranks once a step if there are several pieces
VERDICT_BYTES = 40
LOSS_BYTES = 8
GENERATOR_BYTES = 8  # digest of one rank's random generators


@dataclass(frozen=True)
class PipelinePlan:
    """The stages, micro-batches and messages of one rank of a pipeline in a step.

    Attributes:
        schedule: The name of the schedule (pipeline/schedule.py).
        rank: The coordinate along "pp".
        virtual: The number of stages per rank (virtual pipeline stages).
        group: The number of micro-batches that a rank runs in one stage before its next stage; None
            for the default of the schedule.
        micro_batches: The number of micro-batches of a step.
        placement: For each stage, its rank.
        blocks: For each stage, the full names of its modules.
        in_flight: For each rank, the largest number of micro-batches between forward and backward.
            As many send buffers exist in each direction.
        gathers: For each stage of this rank, how often its weights are gathered in a step.
        of_all: How often weights that several stages use are gathered in a step.
        outputs: For each pair of consecutive stages, the bytes of one micro-batch's activations;
            empty if they are unknown.
        grads: For each pair of consecutive stages, the bytes of the gradients of these activations.
        sample: A description of the micro-batch with which `outputs` and `grads` were measured.
        ties: For each shared parameter, the stages that share it.
    """

    schedule: str
    virtual: int
    group: int | None
    micro_batches: int
    rank: int
    placement: tuple[int, ...]
    blocks: tuple[tuple[str, ...], ...]
    in_flight: tuple[int, ...]
    gathers: Mapping[int, int]
    of_all: int = 1
    outputs: tuple[int, ...] = ()
    grads: tuple[int, ...] = ()
    sample: str = ""
    ties: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """The number of pipeline ranks."""
        return len(self.in_flight)

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of this rank, ascending."""
        return tuple(stage for stage, rank in enumerate(self.placement) if rank == self.rank)

    def seen(self, outputs: Sequence[int], grads: Sequence[int]) -> PipelinePlan:
        """Return a copy of the plan with the message sizes that a step has measured.

        Args:
            outputs: For each pair of consecutive stages, the bytes of one micro-batch's
                activations.
            grads: For each pair of consecutive stages, the bytes of the gradients of these
                activations.
        """
        return replace(self, outputs=tuple(outputs), grads=tuple(grads), sample="of the last step")

    def boundaries(self) -> list[tuple[int, int, int, int]]:
        """Return the pairs of consecutive stages of which exactly one is on this rank.

        Returns:
            For each pair: the number of its first stage, the bytes of activations that this rank
            sends, the bytes of gradients that it sends, and the other rank. One of the two byte
            counts is 0.
        """
        found = []
        for number, (output, grad) in enumerate(zip(self.outputs, self.grads, strict=True)):
            before = self.placement[number]
            behind = self.placement[number + 1]
            if before != behind and before == self.rank:
                found.append((number, output, 0, behind))
            elif before != behind and behind == self.rank:
                found.append((number, 0, grad, before))
        return found

    @property
    def sent_bytes(self) -> int:
        """The bytes of activations and their gradients that this rank sends in a step."""
        return self.micro_batches * sum(output + grad for _, output, grad, _ in self.boundaries())

    @property
    def header_bytes(self) -> int:
        """The bytes of message headers that this rank sends in the first step."""
        return (
            self.micro_batches
            * HEADER_BYTES
            * sum(output > 0 for _, output, _, _ in self.boundaries())
        )

    @property
    def slot_bytes(self) -> int:
        """The bytes of the send buffers of this rank.

        Each direction of each pair of ranks has one buffer per micro-batch in flight, each of the
        size of the largest message.
        """
        lanes: dict[tuple[int, int, bool], int] = {}
        for number, output, grad, _ in self.boundaries():
            lane = (self.placement[number], self.placement[number + 1], output > 0)
            lanes[lane] = max(lanes.get(lane, 0), output + grad)
        return self.in_flight[self.rank] * sum(lanes.values())

    def tie_bytes(self, units: Sequence[UnitPlan]) -> int:
        """Return the bytes of gradients that this rank sends for parameters of several stages.

        Args:
            units: The planned units of the model.
        """
        sharers = {
            name: len({self.placement[stage] for stage in stages})
            for name, stages in self.ties.items()
        }
        return sum(
            (sharers[slot.name] - 1) * slot.numel * group.plan.grad.dtype.itemsize
            for group in trained_groups(units)
            for slot in group.layout.slots
            if slot.name in sharers and group.plan.grad is not None
        )

    def gathers_of(self, unit: str) -> int:
        """Return how often a unit is gathered in a step.

        Args:
            unit: The name of the unit's module.
        """
        inside = stages_with(unit, {stage: self.blocks[stage] for stage in self.stages})
        return self.gathers[inside[0]] if len(inside) == 1 else self.of_all

    def explain(self) -> list[str]:
        """Return lines that describe the stages and their messages, for reports."""
        many = self.micro_batches
        own = self.stages
        lines = [
            f"pipeline: {self.schedule}, {len(self.placement)} stages on {self.ranks} ranks, "
            f"{many} micro-batch(es) per step, at most {self.in_flight[self.rank]} in flight here"
        ]
        for stage in own:
            blocks = self.blocks[stage]
            told = (
                f"{blocks[0]} to {blocks[-1]} ({len(blocks)})"
                if len(blocks) > 1
                else "".join(blocks)
            )
            lines.append(f"  stage {stage}: {told}")
        for number, output, grad, there in self.boundaries():
            what, to = ("activations", number + 1) if output else ("gradients", number)
            lines.append(
                f"  {what} to stage {to} on pipeline rank {there}: {format_bytes(output + grad)} "
                "per "
                f"micro-batch, {self.sample}"
            )
        if not self.outputs:
            lines.append("  messages between stages: known after the first step")
        lines += [
            f"  {name} is shared by the stages {', '.join(map(str, stages))}: its gradients are "
            "summed"
            for name, stages in self.ties.items()
            if not set(stages).isdisjoint(own)
        ]
        return lines


def stages_with(unit: str, blocks: Mapping[int, Collection[str]]) -> list[int]:
    """Return the stages that have a unit, in the order of `blocks`.

    Args:
        unit: The name of the unit's module.
        blocks: The names of the modules of each stage.
    """
    return [
        stage
        for stage, names in blocks.items()
        if any(unit == name or unit.startswith(f"{name}.") for name in names)
    ]


@dataclass(frozen=True)
class TensorPlan:
    """The bytes that one rank sends and keeps for tensor parallelism ("tp").

    Attributes:
        ranks: The number of ranks along the axis.
        share_bytes: The bytes that this rank sends for every `ranks` tokens, in forward and
            backward.
        tokens: The number of tokens of a micro-batch; None if it is unknown.
        micro_batches: The number of micro-batches of a step.
        scratch_bytes: The bytes of the scratch buffer in which sums over ranks are computed.
        stages: The number of pipeline stages of this rank, each with a separate forward.
    """

    ranks: int
    share_bytes: int
    tokens: int | None = None
    micro_batches: int = 1
    scratch_bytes: int = 0
    stages: int = 1

    @property
    def sent_bytes(self) -> int:
        """The bytes that this rank sends for its layers in a step; 0 if unknown."""
        return self.micro_batches * self.share_bytes * (self.tokens or 0) // self.ranks

    @property
    def sent_rows(self) -> int:
        """The bytes that this rank sends in a step to compare random generators in each forward."""
        return GENERATOR_BYTES * (self.ranks - 1) * self.micro_batches * self.stages

    def explain(self) -> list[str]:
        """Return lines that describe the bytes of the axis, for reports."""
        known = f", {self.tokens:,} tokens per micro-batch" if self.tokens is not None else ""
        sent = format_bytes(self.share_bytes // self.ranks)
        return [f"tensor parallel: {self.ranks} ranks, {sent} sent per token{known}"]


@dataclass(frozen=True)
class SequencePlan:
    """The bytes that one rank sends and keeps for sequence parallelism ("sp").

    Attributes:
        ranks: The number of ranks along the axis.
        attention: How attention reads other ranks' tokens; empty if the model exchanges them
            itself.
        token_bytes: The bytes that this rank sends for each of its tokens, forward and backward;
            None if the configuration of the model does not define them.
        row_bytes: The bytes that this rank sends for the loss of a micro-batch.
        tokens: The number of this rank's tokens of a micro-batch; None if it is unknown.
        micro_batches: The number of micro-batches of a step.
        scratch_bytes: The bytes of the scratch buffer in which sums over ranks are computed.
    """

    ranks: int
    attention: str
    token_bytes: int | None
    row_bytes: int = 0
    tokens: int | None = None
    micro_batches: int = 1
    scratch_bytes: int = 0

    @property
    def sent_bytes(self) -> int:
        """The bytes that this rank sends for attention in a step; 0 if unknown."""
        return self.micro_batches * (self.token_bytes or 0) * (self.tokens or 0)

    @property
    def sent_rows(self) -> int:
        """The bytes that this rank sends in a step to compute the loss of all tokens."""
        return self.micro_batches * self.row_bytes

    def explain(self) -> list[str]:
        """Return lines that describe the bytes of the axis, for reports."""
        known = (
            f", {self.tokens:,} tokens per rank and micro-batch" if self.tokens is not None else ""
        )
        if self.token_bytes is None:
            return [
                f"shared sequences: {self.ranks} ranks; the bytes that attention sends are unknown "
                f"here{known}"
            ]
        return [
            f"shared sequences: {self.ranks} ranks, attention by {self.attention}, "
            f"{format_bytes(self.token_bytes)} sent per token{known}"
        ]
