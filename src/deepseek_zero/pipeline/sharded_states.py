"""ZeRO under a pipeline: what a wrapped stage does when the schedule gathers, computes, reduces.

Units that a forward or backward has gathered are held until the schedule releases their stage, so
that a unit is gathered once for each run of micro-batches; passes go to the units of their stage
alone.  Gradients are added up where they are made (`PlanSettings.reduces_once`), and reduced in the
last backward of the step, or behind the sum of tied ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

from ..sharding.runtime import Runtime
from ..sharding.unit import Unit
from .ties import Ties


class ShardedStates:
    """The states of one rank's stages, in a runtime that wraps the model they are cut from
    (executor.py's `States`).
    """

    def __init__(
        self,
        runtime: Runtime,
        ties: Ties | None = None,
        blocks: Mapping[int, Collection[str]] | None = None,
    ) -> None:
        """ties: of the weights that stages share.  blocks: by stage of this rank, the full names of
        its modules; None: there is one stage, which has all.
        """
        self.runtime = runtime
        self.ties = ties if ties is not None and ties.is_sharing else None
        self._gathered: set[int] = set()
        self.reduces = True  # whether a run of the schedule ends a step
        self._units = _units_of(runtime, blocks) if blocks is not None and len(blocks) > 1 else {}
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
        for unit in self._part(stage):
            unit.is_pinned = True

    def release(self, stage: int) -> None:
        """Release everything, when the last stage of this rank is released."""
        self._gathered.discard(stage)
        if stage in self._units:
            _unpin(unit for unit in self._part(stage) if unit.number)
        if not self._gathered and not (self.ties is not None and self.reduces):
            _unpin(self.runtime.units)

    def _part(self, stage: int) -> list[Unit]:
        """Return the units of a stage; all if it is not known which they are."""
        numbers = self._units.get(stage)
        return [unit for unit in self.runtime.units if numbers is None or unit.number in numbers]

    @contextmanager
    def forward(self, stage: int) -> Iterator[None]:
        """Open a block with one forward, which goes to the units of its stage."""
        self.runtime.executor.gathers.restrict_to(self._units.get(stage))
        try:
            yield
        finally:
            self.runtime.executor.gathers.restrict_to(None)

    @contextmanager
    def backward(self, stage: int, *, ends_step: bool, is_carried: bool) -> Iterator[None]:
        """Open a block with one backward.  The last one of a step reduces, unless tied gradients
        are added up first.
        """
        self.runtime.step.is_boundary = ends_step and self.reduces and self.ties is None
        with (
            self.forward(stage),
            self.runtime.loss_factor.carried() if is_carried else nullcontext(),
        ):
            yield

    def reduce(self, stage: int) -> None:
        """Reduce what the last backward has not."""
        if self._waits:
            self._waits = False
            self.runtime.step.is_boundary = True
            self._reduce_step()

    def _reduce_step(self) -> None:
        self.runtime.executor.gathers.restrict_to(frozenset({0}))  # nothing is gathered for it
        self.runtime.backward.reduce_step()
        self.runtime.executor.gathers.restrict_to(None)
        _unpin(self.runtime.units)

    def tie(self, stage: int) -> None:
        """Add up the gradients of tied weights, before their reduction.  Collective among the
        sharing ranks.
        """
        if self.reduces:
            self._add_up()
            self._waits = True

    def _add_up(self) -> None:
        assert self.ties is not None
        self.ties.add_up(
            {
                name: group.gradient.summand.values(number)
                for name, (group, number) in self._members.items()
            }
        )

    def end_step(self) -> None:
        """Add up tied gradients and reduce all, of runs since the last step that did not
        (`reduces`).  Collective.
        """
        if self.ties is not None:
            self._add_up()
        self._reduce_step()


def _units_of(runtime: Runtime, blocks: Mapping[int, Collection[str]]) -> dict[int, frozenset[int]]:
    """By stage, the numbers of the units in its modules, and those that are in no stage's, the root
    above all.
    """
    found: dict[int, set[int]] = {stage: set() for stage in blocks}
    for unit in runtime.units:
        inside = [
            stage
            for stage, names in blocks.items()
            if any(unit.name == name or unit.name.startswith(f"{name}.") for name in names)
        ]
        for stage in inside or blocks:
            found[stage].add(unit.number)
    return {stage: frozenset(units) for stage, units in found.items()}


def _unpin(units: Iterable[Unit]) -> None:
    for unit in units:
        unit.unpin()
