"""What the ranks of one world share, whatever engines run on it: gloo's connections, the notice board, the lanes.

One per process and world, so that connections and their threads are made once, and a rank that waits in one engine
knows where the others stand in every engine.  Called by collectives.py.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import ClassVar

import torch.distributed as dist

from ..base.mesh import PATIENCE
from .board import Board, Position
from .neighbours import find_neighbours
from .same_host import SameHost
from .transports import Gloo, Together, Transport, engine_of

LOG_LENGTH = 64  # collectives remembered per lane, for the board


@dataclass
class Lane:
    """A sequence of collectives in one agreed order; different lanes may interleave differently on different ranks."""

    name: str
    issued: int = 0
    log: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=LOG_LENGTH))

    def next(self, name: str) -> int:
        self.log.append((self.issued, name))
        self.issued += 1
        return self.issued - 1


class Links:
    """The first `of_this_world` is collective; later ones return the same object."""

    _current: ClassVar[Links | None] = None

    def __init__(self) -> None:
        self.world = dist.group.WORLD
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.board = Board(self.rank, self.size, group)
        others = [peer for peer in range(self.size) if peer != self.rank]
        self.gloo = Gloo(self.rank, self.size, group, others)
        neighbours = find_neighbours(self.rank, self.size, group)
        same_host = SameHost(self.rank, self.size, neighbours) if neighbours is not None else None
        near = same_host.peers if same_host is not None else ()
        far = Gloo(self.rank, self.size, group, [peer for peer in others if peer not in near])
        self.fastest: Transport = far  # shared memory to the ranks of this host, gloo to the others
        if same_host is not None:
            self.fastest = Together(same_host, far, self.rank) if far.peers else same_host
        self.engines = itertools.count()  # numbers for those that will use it
        self._lanes: dict[str, Lane] = {}

    @classmethod
    def of_this_world(cls) -> Links:
        if cls._current is None or cls._current.world is not dist.group.WORLD:
            cls._current = cls()
        return cls._current

    def lane(self, name: str) -> Lane:
        """The lane of that name ("engine 0/gather"), made at its first use."""
        return self._lanes.setdefault(name, Lane(name))

    def forget(self, engine: str) -> None:
        """An engine is gone: its waiting threads may go.  How far it came stays, for ranks that are still behind."""
        for name, lane in list(self._lanes.items()):  # a backward thread may add one meanwhile
            if engine_of(name) == engine:
                lane.log.clear()
        self.gloo.end_engine(engine)
        self.fastest.end_engine(engine)

    def position(self, lane: str, sequence: int) -> Position:
        """Where this rank stands, as it waits for one collective of one lane."""
        return Position(
            lane,
            sequence,
            {name: each.issued for name, each in self._lanes.items()},
            {name: {str(number): what for number, what in each.log} for name, each in self._lanes.items()},
        )
