"""DeepSpeed's pipeline schedules: a stage's instructions for each tick.

They are for programs that inspect a schedule. Engines run the table of pipeline/schedule.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


class PipeInstruction:
    """One instruction, whose keyword arguments become attributes."""

    def __init__(self, **kwargs: Any) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        for key, value in kwargs.items():
            setattr(self, key, value)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.kwargs.items())})"


class OptimizerStep(PipeInstruction):
    """Run the optimizer's step and drop the gradients."""


class ReduceGrads(PipeInstruction):
    """Reduce gradients over the ranks of a stage."""


class ReduceTiedGrads(PipeInstruction):
    """Reduce the gradients of parameters that several stages hold copies of."""


class BufferOpInstruction(PipeInstruction):
    """An instruction for one of the stage's buffers.

    Args:
        buffer_id: Index of the buffer.
        **kwargs: Further attributes.
    """

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Load a micro-batch into a buffer of the stage."""


class ForwardPass(BufferOpInstruction):
    """Run the stage's forward pass on the input in a buffer."""


class BackwardPass(BufferOpInstruction):
    """Run the stage's backward pass for a buffer and accumulate gradients."""


class SendActivation(BufferOpInstruction):
    """Send the output in a buffer to the next stage."""


class RecvActivation(BufferOpInstruction):
    """Receive the output of the previous stage into a buffer."""


class SendGrad(BufferOpInstruction):
    """Send the gradient of a buffer's input to the previous stage."""


class RecvGrad(BufferOpInstruction):
    """Receive the gradient of a buffer's output from the next stage."""


Tick = list[PipeInstruction]


@dataclass(eq=False)
class PipeSchedule(ABC):
    """Yield the instructions of one stage, tick by tick.

    Args:
        micro_batches: Number of micro-batches.
        stages: Number of stages.
        stage_id: Index of the stage.
    """

    micro_batches: int
    stages: int
    stage_id: int

    def __post_init__(self) -> None:
        self.stage = self.stage_id
        self.num_stages = self.stages
        self.num_micro_batches = self.micro_batches
        self.prev_stage = self.stage_id - 1
        self.next_stage = self.stage_id + 1
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.next_stage == self.stages
        self._ticks: Iterator[Tick] | None = None

    @abstractmethod
    def steps(self) -> Iterator[Tick]:
        """Yield the instructions of each tick."""

    def num_pipe_buffers(self) -> int:
        """Return the number of buffers of the stage."""
        return self.micro_batches

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.micro_batches

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages

    def _buffer_idx(self, micro_batch_id: int) -> int:
        assert self._valid_micro_batch(micro_batch_id)
        return micro_batch_id % self.num_pipe_buffers()

    def __iter__(self) -> PipeSchedule:
        self._ticks = None
        return self

    def __next__(self) -> Tick:
        if self._ticks is None:
            self._ticks = iter(self.steps())
        return next(self._ticks)


class InferenceSchedule(PipeSchedule):
    """A schedule with forward passes only: stage s computes micro-batch t - s in tick t."""

    def steps(self) -> Iterator[Tick]:
        for tick in range(self.micro_batches + self.stages - 1):
            micro = tick - self.stage_id
            is_even = self.stage_id % 2 == 0
            here, other = (tick % 2, (tick + 1) % 2) if is_even else ((tick + 1) % 2, tick % 2)
            found: Tick = []
            if (self.is_first_stage or self.is_last_stage) and self._valid_micro_batch(micro):
                found.append(LoadMicroBatch(here))
            messages: Tick = []
            if self._valid_stage(self.next_stage) and self._valid_micro_batch(micro - 1):
                messages.append(SendActivation(other))
            if self._valid_stage(self.prev_stage) and self._valid_micro_batch(micro):
                messages.append(RecvActivation(here))
            found += messages if is_even else messages[::-1]
            if self._valid_micro_batch(micro):
                found.append(ForwardPass(here))
            yield found

    def num_pipe_buffers(self) -> int:
        return 2


class TrainSchedule(PipeSchedule):
    """The 1F1B schedule, with alternating forward and backward passes.

    With m micro-batches and P stages it has 2(m + P - 1) ticks. In tick t, stage s computes the
    forward pass of micro-batch (t - s) / 2 if that is an integer. Otherwise it computes the
    backward pass of micro-batch (t - 2P + 1 + s) / 2.
    """

    def steps(self) -> Iterator[Tick]:
        before = -1
        ticks = 2 * (self.micro_batches + self.stages - 1)
        for tick in range(ticks):
            is_forward = (tick - self.stage_id) % 2 == 0
            late = self.stage_id if is_forward else 2 * self.stages - 1 - self.stage_id
            micro = (tick - late) // 2
            is_here = self._valid_micro_batch(micro)
            was_before = self._valid_micro_batch(before)
            found: Tick = []
            if is_forward and self._valid_stage(self.prev_stage):
                found += [RecvActivation(self._buffer_idx(micro))] if is_here else []
                found += [SendGrad(self._buffer_idx(before))] if was_before else []
            if not is_forward and self._valid_stage(self.next_stage):
                found += [SendActivation(self._buffer_idx(before))] if was_before else []
                found += [RecvGrad(self._buffer_idx(micro))] if is_here else []
            if is_here and is_forward:
                if self.is_first_stage or self.is_last_stage:
                    found.append(LoadMicroBatch(self._buffer_idx(micro)))
                found.append(ForwardPass(self._buffer_idx(micro)))
            elif is_here:
                found.append(BackwardPass(self._buffer_idx(micro)))
            if tick == ticks - 1:
                found += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            before = micro
            yield found

    def num_pipe_buffers(self) -> int:
        return max(2, min(self.stages - self.stage_id, self.micro_batches))


class DataParallelSchedule(PipeSchedule):
    """A schedule that accumulates gradients over micro-batches, without pipeline stages."""

    def steps(self) -> Iterator[Tick]:
        for micro in range(self.micro_batches):
            found: Tick = [
                LoadMicroBatch(buffer_id=0),
                ForwardPass(buffer_id=0),
                BackwardPass(buffer_id=0),
            ]
            yield (
                [*found, ReduceGrads(), OptimizerStep()]
                if micro == self.micro_batches - 1
                else found
            )

    def num_pipe_buffers(self) -> int:
        return 1
