"""Where an optimizer's moments rest when that is not the training device: as extents, one per group and kind of moment.

Any torch optimizer will do: what it made in its first step and follows a piece's elements is taken over; counters and
states of another shape stay where they are.  Called by sharded.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..tiers.tier import Extent
from .flow import Stretch
from .piece import Piece, rests
from .scratch import Scratch


class Moments:
    """The moments of one optimizer."""

    def __init__(self, state: Any, scratch: Scratch) -> None:
        self._state, self._scratch = state, scratch
        self._extents: dict[tuple[int, str], Extent] = {}  # by (id of the group, name)
        self._names: dict[int, list[str]] = {}

    def extents(self) -> Iterable[Extent]:
        """All of them."""
        return self._extents.values()

    def stretches(self, piece: Piece) -> Iterator[Stretch]:
        """What of the moments a piece's update reads and writes."""
        for name in self._names.get(id(piece.group), ()):
            yield Stretch(self._extents[id(piece.group), name], piece.start, piece.stop)

    def show(self, piece: Piece) -> None:
        """Let the optimizer see a piece's moments."""
        for name, extent in self._of(piece):
            if self._is_hidden(self._state[piece.param].get(name)):
                self._state[piece.param][name] = extent.part(piece.start, piece.stop).view(piece.param.shape)

    def hide(self, piece: Piece) -> None:
        """Keep what the optimizer has made of them; where they rest elsewhere, it sees NaN until they are shown."""
        if not rests(piece):
            return
        for name, value in self._state.get(piece.param, {}).items():
            if not isinstance(value, Tensor) or value.shape != piece.param.shape or self._is_hidden(value):
                continue
            extent = self._extent(piece, name, value.dtype)
            own = extent.memory[piece.start : piece.stop]
            if value.data_ptr() != own.data_ptr():
                extent.part(piece.start, piece.stop).copy_(value.reshape(-1))
            shown = own.view(value.shape)
            hidden = extent.rests_elsewhere
            self._state[piece.param][name] = self._scratch.nothing(value.shape, value.dtype) if hidden else shown

    def _of(self, piece: Piece) -> Iterator[tuple[str, Extent]]:
        if piece.param in self._state:
            for name in self._names.get(id(piece.group), ()):
                yield name, self._extents[id(piece.group), name]

    def _extent(self, piece: Piece, name: str, dtype: torch.dtype) -> Extent:
        key = id(piece.group), name
        if key not in self._extents:
            plan, group = piece.group.plan, piece.group
            assert plan.moments is not None
            numel, what = piece.master.buffer.memory.numel(), f"{name} of {group.members[0].name}"
            self._extents[key] = group.route.tiers.reserve(plan.moments.tier, numel, dtype, what)
            self._names.setdefault(id(group), []).append(name)
        return self._extents[key]

    def _is_hidden(self, value: object) -> bool:
        nothing = self._scratch.kept.get("nothing")
        return isinstance(value, Tensor) and nothing is not None and value.data_ptr() == nothing.data_ptr()
