"""Writes the whole weights of a live engine as files that other programs read: safetensors by all
ranks, or one file.

Weights are gathered group by group, each rank writes the tensors of its own files, and no rank ever
holds the model; only a torch file (`.pth`) needs it whole, on rank 0.  The files are the same bytes
on every mesh.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.errors import CheckpointError
from ..base.progress import LongWork
from ..comm.collectives import Comm, scatter
from ..extensions.gathered_parameters import gather_full, join_split
from ..planner.split import split_of
from ..sharding.buffer import FlatBuffer
from ..sharding.param_group import ParamGroup
from ..sharding.runtime import Runtime
from . import files
from .hf_folder import (
    EXPORT_PATTERNS,
    INDEX,
    MAX_SHARD_BYTES,
    plan_shards,
    shard_names,
    write_index,
)
from .lockstep import run_and_gather
from .piece import ModelPiece, persistent_buffers, whole_names
from .safetensors_file import SafetensorsWriter, TensorInfo, cast, dtype_name, dtype_named, run_of
from .staging import StagedOutput
from .state import exact_storages

Companions = Callable[[Path], None]  # writes what else belongs into an exported folder
# That mean one file; anything else is a folder
FILE_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")


@dataclass(frozen=True)
class ExportSettings:
    """How whole weights are written.

    dtype: of floating-point tensors; None: the one that they compute in.  max_shard_bytes: of one
    file.
    exclude_frozen: leave out parameters that are not trained.
    """

    dtype: torch.dtype | None = None
    max_shard_bytes: int = MAX_SHARD_BYTES
    exclude_frozen: bool = False

    def dtype_for(self, own: torch.dtype) -> torch.dtype:
        """Return the dtype in the file of a tensor whose dtype here is `own`."""
        return self.dtype if self.dtype is not None and own.is_floating_point else own


# -- what there is


@dataclass(frozen=True)
class WholeModel:
    """The tensors of the whole model, of which each rank's wrapped model is a piece; the same on
    every rank.

    stages: by coordinate along "pp", what its ranks hold, with the dtype that it is gathered in, in
    the order in which they gather it.  A parameter that is tied to one of an earlier stage is that
    stage's.
    """

    runtime: Runtime
    settings: ExportSettings
    stages: tuple[tuple[TensorInfo, ...], ...]

    @classmethod
    def of(cls, runtime: Runtime, settings: ExportSettings) -> WholeModel:
        """Look at what all stages hold.  Collective in the world where there are several."""
        own = _held(runtime, settings)
        stages = runtime.comm.along.get("pp")
        if stages is None:
            return cls(runtime, settings, (tuple(own),))
        text = json.dumps([[info.name, info.shape, dtype_name(info.dtype)] for info in own])
        found = run_and_gather(runtime.comm.whole, "export: what all stages hold", lambda: text)
        by_stage = list[tuple[TensorInfo, ...]]()
        known = set[str]()
        for rank in stages.ranks:
            rows = json.loads(found[rank])
            infos = [
                TensorInfo(name, tuple(shape), dtype_named(dtype)) for name, shape, dtype in rows
            ]
            by_stage.append(tuple(info for info in infos if info.name not in known))
            known |= {info.name for info in infos}
        return cls(runtime, settings, tuple(by_stage))

    @property
    def tensors(self) -> list[TensorInfo]:
        """Every tensor to write, tied ones once under their first name, as a file will have
        them.
        """
        kept = {
            info.name: replace(info, dtype=self.settings.dtype_for(info.dtype))
            for infos in self.stages
            for info in infos
        }
        return [kept[name] for name in whole_names(self.runtime.model) if name in kept]

    def values(self) -> Iterator[tuple[str, int, Tensor]]:
        """Yield (name, start, flat values) of each tensor, on every rank; valid until the next one
        is asked for. Collective in the world.

        A tensor is whole and starts at 0, but for tiles of rows (cut_layers.py), which come one
        after another.

        A weight asked for in its own dtype is the weight itself, in any other dtype the master.
        Buffers are the first rank's.
        """
        stages = self.runtime.comm.along.get("pp")
        with torch.no_grad():
            for stage, infos in enumerate(self.stages):
                names = {info.name for info in infos}
                if stages is None:
                    yield from _own_values(self.runtime, self.settings, names)
                elif stage == stages.rank:
                    for name, start, values in _own_values(self.runtime, self.settings, names):
                        scatter(stages, [values] * stages.size, values, f"export of {name}", stage)
                        yield name, start, values
                        del values
                else:
                    device = self.runtime.comm_ctx.pool.device
                    for info in infos:
                        came = torch.empty(info.numel, dtype=info.dtype, device=device)
                        scatter(stages, [came] * stages.size, came, f"export of {info.name}", stage)
                        yield info.name, 0, came
                        del came


def _held(runtime: Runtime, settings: ExportSettings) -> list[TensorInfo]:
    """List what `_own_values` yields: whole shapes, and the dtypes they come in."""
    piece = ModelPiece.of(runtime)
    found = list[TensorInfo]()
    for group in runtime.groups:
        if group.trainable or not settings.exclude_frozen:
            dtype = _source_dtype(group, settings)
            found += [
                TensorInfo(piece.name(member), piece.shape(member), dtype)
                for member in group.members
            ]
    buffers = persistent_buffers(runtime.model)
    return found + [
        TensorInfo(name, tuple(each.shape), each.dtype) for name, each in buffers.items()
    ]


# -- whole values, one group at a time


def _own_values(
    runtime: Runtime, settings: ExportSettings, names: Collection[str]
) -> Iterator[tuple[str, int, Tensor]]:
    """Yield (name, start, flat values) of these tensors, which the ranks of this stage hold, joined
    over "tp". Collective among them.
    """
    piece = ModelPiece.of(runtime)
    tp = runtime.comm.along.get("tp")
    for group in runtime.groups:
        members = [member for member in group.members if piece.name(member) in names]
        if not members:
            continue
        flat = gather_full(_source(group, settings), group, f"export of {group.members[0].name}")
        _evict(group)
        for member in members:
            values = flat[member.slot.start : member.slot.stop]
            split = split_of(member.param)
            if split is not None and tp is not None:
                values = join_split(values, split, tp, f"export of {member.name}")
            yield piece.name(member), piece.start(member), values
            del values
        del flat
    for name, buffer in persistent_buffers(runtime.model).items():
        if name in names:
            yield name, 0, _broadcast_first(runtime.comm, buffer, name)


def _source_dtype(group: ParamGroup, settings: ExportSettings) -> torch.dtype:
    """Return the dtype of `_source`."""
    own = group.weight.spec.dtype
    return own if group.master is None or settings.dtype_for(own) == own else group.master.dtype


def _source(group: ParamGroup, settings: ExportSettings) -> FlatBuffer:
    """Return the buffer that a group's tensors are written from: the weight, or the master for
    another dtype.
    """
    own = group.weight.spec.dtype
    if group.master is None or settings.dtype_for(own) == own:
        return group.weight
    return group.master.values()


def _evict(group: ParamGroup) -> None:
    """Give up the copies that were fetched from another memory to be read."""
    for storage in (group.weight.storage, *exact_storages(group)):
        storage.evict(0, storage.memory.numel())


def _broadcast_first(comm: Comm, buffer: Tensor, name: str) -> Tensor:
    """Return the values that a buffer has on the first rank of a communicator, flat, in new memory.
    Collective.
    """
    flat = buffer.detach().reshape(-1).clone()
    if comm.size > 1 and flat.numel():
        scatter(comm, [flat] * comm.size, flat, f"export of {name}")
    return flat


# -- writing


class _RankFiles:
    """The files that this rank writes.  An error of the disk is kept until `close`, so that the
    rank still takes part in every gather.
    """

    def __init__(self, folder: Path, shards: dict[str, list[TensorInfo]]) -> None:
        self.folder = folder
        self.shards = shards
        self._stack = ExitStack()
        self._files: list[SafetensorsWriter] = []
        self._file_of: dict[str, SafetensorsWriter] = {}
        self._problem: Exception | None = None

    def open(self) -> str:
        """Create the files.  CheckpointError where the disk refuses."""
        for name, infos in self.shards.items():
            file = self._stack.enter_context(SafetensorsWriter(self.folder / name, infos))
            self._files.append(file)
            self._file_of |= {info.name: file for info in infos}
        return ""

    def put(self, name: str, start: int, values: Tensor) -> None:
        """Write a tensor's elements from `start` on, if it is in one of this rank's files; keeps an
        error for `close`.
        """
        file = self._file_of.get(name)
        if file is None or self._problem is not None:
            return
        try:
            file.write(name, start, values)
        except (OSError, CheckpointError) as error:
            self._problem = error

    def checksums(self) -> str:
        """Return the checksums of all tensors in these files, as JSON; raises the first error of a
        `put`.
        """
        if self._problem is not None:
            raise self._problem
        return json.dumps([each for file in self._files for each in file.checksums])

    def close(self, run: str) -> str:
        """Complete the files and have them on the disk.  run: the identity of the export they
        belong to.
        """
        for file in self._files:
            file.run = run
        self._stack.close()
        return ""

    def abandon(self) -> None:
        """Close the files without completing them."""
        with suppress(OSError, CheckpointError):
            self._stack.close()


def export_safetensors(
    runtime: Runtime,
    directory: Path,
    settings: ExportSettings,
    companions: Companions | None = None,
) -> list[str]:
    """Write the whole weights into the folder `directory` and return the files' names.  Collective.

    File k is rank k's (modulo the number of ranks), so with as many files as ranks all of them
    write at once. `directory` changes only when everything is on the disk.  CheckpointError on
    every rank where one of them cannot
    write.  companions: called on rank 0 with the folder, to write further files into it.
    """
    comm = runtime.comm.whole
    output = StagedOutput(directory)
    model = WholeModel.of(runtime, settings)
    shards = plan_shards(model.tensors, settings.max_shard_bytes)
    names = shard_names(len(shards))

    def finish() -> None:
        if len(names) > 1:
            write_index(output.path / INDEX, shards, names)
        if companions is not None:
            companions(output.path)
        output.publish_folder(EXPORT_PATTERNS, INDEX)

    try:
        run_and_gather(
            comm, "export: the folder", lambda: _on_first_rank(comm, lambda: _begin(output))
        )
        own_files = {name: shards[k] for k, name in enumerate(names) if k % comm.size == comm.rank}
        _write(model, _RankFiles(output.path, own_files))
        run_and_gather(comm, "export: the names", lambda: _on_first_rank(comm, finish))
    except Exception:
        output.discard()
        raise
    return names


def export_file(runtime: Runtime, path: Path, settings: ExportSettings) -> None:
    """Write the whole weights as one file of rank 0's: safetensors by its suffix, otherwise
    torch's.  Collective.

    A safetensors file is written tensor by tensor.  torch.save wants everything at once, so rank 0
    then holds the whole model in host memory, in the dtype asked for.  CheckpointError on every
    rank where rank 0 cannot write.
    """
    comm = runtime.comm.whole
    output = StagedOutput(path)
    try:
        run_and_gather(
            comm, "export: the folder", lambda: _on_first_rank(comm, lambda: _begin(output))
        )
        if path.suffix == ".safetensors":
            model = WholeModel.of(runtime, settings)
            written = {path.name: model.tensors} if comm.rank == 0 else {}
            _write(model, _RankFiles(output.path, written))
        else:
            state = consolidated(runtime, settings)
            into = output.path / path.name
            run_and_gather(
                comm,
                "export: the file",
                lambda: save_torch(state, into) if state is not None else "",
            )
        run_and_gather(comm, "export: the name", lambda: _on_first_rank(comm, output.publish_file))
    except Exception:
        output.discard()
        raise


def _begin(output: StagedOutput) -> None:
    """Open the staging folder.  Rank 0 alone calls it."""
    if output.final.is_dir() and output.final.suffix in FILE_SUFFIXES:
        raise CheckpointError(
            f"{output.final} is a folder.", "Its name is that of a file.", "name another file."
        )
    if output.final.is_file() and output.final.suffix not in FILE_SUFFIXES:
        raise CheckpointError(
            f"{output.final} is a file.",
            "An export is a folder.",
            "name a folder, or a file that ends in .pth.",
        )
    output.open()


def _write(model: WholeModel, own_files: _RankFiles) -> None:
    """Gather every tensor on every rank, and write those of this rank's files."""
    comm = model.runtime.comm.whole
    try:
        run_and_gather(comm, "export: this rank's files", own_files.open)
        with LongWork("writing weights", sum(info.nbytes for info in model.tensors)) as work:
            for name, start, values in model.values():
                own_files.put(name, start, values)
                work.advance(values.numel() * model.settings.dtype_for(values.dtype).itemsize)
                del values  # or its group would stay while the next one is gathered
        found = run_and_gather(comm, "export: this rank's tensors", own_files.checksums)
        run = run_of(checksum for each in found for checksum in json.loads(each))
        run_and_gather(comm, "export: this rank's headers", lambda: own_files.close(run))
    finally:
        own_files.abandon()


def consolidated(runtime: Runtime, settings: ExportSettings) -> dict[str, Any] | None:
    """Gather the whole state dict into rank 0's host memory, tied weights under each name; None on
    other ranks. Collective.
    """
    found: dict[str, list[Tensor]] = {}
    model = WholeModel.of(runtime, settings)
    is_first = runtime.comm.whole.rank == 0
    for name, _, values in model.values():
        if is_first:
            found.setdefault(name, []).append(
                cast(values, settings.dtype_for(values.dtype)).to("cpu", copy=True)
            )
        del values
    if not is_first:
        return None
    shapes = {info.name: info.shape for info in model.tensors}
    whole_of = {
        name: (torch.cat(parts) if len(parts) > 1 else parts[0]).view(shapes[name])
        for name, parts in found.items()
    }
    return {
        name: whole_of[first]
        for name, first in whole_names(runtime.model).items()
        if first in whole_of
    }


def save_torch(state: dict[str, Any], path: Path) -> str:
    """Write `state` with torch.save into a new file, readable by its owner alone and on the disk
    when this returns.
    """
    with files.describing_errors(f"writing '{path}'"), files.new_file(path) as stream:
        torch.save(state, stream)
    return ""


def _on_first_rank(comm: Comm, action: Callable[[], None]) -> str:
    """Call `action` on rank 0; other ranks do nothing."""
    if comm.rank == 0:
        action()
    return ""
