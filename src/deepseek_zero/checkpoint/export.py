"""Writes the whole weights of a live engine as files that other programs read: safetensors by all ranks, or one file.

Weights are gathered group by group, each rank writes the tensors of its own files, and no rank ever holds the model;
only a torch file (`.pth`) needs it whole, on rank 0.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.errors import CheckpointError
from ..comm.collectives import Comm, scatter
from ..sharding.access import gather_full
from ..sharding.buffer import FlatBuffer
from ..sharding.param_group import ParamGroup
from ..sharding.runtime import Runtime
from . import files
from .hf_folder import EXPORT_PATTERNS, INDEX, MAX_SHARD_BYTES, plan_shards, shard_names, write_index
from .lockstep import run_and_gather
from .safetensors_file import SafetensorsWriter, TensorInfo, cast
from .staging import StagedOutput
from .state import exact_extents, persistent_buffers, state_names

Companions = Callable[[Path], None]  # writes what else belongs into an exported folder
FILE_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")  # that mean one file; anything else is a folder


@dataclass(frozen=True)
class ExportSettings:
    """How whole weights are written.

    dtype: of floating-point tensors; None: the one that they compute in.  max_shard_bytes: of one file.
    exclude_frozen: leave out parameters that are not trained.
    """

    dtype: torch.dtype | None = None
    max_shard_bytes: int = MAX_SHARD_BYTES
    exclude_frozen: bool = False

    def dtype_for(self, own: torch.dtype) -> torch.dtype:
        """Return the dtype in the file of a tensor whose dtype here is `own`."""
        return self.dtype if self.dtype is not None and own.is_floating_point else own


# -- what there is


def tensors_to_export(runtime: Runtime, settings: ExportSettings) -> list[TensorInfo]:
    """List every tensor to write, tied ones once under their first name; the same on every rank."""
    kept = {
        member.name: TensorInfo(member.name, tuple(member.slot.shape), settings.dtype_for(group.weight.spec.dtype))
        for group in runtime.groups
        for member in group.members
        if group.trainable or not settings.exclude_frozen
    }
    buffers = persistent_buffers(runtime.model)
    kept |= {
        name: TensorInfo(name, tuple(each.shape), settings.dtype_for(each.dtype)) for name, each in buffers.items()
    }
    return [kept[name] for name in state_names(runtime.model) if name in kept]


# -- whole values, one group at a time


def whole_values(runtime: Runtime, settings: ExportSettings) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, flat values) of each tensor of `tensors_to_export`, on every rank; valid until the next one is asked
    for.  Collective.

    A weight asked for in its own dtype is the weight itself, in any other dtype the master.  Buffers are rank 0's.
    """
    with torch.no_grad():
        for group in runtime.groups:
            if settings.exclude_frozen and not group.trainable:
                continue
            flat = gather_full(_source(group, settings), group, f"export of {group.members[0].name}")
            _evict(group)
            for member in group.members:
                yield member.name, flat[member.slot.start : member.slot.stop]
            del flat
        for name, buffer in persistent_buffers(runtime.model).items():
            yield name, _broadcast_first(runtime.comm, buffer, name)


def _source(group: ParamGroup, settings: ExportSettings) -> FlatBuffer:
    """Return the buffer that a group's tensors are written from: the weight, or the master for another dtype."""
    own = group.weight.spec.dtype
    if group.master is None or settings.dtype_for(own) == own:
        return group.weight
    return group.master.values()


def _evict(group: ParamGroup) -> None:
    """Give up the copies that were fetched from another memory to be read."""
    for extent in (group.weight.extent, *exact_extents(group)):
        if extent is not None:
            extent.evict(0, extent.memory.numel())


def _broadcast_first(comm: Comm, buffer: Tensor, name: str) -> Tensor:
    """Return rank 0's values of a buffer, flat, in new memory.  Collective."""
    flat = buffer.detach().reshape(-1).clone()
    if comm.size > 1 and flat.numel():
        scatter(comm, [flat] * comm.size, flat, f"export of {name}")
    return flat


# -- writing


class _RankFiles:
    """The files that this rank writes.  An error of the disk is kept until `close`, so that the rank still takes part
    in every gather.
    """

    def __init__(self, folder: Path, shards: dict[str, list[TensorInfo]], run: str) -> None:
        self.folder, self.shards, self.run = folder, shards, run
        self._stack = ExitStack()
        self._file_of: dict[str, SafetensorsWriter] = {}
        self._problem: Exception | None = None

    def open(self) -> str:
        """Create the files.  CheckpointError where the disk refuses."""
        for name, infos in self.shards.items():
            file = self._stack.enter_context(SafetensorsWriter(self.folder / name, infos, self.run))
            self._file_of |= {info.name: file for info in infos}
        return ""

    def put(self, name: str, values: Tensor) -> None:
        """Write a whole tensor, if it is in one of this rank's files; keeps an error for `close`."""
        file = self._file_of.get(name)
        if file is None or self._problem is not None:
            return
        try:
            file.write(name, 0, values)
        except (OSError, CheckpointError) as error:
            self._problem = error

    def close(self) -> str:
        """Complete the files and have them on the disk; raises the first error of a `put`."""
        if self._problem is not None:
            raise self._problem
        self._stack.close()
        return ""

    def abandon(self) -> None:
        """Close the files without completing them."""
        with suppress(OSError, CheckpointError):
            self._stack.close()


def export_safetensors(
    runtime: Runtime, directory: Path, settings: ExportSettings, companions: Companions | None = None
) -> list[str]:
    """Write the whole weights into the folder `directory` and return the files' names.  Collective.

    File k is rank k's (modulo the number of ranks), so with as many files as ranks all of them write at once.
    `directory` changes only when everything is on the disk.  CheckpointError on every rank where one of them cannot
    write.  companions: called on rank 0 with the folder, to write further files into it.
    """
    comm, output = runtime.comm, StagedOutput(directory)
    shards = plan_shards(tensors_to_export(runtime, settings), settings.max_shard_bytes)
    names = shard_names(len(shards))

    def finish() -> None:
        if len(names) > 1:
            write_index(output.path / INDEX, shards, names)
        if companions is not None:
            companions(output.path)
        output.publish_folder(EXPORT_PATTERNS, INDEX)

    try:
        run = run_and_gather(comm, "export: the folder", lambda: _begin(comm, output))[0]
        own_files = {name: shards[k] for k, name in enumerate(names) if k % comm.size == comm.rank}
        _write(runtime, settings, _RankFiles(output.path, own_files, run))
        run_and_gather(comm, "export: the names", lambda: _on_first_rank(comm, finish))
    except Exception:
        output.discard()
        raise
    return names


def export_file(runtime: Runtime, path: Path, settings: ExportSettings) -> None:
    """Write the whole weights as one file of rank 0's: safetensors by its suffix, otherwise torch's.  Collective.

    A safetensors file is written tensor by tensor.  torch.save wants everything at once, so rank 0 then holds the whole
    model in host memory, in the dtype asked for.  CheckpointError on every rank where rank 0 cannot write.
    """
    comm, output = runtime.comm, StagedOutput(path)
    try:
        run = run_and_gather(comm, "export: the folder", lambda: _begin(comm, output))[0]
        if path.suffix == ".safetensors":
            own_files = {path.name: tensors_to_export(runtime, settings)} if comm.rank == 0 else {}
            _write(runtime, settings, _RankFiles(output.path, own_files, run))
        else:
            state = consolidated(runtime, settings)
            into = output.path / path.name
            run_and_gather(comm, "export: the file", lambda: save_torch(state, into) if state is not None else "")
        run_and_gather(comm, "export: the name", lambda: _on_first_rank(comm, output.publish_file))
    except Exception:
        output.discard()
        raise


def _begin(comm: Comm, output: StagedOutput) -> str:
    """Open the staging folder on rank 0, and return a new identity for this export; "" on other ranks."""
    if comm.rank:
        return ""
    if output.final.is_dir() and output.final.suffix in FILE_SUFFIXES:
        raise CheckpointError(f"{output.final} is a folder.", "Its name is that of a file.", "name another file.")
    if output.final.is_file() and output.final.suffix not in FILE_SUFFIXES:
        raise CheckpointError(
            f"{output.final} is a file.", "An export is a folder.", "name a folder, or a file that ends in .pth."
        )
    output.open()
    return secrets.token_hex(8)


def _write(runtime: Runtime, settings: ExportSettings, own_files: _RankFiles) -> None:
    """Gather every tensor on every rank, and write those of this rank's files."""
    try:
        run_and_gather(runtime.comm, "export: this rank's files", own_files.open)
        for name, values in whole_values(runtime, settings):
            own_files.put(name, values)
            del values  # or its group would stay while the next one is gathered
        run_and_gather(runtime.comm, "export: this rank's tensors", own_files.close)
    finally:
        own_files.abandon()


def consolidated(runtime: Runtime, settings: ExportSettings) -> dict[str, Any] | None:
    """Gather the whole state dict into rank 0's host memory, tied weights under each name; None on other ranks.
    Collective.
    """
    found: dict[str, Tensor] = {}
    for name, values in whole_values(runtime, settings):
        if runtime.comm.rank == 0:
            found[name] = cast(values, settings.dtype_for(values.dtype)).to("cpu", copy=True)
        del values
    if runtime.comm.rank:
        return None
    shapes = {info.name: info.shape for info in tensors_to_export(runtime, settings)}
    whole_of = {name: values.view(shapes[name]) for name, values in found.items()}
    return {name: whole_of[first] for name, first in state_names(runtime.model).items() if first in whole_of}


def save_torch(state: dict[str, Any], path: Path) -> str:
    """Write `state` with torch.save into a new file, readable by its owner alone and on the disk when this returns."""
    with files.describing_errors(f"writing '{path}'"), files.new_file(path) as stream:
        torch.save(state, stream)
    return ""


def _on_first_rank(comm: Comm, action: Callable[[], None]) -> str:
    """Call `action` on rank 0; other ranks do nothing."""
    if comm.rank == 0:
        action()
    return ""
