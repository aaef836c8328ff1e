"""Find bits that changed although nothing wrote them.

Every few steps, ranks compare states that several of them hold, and each rank compares states at
rest with their earlier sums:

    after step n-1: sums of the states that only this rank holds
    step n, gradients reduced, nothing updated yet: the same sums, and sums of shared states
    the step message (optim/step_message.py) carries digests of the sums
    if digests differ: ranks exchange the sums, and every rank reports rank, state and parameters

Shared states are replicated weights, main weights, moments and reduced gradients, gathered copies
of a sharded weight, and the slices of replicas. If more than half of at least three ranks agree,
the other ranks are reported.

States at rest are slices, main weights and moments. Their sums are valid until the next write
(`StateGuard.writes`). So for trained states, one step in every n is checked, and for frozen states,
all steps.

A wrong gradient that one rank computed before the reduction is not found, because all ranks then
hold the same sum.
"""

from __future__ import annotations

import json
import logging
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..base.checksums import BLOCK_BYTES, block_sums
from ..base.errors import IntegrityError, listed_ranks
from ..base.log import log_once
from ..base.mesh import REDUCE_AXES, Mesh
from ..comm.collectives import propagate_errors
from ..comm.context import Partition
from ..optim.sharded import ShardedOptimizer
from ..optim.step_message import Fields, StepMessage
from ..planner.spec import Placement
from ..sharding.buffer import StateGuard
from ..sharding.group_build import is_exposed
from ..sharding.param_group import ParamGroup
from ..sharding.runtime import Runtime
from ..sharding.unit import Unit
from .saving import Trainer

if TYPE_CHECKING:  # as in engine.py
    from ..config.schema import IntegritySection

MOST_SHOWN = 8  # findings of one step that an error or a warning lists
# Fields of the step message
OF_PIECE = "digest of states that a piece's ranks share"
OF_REPLICAS = "digest of states that replicas share"
CHANGED = "states that changed without an update"
# For each state: the sum of each block, and its parameters
Table = dict[str, list[tuple[int, str]]]
Sums = list[int]  # one per block


@dataclass(frozen=True)
class State:
    """The memory of one state of a group, or of a part of it.

    Attributes:
        low: The position of its first element in the layout.
        is_whole: Whether all ranks with this piece of the model hold the same values, not only
            replicas.
        is_guarded: Whether it is only written after a call of the group's guard.
        what: The name of the state, for example "weight".
        group: The parameter group to which the state belongs.
        dtype: The dtype of the elements.
        numel: The number of elements.
    """

    what: str
    group: ParamGroup
    dtype: torch.dtype
    numel: int
    low: int = 0
    is_whole: bool = True
    is_guarded: bool = False

    @property
    def key(self) -> str:
        """The key under which ranks compare this state."""
        return f"{self.what} of '{self.group.members[0].name}' from {self.low}"

    def names_in(self, block: int) -> str:
        """Return the names of the parameters that have elements in a block of this memory."""
        names = [member.name for member in self.group.members]
        # Codes and halves of numbers have no position in the layout
        if self.dtype.is_floating_point:
            numel = BLOCK_BYTES // self.dtype.itemsize
            first = self.low + block * numel
            last = min(first + numel, self.low + self.numel)
            slots = self.group.layout.slots
            names = [
                slot.name for slot in slots if slot.start < last and first < slot.start + slot.numel
            ] or names
        return f"{self.what} of '{names[0]}'" + (
            f" and {len(names) - 1} more" if len(names) > 1 else ""
        )


class Integrity:
    """Detects memory corruption in the states of one engine.

    The section `integrity` of the configuration enables it.

    Args:
        runtime: The runtime of the wrapped model, whose weights and gradients are checked.
        optimizer: The sharded optimizer, whose main weights and moments are checked.
        mesh: The device mesh, which determines the ranks that hold equal states.
        settings: The section `integrity`: how often to check, and what to do if states differ.
    """

    def __init__(
        self, runtime: Runtime, optimizer: ShardedOptimizer, mesh: Mesh, settings: IntegritySection
    ) -> None:
        self._runtime = runtime
        self._optimizer = optimizer
        self.settings = settings
        self._pieces = mesh.groups_along(*REDUCE_AXES)
        self._replicas = mesh.groups_along("dp_replicate")
        # For each state: its guard, its write count at that time, its sums
        self._rested: dict[str, tuple[StateGuard, int, Sums]] = {}
        self._gathered: dict[str, tuple[State, Tensor]] = {}
        self._found: list[tuple[State, Sums]] = []  # in the current step
        self._changed: list[str] = []
        self._reported: set[str] = set()

    def after_step(self, trainer: Trainer) -> None:
        """Compute checksums of the states that no operation writes before the next step.

        The method does nothing unless the next step compares the states of all ranks. States on a
        disk are left out. Pending optimizer updates run first. If one of them fails on this rank,
        for example because of a disk, the error is sent to the other ranks and raised. The units
        also begin to record checksums of the weights that the next step gathers.

        Args:
            trainer: The engine, whose step has just ended.
        """
        if (trainer.global_steps + 1) % self.settings.every:
            return
        with propagate_errors(self._runtime.comm):
            self._optimizer.finish()
            for state, values in self._states():
                if state.is_guarded and self._sums_before(state) is None:
                    guard = state.group.guard
                    self._rested[state.key] = guard, guard.writes, block_sums(values).tolist()
        for unit in self._runtime.units:
            # Do not capture this object, which holds the engine's parts
            unit.watch = partial(_note_gathered, self._gathered)

    def add_to(self, message: StepMessage, step: int) -> None:
        """Add digests of this rank's states to its step message.

        All ranks receive the message and compare the digests. Nothing is added unless `step` is a
        multiple of `integrity.every`. One digest covers the states that all ranks with the same
        piece of the model hold. Another digest covers the states that only replicas share. A third
        field contains the number of memory blocks that have changed since `after_step`, although no
        operation wrote them. The units stop recording checksums of gathered weights.

        Args:
            message: The step message, which this rank sends together with its gradient norm.
            step: The number of the step, counted from 1.
        """
        if step % self.settings.every:
            return
        for unit in self._runtime.units:
            unit.watch = None
        made = [
            (state, block_sums(values)) for state, values in (*self._states(), *self._gradients())
        ]
        self._found = [(state, sums.tolist()) for state, sums in (*made, *self._gathered.values())]
        self._gathered.clear()
        self._changed = []
        digests = {True: 0, False: 0}
        for state, sums in self._found:
            digests[state.is_whole] = zlib.crc32(array("q", sums), digests[state.is_whole])
            before = self._sums_before(state) or sums
            for block, (then, now) in enumerate(zip(before, sums, strict=True)):
                if then != now:
                    self._changed.append(state.names_in(block))
        message.add(OF_PIECE, [digests[True]])
        message.add(OF_REPLICAS, [digests[False]])
        message.add(CHANGED, [len(self._changed)])

    def compare(self, step: int, fields: Fields) -> None:
        """Compare the digests of all ranks, and report the states that differ.

        Each difference is reported once. Unless `integrity.mode` is "end", rank 0 logs it as a
        warning. In a step in which `add_to` added nothing, the method does nothing.

        Args:
            step: The number of the step, counted from 1.
            fields: The fields of the step messages of all ranks, by name. Each field has one tuple
                of values per rank.

        Raises:
            IntegrityError: States differ or have changed without an update, and `integrity.mode` is
                "end". Every rank raises the error.
            PeerError: Another rank failed or issued a different collective.

        Note:
            Collective if digests differ: every rank of the world must call it.
        """
        if CHANGED not in fields:
            return
        differ = any(count for (count,) in fields[CHANGED])
        for name, partition in ((OF_PIECE, self._pieces), (OF_REPLICAS, self._replicas)):
            for ranks in partition:
                differ = differ or len({fields[name][rank] for rank in ranks}) > 1
        if differ:
            tables: dict[bool, Table] = {True: {}, False: {}}
            for state, sums in self._found:
                tables[state.is_whole][state.key] = [
                    (value, state.names_in(block)) for block, value in enumerate(sums)
                ]
            report = json.dumps([tables[True], tables[False], self._changed])
            texts = [report]
            if len(fields[OF_PIECE]) > 1:
                texts = self._runtime.comm.whole.all_gather_text(
                    report, "differences between ranks"
                )
            reports = [json.loads(text) for text in texts]
            self._report(step, found_in(reports, self._pieces, self._replicas))
        self._found = []
        self._changed = []

    def _report(self, step: int, lines: Sequence[str]) -> None:
        new = [line for line in lines if line not in self._reported]
        if not new:
            return
        self._reported.update(new)
        shown = "; ".join(new[:MOST_SHOWN]) + (
            f"; and {len(new) - MOST_SHOWN} more" if len(new) > MOST_SHOWN else ""
        )
        error = IntegrityError(
            f"step {step}: {shown}.",
            "A bit changed in memory or in a transfer, or a core computed a wrong result; no "
            "operation of the run explains it.",
            "test the memory of that rank's host, and resume from a checkpoint that was saved "
            f"before step {max(1, step - self.settings.every)}.",
        )
        if self.settings.mode == "end":
            raise error
        log_once(str(error), logging.WARNING)

    def _sums_before(self, state: State) -> Sums | None:
        """Return the sums of a state since it was last written, if they are known."""
        guard, writes, sums = self._rested.get(state.key, (None, 0, None))
        return sums if guard is state.group.guard and writes == guard.writes else None

    def _states(self) -> Iterator[tuple[State, Tensor]]:
        """Yield the states that are in memory between steps.

        States on a disk are not included, because tiers/disk.py checks what it reads.
        """
        for unit in self._runtime.units:
            for group in unit.groups:
                is_at_rest = not is_exposed(group)
                buffers = [("weight", group.weight, is_at_rest)]
                if group.master is not None and not group.plan.master_is_weight:
                    buffers.append(("master", group.master.buffer, True))
                for what, buffer, is_guarded in buffers:
                    if not buffer.storage.is_offloaded:
                        yield _state(
                            what, group, buffer.memory, buffer.spec.placement, is_guarded=is_guarded
                        )
        for shard in self._optimizer.shards():
            for name, values in self._optimizer.moments.resting(shard):
                yield _state(
                    name, shard.group, values, shard.master.placement, shard.start, is_guarded=True
                )

    def _gradients(self) -> Iterator[tuple[State, Tensor]]:
        """Yield reduced gradients that each rank holds whole and no program changed."""
        for group in self._runtime.trained_groups:
            gradient = group.gradient
            if (
                group.plan.sums_to_all
                and not gradient.is_edited
                and (values := gradient.sum.reduced()) is not None
            ):
                yield _state("gradient", group, values, Placement.REPLICATE)


def _note_gathered(found: dict[str, tuple[State, Tensor]], unit: Unit) -> None:
    """Record the sums of a unit's gathered weights, the first time in a step."""
    for group in unit.sharded:
        if group.unsharded is not None:
            values = group.unsharded.memory
            state, _ = _state("gathered weight", group, values, Placement.REPLICATE)
            if state.key not in found:
                found[state.key] = state, block_sums(values)


def _state(
    what: str,
    group: ParamGroup,
    values: Tensor,
    placement: Placement,
    start: int = 0,
    *,
    is_guarded: bool = False,
) -> tuple[State, Tensor]:
    """Return the state that begins at element `start` on this rank, and its memory."""
    is_whole = placement is Placement.REPLICATE
    low = start + (0 if is_whole else group.layout.bounds(group.comm_ctx.comm.rank)[0])
    return State(what, group, values.dtype, values.numel(), low, is_whole, is_guarded), values


def found_in(
    reports: Sequence[tuple[Table, Table, list[str]]], pieces: Partition, replicas: Partition
) -> list[str]:
    """Return a line for each state that differs between ranks, with the ranks that report it.

    Args:
        reports: For each rank of the world, three results: states shared by all ranks with its
            piece of the model, states shared by replicas, and states that changed without an
            update.
        pieces: The sets of ranks with the same piece of the model.
        replicas: The sets of ranks that are replicas of each other.

    Returns:
        One line per differing state, for an error message; empty if all states are equal.
    """
    lines = [
        f"{what} changed on rank {rank} although nothing wrote it"
        for rank, (_, _, changed) in enumerate(reports)
        for what in changed
    ]
    for ranks in pieces:
        lines += differences({rank: reports[rank][0] for rank in ranks})
    for ranks in replicas:
        lines += differences({rank: reports[rank][1] for rank in ranks})
    return lines


def differences(tables: Mapping[int, Table]) -> list[str]:
    """Return a line for each state whose checksums differ between ranks.

    Args:
        tables: For each rank, the checksums of its states by key.

    Returns:
        One line per differing state, for an error message; empty if all checksums are equal.
    """
    lines: dict[tuple[str, str], list[str]] = {}  # by state and ranks
    for key in dict.fromkeys(key for table in tables.values() for key in table):
        ranks = [rank for rank, table in tables.items() if key in table]
        for block in range(min(len(tables[rank][key]) for rank in ranks)):
            sums = {rank: tables[rank][key][block][0] for rank in ranks}
            ((most, count),) = Counter(sums.values()).most_common(1)
            if count == len(sums):
                continue
            who = f" differs between {listed_ranks(ranks)}, without a majority"
            if 2 * count > len(sums):
                others = listed_ranks([rank for rank in ranks if sums[rank] != most])
                agreed = listed_ranks([rank for rank in ranks if sums[rank] == most])
                who = f" differs on {others} from {agreed}"
            lines.setdefault((key, who), []).append(tables[ranks[0]][key][block][1])
    return [
        where[0] + (f" (and {len(where) - 1} MiB more)" if len(where) > 1 else "") + who
        for (_, who), where in lines.items()
    ]
