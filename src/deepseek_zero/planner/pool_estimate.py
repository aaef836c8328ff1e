"""Estimate the pool's buffers after a training step by replaying the schedule.

The pool (sharding/message.py) lends flat buffers by dtype and size and keeps returned ones. So for
each size it holds the largest number that was in use at the same time. That depends on the sizes of
units, the window and the ranks, but not on the number of units (ZeRO-R's constant buffers).

A unit's gradient is counted from the time when backward reaches the unit. If other units are inside
it, its first gradient may be computed later, so the number is an upper bound.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from ..base.device import CPU
from ..base.quantities import ceil_div
from ..precision.codecs import WORK_NUMEL, Cast
from ..tiers.tier import Tier
from .by_host import hop_buffer_sizes
from .extras import can_be_shared, momenta_codec_of
from .layout import FlatLayout
from .make_schedule import schedule_units
from .messages import MAX_IN_FLIGHT, SUM_TILE_NUMEL, Messages, inbox_sizes, messages_of
from .plan_settings import Machine, PlanSettings
from .schedule import ActionKind, Schedule
from .spec import S
from .units import GroupPlan, UnitPlan, all_groups, trained_groups

Size = tuple[torch.dtype, int]  # dtype and number of elements, which identify a buffer


@dataclass
class PoolLedger:
    """Counts the pooled buffers of each size that are in use, and the largest number of them.

    Attributes:
        lent: The number of buffers in use, by size.
        peak: The largest number of buffers that were in use at the same time, by size.
    """

    lent: Counter[Size] = field(default_factory=Counter)
    peak: Counter[Size] = field(default_factory=Counter)

    def take(self, sizes: Iterable[Size]) -> None:
        """Count buffers of these sizes as in use."""
        for size in sizes:
            self.lent[size] += 1
            self.peak[size] = max(self.peak[size], self.lent[size])

    def give(self, sizes: Iterable[Size]) -> None:
        """Count buffers of these sizes as returned."""
        self.lent.subtract(sizes)


@dataclass
class _Reduction:
    """The reduction of one unit's gradients in progress.

    Attributes:
        lent: The buffers that are returned when it ends.
        staged: For each group, the size of a message, their number, and the most in flight.
    """

    is_sum: bool
    lent: list[Size] = field(default_factory=list)
    staged: list[tuple[Size, int, int]] = field(default_factory=list)


@dataclass
class _StepReplay:
    """Replays one micro-batch that ends a step."""

    units: Sequence[UnitPlan]
    settings: PlanSettings
    scratch: Size  # the buffer in which partial sums are formed
    device: torch.device
    machine: Machine
    ledger: PoolLedger = field(default_factory=PoolLedger)
    in_flight: deque[_Reduction] = field(default_factory=deque)
    # By unit: buffers of its coded weights, until the unit is used
    coded: dict[int, list[Size]] = field(default_factory=dict)
    # Buffers of the sums over replicas in flight
    all_reducing: list[Size] = field(default_factory=list)
    # Buffers of the last message, which is in flight until the next one is
    outgoing: list[Size] = field(default_factory=list)

    def play(self, schedule: Schedule) -> None:
        """Take and return the buffers of all actions, in the order of the schedule."""
        for action in schedule.actions():
            unit = self.units[action.unit]
            if action.kind not in (ActionKind.ALL_REDUCE, ActionKind.UPDATE):
                self._end_all_reduces()
            match action.kind:
                case ActionKind.GATHER:
                    self.ledger.take(self._gathered(unit))
                    self._send_weights(action.unit)
                case ActionKind.RELEASE:
                    self.ledger.give(self._gathered(unit))
                case ActionKind.BACKWARD if action is schedule.backward.computes[action.unit][0]:
                    self._use(action.unit)
                    self.ledger.take(self._partials(unit))
                case ActionKind.FORWARD:
                    self._use(action.unit)
                case ActionKind.REDUCE:
                    self._reduce(unit)
                case ActionKind.ALL_REDUCE if unit.trained:
                    self._all_reduce(unit)
        self._wait_for_all()
        self.ledger.give(self.outgoing)
        self.outgoing = []
        self._send_differences()

    def _send_differences(self) -> None:
        """Send the quantized differences that whole weights follow after an update.

        The codec needs a buffer, too.
        """
        under_way: deque[Size] = deque()
        for group in trained_groups(self.units):
            if not group.plan.weight_is_independent:
                continue
            if len(under_way) == MAX_IN_FLIGHT:
                self.ledger.give([under_way.popleft()])
            message = _coded_weight(group)
            under_way.append(message)
            working = [(torch.float32, group.layout.slice_numel), self.scratch]
            self.ledger.take([message, *working])
            self.ledger.give(working)
        self.ledger.give(under_way)

    def _all_reduce(self, unit: UnitPlan) -> None:
        """Sum over replicas, two units at a time."""
        self._wait_for_all()
        taken = [size for group in unit.trained for size in self._outer(group)]
        self.ledger.take([*taken, self.scratch])
        self.ledger.give([*self.all_reducing, self.scratch])
        self.all_reducing = taken

    def _end_all_reduces(self) -> None:
        """Return the buffers of the sums over replicas."""
        self.ledger.give(self.all_reducing)
        self.all_reducing = []

    def _outer(self, group: GroupPlan) -> list[Size]:
        """Return the buffers for the sum of one group's slice.

        These are the inboxes, and the slice if it cannot be divided evenly.
        """
        assert group.plan.grad is not None
        dtype = group.plan.grad.dtype
        slice_numel = group.layout.slice_numel
        if group.replicas == 1:
            return []
        parts = FlatLayout((), ceil_div(slice_numel, group.replicas), group.replicas)
        messages = messages_of(parts.slice_numel, parts.ranks, self.settings.bucket_numel)
        found = [(dtype, parts.padded_numel)] if parts.padded_numel != slice_numel else []
        if self.machine.replicas_read_in_place or not slice_numel:
            return found
        inbox = (dtype, messages.numel * (group.replicas - 1))
        return found + [inbox] * messages.in_flight

    def _gathered(self, unit: UnitPlan) -> list[Size]:
        """Return the buffers of gathered weights.

        Shared weights need none if all ranks can read each other's memory.
        """
        return [
            gathered_size(group)
            for group in unit.sharded
            if not (self.machine.reads_in_place and can_be_shared(group.plan, self.device))
        ]

    def _send_weights(self, number: int) -> None:
        """Send quantized weights from a separate buffer.

        A single rank decodes its weights in place.
        """
        coded = [group for group in self.units[number].sharded if _is_coded(group)]
        if coded:
            self.coded[number] = [_coded_weight(group) for group in coded if group.ranks > 1]
            self.ledger.take([*self.coded[number], self.scratch])
            self.ledger.give([self.scratch])

    def _use(self, number: int) -> None:
        """Return the buffers of a unit's coded weights, which are decoded for its use."""
        self.ledger.give(self.coded.pop(number, []))

    def _partials(self, unit: UnitPlan) -> list[Size]:
        """Return the pool buffers that collect sharded gradients.

        Whole gradients have separate storage.
        """
        return [
            (group.plan.summands.dtype, group.padded_numel)
            for group in unit.trained
            if _is_cut(group)
        ]

    def _travel(self, group: GroupPlan) -> Size:
        """Return the buffer of a group's gradient in the form in which it is sent."""
        codec = momenta_codec_of(group.plan)
        if codec is not None:
            return codec.dtype, group.ranks * group.exchange_length
        wire, _ = group.hop_wires
        return wire.dtype, wire.length(group.padded_numel)

    def _reduce(self, unit: UnitPlan) -> None:
        """Begin the reduction of a unit's gradients, after one that must end first."""
        if len(self.in_flight) >= self.machine.most_reductions:
            self._wait_for_first()
        reduction = _Reduction(any(group.ranks > 1 or _is_cut(group) for group in unit.trained))
        self.in_flight.append(reduction)
        for group in unit.trained:
            # These buffers were taken in backward
            held = [(group.plan.summands.dtype, group.padded_numel)] if _is_cut(group) else []
            taken = [self._travel(group)] if self._is_copied(group) else []
            under_way = self._messages(group).in_flight
            taken += self._receive_buffers(group) * under_way
            self.ledger.take(taken)
            reduction.lent += held + taken
            if self._is_staged(group):
                reduction.staged.append((*self._staging(group), under_way))
                self.ledger.take([reduction.staged[-1][0]] * under_way)
            if group.ranks == 1:
                self._send(reduction)  # nothing to wait for
        if not self.settings.overlap:
            self._wait_for_all()

    def _messages(self, group: GroupPlan) -> Messages:
        """Return how the reduction of one group's gradients is cut into messages."""
        if momenta_codec_of(group.plan) is not None:
            return Messages(group.layout.slice_numel, 1)
        most = group.plan.grad_wire.message_numel
        return messages_of(
            group.layout.slice_numel, group.layout.ranks, self.settings.bucket_numel, most
        )

    def _is_copied(self, group: GroupPlan) -> bool:
        """Return whether a gradient is sent in another form than it is collected."""
        if momenta_codec_of(group.plan) is not None:
            return True
        return group.hop_wires[0] != Cast(group.plan.summands.dtype)

    def _is_staged(self, group: GroupPlan) -> bool:
        """Return whether a sum is formed in one memory and kept in another."""
        return (
            self.device.type != "cpu"
            and group.plan.grad is not None
            and group.plan.grad.tier is not Tier.DEVICE
        )

    def _staging(self, group: GroupPlan) -> tuple[Size, int]:
        """Return the staging buffer of one message's sum, and the number of buffers."""
        assert group.plan.grad is not None
        message = self._messages(group).numel
        many = ceil_div(group.layout.slice_numel, max(1, message))
        return (group.plan.grad.dtype, message), many

    def _receive_buffers(self, group: GroupPlan) -> tuple[Size, ...]:
        """Return the buffers that receive one message from every other rank."""
        codec = momenta_codec_of(group.plan)
        if codec is not None and self.machine.reads_in_place:
            return ()
        if codec is not None:
            return ((codec.dtype, group.exchange_length * (group.ranks - 1)),)
        numel = self._messages(group).numel
        if group.near == 1:
            wire = group.hop_wires[0]
            return inbox_sizes(numel, wire, group.ranks, in_place=self.machine.reads_in_place)
        return hop_buffer_sizes(
            numel,
            group.hop_wires,
            group.ranks,
            group.near,
            near_in_place=self.machine.near_read_in_place,
            far_in_place=self.machine.far_read_in_place,
        )

    def _wait_for_all(self) -> None:
        while self.in_flight:
            self._wait_for_first()

    def _wait_for_first(self) -> None:
        """End the oldest reduction; its sums are formed in the scratch buffer."""
        reduction = self.in_flight.popleft()
        if reduction.is_sum:
            self.ledger.take([self.scratch])
            self.ledger.give([self.scratch])
        self._send(reduction)
        self.ledger.give(reduction.lent)

    def _send(self, reduction: _Reduction) -> None:
        """Form sums and transfer them, message by message.

        A buffer is free when the next message is in progress.
        """
        for size, messages, under_way in reduction.staged:
            for number in range(messages):
                self.ledger.give(self.outgoing)
                self.outgoing = [size]
                # The first ones were taken when the reduction began
                taken = [size] if number + under_way < messages else []
                self.ledger.take(taken)
        reduction.staged = []


def gathered_size(group: GroupPlan) -> Size:
    """Return the dtype and number of elements of the buffer for a group's gathered weight."""
    return group.plan.weight.dtype, group.padded_numel


def _coded_weight(group: GroupPlan) -> Size:
    """Return the buffer of a group's weight as gathers send it."""
    return group.weight_wire.dtype, group.weight_wire.length(group.padded_numel)


def _is_coded(group: GroupPlan) -> bool:
    """Return whether gathers send codes."""
    return group.plan.weight.wire is not None


def _is_cut(group: GroupPlan) -> bool:
    """Return whether gradients are sharded, and collected in a buffer of the pool."""
    return group.plan.grad is not None and group.plan.grad.placement is S


def scratch_numel(units: Sequence[UnitPlan], device: torch.device) -> int:
    """Return the elements of the fp32 scratch buffer for sums over ranks and codecs.

    Args:
        units: The planned units of the model, the root first.
        device: The device on which the ranks train.
    """
    groups = all_groups(units)
    has_codes = any(group.is_coded or group.plan.weight.stored_as is not None for group in groups)
    return (WORK_NUMEL if has_codes else SUM_TILE_NUMEL).on(device)


def pool_buffers(
    units: Sequence[UnitPlan],
    settings: PlanSettings,
    agreed: Schedule | None = None,
    device: torch.device = CPU,
    machine: Machine = Machine(),  # noqa: B008  # frozen
) -> Counter[Size]:
    """Return how many buffers of each size the pool holds after two training steps.

    The first step runs the units in the order of declaration, later ones in the agreed order. On a
    single rank there are buffers only for states that are offloaded or stored quantized.

    Args:
        units: The planned units of the model, the root first.
        settings: The ZeRO stage, dtypes, sizes and memories of the run.
        agreed: The schedule in the order of units on which the ranks agreed; None before the first
            step.
        device: The device on which the ranks train.
        machine: Which ranks are on one host, and the memory budgets.
    """
    groups = all_groups(units)
    if all(group.ranks == 1 for group in groups):
        rows = [group.plan for group in groups]
        if not any(row.is_offloaded or row.weight.stored_as is not None for row in rows) and all(
            group.replicas == 1 for group in groups
        ):
            return Counter()
        machine = replace(machine, reads_in_place=True)
    declared = schedule_units(units, settings)
    most: Counter[Size] = Counter()
    for schedule in (declared, agreed or declared):
        scratch = (torch.float32, scratch_numel(units, device))
        player = _StepReplay(units, settings, scratch, device, machine)
        player.play(schedule)
        most |= player.ledger.peak
    return most


def buffer_bytes(buffers: Counter[Size]) -> int:
    """Return the total bytes of pool buffers that are counted by size."""
    return sum(count * dtype.itemsize * numel for (dtype, numel), count in buffers.items())
