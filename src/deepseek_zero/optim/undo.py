"""What brings a piece back to where it was before an update, bit by bit: a copy of every byte that the update writes.

Copies, not arithmetic: an update cannot be calculated backwards without rounding, and not at all once a number is not
finite.  They lie in one buffer that is taken once, on the host, where everything rests that is updated early.  Called
by early.py; planner/memory.py predicts its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..base.device import CPU
from ..base.memory import return_pages
from ..sharding.buffer import has_pages_to_return
from .flow import ExtentRange
from .moments import Moments
from .piece import MasterShard
from .scratch import Scratch


@dataclass
class Before:
    """One piece as it was.  places, powers: what was copied, and the copy.  state: the optimizer's entry, counters as
    numbers; None where there was none.
    """

    piece: MasterShard
    places: list[tuple[ExtentRange, Tensor]] = field(default_factory=list)
    powers: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    state: dict[str, Any] | None = None
    counters: dict[str, float] = field(default_factory=dict)


class UndoLog:
    """Pieces as they were, latest last."""

    def __init__(self, inner: Optimizer, moments: Moments, scratch: Scratch) -> None:
        self._inner, self._moments, self._scratch = inner, moments, scratch
        self._entries: list[Before] = []
        self._memory: Tensor | None = None
        self._used = 0

    def bytes_of(self, piece: MasterShard) -> int:
        """What `note` will take."""
        places = sum(stretch.extent.memory.itemsize for stretch in self._written(piece)) * piece.numel
        return places + sum(powers.nbytes for _, powers in self._moments.storages(piece) if powers is not None)

    def reserve(self, nbytes: int) -> None:
        """Take the buffer.  `OutOfMemoryError` where memory_budget.device does not allow it."""
        self._memory = self._scratch.take("undo", torch.uint8, CPU, nbytes)

    def note(self, piece: MasterShard) -> None:
        """This piece is about to be updated."""
        before = Before(piece)
        self._entries.append(before)
        for stretch in self._written(piece):
            before.places.append((stretch, self._copy(stretch.extent.read(stretch.low, stretch.high))))
        for _, powers in self._moments.storages(piece):
            if powers is not None:
                before.powers.append((powers, self._copy(powers)))
        if piece.param in self._inner.state:
            before.state = dict(self._inner.state[piece.param])
            counters = {key: value for key, value in before.state.items() if _counts(value)}
            before.counters = {key: value.item() for key, value in counters.items()}

    def undo(self) -> None:
        """Bring back every piece that was noted."""
        for before in reversed(self._entries):
            before.piece.group.barrier.before_write()
            for stretch, copy in before.places:
                stretch.extent.write(stretch.low, stretch.high).view(torch.uint8).copy_(copy)
                stretch.release()
            for powers, copy in before.powers:
                powers.view(torch.uint8).copy_(copy)
            self._restore_state(before)
        self.clear()

    def clear(self) -> None:
        """Nothing will be undone any more; on the CPU the buffer's pages are the system's until it is used again."""
        self._entries, self._used = [], 0
        if self._memory is not None and has_pages_to_return(self._memory):
            return_pages(self._memory)

    def _restore_state(self, before: Before) -> None:
        state = self._inner.state
        if before.state is None:
            state.pop(before.piece.param, None)
            return
        state[before.piece.param] = before.state
        for key, number in before.counters.items():
            before.state[key].fill_(number)

    def _written(self, piece: MasterShard) -> Iterator[ExtentRange]:
        """Every place outside the optimizer's own counters that an update of this piece writes."""
        yield from (stretch for stretch in piece.extent_ranges() if stretch.changes)
        yield from (stretch for stretch, _ in self._moments.storages(piece))

    def _copy(self, values: Tensor) -> Tensor:
        assert self._memory is not None
        copy = self._memory[self._used : self._used + values.nbytes]
        self._used += values.nbytes
        return copy.copy_(values.view(torch.uint8))


def _counts(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0
