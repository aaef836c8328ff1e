"""Flat buffers: one state of one parameter group on this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..planner.layout import FlatLayout, Slot
from ..planner.spec import R, S, Spec
from ..precision.codecs import Codec, LeftOut
from ..tiers.tier import StagedTile, Storage, Tier
from .comm_context import CommContext


class PendingUpdate(Protocol):
    """Interface of optimizer updates that run after their step, or that ran in backward."""

    def flush_group(self, group: Any) -> None:
        """Run or undo the updates of one `ParamGroup`; of others only if necessary."""

    def flush(self) -> None:
        """Run or undo updates, so that every group has its values after the last step.

        Raises:
            StorageError: A disk failed.
            UsageError: An earlier update failed.
        """


@dataclass(eq=False)
class StateGuard:
    """Callbacks before every read and write of the states of one parameter group.

    The states are the weight, the main weight, the moments and a kept gradient.

    Attributes:
        is_offloaded: Whether the states were moved away. Every access then raises, by the subclass
            `OffloadedGuard` (engine/state_offload.py).
        pending: A deferred update, which runs before a read. The optimizer sets and clears it.
        reader: Called before a write; a background save copies the old values in it.
        writes: The number of writes so far, by which a reader detects that states have changed.
        refusal: Raises at a write while states of the group are moved away.
    """

    is_offloaded = False

    pending: PendingUpdate | None = None
    reader: Callable[[], None] | None = None
    writes: int = 0
    refusal: Callable[[], None] | None = None

    def refuse_offloaded(self) -> None:
        """Raise `UsageError` if `engine.offload_states` has moved a state away."""
        if self.refusal is not None:
            self.refusal()

    def before_read(self) -> None:
        """Flush the pending updates of all groups, because a reader may hold views of several."""
        if self.pending is not None:
            self.pending.flush()

    def before_write(self) -> None:
        """Prepare a write: let a background save copy the old values first."""
        self.refuse_offloaded()
        self.writes += 1
        if self.reader is not None:
            self.reader()


class FlatBuffer:
    """A flat buffer with one state (such as the weight) of one parameter group on this rank.

    The buffer has one slice if the state is sharded. It has all elements if the state is
    replicated, or partial (a gradient that is not yet summed over the ranks). Ranges [low, high) of
    its methods count elements of this buffer.

    Attributes:
        layout: The positions of the parameters in the buffer.
        spec: The placement, dtype and memory of the state.
        memory: The elements, flat, in the spec's dtype. If they are offloaded or quantized, `load`
            and `elements` fetch them, and `memory` must not be read.
        storage: The memory in which the elements are kept between uses.
        guard: Called before every access.
        coded_as: The codec of slices that are gathered into this buffer; None if they are sent
            exactly.
        errors: The quantization errors, which are added to the next gradient (error feedback).
        on_sum: Called with each part of a reduced gradient that is written to this buffer, flat,
            while the part is on the training device.
        staged: Copies ranges of this rank's slice from the training device to the host, which
            updates them, and back; None if no range is copied.
    """

    def __init__(
        self,
        layout: FlatLayout,
        spec: Spec,
        memory: Tensor,
        storage: Storage | None = None,
        *,
        guard: StateGuard | None = None,
        coded_as: Codec | None = None,
    ) -> None:
        self.layout = layout
        self.spec = spec
        self.memory = memory
        self.storage = Storage(memory) if storage is None else storage
        self.guard = StateGuard() if guard is None else guard
        self.coded_as = coded_as
        self.errors: LeftOut | None = None
        self.on_sum: Callable[[Tensor], object] | None = None
        self.staged: StagedTile | None = None

    def load(self) -> Tensor:
        """Return all elements on this rank, flat, for reading or as the output of `move`.

        Offloaded elements are fetched as in `elements`.
        """
        if self.storage.on_device and self.storage.has_elements:
            self.guard.before_read()
            return self.memory
        return self.elements(0, self.numel)

    @property
    def numel(self) -> int:
        """The number of elements on this rank."""
        return self.storage.numel

    def elements(self, low: int, high: int) -> Tensor:
        """Return a flat view of elements [low, high), fetched if offloaded, after pending updates.

        Raises:
            StorageError: A disk failed.
        """
        self.guard.before_read()
        return self.storage.write(low, high)

    def at_update_device(self, low: int, high: int) -> Tensor:
        """Return elements [low, high), to be written, on the device that updates them."""
        copy = None if self.staged is None else self.staged.view(low, high)
        return self.elements(low, high) if copy is None else copy

    def write(self, low: int, high: int) -> Tensor:
        """Return a flat view of elements [low, high) to be written.

        A background save has copied the old values before this returns. The storage must hold the
        elements themselves; use `writing` for other storages.
        """
        assert self.storage.has_elements, "what is written to a copy of elements is lost"
        self.guard.before_write()
        return self.elements(low, high)

    @contextmanager
    def writing(self, low: int, high: int) -> Iterator[Tensor]:
        """Return a context manager that yields a flat tensor to overwrite [low, high)."""
        self.guard.before_write()
        self.guard.before_read()
        with self.storage.writing(low, high) as values:
            yield values

    def read(self, low: int, high: int) -> Tensor:
        """Return a read-only view as `elements`; an offloaded range is not stored again."""
        self.guard.before_read()
        return self.storage.read(low, high)

    def read_now(self, low: int, high: int) -> Tensor:
        """Return a read-only view of the current values; a pending update does not run."""
        return self.storage.read_now(low, high)

    @classmethod
    def empty(cls, layout: FlatLayout, spec: Spec, device: torch.device) -> FlatBuffer:
        """Return a buffer of zeros on a device."""
        numel = spec.numel(layout.padded_numel, layout.ranks)
        return cls(layout, spec, torch.zeros(numel, dtype=spec.dtype, device=device))

    @classmethod
    def allocate(
        cls,
        layout: FlatLayout,
        spec: Spec,
        comm_ctx: CommContext,
        what: str,
        *,
        is_copied: bool = True,
    ) -> FlatBuffer:
        """Allocate a buffer in the planned memory: the training device, the host or a disk.

        Args:
            layout: The layout of the group.
            spec: The placement, dtype and memory of the state.
            comm_ctx: The context that has the pool and the tiers.
            what: The name of the state, used in error messages.
            is_copied: Whether the training device copies the state from or to its memory, if that
                is another one.
        """
        if spec.tier is Tier.DEVICE:
            return cls.empty(layout, spec, comm_ctx.pool.device).counted(comm_ctx, what)
        numel = spec.numel(layout.padded_numel, layout.ranks)
        storage = comm_ctx.tiers.reserve(spec.tier, numel, spec.dtype, what, is_copied=is_copied)
        return cls(layout, spec, storage.memory, storage)

    @classmethod
    def allocate_for_comm(
        cls,
        layout: FlatLayout,
        spec: Spec,
        comm_ctx: CommContext,
        what: str,
        *,
        is_zeroed: bool = True,
    ) -> FlatBuffer:
        """Allocate a buffer in memory that other ranks can access fast, such as shared memory.

        The arguments are those of `allocate`. Without `is_zeroed`, the buffer is uninitialized.
        """
        memory = comm_ctx.pool.comm.empty(spec.numel(layout.padded_numel, layout.ranks), spec.dtype)
        if is_zeroed:
            memory.zero_()
        return cls(layout, spec, memory).counted(comm_ctx, what)

    def counted(self, comm_ctx: CommContext, what: str) -> FlatBuffer:
        """Count the bytes of this buffer in the device's budget until it is freed; return it."""
        return comm_ctx.tiers.budget.reserve_for(self, self.memory.nbytes, what)

    def gathered_in(self, memory: Tensor, coded_as: Codec | None = None) -> FlatBuffer:
        """Return a buffer of all elements in `memory`, as the target of a gather.

        Slices are sent in the codec `coded_as`, or exactly if it is None.
        """
        return FlatBuffer(self.layout, Spec(R, self.spec.dtype), memory, coded_as=coded_as)

    def slice_of(self, rank: int) -> Tensor:
        """Return a flat view of the slice of a rank."""
        if self.spec.placement is S:
            return self.load()
        numel = self.layout.slice_numel
        return self.load()[rank * numel : (rank + 1) * numel]

    def view(self, slot: Slot) -> Tensor:
        """Return a view of one parameter, in its shape; the buffer must not be sharded."""
        values = self.load()
        return values.as_strided(slot.shape, slot.strides, values.storage_offset() + slot.start)
