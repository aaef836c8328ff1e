"""Divide a model into pipeline stages and run them.

The model is divided before it is planned, and the stages are connected after it is wrapped:

    # the model keeps this rank's stages
    staged = cut_model(model, find_chain(model, args, kwargs), mesh)
    # weights that several stages use
    ties = Ties(world, mesh, staged.placement, staged.ties)
    ... plan and wrap the model, with `PlanSettings.reduces_once` ...
    pipeline = Pipeline(staged, ties, world, mesh, runtime, "1f1b")
    # then the optimizer's step, as usual
    loss = pipeline.train(micro_batches)
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import UsageError
from ..base.log import log_once
from ..base.mesh import Mesh
from ..comm.collectives import Comm, propagate_errors
from ..sharding.runtime import Runtime
from .chain import Chain
from .executor import PipelineExecutor, StepOutcome
from .layers import Labelled, LayersStage, LayerStages
from .messages import StageLinks
from .schedule import Numbers, PipelineSchedule, forward_only, make_schedule
from .sharded_states import ShardedStates
from .stage import MicroBatch, ModelStage, Stage, cut_chain, take_stages, tied_stages
from .ties import Ties
from .verify import verify


@dataclass(frozen=True)
class StagedModel:
    """Describes the stages of a divided model, and contains the stages of this rank.

    Attributes:
        stages: The stages that this rank runs.
        placement: The rank along "pp" of each stage of the model.
        virtual: Number of stages per rank.
        ties: For each weight that several stages share, the numbers of the stages that use it.
        has_all_inputs: Whether every stage receives the inputs of the model. The shapes of the
            inputs then identify the shapes of messages between stages.
    """

    stages: Sequence[Stage]
    placement: Numbers
    virtual: int
    ties: Mapping[str, Numbers]
    has_all_inputs: bool

    @property
    def tied(self) -> Numbers:
        """Return the numbers of the stages that share a weight, in ascending order."""
        return tied_stages(self.ties)


def cut_model(
    model: nn.Module,
    chain: Chain | None,
    mesh: Mesh,
    *,
    partition: str = "best",
    schedule: str = "1f1b",
    virtual: int = 1,
    group: int | None = None,
    micro_batches: int = 1,
) -> StagedModel:
    """Divide a model into pipeline stages, and keep only the stages of this rank.

    The blocks and parameters of all other stages are freed. Afterwards, a direct call of the model
    raises UsageError, and its key-value caches are disabled unless the caller requests them. A list
    of layers (`LayerStages`) is not changed. Every rank of a pipeline must pass the same arguments,
    except for its coordinates in the mesh.

    Args:
        model: The model, which is changed in place.
        chain: The blocks between which the model can be divided, as `find_chain` returned them.
            None for a list of layers (`LayerStages`), which is already divided.
        mesh: The mesh, whose size along "pp" is the number of pipeline ranks and whose coordinates
            select this rank's stages.
        partition: How blocks are assigned to stages; see `method` of the function `partition`.
        schedule: Name of the schedule: "1f1b", "interleaved" or "breadth_first". It determines for
            how many micro-batches a stage keeps activations, which the partition "best" considers.
        virtual: Number of stages per rank.
        group: For the schedule "breadth_first": the number of micro-batches that a rank runs in one
            stage before its next stage. None means all micro-batches of a step.
        micro_batches: Number of micro-batches of a step.

    Returns:
        A `StagedModel` with this rank's stages, the rank of every stage, and the weights that
        stages share.

    Raises:
        UsageError: The model has fewer blocks than stages, the schedule does not support these
            numbers of ranks, stages and micro-batches, or the partition is unknown or matches no
            block. For a `LayerStages`, the error is raised if it was divided into another number of
            stages.
        NotBuiltError: The partition is "profile".
    """
    if isinstance(model, LayerStages):
        if model.num_stages != mesh.pp or virtual != 1:
            raise UsageError(
                f"a list of {model.num_stages} stages on a mesh with pp={mesh.pp} and {virtual} "
                "stages on each rank.",
                "It was cut when it was made, one stage for each pipeline rank.",
                "state the same number of stages, and virtual 1.",
            )
        return StagedModel([LayersStage(model)], tuple(range(mesh.pp)), 1, model.ties, False)
    assert chain is not None
    table = make_schedule(schedule, mesh.pp, virtual, micro_batches, group=group)
    in_flight = [table.in_flight[rank] // virtual or 1 for rank in table.placement]
    cut = cut_chain(model, chain, table.stages, partition, in_flight)
    stages: list[ModelStage] = take_stages(model, cut, table.stages_of(mesh.coordinates["pp"]))
    return StagedModel(stages, tuple(table.placement), virtual, cut.ties, True)


class Pipeline:
    """Runs steps of a divided model over the ranks along "pp".

    Args:
        staged: This rank's stages, as `cut_model` returned them.
        ties: The weights that stages share, whose gradients are summed in each step.
        world: The communicator of all ranks.
        mesh: The mesh, which defines the ranks of each pipeline.
        runtime: The ZeRO runtime of the wrapped model, which gathers weights and reduces gradients.
        schedule: Name of the schedule of training steps.
        group: For "breadth_first": the number of micro-batches that a rank runs in one stage before
            its next stage. None means all micro-batches of a step.
        is_dynamic: Whether to send the shapes before each message. This is necessary if activations
            differ in shape between micro-batches whose inputs have equal shapes.

    Raises:
        UsageError: The schedule is unknown, or does not support the numbers of ranks and stages.
        PeerError: Another rank failed or issued a different collective.

    Note:
        Collective: every rank of `world` must construct it.
    """

    def __init__(
        self,
        staged: StagedModel,
        ties: Ties,
        world: Comm,
        mesh: Mesh,
        runtime: Runtime,
        schedule: str = "1f1b",
        *,
        group: int | None = None,
        is_dynamic: bool = False,
    ) -> None:
        """Create the communicators between neighboring stages."""
        self.staged = staged
        self.ties = ties
        self.mesh = mesh
        self.runtime = runtime
        self.name = schedule
        self.group = group
        self.is_dynamic = is_dynamic
        self._schedules: dict[tuple[str, int], PipelineSchedule] = {}
        table = self.schedule(1)
        own = [stage for stage in staged.stages if isinstance(stage, ModelStage)]
        blocks = {stage.index: stage.cut.blocks_of(stage.index) for stage in own}
        self.states = ShardedStates(runtime, self.ties, blocks)
        self.executor = PipelineExecutor(StageLinks(world, mesh, table), staged.stages, self.states)
        self._pipe = runtime.comm.along.get("pp")

    def schedule(self, micro_batches: int, *, trains: bool = True) -> PipelineSchedule:
        """Return the schedule of a step.

        A new schedule is verified and then cached. If a training step has fewer micro-batches than
        pipeline ranks, a message is logged once.

        Args:
            micro_batches: Number of micro-batches of the step.
            trains: Whether the schedule has forwards and backwards. If False, it has only forwards.

        Returns:
            The order of actions for every pipeline rank.

        Raises:
            UsageError: The training schedule does not support this number of micro-batches.
        """
        key = self.name if trains else "forward_only", micro_batches
        if key in self._schedules:
            return self._schedules[key]
        sizes = self.mesh.pp, self.staged.virtual, micro_batches
        if not trains:
            made = forward_only(*sizes)
        else:
            made = make_schedule(self.name, *sizes, group=self.group, tied=self.staged.tied)
            if micro_batches < self.mesh.pp and self._schedules:
                log_once(
                    f"{micro_batches} micro-batches on {self.mesh.pp} pipeline ranks: some stages "
                    "are always idle"
                )
        verify(made)
        self._schedules[key] = made
        return made

    def read(self, batches: Sequence[Any]) -> list[Any]:
        """Convert items of a data loader to micro-batches of the model.

        Args:
            batches: The items of the data loader.

        Returns:
            `MicroBatch` objects, or `Labelled` objects if the model is a list of layers.

        Raises:
            UsageError: The model is a list of layers, and an item is not a pair (inputs, labels).
        """
        return [
            MicroBatch.of(each) if self.staged.has_all_inputs else Labelled.of(each)
            for each in batches
        ]

    def train(self, micro_batches: Sequence[Any]) -> Tensor:
        """Run the forwards and backwards of a step, and reduce the gradients.

        The optimizer's step is not included.

        Args:
            micro_batches: At least one `MicroBatch`, equal on all ranks of a pipeline, or at least
                one `Labelled`. The first stage uses the inputs of a `Labelled`, the last one its
                labels.

        Returns:
            The mean loss over micro-batches and data-parallel ranks, an fp32 scalar on the mesh's
            device that is the same on every rank.

        Raises:
            UsageError: `micro_batches` is empty, the model returned no loss in the last stage, or
                the schedule does not support this number of micro-batches.
            PeerError: Another rank failed or issued a different collective.

        Note:
            Collective: every rank must call it.
        """
        # `LossFactor` divides gradients by the accumulation steps. `run` refuses an empty list.
        factor = self.runtime.settings.accumulation / max(len(micro_batches), 1)
        return self._agree(self.run(micro_batches, scale=factor).losses)

    def run(
        self,
        micro_batches: Sequence[Any],
        *,
        scale: float | Sequence[float] = 1.0,
        trains: bool = True,
    ) -> StepOutcome:
        """Execute this rank's schedule for a step.

        In training, gradients are accumulated. They are reduced at the end of the schedule if
        `ShardedStates.reduces` is True.

        Args:
            micro_batches: The micro-batches of the step, as for `train`.
            scale: The factor by which losses are multiplied before their backward: one number, or
                one for each micro-batch.
            trains: Whether to run forwards and backwards. If False, only forwards run.

        Returns:
            A `StepOutcome`. On ranks with the last stage, it contains the losses if `trains` is
            True. Otherwise it contains the outputs, and the list of losses is empty. On all other
            ranks, both are None.

        Raises:
            UsageError: `micro_batches` is empty, the schedule does not support this number of
                micro-batches, or `trains` is True and the model returned no loss in the last stage.
            PeerError: Another rank failed or issued a different collective.

        Note:
            Collective: every rank of the pipeline must call it. Data-parallel ranks must call it
            too, because they gather weights and reduce gradients together.
        """
        with propagate_errors(self.executor.links.world):
            if not micro_batches:
                raise UsageError(
                    "a pipeline was given no micro-batches.",
                    "A step runs at least one, and its loss is their mean.",
                    "pass at least one micro-batch, the same number on every rank.",
                )
            table = self.schedule(len(micro_batches), trains=trains)
            keys = self._keys(micro_batches)
        return self.executor.run(
            table, micro_batches, keys=keys, scale=scale, keeps_outputs=not trains
        )

    def evaluate(
        self, micro_batches: Sequence[Any], *, keeps_outputs: bool = False, has_loss: bool = True
    ) -> tuple[Tensor | None, list[Any] | None]:
        """Run the forwards of micro-batches, without backwards.

        The recorded shapes of messages are discarded before and after the forwards.

        Args:
            micro_batches: At least one micro-batch, as for `train`.
            keeps_outputs: Whether to return the outputs on ranks with the last stage.
            has_loss: Whether to compute the loss from the outputs.

        Returns:
            A tuple of the mean loss and the list of the model's outputs. The mean is taken over
            micro-batches and data-parallel ranks. It is the same on every rank, and None if
            `has_loss` is False. The outputs are None if `keeps_outputs` is False, and on ranks
            without the last stage.

        Raises:
            UsageError: `micro_batches` is empty, or `has_loss` is True and the model returned no
                loss in the last stage. In the second case, ranks without this stage raise
                PeerError.
            PeerError: Another rank failed or issued a different collective.

        Note:
            Collective: every rank must call it.
        """
        self.executor.forms.forget()
        outcome = self.run(micro_batches, trains=False)
        self.executor.forms.forget()
        losses = None
        if has_loss and outcome.outputs is not None:
            last = self.executor.stages[len(self.staged.placement) - 1]
            with propagate_errors(self.executor.links.world), torch.no_grad():
                pairs = zip(outcome.outputs, micro_batches, strict=True)
                losses = [last.loss(output, micro) for output, micro in pairs]
        return self._agree(losses) if has_loss else None, outcome.outputs if keeps_outputs else None

    def gather_rows(self, row: Tensor, what: str) -> Tensor:
        """All-gather a vector over the ranks of this pipeline.

        Args:
            row: A one-dimensional CPU tensor, of the same size on every rank.
            what: Name of the exchange in error messages.

        Returns:
            A CPU tensor of shape (pipeline ranks, size), in the order of the ranks along "pp".

        Raises:
            PeerError: Another rank failed or issued a different collective.

        Note:
            Collective: every rank of the pipeline must call it.
        """
        return row.unsqueeze(0) if self._pipe is None else self._pipe.all_gather_rows(row, what)

    def broadcast_from_last(self, row: Tensor, what: str) -> Tensor:
        """Broadcast a vector from the last stage's rank to every rank of this pipeline.

        Args:
            row: A one-dimensional CPU tensor, of the same size on every rank. Only the values on
                the last stage's rank are used.
            what: Name of the exchange in error messages.

        Returns:
            The vector of the last stage's rank.

        Raises:
            PeerError: Another rank failed or issued a different collective.

        Note:
            Collective: every rank of the pipeline must call it.
        """
        return self.gather_rows(row, what)[-1]

    def seen_bytes(self) -> tuple[list[int], list[int]] | None:
        """Return the bytes that stages sent each other for the last training micro-batch.

        Returns:
            A tuple of two lists, with one number for each pair of consecutive stages. The first
            list contains the bytes of the outputs of one micro-batch. The second list contains the
            bytes of the gradients of these outputs. A number is 0 if neither stage of the pair is
            on this rank. The result is None if this rank has not sent or received an output in
            training.
        """
        forms = self.executor.forms.seen_in_training
        if not forms:
            return None
        outputs = []
        grads = []
        for number in range(len(self.staged.placement) - 1):
            form = forms.get(number, ())
            outputs.append(sum(each.nbytes for each in form))
            grads.append(sum(each.nbytes for each in form if each.is_differentiated))
        return outputs, grads

    def reset_shapes(self) -> None:
        """Discard the recorded shapes of messages.

        The next step may then have other shapes. It sends them before each message.

        Note:
            Every rank of the pipeline must call it, although it does not communicate.
        """
        self.executor.forms.forget()

    def _keys(self, micro_batches: Sequence[Any]) -> list[Hashable] | None:
        if self.is_dynamic:
            return None
        if not self.staged.has_all_inputs:
            return ["as ever"] * len(micro_batches)
        return [tuple(_forms_in((micro.args, micro.kwargs))) for micro in micro_batches]

    def _agree(self, losses: Sequence[Tensor] | None) -> Tensor:
        """Return the mean loss over micro-batches and last-stage ranks, on every rank."""
        mean = torch.zeros(1, dtype=torch.float64, device="cpu")
        if losses is not None:
            own = torch.stack([loss.detach().double().cpu() for loss in losses]).mean().reshape(1)
            mean = self.runtime.comm.all_gather_rows(own, "mean loss").mean().reshape(1)
        mean = self.broadcast_from_last(mean, "loss of the last stage")
        return mean.float().reshape(()).to(self.mesh.device)


def _forms_in(value: Any) -> list[Hashable]:
    """Return the shapes and dtypes of the tensors in arguments, in order."""
    if isinstance(value, Tensor):
        return [(tuple(value.shape), value.dtype)]
    if isinstance(value, Mapping):
        return [
            form for key in sorted(value, key=str) for form in (str(key), *_forms_in(value[key]))
        ]
    if isinstance(value, list | tuple):
        return [form for each in value for form in _forms_in(each)]
    return []
