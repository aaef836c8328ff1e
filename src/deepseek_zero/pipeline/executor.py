"""Execute one rank's program of a pipeline schedule.

Between a forward and its backward, a rank keeps the received tensors, whose gradients it sends
back, and the graph edges at the stage's outputs. The memory of the outputs is free after they are
sent. Gradients are accumulated in `.grad` of the parameters in the order of the micro-batches,
because the schedule orders the backwards in this way.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..activations.offload import mark_held
from ..base.errors import UsageError
from ..comm.collectives import propagate_errors
from ..parallel.autograd import with_backward
from .messages import Forms, MessageForm, StageLane, StageLinks, form_of
from .schedule import RECEIVES, PipelineSchedule, Program, StageAction, StageActionKind
from .stage import Received, Stage

AHEAD = 2  # receives posted ahead in each lane


class States:
    """Interface through which a pipeline gathers weights and reduces gradients of stages.

    This class is for plain parameters that are neither sharded nor shared: its methods do nothing.
    """

    def gather(self, stage: int) -> None:
        """Gather the weights of a stage for its next forwards and backwards.

        Args:
            stage: Number of the stage.
        """

    def release(self, stage: int) -> None:
        """Free the gathered weights of a stage.

        Args:
            stage: Number of the stage.
        """

    def forward(self, stage: int) -> AbstractContextManager[None]:
        """Return the context manager in which one forward of a stage runs.

        Args:
            stage: Number of the stage.
        """
        return nullcontext()

    def backward(
        self, stage: int, *, ends_step: bool, is_carried: bool
    ) -> AbstractContextManager[None]:
        """Return the context manager in which one backward of a stage runs.

        Args:
            stage: Number of the stage.
            ends_step: Whether it is this rank's last backward of the step.
            is_carried: Whether the gradients come from a later stage, which has already applied the
                factor of the loss.
        """
        return nullcontext()

    def reduce(self, stage: int) -> None:
        """Reduce a stage's gradients over the ranks with the same stage.

        It is called after all backwards of the stage in a step.
        """

    def tie(self, stage: int) -> None:
        """Sum the gradients of weights that stages share, in the order of the stages.

        Note:
            Collective: every rank with a shared weight must call it.
        """


@dataclass
class StepOutcome:
    """The results of one step on one rank.

    Attributes:
        losses: Detached losses of the last stage by micro-batch, as the model returned them; None
            on other ranks.
        outputs: Outputs of the last stage by micro-batch, if requested; None on other ranks.
        is_bare: Whether the model returned only its loss.
    """

    losses: list[Tensor] | None = None
    outputs: list[Any] | None = None
    is_bare: bool = False


@dataclass
class _Held:
    """Values of a micro-batch that a stage keeps until its backward.

    `edges` are the graph edges of the outputs (None without a gradient). `form` is the form of the
    output message, which determines the gradients that are received.
    """

    received: Received
    edges: list[GradientEdge | None] = field(default_factory=list)
    form: MessageForm = ()
    loss: Tensor | None = None


class PipelineExecutor:
    """Executes the actions of one pipeline rank in the order of a schedule.

    Args:
        links: Communicators with the neighboring pipeline ranks.
        stages: The stages that this rank runs.
        states: Gathers weights and reduces gradients; None for plain parameters.
    """

    def __init__(
        self, links: StageLinks, stages: Sequence[Stage], states: States | None = None
    ) -> None:
        self.links = links
        self.rank = links.rank
        self.stages = {stage.index: stage for stage in stages}
        self.states = states if states is not None else States()
        self.forms = Forms()
        self._lanes: dict[tuple[int, int, str], StageLane] = {}

    def run(
        self,
        schedule: PipelineSchedule,
        micro_batches: Sequence[Any],
        *,
        keys: Sequence[Hashable] | None = None,
        scale: float | Sequence[float] | None = None,
        keeps_outputs: bool = False,
    ) -> StepOutcome:
        """Execute this rank's actions of one step.

        An error ends the step on every rank.

        Args:
            schedule: The order of actions for every rank.
            micro_batches: Inputs of the stages, one for each micro-batch of the schedule.
            keys: For each micro-batch, a value that identifies the shapes of its inputs, equal on
                all ranks of the pipeline. None sends the shapes before each message.
            scale: The factor by which each loss is multiplied before its backward; None means 1 /
                number of micro-batches.
            keeps_outputs: Whether to return the outputs of the last stage.

        Returns:
            The losses and the requested outputs of the last stage; None on other ranks.

        Raises:
            UsageError: The number of micro-batches differs from the schedule.

        Note:
            Collective: every rank of the pipeline must call it.
        """
        many = schedule.micro_batches
        if len(micro_batches) != many:
            raise UsageError(
                f"{len(micro_batches)} micro-batches for a schedule of {many}.",
                "Every rank of a pipeline runs the same number.",
                f"pass {many} micro-batches.",
            )
        scale = 1.0 / many if scale is None else scale
        factors = scale if isinstance(scale, Sequence) else [scale] * many
        step = _Step(self, schedule, micro_batches, keys or [None] * many, factors, keeps_outputs)
        with propagate_errors(self.links.world):
            try:
                return step.run()
            except BaseException:
                for lane in self._lanes.values():
                    lane.drop()
                raise

    def lane(self, edge: tuple[int, int], name: str, slots: int) -> StageLane:
        """Return the channel for messages to or from a neighboring rank; create it on first use.

        Args:
            edge: The pair of pipeline ranks, as in `StageLinks.pairs`.
            name: "gather" for activations or "reduce" for gradients.
            slots: Minimum number of messages that may be in progress at a time.
        """
        found = self._lanes.get((*edge, name))
        if found is None or found.slots < slots:
            if found is not None:
                found.flush()
            found = self._lanes[(*edge, name)] = StageLane(self.links.pairs[edge], name, slots)
        return found

    def buffers(self) -> list[Tensor]:
        """Return the buffers from which messages are sent."""
        return [buffer for lane in self._lanes.values() for buffer in lane.buffers()]

    def flush(self) -> None:
        """Block until the neighbors have read all sent messages."""
        for lane in self._lanes.values():
            lane.flush()


class _Step:
    """One step of a `PipelineExecutor`."""

    def __init__(
        self,
        executor: PipelineExecutor,
        schedule: PipelineSchedule,
        micro_batches: Sequence[Any],
        keys: Sequence[Hashable],
        factors: Sequence[float],
        keeps_outputs: bool,
    ) -> None:
        self.executor = executor
        self.schedule = schedule
        self.micro_batches = micro_batches
        self.program: Program = schedule.programs[executor.rank]
        kinds = [action.kind for action in self.program]
        self._backwards = kinds.count(StageActionKind.BACKWARD)  # remaining backwards
        self.trains = self._backwards > 0
        self.keys = [None if key is None else (key, self.trains) for key in keys]
        self.factors = factors
        self.last = schedule.stages - 1
        self._is_bare = False
        self._losses: dict[int, Tensor] = {}
        self._outputs: dict[int, Any] = {}
        self._keeps_outputs = keeps_outputs
        self._lanes: dict[tuple[int, StageActionKind], StageLane] = {}
        self._held: dict[tuple[int, int], _Held] = {}
        self._sending: dict[StageAction, Received] = {}
        self._arrived: dict[StageAction, Received] = {}
        self._run: Mapping[StageActionKind, Any] = {
            StageActionKind.FORWARD: self._forward,
            StageActionKind.BACKWARD: self._backward,
            StageActionKind.SEND_F: self._send_output,
            StageActionKind.SEND_B: self._send_grads,
            StageActionKind.RECV_F: self._receive_output,
            StageActionKind.RECV_B: self._receive_grads,
            StageActionKind.GATHER: lambda stage, micro: executor.states.gather(stage),
            StageActionKind.RELEASE: lambda stage, micro: executor.states.release(stage),
            StageActionKind.REDUCE: lambda stage, micro: executor.states.reduce(stage),
            StageActionKind.TIE: lambda stage, micro: executor.states.tie(stage),
        }

    def run(self) -> StepOutcome:
        """Run the program."""
        for action in self.program:
            place = (action.stage, action.kind)
            if action.is_message and place not in self._lanes:
                self._lanes[place] = self._lane_of(action)
                self._lanes[place].to_post = []
        for action in reversed(self.program):
            if action.kind in RECEIVES:
                self._lanes[action.stage, action.kind].to_post.append(action)
        for lane in self._lanes.values():
            self._post_ahead(lane)
        with torch.set_grad_enabled(self.trains):
            for stage, kind, micro in self.program:
                self._run[kind](stage, micro)
            self.executor.flush()
        self.executor.forms.end_step()
        if self.last not in self.executor.stages:
            return StepOutcome()
        losses = [self._losses[micro] for micro in sorted(self._losses)]
        outputs = [self._outputs[micro] for micro in sorted(self._outputs)]
        return StepOutcome(losses, outputs if self._keeps_outputs else None, self._is_bare)

    # -- computations

    def _forward(self, stage: int, micro: int) -> None:
        received = self._arrived.pop(StageAction(stage, StageActionKind.RECV_F, micro), ())
        own = self.executor.stages[stage]
        with self.executor.states.forward(stage):
            output = own.forward(
                self.micro_batches[micro], tuple(_entered(each) for each in received)
            )
        held = self._held[stage, micro] = _Held(received)
        if stage == self.last:
            if self.trains:
                held.loss = own.loss(output, self.micro_batches[micro])
                self._losses[micro] = held.loss.detach()
                self._is_bare = isinstance(output, Tensor)
            if self._keeps_outputs:
                self._outputs[micro] = output
        else:
            outputs: Received = output
            held.form = form_of(outputs)
            held.edges = [
                get_gradient_edge(each) if each.requires_grad else None for each in outputs
            ]
            self._sending[StageAction(stage, StageActionKind.SEND_F, micro)] = outputs
        if not self.trains:
            del self._held[stage, micro]

    def _backward(self, stage: int, micro: int) -> None:
        held = self._held.pop((stage, micro))
        self._backwards -= 1
        is_carried = held.loss is None
        with self.executor.states.backward(
            stage, ends_step=not self._backwards, is_carried=is_carried
        ):
            self._differentiate(held, stage, micro)
        if stage:
            grads = tuple(
                torch.zeros_like(each) if each.grad is None else each.grad
                for each in held.received
                if each.requires_grad
            )
            self._sending[StageAction(stage, StageActionKind.SEND_B, micro)] = grads

    def _differentiate(self, held: _Held, stage: int, micro: int) -> None:
        if held.loss is not None:
            if held.loss.requires_grad:
                torch.autograd.backward(held.loss, torch.full_like(held.loss, self.factors[micro]))
            return
        grads = iter(self._arrived.pop(StageAction(stage, StageActionKind.RECV_B, micro)))
        edges = []
        differentiated = []
        for edge, form in zip(held.edges, held.form, strict=True):
            if form.is_differentiated:
                grad = next(grads)
                if edge is not None:
                    edges.append(edge)
                    differentiated.append(grad)
        if edges:
            torch.autograd.backward(edges, differentiated)

    # -- messages

    def _lane_of(self, action: StageAction) -> StageLane:
        source, target = action.ends
        lower = min(source, target)
        edge = self.schedule.placement[lower], self.schedule.placement[lower + 1]
        name = "gather" if source < target else "reduce"
        return self.executor.lane(edge, name, self.schedule.in_flight[self.executor.rank])

    def _send_output(self, stage: int, micro: int) -> None:
        outputs = self._sending.pop(StageAction(stage, StageActionKind.SEND_F, micro))
        key = self.keys[micro]
        forms = self.executor.forms
        form = form_of(outputs)
        forms.check(stage, key, form)
        header = form if forms.known(stage, key) is None else None
        forms.see(stage, key, form)
        lane = self._lanes[stage, StageActionKind.SEND_F]
        lane.send(outputs, f"output {micro} of stage {stage}", header)

    def _send_grads(self, stage: int, micro: int) -> None:
        grads = self._sending.pop(StageAction(stage, StageActionKind.SEND_B, micro))
        lane = self._lanes[stage, StageActionKind.SEND_B]
        lane.send(grads, f"gradient {micro} of stage {stage - 1}")

    def _receive_output(self, stage: int, micro: int) -> None:
        form, tensors = self._take(stage, StageActionKind.RECV_F)
        self.executor.forms.see(stage - 1, self.keys[micro], form)
        for tensor, each in zip(tensors, form, strict=True):
            tensor.requires_grad_(each.is_differentiated)
        self._arrived[StageAction(stage, StageActionKind.RECV_F, micro)] = tensors

    def _receive_grads(self, stage: int, micro: int) -> None:
        self._arrived[StageAction(stage, StageActionKind.RECV_B, micro)] = self._take(
            stage, StageActionKind.RECV_B
        )[1]

    def _take(self, stage: int, kind: StageActionKind) -> tuple[MessageForm, Received]:
        lane = self._lanes[stage, kind]
        if not lane.posted:
            self._post(lane)
        found = lane.take()
        self._post_ahead(lane)
        return found

    def _post_ahead(self, lane: StageLane) -> None:
        """Post receives ahead, as far as their forms are known."""
        while lane.posted < AHEAD and lane.to_post and lane.knows_next:
            stage, kind, micro = lane.to_post[-1]
            assert micro is not None
            if kind is StageActionKind.RECV_B and (stage, micro) not in self._held:
                break  # the form is known only after its forward
            self._post(lane)

    def _post(self, lane: StageLane) -> None:
        stage, kind, micro = lane.to_post.pop()
        assert micro is not None
        if kind is StageActionKind.RECV_F:
            form = self.executor.forms.known(stage - 1, self.keys[micro])
            lane.post(form, f"output {micro} of stage {stage - 1}")
        else:
            sent = self._held[stage, micro].form
            lane.post(
                tuple(each for each in sent if each.is_differentiated),
                f"gradient {micro} of stage {stage}",
            )


def _entered(received: Tensor) -> Tensor:
    """Make a received tensor part of the stage's graph.

    A leaf that requires a gradient cannot be written in place.
    """
    if not received.requires_grad:
        return received
    # `data` is not a view for autograd
    found: Tensor = with_backward(lambda received: received.data, lambda grad: (grad,), received)
    mark_held(found)  # `_Held` keeps it until the backward
    return found
