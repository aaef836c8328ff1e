"""Gradients on their way to their owners: in one agreed order, one reduction in flight while backward goes on.

A unit is reduced when every gradient that is expected of it has arrived and every unit before it in the agreed order
has been reduced; what never arrives counts as zeros at the end of backward.  A gradient that arrives after its unit
was reduced (a block shared by two reentrant checkpoints) is added in a second reduction that all ranks agree on
before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..base.errors import UsageError
from ..comm.collectives import Comm
from ..planner.schedule import Pass
from ..planner.spec import S
from .unit import Unit


class Reducer:
    """The reduce lane of one wrapped model."""

    def __init__(self, units: Sequence[Unit], comm: Comm, overlap: bool) -> None:
        self.units, self.comm, self.overlap = list(units), comm, overlap
        self.shards = False
        self.order: list[int] = []
        self._passed: dict[int, int] = {}  # how many of `order` are done before backward comes to a unit
        self.late: set[int] = set()
        self._cursor = 0
        self._in_flight: Unit | None = None
        self.when_reduced: Callable[[], Callable[[Unit], None] | None] = lambda: None  # weak: set by an optimizer

    def set_order(self, backward: Pass) -> None:
        """Reductions follow the backward walk: each unit when it is done, the root at the end."""
        grads = [group.plan.grad for unit in self.units for group in unit.trained]
        self.shards = any(grad is not None and grad.placement is S for grad in grads)  # so every backward reduces
        self.order, self._passed = [], {}
        for unit, ended in zip(backward.order, backward.ends, strict=True):
            self._passed[unit] = len(self.order)
            self.order += [number for number in ended if self.units[number].trained]
        self.order += [backward.order[0]] if self.units[backward.order[0]].trained else []

    def begin(self) -> None:
        """A backward starts."""
        self._cursor = 0
        for unit in self.units:
            unit.arrived.clear()
            unit.reduced_in_backward = False

    def advance(self) -> list[Unit]:
        """Reduce the units whose turn has come and whose gradients are all here; returns them."""
        done = []
        while self._cursor < len(self.order) and self.units[self.order[self._cursor]].is_complete:
            done.append(self._launch(self.units[self.order[self._cursor]]))
            self._cursor += 1
        return done

    def skip_past(self, unit: Unit) -> None:
        """Backward has come to `unit`: what lies well behind it gets no more gradients, so it is not waited for.

        A rank that skips a parameter would otherwise keep the others waiting for a reduction that it starts only at the
        end, while it waits for their next gather.  Should a gradient come after all, it is late (`settle`).
        """
        margin = 2 if self.overlap else 1
        reached = self._passed[unit.number] if unit.trained else 0
        while self._cursor < min(reached - margin + 1, len(self.order)):
            self._launch(self.units[self.order[self._cursor]])
            self._cursor += 1

    def finish(self) -> None:
        """End of backward: reduce what is left, in order, and learn which gradients to expect next time."""
        for number in self.order[self._cursor :]:
            self._launch(self.units[number])
        self._cursor = len(self.order)
        self.wait()

    def refuse_unused(self) -> None:
        """Raise if a trainable parameter got no gradient in this backward (ignore_unused_parameters: false)."""
        members = [member for unit in self.units for group in unit.trained for member in group.members]
        got = {number for unit in self.units for number in unit.arrived}
        unused = [each.name for each in members if id(each.param) not in got and each.param.requires_grad]
        if unused:
            raise UsageError(
                f"{len(unused)} parameters got no gradient in this backward, among them '{unused[0]}'.",
                "ignore_unused_parameters is false: an unused parameter is an error.",
                "use them in forward, freeze them (requires_grad_(False)), or set ignore_unused_parameters to true.",
            )

    def update_expected(self) -> None:
        """Expect next time what arrived this time; a unit that got nothing keeps its expectation."""
        for unit in self.units:
            if unit.arrived:
                unit.expected = set(unit.arrived)

    def wait(self) -> None:
        """Wait for the reduction in flight."""
        self._notify(self._wait_in_flight())

    def reduce_late(self) -> None:
        """Before a step: reduce what any rank collected too late.  Collective; where none did, nobody need call."""
        mask = torch.zeros(len(self.units), dtype=torch.uint8)
        mask[list(self.late)] = 1
        agreed = self.comm.all_gather_rows(mask, "late gradients").amax(dim=0)
        for number in self.order:
            if agreed[number]:
                self._launch(self.units[number])
        self.wait()
        self.late.clear()

    def _launch(self, unit: Unit) -> Unit:
        landed = self._wait_in_flight()
        unit.reduce_grads()
        unit.reduced_in_backward = True
        self._in_flight = unit
        self._notify(landed)  # when the next one is on its way, since other ranks wait for that
        if not self.overlap:
            self.wait()
        return unit

    def _wait_in_flight(self) -> Unit | None:
        """Wait for the reduction in flight; whose it was."""
        landed = self._in_flight
        if landed is not None:
            landed.wait_for_reduce()
            self._in_flight = None
        return landed

    def _notify(self, landed: Unit | None) -> None:
        if landed is not None and (tell := self.when_reduced()) is not None:
            tell(landed)
