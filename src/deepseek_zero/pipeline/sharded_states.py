"""ZeRO under a pipeline: what a wrapped stage does when the schedule gathers, computes, reduces.

Units that a forward or backward has gathered are held until the schedule releases the stage, so that a unit is
gathered once however many micro-batches there are.  Gradients are added up where they are made
(`PlanSettings.reduces_once`), and reduced in the last backward of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from ..sharding.runtime import Runtime


class ShardedStates:
    """The states of one rank's stages, in a runtime that wraps the model they are cut from (executor.py's `States`)."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._gathered: set[int] = set()

    def gather(self, stage: int) -> None:
        """Hold what the computations of a stage gather."""
        self._gathered.add(stage)
        self.runtime.executor.hold()

    def release(self, stage: int) -> None:
        """Release everything, when the last stage of this rank is released."""
        self._gathered.discard(stage)
        if not self._gathered:
            self.runtime.executor.let_go()

    @contextmanager
    def backward(self, stage: int, *, ends_step: bool, is_carried: bool) -> Iterator[None]:
        """Open a block with one backward.  The last one of a step reduces."""
        self.runtime.is_boundary = ends_step
        with self.runtime.loss_factor.carried() if is_carried else nullcontext():
            yield

    def reduce(self, stage: int) -> None:
        """Nothing: the last backward has."""

    def tie(self, stage: int) -> None:
        """Nothing: tied stages are refused where a pipeline is planned."""

    def update(self) -> None:
        """Nothing: the step is the engine's."""
