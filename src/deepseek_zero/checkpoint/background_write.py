"""Write a rank's checkpoint file, immediately or in a thread during training.

The thread reads the states in place, because only a step changes them. Before a step changes
unwritten states, it copies them, up to `snapshot_bytes`, and waits for the thread if more are left.
The file therefore has the values at the start of the save.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ..base.progress import LongWork
from ..optim.tile_memory import PrefetchSettings, TilePrefetcher
from ..sharding.param_group import ParamGroup
from .format import SavedChunk
from .safetensors_file import TensorInfo, encode_header
from .state import WriteGroup, WriteItem
from .writebehind import StreamingWriter

BLOCK_NUMEL = 1 << 20  # elements that are read, and joined or decoded, at a time


@dataclass(eq=False)
class ItemProgress:
    """Progress of writing one item of a checkpoint."""

    item: WriteItem
    copy: Tensor | None = None  # values that were copied before a step changed them
    is_begun: bool = False  # the writer has started on it, or its values are copied
    crc: int | None = None  # set when the item has been written

    @property
    def nbytes(self) -> int:
        """Return the size of the item in bytes."""
        return self.item.numel * self.item.dtype.itemsize


class BackgroundWrite:
    """Write this rank's file, either immediately (`write`) or in a thread (`start`)."""

    def __init__(
        self,
        path: Path,
        groups: Sequence[WriteGroup],
        metadata: dict[str, str],
        snapshot_bytes: int = 0,
    ) -> None:
        self.path = path
        self.metadata = metadata
        self.snapshot_bytes = snapshot_bytes
        self._groups = by_element_size(groups)
        items = (item for write_group in self._groups for item in write_group.items)
        self._items = {item: ItemProgress(item) for item in items}
        self._of_group: dict[ParamGroup, list[ItemProgress]] = {}
        for state in self._items.values():
            if state.item.group is not None:
                self._of_group.setdefault(state.item.group, []).append(state)
        self._progress = threading.Condition()
        self._thread: threading.Thread | None = None
        self._copied_bytes = 0
        self._error: Exception | None = None
        self.is_over = False  # the file is finished or has failed
        self.blocked_seconds = 0.0
        self.seconds = 0.0
        self.head_crc = 0  # CRC-32 of the file's header

    def start(self) -> None:
        """Start writing in a thread; requires `is_resident`."""
        for group in self._of_group:
            group.guard.reader = partial(self._copy_before_change, group)
        self._thread = threading.Thread(
            target=self._run, name="deepseek_zero checkpoint", daemon=True
        )
        self._thread.start()

    def write(self) -> None:
        """Write the file in the calling thread, and return when it is complete."""
        self._run()
        self.blocked_seconds += self.seconds
        if self._error is not None:
            raise self._error

    @property
    def is_resident(self) -> bool:
        """Return whether all states are in memory, so that a thread may read them."""
        return not any(
            part.storage.is_offloaded for write_group in self._groups for part in write_group.ranges
        )

    def chunks(self) -> list[SavedChunk]:
        """Wait for the thread, and return the chunks with their checksums.

        An error of the thread is raised here.
        """
        if self._thread is not None:
            self._thread.join()
            for group in self._of_group:
                group.guard.reader = None
        if self._error is not None:
            raise self._error
        return [replace(state.item.chunk, crc=state.crc) for state in self._items.values()]

    def _run(self) -> None:
        """Write the file and keep an error; a thread runs this."""
        began = time.perf_counter()
        try:
            with torch.no_grad():
                self._write()
        except Exception as error:
            self._error = error
        with self._progress:
            self.is_over = True
            self.seconds = time.perf_counter() - began
            self._progress.notify_all()

    def _write(self) -> None:
        infos = [TensorInfo(each.chunk.tensor_name, each.shape, each.dtype) for each in self._items]
        nbytes = sum(info.nbytes for info in infos)
        header = encode_header(infos, self.metadata)
        self.head_crc = zlib.crc32(header)
        writer = StreamingWriter(self.path, len(header) + nbytes)
        try:
            writer.append(torch.frombuffer(bytearray(header), dtype=torch.uint8))
            prefetcher = TilePrefetcher(
                self._groups, lambda write_group: write_group.ranges, PrefetchSettings()
            )
            with LongWork("writing the checkpoint", nbytes) as work:
                while (write_group := prefetcher.next()) is not None:
                    for item in write_group.items:
                        self._write_item(writer, self._items[item])
                        work.advance(self._items[item].nbytes)
                    prefetcher.release(write_group)
                writer.finish()
        finally:
            writer.close()

    def _write_item(self, writer: StreamingWriter, state: ItemProgress) -> None:
        with self._progress:
            state.is_begun = True
        numel = state.item.numel
        crc = 0
        for low in range(0, numel, BLOCK_NUMEL):
            high = min(low + BLOCK_NUMEL, numel)
            values = state.item.read(low, high) if state.copy is None else state.copy[low:high]
            crc = writer.append(values, crc)
        with self._progress:
            self._copied_bytes -= state.nbytes if state.copy is not None else 0
            state.copy = None
            state.crc = crc
            self._progress.notify_all()

    # -- in the training thread

    def _copy_before_change(self, group: ParamGroup) -> None:
        """Copy a group's unwritten states, or wait for them, before a step changes them."""
        began = time.perf_counter()
        for state in self._of_group[group]:
            with self._progress:
                if not state.is_begun and self._copied_bytes + state.nbytes <= self.snapshot_bytes:
                    state.copy = state.item.read(0, state.item.numel).detach().to("cpu", copy=True)
                    state.is_begun = True
                    self._copied_bytes += state.nbytes
                while state.copy is None and state.crc is None and not self.is_over:
                    self._progress.wait()
        group.guard.reader = None
        self.blocked_seconds += time.perf_counter() - began


def by_element_size(groups: Sequence[WriteGroup]) -> list[WriteGroup]:
    """Return items in the order in which they are written: larger element sizes first.

    This aligns every tensor to its element size. Otherwise the order is kept.
    """
    found = []
    sizes = {item.dtype.itemsize for group in groups for item in group.items}
    for size in sorted(sizes, reverse=True):
        for group in groups:
            items = [item for item in group.items if item.dtype.itemsize == size]
            if items:
                found.append(WriteGroup(items, group.ranges))
    return found
