"""The gather lane of a model: scheduled all-gathers and releases of weights.

Uses that leave the schedule are served on demand. If a unit is used before its turn, the schedule
is run up to it; if it is used again, it is gathered again. The order of uses is recorded until the
ranks have agreed on an order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from ..base.progress import FirstPasses
from ..comm.collectives import Comm
from ..comm.pending import OrderedIssueQueue
from ..planner.schedule import Pass, Schedule
from ..tiers.tier import Tier
from .unit import Unit, UnitState


class GatherLane:
    """Issues the all-gathers of weights, and frees gathered weights, in the order of a schedule.

    In each forward or backward (a pass), units are gathered before their use and released after it.
    Every collective is issued in the same order on every rank of the shard group.

    Attributes:
        units: The units of the model, the root first.
        schedule: The planned order of actions in each forward and backward.
        comm: The communicator of all ranks of the job.
        issue_queue: The gathers whose slices are still fetched from an offload memory.
        order_is_agreed: Whether all ranks have agreed on the order of units.
        recorded: The numbers of units in the order of their first use, until the ranks have agreed.
        part_of: Returns the part of a forward or backward that runs. A pipeline leaves out units of
            other stages.
    """

    def __init__(
        self, units: Sequence[Unit], schedule: Schedule, comm: Comm, queue: OrderedIssueQueue
    ) -> None:
        self.units = units
        self.comm = comm
        self.issue_queue = queue
        self.order_is_agreed = False
        self.recorded: list[int] = []
        self.part_of: Callable[[Pass], Pass] = whole_pass
        self._walk: Pass | None = None  # the current pass
        self._reached = 0  # the number of places whose gathers were requested
        # Units whose gathers were requested, but must wait for an update.
        self._to_gather: deque[int] = deque()
        self._resident_before: frozenset[int] = frozenset()  # units unsharded before the pass
        # Logs the progress of the first forward and backward, which may be slow.
        self._first_passes = FirstPasses(sum(unit.numel for unit in units))
        self.follow(schedule)

    def follow(self, schedule: Schedule) -> None:
        """Replace the schedule between a forward and a backward."""
        self.schedule = schedule
        self._frozen = [unit for unit in self.units[1:] if unit.has_frozen_shards]
        sharded = [group for unit in self.units for group in unit.sharded]
        in_place = any(not group.weight_gather.makes_copies for group in sharded)
        # A weight in another memory may be updated in forward, so the ranks meet at each gather.
        may_wait = any(group.plan.weight.tier is not Tier.DEVICE for group in sharded)
        self._meets_at_begin = in_place and not may_wait

    def agree_on_order(self) -> tuple[int, ...]:
        """Return the order of units in which all ranks issue collectives from now on. Collective.

        It is the order of the rank that used most units in the first step, followed by unused
        units.
        """
        unused = [-1] * (len(self.units) - len(self.recorded))
        row = torch.tensor(self.recorded + unused, dtype=torch.int64, device="cpu")
        rows = self.comm.all_gather_rows(row, "order of units")
        fullest = int((rows >= 0).sum(dim=1).argmax())  # the first such rank
        used = [int(number) for number in rows[fullest] if number > 0]
        self.order_is_agreed = True
        return (0, *used, *(unit.number for unit in self.units[1:] if unit.number not in used))

    def begin(self, walk: Pass) -> None:
        """Begin a forward or backward, whose gathers `unshard` starts one by one. Collective."""
        name = "forward"
        if walk is self.schedule.backward or walk is self.schedule.accumulate:
            name = "backward"
        # Without a unit to gather, as inside `GatheredParameters`, one rank may run forward alone.
        if self._meets_at_begin and any(unit.is_gathered_from_ranks for unit in self.units):
            # Other ranks read this rank's slices in place. Announce that they are written.
            self.comm.shard.in_place.begin(name)
        self._first_passes.begin(name)
        self._walk = self.part_of(walk)
        self._reached = 0
        self._to_gather.clear()
        self._resident_before = frozenset(
            unit.number for unit in self.units if unit.state is not UnitState.SHARDED
        )

    def unshard(self, unit: Unit, *, in_turn: bool = True, externals: bool = False) -> None:
        """Unshard a unit, and wait until its weights can be used. Collective.

        Args:
            unit: The unit whose weights are needed.
            in_turn: Whether to advance the schedule to the unit. False for a use that backward
                recomputes by itself, because the schedule contains the unit later.
            externals: Whether to also unshard units whose parameters the forward of this unit
                reads.
        """
        if not self.order_is_agreed and unit.number not in self.recorded:
            self.recorded.append(unit.number)
        with torch.inference_mode(False), torch.no_grad():
            if self._walk is not None and in_turn:
                self._gather_up_to(self._walk.position[unit.number])
            unit.unshard()  # on demand, if it is not in the pass or was released since
            unit.wait_for_unshard()
        if in_turn:
            self._first_passes.advance(unit.numel)
        if externals:
            for other in unit.externals:
                self.unshard(other)

    def after_forward(self, unit: Unit, *, training: bool) -> None:
        """Release a unit after its forward, if the schedule contains the release.

        Args:
            unit: The unit whose forward has ended.
            training: Whether the outputs of the forward need gradients.
        """
        walk = self.schedule.forward if training else self.schedule.inference
        if unit.number in walk.released and unit.number:  # the root stays until the end
            unit.reshard()

    def gather_for_others(self, before: Unit | None = None) -> None:
        """Start the gathers of units before `before` (None for all) that only other ranks may use.

        The call also waits until their slices have been fetched from other memories. A reduction
        may follow, and slower ranks issue it only after these gathers.
        """
        if self._walk is None:
            return
        last = len(self._walk.order) - 1
        if before is not None:
            last = self._walk.position[before.number] - 1
        if last >= self._reached:
            with torch.inference_mode(False), torch.no_grad():
                self._gather_up_to(last)
                self.issue_queue.issue_all()

    def end(self) -> None:
        """End a forward or backward: gather the units that this rank skipped, and release units."""
        walk = self._walk
        if walk is None:
            return
        self._first_passes.finish()
        self.gather_for_others()
        with torch.inference_mode(False), torch.no_grad():
            self._walk = None
            self.comm.shard.in_place.end()
            for unit in self.units:
                if unit.number in walk.released and unit.number not in self._resident_before:
                    unit.reshard()

    def reshard_all(self) -> None:
        """Release every unit, after gathers in flight have finished."""
        self._walk = None
        self.comm.shard.in_place.end()
        for unit in self.units:
            unit.reshard()

    def reshard_frozen_before(self, unit: Unit) -> None:
        """Free the weights of frozen units that backward has passed when it reaches `unit`.

        Other units are released after their gradient reduction, which frozen units do not have.
        """
        if not self._frozen:
            return
        gone = self.schedule.backward.released_before[unit.number]
        for other in self._frozen:
            if other.number in gone and (other.is_complete or not other.trained):
                other.reshard()

    def _gather_up_to(self, place: int) -> None:
        """Run the gathers and updates up to a place of the pass.

        Gathers beyond it stop at an update that waits for states. That update runs when its unit is
        used, so that the states of the next tiles are fetched meanwhile. An update that waits for
        no states overlaps with the gathers before it.
        """
        assert self._walk is not None
        for index in range(self._reached, place + 1):
            self._to_gather.extend(self._walk.gathers[index])
        self._reached = max(self._reached, place + 1)
        while self._to_gather:
            unit = self.units[self._to_gather[0]]
            if unit.waits_for_states and self._walk.position[unit.number] > place:
                break
            self._to_gather.popleft()
            unit.unshard()  # runs a pending update first


def whole_pass(walk: Pass) -> Pass:
    """Return all actions of a forward or backward."""
    return walk
