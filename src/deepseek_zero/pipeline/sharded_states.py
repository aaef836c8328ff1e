"""ZeRO under a pipeline: what a wrapped stage does when the schedule gathers, computes, reduces.

Units that a forward or backward has gathered are held until the schedule releases the stage, so that a unit is
gathered once however many micro-batches there are.  Gradients are added up where they are made
(`PlanSettings.reduces_once`), and reduced in the last backward of the step, or behind the sum of tied ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from ..sharding.runtime import Runtime
from .ties import Ties


class ShardedStates:
    """The states of one rank's stages, in a runtime that wraps the model they are cut from (executor.py's `States`)."""

    def __init__(self, runtime: Runtime, ties: Ties | None = None) -> None:
        self.runtime, self.ties = runtime, ties if ties is not None and ties.is_sharing else None
        self._gathered: set[int] = set()
        self._waits = False  # gradients are tied, and not reduced yet
        self._members = {
            member.name: (group, number)
            for group in runtime.trained_groups
            for number, member in enumerate(group.members)
            if ties is not None and member.name in ties.ranks
        }

    def gather(self, stage: int) -> None:
        """Hold what the computations of a stage gather."""
        self._gathered.add(stage)
        self.runtime.executor.hold()

    def release(self, stage: int) -> None:
        """Release everything, when the last stage of this rank is released."""
        self._gathered.discard(stage)
        if not self._gathered and self.ties is None:
            self.runtime.executor.let_go()

    @contextmanager
    def backward(self, stage: int, *, ends_step: bool, is_carried: bool) -> Iterator[None]:
        """Open a block with one backward.  The last one of a step reduces, unless tied gradients are added up first."""
        self.runtime.is_boundary = ends_step and self.ties is None
        with self.runtime.loss_factor.carried() if is_carried else nullcontext():
            yield

    def reduce(self, stage: int) -> None:
        """Reduce what the last backward has not."""
        if self._waits:
            self._waits = False
            self.runtime.is_boundary = True
            self.runtime.reduce_step()
            self.runtime.executor.let_go()

    def tie(self, stage: int) -> None:
        """Add up the gradients of tied weights, before their reduction.  Collective among the sharing ranks."""
        assert self.ties is not None
        self.ties.add_up({name: group.gradient.summand(number) for name, (group, number) in self._members.items()})
        self._waits = True

    def update(self) -> None:
        """Nothing: the step is the engine's."""
