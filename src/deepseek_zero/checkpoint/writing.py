"""Writes this rank's file of a checkpoint: at once, or in a thread while training goes on.

A thread reads states where they lie, since nothing but a step changes them.  A step that comes to a unit whose states
are still to be written has them copied first, as far as `snapshot_bytes` go, and waits for the thread beyond that: the
file has the values of the moment the save began.  Called by save.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from ..optim.flow import Flow, FlowSettings
from ..sharding.group import FlatGroup
from .manifest import Chunk
from .shard import ShardWriter
from .state import Batch, Origin
from .tensor_file import Entry

READ_NUMEL = 1 << 20  # elements that are read, and joined or decoded, at once


@dataclass(eq=False)
class Written:
    """What one origin has become so far."""

    origin: Origin
    held: Tensor | None = None  # its values, copied because a step was about to change them
    is_taken: bool = False  # the writer has begun with it
    crc: int | None = None  # the writer is done with it

    @property
    def nbytes(self) -> int:
        return self.origin.numel * self.origin.dtype.itemsize


class Shard:
    """This rank's file, and how far it is."""

    def __init__(self, path: Path, batches: Sequence[Batch], metadata: dict[str, str], snapshot_bytes: int = 0) -> None:
        self.path, self.metadata, self.snapshot_bytes = path, metadata, snapshot_bytes
        self._batches = aligned(batches)
        self._states = {id(origin): Written(origin) for batch in self._batches for origin in batch.origins}
        self._of_group: dict[FlatGroup, list[Written]] = {}
        for state in self._states.values():
            if state.origin.group is not None:
                self._of_group.setdefault(state.origin.group, []).append(state)
        self._moved = threading.Condition()
        self._thread: threading.Thread | None = None
        self._held_bytes = 0
        self._error: Exception | None = None
        self._is_over = False
        self.blocked_seconds = self.seconds = 0.0
        self.head_crc = 0  # of the file's header

    def start(self) -> None:
        """Write in a thread from now on; only where all of it `rests_in_place`."""
        for group in self._of_group:
            group.barrier.reader = partial(self._let_go, group)
        self._thread = threading.Thread(target=self._try, name="deepseek_zero checkpoint", daemon=True)
        self._thread.start()

    def write(self) -> None:
        """Write all of it now."""
        began = time.perf_counter()
        try:
            self._write()
        finally:
            self._is_over, self.seconds = True, time.perf_counter() - began
            self.blocked_seconds += self.seconds

    @property
    def rests_in_place(self) -> bool:
        """Whether a thread may read all of it."""
        return not any(stretch.extent.rests_elsewhere for batch in self._batches for stretch in batch.stretches)

    @property
    def is_over(self) -> bool:
        """Whether the file is finished, or has failed."""
        return self._is_over

    def chunks(self) -> list[Chunk]:
        """What was written, with its checksums; waits for the thread, and raises what ended it."""
        if self._thread is not None:
            self._thread.join()
            for group in self._of_group:
                group.barrier.reader = None
        if self._error is not None:
            raise self._error
        return [replace(state.origin.chunk, crc=state.crc) for state in self._states.values()]

    # -- in the thread

    def _try(self) -> None:
        began = time.perf_counter()
        try:
            with torch.no_grad():
                self._write()
        except Exception as error:
            self._error = error
        with self._moved:
            self._is_over, self.seconds = True, time.perf_counter() - began
            self._moved.notify_all()

    def _write(self) -> None:
        origins = [state.origin for state in self._states.values()]
        writer = ShardWriter(
            self.path, [Entry(each.chunk.entry, each.shape, each.dtype) for each in origins], self.metadata
        )
        self.head_crc = writer.head_crc
        try:
            flow = Flow(self._batches, lambda batch: batch.stretches, FlowSettings())
            while (batch := flow.take()) is not None:
                for origin in batch.origins:
                    self._put(writer, self._states[id(origin)])
                flow.give(batch)
            writer.finish()
        finally:
            writer.close()

    def _put(self, writer: ShardWriter, state: Written) -> None:
        with self._moved:
            state.is_taken = True
        origin, crc = state.origin, 0
        read: Callable[[int, int], Tensor] = origin.read if state.held is None else _slice_of(state.held)
        for low in range(0, origin.numel, READ_NUMEL):
            crc = writer.put(read(low, min(low + READ_NUMEL, origin.numel)), crc)
        with self._moved:
            self._held_bytes -= state.nbytes if state.held is not None else 0
            state.held, state.crc = None, crc
            self._moved.notify_all()

    # -- in the thread that trains

    def _let_go(self, group: FlatGroup) -> None:
        """This group's states are about to change."""
        began = time.perf_counter()
        for state in self._of_group[group]:
            with self._moved:
                if not state.is_taken and self._held_bytes + state.nbytes <= self.snapshot_bytes:
                    state.held = state.origin.read(0, state.origin.numel).detach().to("cpu", copy=True)
                    state.is_taken = True
                    self._held_bytes += state.nbytes
                while state.held is None and state.crc is None and not self._is_over:
                    self._moved.wait()
        group.barrier.reader = None
        self.blocked_seconds += time.perf_counter() - began


def _slice_of(values: Tensor) -> Callable[[int, int], Tensor]:
    flat = values.reshape(-1)
    return lambda low, high: flat[low:high]


def aligned(batches: Sequence[Batch]) -> list[Batch]:
    """In the order of the file: larger dtypes first, so that every tensor lies at a multiple of its elements' size;
    else as they come.
    """
    found = [(origin, batch) for batch in batches for origin in batch.origins]
    found.sort(key=lambda item: -item[0].dtype.itemsize)
    parts = groupby(found, key=lambda item: id(item[1]))
    return [Batch([origin for origin, _ in part], part[0][1].stretches) for part in (list(each) for _, each in parts)]
