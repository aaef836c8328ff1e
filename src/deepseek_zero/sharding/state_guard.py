"""The guard of a group's states, which every access passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


class PendingUpdate(Protocol):
    """An update that runs after its step, or that ran before its step was over."""

    def flush_group(self, group: Any) -> None:
        """Bring the states of this `ParamGroup` to the values that its last step leaves.

        Other groups are updated only if that is necessary.
        """

    def flush(self) -> None:
        """Bring the states of every group to the values that the last step leaves.

        Raises:
            StorageError: A disk failed.
            UsageError: An earlier update failed.
        """


@dataclass(eq=False)
class StateGuard:
    """Guards the states of one group: every read and every write passes it first.

    Views for writing come from `FlatBuffer.write` and `FlatBuffer.writing`, `MasterWeight` and
    `Moments`, which all call `before_write`. Nothing else writes a state.

    Attributes:
        pending: An update that must run before a read. The optimizer that defers it sets and clears
            it.
        reader: Is called before a write. A save in the background copies the old values in it.
        writes: The number of writes; a state with an unchanged number was not written.
        refusal: Raises while states of the group are moved away by `engine.offload_states`.
    """

    # The values were moved away, so that every access raises (engine/state_offload.py)
    is_offloaded = False

    pending: PendingUpdate | None = None
    reader: Callable[[], None] | None = None
    writes: int = 0
    refusal: Callable[[], None] | None = None

    def refuse_offloaded(self) -> None:
        """Raise `UsageError` if a state of the group was moved away by `engine.offload_states`."""
        if self.refusal is not None:
            self.refusal()

    def before_read(self) -> None:
        """Flush the pending updates of all groups: a reader may hold views of several."""
        if self.pending is not None:
            self.pending.flush()

    def before_write(self) -> None:
        """Let a save in the background copy the old values, and count the write."""
        self.refuse_offloaded()
        self.writes += 1
        if self.reader is not None:
            self.reader()
