"""Tiles: parts of a large layer, which several layers may share (tiled.py)."""

from __future__ import annotations

import torch

from ..sharding.gather_lane import GatherLane
from ..sharding.runtime import Runtime
from ..sharding.step_state import Phase, UnitUses
from ..sharding.unit import Unit, UnitState


class LayerTiles(UnitUses):
    """Gathers tiles for uses that the schedule does not contain.

    If several layers share a tile, the schedule contains only its first use in forward, which
    backward reaches last.

    Args:
        gathers: Issues the all-gathers of the model.
    """

    def __init__(self, gathers: GatherLane) -> None:
        self.gathers = gathers
        self._used: set[int] = set()  # tiles used in the current forward
        self._again: Unit | None = None  # the tile that `unshard_again` has gathered

    def begin_forward(self) -> None:
        """Forget the uses of tiles in the last forward."""
        self._used.clear()

    def is_first(self, unit: Unit, phase: Phase) -> bool:
        """Record a use of a unit, and return whether it is the first one in this forward.

        A recomputed use, and any use of a unit that is not a tile, counts as a first one.

        Args:
            unit: The unit whose forward begins.
            phase: The phase of the model.
        """
        if not unit.is_layer_tile or phase is not Phase.FORWARD:
            return True
        is_first = unit.number not in self._used
        self._used.add(unit.number)
        return is_first

    def unshard_again(self, unit: Unit) -> None:
        """Unshard a tile outside of the schedule, until `end_again`.

        Args:
            unit: The unit of the tile.

        Note:
            Collective: every rank of the shard group must call it in the same order.
        """
        if self._again is unit:
            return
        self.end_again()
        self._again = unit if unit.state is UnitState.SHARDED else None
        self.gathers.unshard(unit, in_turn=False)

    def end_again(self) -> None:
        """Release the tile that `unshard_again` has gathered."""
        if self._again is not None:
            unit = self._again
            self._again = None
            with torch.no_grad():
                unit.reshard()


def follow_tiles(runtime: Runtime) -> None:
    """Record the uses of tiles from now on.

    Args:
        runtime: The runtime of the model, which has tiles.
    """
    tiles = LayerTiles(runtime.gathers)
    runtime.step.uses = tiles
    runtime.forward.before_forwards.append(tiles.begin_forward)
