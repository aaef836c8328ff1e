"""The whole weights of a live engine as files that others read: safetensors written by all ranks, or one file.

Weights are gathered group by group, each rank writes the tensors of its own files, and no rank ever holds the model;
only a torch file (`.pth`) needs it whole, on rank 0.  Called by engine/exporting.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..comm.collectives import Comm, hand_out
from ..sharding.access import whole
from ..sharding.buffer import FlatBuffer
from ..sharding.group import FlatGroup
from ..sharding.runtime import Runtime
from . import files
from .manifest import together
from .shards import (
    INDEX,
    MAX_SHARD_BYTES,
    hidden_beside,
    open_hidden,
    plan_shards,
    put_in_place,
    shard_names,
    write_index,
)
from .state import persistent_buffers, state_names
from .tensor_file import Entry, TensorFile, cast, private

Companions = Callable[[Path], None]  # writes what else belongs into an exported folder


@dataclass(frozen=True)
class ExportSettings:
    """dtype: of floating-point tensors; None: what they compute in.  exclude_frozen: leave out what is not trained."""

    dtype: torch.dtype | None = None
    max_shard_bytes: int = MAX_SHARD_BYTES
    exclude_frozen: bool = False

    def dtype_for(self, own: torch.dtype) -> torch.dtype:
        """Dtype in the file of a tensor that is here in `own`."""
        return self.dtype if self.dtype is not None and own.is_floating_point else own


# -- what there is


def entries_of(runtime: Runtime, settings: ExportSettings) -> list[Entry]:
    """Every tensor to write, tied ones once under their first name; the same on every rank."""
    kept = {
        member.name: Entry(member.name, tuple(member.slot.shape), settings.dtype_for(group.weight.spec.dtype))
        for group in runtime.groups
        for member in group.members
        if group.trainable or not settings.exclude_frozen
    }
    buffers = persistent_buffers(runtime.model)
    kept |= {name: Entry(name, tuple(each.shape), settings.dtype_for(each.dtype)) for name, each in buffers.items()}
    return [kept[name] for name in state_names(runtime.model) if name in kept]


# -- whole values, one group at a time


def whole_values(runtime: Runtime, settings: ExportSettings) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of `entries_of`, flat, on every rank; valid until the next one is asked for.  Collective.

    In the weight's own dtype the weight itself, in any other the master.  Buffers are rank 0's.
    """
    with torch.no_grad():
        for group in runtime.groups:
            if settings.exclude_frozen and not group.trainable:
                continue
            flat = whole(_source(group, settings), group, f"export of {group.members[0].name}")
            _let_go(group)
            for member in group.members:
                yield member.name, flat[member.slot.start : member.slot.stop]
            del flat
        for name, buffer in persistent_buffers(runtime.model).items():
            yield name, _of_first(runtime.comm, buffer, name)


def _source(group: FlatGroup, settings: ExportSettings) -> FlatBuffer:
    own = group.weight.spec.dtype
    if group.master is None or settings.dtype_for(own) == own:
        return group.weight
    return group.master.values()


def _let_go(group: FlatGroup) -> None:
    """What came from another memory to be read is not needed there any more."""
    extents = [group.weight.extent, *(group.master.extents() if group.master is not None else [])]
    for extent in extents:
        if extent is not None:
            extent.drop(0, extent.memory.numel())


def _of_first(comm: Comm, buffer: Tensor, name: str) -> Tensor:
    flat = buffer.detach().reshape(-1).clone()
    if comm.size > 1 and flat.numel():
        hand_out(comm, [flat] * comm.size, flat, f"export of {name}")
    return flat


# -- writing


class _Files:
    """This rank's files.  A disk that refuses is remembered, so that the rank still takes part in every gather."""

    def __init__(self, folder: Path, shards: dict[str, list[Entry]]) -> None:
        self.folder, self.shards = folder, shards
        self._stack = ExitStack()
        self._file_of: dict[str, TensorFile] = {}
        self._problem: OSError | None = None

    def open(self) -> str:
        for name, entries in self.shards.items():
            file = self._stack.enter_context(TensorFile(self.folder / name, entries))
            self._file_of |= {entry.name: file for entry in entries}
        return ""

    def put(self, name: str, values: Tensor) -> None:
        file = self._file_of.get(name)
        if file is None or self._problem is not None:
            return
        try:
            file.write(name, 0, values)
        except OSError as error:
            self._problem = error

    def close(self) -> str:
        if self._problem is not None:
            raise self._problem
        self._stack.close()
        return ""

    def abandon(self) -> None:
        """Let go of files that will not be used."""
        with suppress(OSError):
            self._stack.close()


def export_safetensors(
    runtime: Runtime, directory: Path, settings: ExportSettings, companions: Companions | None = None
) -> list[str]:
    """Write the whole weights into `directory` and return the files' names.  Collective.

    File k is rank k's (modulo their number): with as many files as ranks all of them write at once.  Nothing is to be
    seen in `directory` before everything is on the disk.
    """
    comm = runtime.comm
    shards = plan_shards(entries_of(runtime, settings), settings.max_shard_bytes)
    names = shard_names(len(shards))
    hidden = hidden_beside(directory)
    mine = {name: shards[k] for k, name in enumerate(names) if k % comm.size == comm.rank}
    files = _Files(hidden, mine)

    def finish() -> str:
        if len(names) > 1:
            write_index(hidden / INDEX, shards, names)
        if companions is not None:
            companions(hidden)
        put_in_place(directory)
        return ""

    together(comm, "export: the folder", lambda: _only_first(comm, lambda: open_hidden(directory)))
    try:
        together(comm, "export: this rank's files", files.open)
        for name, values in whole_values(runtime, settings):
            files.put(name, values)
            del values  # or its group would stay while the next one is gathered
        together(comm, "export: this rank's tensors", files.close)
    finally:
        files.abandon()
    together(comm, "export: the names", lambda: finish() if comm.rank == 0 else "")
    return names


def export_file(runtime: Runtime, path: Path, settings: ExportSettings) -> None:
    """Write the whole weights as one file of rank 0's: safetensors by its suffix, otherwise torch's.  Collective.

    A safetensors file is written tensor by tensor.  torch.save wants everything at once: rank 0 holds the whole model
    in host memory, in the dtype asked for.
    """
    comm, hidden = runtime.comm, hidden_beside(path)
    together(
        comm, "export: the folder", lambda: _only_first(comm, lambda: path.parent.mkdir(parents=True, exist_ok=True))
    )
    if path.suffix == ".safetensors":
        entries = entries_of(runtime, settings)
        files = _Files(hidden.parent, {hidden.name: entries} if comm.rank == 0 else {})
        try:
            together(comm, "export: the file", files.open)
            for name, values in whole_values(runtime, settings):
                files.put(name, values)
                del values
            together(comm, "export: the tensors", files.close)
        finally:
            files.abandon()
    else:
        state = consolidated(runtime, settings)
        together(comm, "export: the file", lambda: save_torch(state, hidden) if state is not None else "")
    together(comm, "export: the name", lambda: _only_first(comm, lambda: _rename(hidden, path)))


def consolidated(runtime: Runtime, settings: ExportSettings) -> dict[str, Any] | None:
    """The whole state dict on rank 0's host memory, tied weights under each name; None elsewhere.  Collective."""
    found: dict[str, Tensor] = {}
    for name, values in whole_values(runtime, settings):
        if runtime.comm.rank == 0:
            found[name] = cast(values, settings.dtype_for(values.dtype)).to("cpu", copy=True)
        del values
    if runtime.comm.rank:
        return None
    shapes = {entry.name: entry.shape for entry in entries_of(runtime, settings)}
    whole_of = {name: values.view(shapes[name]) for name, values in found.items()}
    return {name: whole_of[first] for name, first in state_names(runtime.model).items() if first in whole_of}


def save_torch(state: dict[str, Any], path: Path) -> str:
    """torch.save, readable by its owner alone and on the disk when this returns."""
    with open(path, "wb", opener=private) as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return ""


def _only_first(comm: Comm, action: Callable[[], None]) -> str:
    if comm.rank == 0:
        action()
    return ""


def _rename(hidden: Path, path: Path) -> None:
    os.replace(hidden, path)
    files.sync_folder(path.parent)
