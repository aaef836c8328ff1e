"""Connect ZeRO with a pipeline's schedule: gather, compute and reduce by stage.

Units that a forward or backward gathered are kept until the schedule releases their stage, so a
unit is gathered once for each run of micro-batches. A pass uses only the units of its stage.
Gradients are accumulated on each rank (`PlanSettings.reduces_once`) and reduced in the last
backward of the step, or after tied gradients are summed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial

from ..extensions.loss_factor import loss_factor_of
from ..planner.pieces import stages_with
from ..planner.schedule import Pass
from ..sharding.gather_lane import whole_pass
from ..sharding.irregular_passes import reduce_step
from ..sharding.runtime import Runtime
from ..sharding.unit import Unit
from .executor import States
from .ties import Ties


class ShardedStates(States):
    """Gathers weights and reduces gradients of a rank's stages through the ZeRO runtime.

    Args:
        runtime: The runtime of the wrapped model.
        ties: The weights that stages share, if any.
        blocks: For each stage of this rank, the full names of its modules; None if there is a
            single stage, which has all.

    Attributes:
        reduces: Whether the end of the schedule is the end of the step, so gradients are reduced.
            If not, they are accumulated until `end_step`.
    """

    def __init__(
        self,
        runtime: Runtime,
        ties: Ties | None = None,
        blocks: Mapping[int, Collection[str]] | None = None,
    ) -> None:
        """Assign the ZeRO units of the model to the stages of this rank."""
        self.runtime = runtime
        self.ties = ties if ties is not None and ties.is_sharing else None
        self._gathered: set[int] = set()
        self.reduces = True  # whether the end of the schedule ends the step
        self._units = _units_of(runtime, blocks) if blocks is not None and len(blocks) > 1 else {}
        self._walks: dict[tuple[int, frozenset[int]], tuple[Pass, Pass]] = {}
        self._waits = False  # tied gradients are summed but not yet reduced
        self._members = {
            member.name: (group, number)
            for group in runtime.trained_groups
            for number, member in enumerate(group.members)
            if ties is not None and member.name in ties.ranks
        }

    def gather(self, stage: int) -> None:
        """Keep the weights of a stage in memory after their next all-gather, until `release`.

        Args:
            stage: Number of the stage.
        """
        self._gathered.add(stage)
        for unit in self._part(stage):
            unit.is_pinned = True

    def release(self, stage: int) -> None:
        """Free the gathered weights of a stage.

        Args:
            stage: Number of the stage. After the last stage, weights that all stages use are freed
                too.
        """
        self._gathered.discard(stage)
        if stage in self._units:
            _unpin(unit for unit in self._part(stage) if unit.number)
        if not self._gathered and not (self.ties is not None and self.reduces):
            _unpin(self.runtime.units)

    def _part(self, stage: int) -> list[Unit]:
        """Return the units of a stage, or all units if there is one stage."""
        numbers = self._units.get(stage)
        return [unit for unit in self.runtime.units if numbers is None or unit.number in numbers]

    @contextmanager
    def forward(self, stage: int) -> Iterator[None]:
        """Return a context manager in which only the weights of one stage are gathered.

        Args:
            stage: Number of the stage whose forward runs in it.
        """
        self._visit(self._units.get(stage))
        try:
            yield
        finally:
            self._visit(None)

    @contextmanager
    def backward(self, stage: int, *, ends_step: bool, is_carried: bool) -> Iterator[None]:
        """Return a context manager in which only the weights of one stage are gathered.

        The last backward of a step reduces the gradients, unless gradients of shared weights must
        be summed first.

        Args:
            stage: Number of the stage.
            ends_step: Whether it is this rank's last backward of the step.
            is_carried: Whether the gradients come from a later stage, which has already applied the
                factor of the loss.
        """
        self.runtime.step.is_boundary = ends_step and self.reduces and self.ties is None
        with (
            self.forward(stage),
            loss_factor_of(self.runtime).carried() if is_carried else nullcontext(),
        ):
            yield

    def reduce(self, stage: int) -> None:
        """Reduce the gradients if the last backward of the step has not reduced them.

        Args:
            stage: Number of the stage.
        """
        if self._waits:
            self._waits = False
            self.runtime.step.is_boundary = True
            self._reduce_step()

    def _reduce_step(self) -> None:
        self._visit(frozenset({0}))  # reduction needs no gathers
        reduce_step(self.runtime.backward)
        self._visit(None)
        _unpin(self.runtime.units)

    def _visit(self, units: frozenset[int] | None) -> None:
        """Restrict the next forwards and backwards to some units; None for all."""
        self.runtime.gathers.part_of = whole_pass
        if units is not None:
            self.runtime.gathers.part_of = partial(self._part_of, units)

    def _part_of(self, units: frozenset[int], walk: Pass) -> Pass:
        key = id(walk), units
        known = self._walks.get(key)
        if known is None or known[0] is not walk:  # ids are reused
            short = Pass(tuple(action for action in walk.actions if action.unit in units))
            known = self._walks[key] = walk, short
        return known[1]

    def tie(self, stage: int) -> None:
        """Sum the gradients of weights that stages share, before their reduction.

        Args:
            stage: Number of the stage.

        Note:
            Collective: every rank that shares a weight must call it.
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
        """Sum the gradients of shared weights, and reduce all accumulated gradients.

        Note:
            Collective: every rank of the pipeline must call it.
        """
        if self.ties is not None:
            self._add_up()
        self._reduce_step()


def _units_of(runtime: Runtime, blocks: Mapping[int, Collection[str]]) -> dict[int, frozenset[int]]:
    """Return the unit numbers of each stage.

    Units in no stage's modules, such as the root, belong to every stage.
    """
    found: dict[int, set[int]] = {stage: set() for stage in blocks}
    for unit in runtime.units:
        for stage in stages_with(unit.name, blocks) or blocks:
            found[stage].add(unit.number)
    return {stage: frozenset(units) for stage, units in found.items()}


def _unpin(units: Iterable[Unit]) -> None:
    for unit in units:
        unit.unpin()
