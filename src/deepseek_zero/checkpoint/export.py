"""Write the full weights of an engine to files that other programs read.

Weights are gathered group by group, and each rank writes the tensors of its own files, so no rank
holds the whole model. Only a torch file (`.pth`) needs the whole model, on rank 0. The files have
the same bytes on every mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from ..base.errors import CheckpointError
from ..base.progress import LongWork
from ..comm.collectives import Comm, scatter
from ..extensions.gathered_parameters import gather_full, join_split
from ..planner.split import split_of
from ..sharding.param_group import ParamGroup
from ..sharding.runtime import Runtime
from ..sharding.whole_values import main_values
from . import files
from .hf_folder import (
    EXPORT_PATTERNS,
    INDEX,
    MAX_SHARD_BYTES,
    plan_shards,
    write_index,
)
from .lockstep import run_and_gather, run_on_all, run_on_first_rank
from .numpy_values import Plain
from .piece import ModelPiece, persistent_buffers, whole_names
from .safetensors_file import SafetensorsWriter, TensorInfo, cast, dtype_name, dtype_named, run_of
from .staging import StagedOutput
from .state import exact_dtype, exact_storages

Companions = Callable[[Path], None]  # writes additional files into an exported folder
# Suffixes that select a single file; any other path is a folder
FILE_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")


@dataclass(frozen=True)
class ExportSettings:
    """Settings of an export: dtype, maximum file size, and whether to omit frozen parameters.

    Attributes:
        dtype: Dtype of floating-point tensors; None keeps the dtype with which the model computes.
        max_shard_bytes: Maximum size of one file in bytes, by default 5 GB. A larger tensor has a
            file to itself.
        exclude_frozen: Whether to omit parameters that are not trained.
    """

    dtype: torch.dtype | None = None
    max_shard_bytes: int = MAX_SHARD_BYTES
    exclude_frozen: bool = False

    def dtype_for(self, own: torch.dtype) -> torch.dtype:
        """Return the dtype in which an export writes a tensor.

        Args:
            own: The tensor's dtype in the model.

        Returns:
            The configured `dtype` for floating-point tensors if it is set, otherwise `own`.
        """
        return self.dtype if self.dtype is not None and own.is_floating_point else own


# -- tensors of the whole model


@dataclass(frozen=True)
class WholeModel:
    """The tensors of the whole model, of which each rank's model is a piece.

    It is the same on every rank.

    Attributes:
        runtime: Runtime that holds this rank's shards.
        settings: Settings of the export.
        stages: For each coordinate along "pp", the tensors of that stage in gather order, with the
            dtype in which they are gathered. A tied parameter belongs to the first stage that has
            it.
    """

    runtime: Runtime
    settings: ExportSettings
    stages: tuple[tuple[TensorInfo, ...], ...]

    @classmethod
    def of(cls, runtime: Runtime, settings: ExportSettings) -> WholeModel:
        """Collect the tensors of all stages.

        Args:
            runtime: Runtime that holds this rank's shards.
            settings: Dtype of the export, and whether to omit frozen parameters.

        Returns:
            The tensors of all stages, the same on every rank.

        Note:
            Collective if there are several stages: every rank of the world must call it.
        """
        own = list(_held(runtime, settings))
        stages = runtime.comm.along.get("pp")
        if stages is None:
            return cls(runtime, settings, (tuple(own),))
        facts = [[info.name, info.shape, dtype_name(info.dtype)] for info in own]
        found = run_and_gather(runtime.comm.whole, "export: what all stages hold", lambda: facts)
        by_stage = list[tuple[TensorInfo, ...]]()
        known = set[str]()
        for rank in stages.ranks:
            infos = [
                TensorInfo(name, tuple(shape), dtype_named(dtype))
                for name, shape, dtype in found[rank]
            ]
            by_stage.append(tuple(info for info in infos if info.name not in known))
            known |= {info.name for info in infos}
        return cls(runtime, settings, tuple(by_stage))

    @property
    def tensors(self) -> list[TensorInfo]:
        """Return the tensors to write, tied ones once under their first name."""
        kept = {
            info.name: replace(info, dtype=self.settings.dtype_for(info.dtype))
            for infos in self.stages
            for info in infos
        }
        return [kept[name] for name in whole_names(self.runtime.model) if name in kept]

    def values(self) -> Iterator[tuple[str, int, Tensor]]:
        """Yield every tensor of the model on every rank.

        A tensor is yielded whole and starts at 0, except tiles of rows (cut_layers.py), which
        follow each other. Floating-point values come from the weight if they are requested in the
        weight's own dtype, and from the main weight otherwise. Buffers come from the first rank.

        Yields:
            Triples of name, start and flat values; each is valid until the next one is requested.

        Note:
            Collective: every rank of the world must iterate.
        """
        stages = self.runtime.comm.along.get("pp")
        with torch.no_grad():
            for stage, infos in enumerate(self.stages):
                if stages is None or stage == stages.rank:
                    source = _own_values(self.runtime, self.settings, {info.name for info in infos})
                else:
                    device = self.runtime.comm_ctx.pool.device
                    source = (
                        (info.name, 0, torch.empty(info.numel, dtype=info.dtype, device=device))
                        for info in infos
                    )
                for name, start, values in source:
                    if stages is not None:
                        sent = [values] * stages.size
                        scatter(stages, sent, values, f"export of {name}", stage)
                        del sent
                    yield name, start, values
                    del values


def _held(runtime: Runtime, settings: ExportSettings) -> Iterator[TensorInfo]:
    """Yield the tensors that `_own_values` yields, with their shapes and dtypes."""
    piece = ModelPiece.of(runtime)
    for group in runtime.groups:
        if group.trainable or not settings.exclude_frozen:
            dtype = group.weight.spec.dtype
            if _needs_master(group, settings):
                dtype = exact_dtype(group)
            for member in group.members:
                yield TensorInfo(piece.name(member), piece.shape(member), dtype)
    for name, buffer in persistent_buffers(runtime.model).items():
        yield TensorInfo(name, tuple(buffer.shape), buffer.dtype)


# -- gathering, one group at a time


def _own_values(
    runtime: Runtime, settings: ExportSettings, names: Collection[str]
) -> Iterator[tuple[str, int, Tensor]]:
    """Yield (name, start, flat values) of tensors of this stage, joined over "tp".

    Every rank of the stage must iterate.
    """
    piece = ModelPiece.of(runtime)
    tp = runtime.comm.along.get("tp")
    for group in runtime.groups:
        members = [member for member in group.members if piece.name(member) in names]
        if not members:
            continue
        source = group.weight
        if group.master is not None and _needs_master(group, settings):
            source = main_values(group.master)
        flat = gather_full(source, group, f"export of {group.members[0].name}")
        for storage in (group.weight.storage, *exact_storages(group)):
            storage.evict(0, storage.memory.numel())  # the copy that was fetched for reading
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
            flat = buffer.detach().reshape(-1).clone()
            if runtime.comm.size > 1 and flat.numel():  # the first rank's values
                scatter(runtime.comm, [flat] * runtime.comm.size, flat, f"export of {name}")
            yield name, 0, flat


def _needs_master(group: ParamGroup, settings: ExportSettings) -> bool:
    """Return whether the export needs another dtype than that of the weight."""
    own = group.weight.spec.dtype
    return group.master is not None and settings.dtype_for(own) != own


# -- writing


class ShardFiles:
    """The files that this rank writes.

    A write error is kept until `checksums` is called, so that the rank still takes part in every
    gather.
    """

    def __init__(self, folder: Path, shards: dict[str, list[TensorInfo]], stack: ExitStack) -> None:
        self._files: list[SafetensorsWriter] = []
        self._file_of: dict[str, SafetensorsWriter] = {}
        self._problem: Exception | None = None
        for name, infos in shards.items():
            file = stack.enter_context(SafetensorsWriter(folder / name, infos))
            self._files.append(file)
            self._file_of |= {info.name: file for info in infos}

    def put(self, name: str, start: int, values: Tensor) -> None:
        """Write elements of a tensor if one of this rank's files contains it."""
        if name in self._file_of and self._problem is None:
            try:
                self._file_of[name].write(name, start, values)
            except (OSError, CheckpointError) as error:
                self._problem = error

    def checksums(self) -> list[str]:
        """Return the checksums of all tensors in these files.

        Raises:
            CheckpointError: An earlier `put` failed; its error is raised.
        """
        if self._problem is not None:
            raise self._problem
        return [each for file in self._files for each in file.checksums]

    def set_run(self, run: str) -> None:
        """Set the identity of the export, which is stored in every file."""
        for file in self._files:
            file.run = run


def export_safetensors(
    runtime: Runtime,
    directory: Path,
    settings: ExportSettings,
    companions: Companions | None = None,
) -> list[str]:
    """Write the full weights as safetensors files into a folder.

    The files are distributed over the ranks, so all ranks write at the same time if there are
    enough files. The folder changes only after everything is on the disk. Safetensors files of an
    earlier export in the folder are then replaced or removed. Other files are kept.

    Args:
        runtime: Runtime that holds this rank's shards.
        directory: Folder to write into; it may contain other files.
        settings: Dtype, file size, and whether to omit frozen parameters.
        companions: A function that writes additional files. Rank 0 calls it with the path of the
            temporary folder that contains the safetensors files. None writes no additional files.

    Returns:
        The names of the safetensors files.

    Raises:
        CheckpointError: A rank cannot write, `directory` is a file, `max_shard_bytes` is below 1,
            or the safetensors format has no name for a dtype. It is raised on every rank.

    Note:
        Collective: every rank must call it.
    """
    comm = runtime.comm.whole
    model = WholeModel.of(runtime, settings)
    shards = plan_shards(model.tensors, settings.max_shard_bytes)
    with _staged_by_first_rank(comm, directory) as output:
        _write(model, output.path, dict(islice(shards.items(), comm.rank, None, comm.size)))

        def finish() -> None:
            write_index(output.path / INDEX, shards)
            if companions is not None:
                companions(output.path)
            output.publish_folder(EXPORT_PATTERNS, INDEX)

        run_on_first_rank(comm, "export: the names", finish)
    return list(shards)


def export_file(runtime: Runtime, path: Path, settings: ExportSettings) -> None:
    """Write the full weights to one file on rank 0.

    An existing file is replaced after the new one is on the disk. The suffix .safetensors selects a
    safetensors file, which is written tensor by tensor. The other suffixes select a file for
    `torch.load`. To write such a file, rank 0 holds the whole model in host memory, in the
    requested dtype.

    Args:
        runtime: Runtime that holds this rank's shards.
        path: File to write, with the suffix .safetensors, .pth, .pt or .bin.
        settings: Dtype of the export, and whether to omit frozen parameters.

    Raises:
        CheckpointError: Rank 0 cannot write, `path` is a folder, or the safetensors format has no
            name for a dtype. It is raised on every rank.

    Note:
        Collective: every rank must call it.
    """
    comm = runtime.comm.whole
    with _staged_by_first_rank(comm, path) as output:
        if path.suffix == ".safetensors":
            model = WholeModel.of(runtime, settings)
            written = {path.name: model.tensors} if comm.rank == 0 else {}
            _write(model, output.path, written)
        else:
            state = consolidated(runtime, settings)
            into = output.path / path.name
            run_on_first_rank(comm, "export: the file", lambda: save_torch(state, into))
        run_on_first_rank(comm, "export: the name", output.publish_file)


@contextmanager
def _staged_by_first_rank(comm: Comm, final: Path) -> Iterator[StagedOutput]:
    """Open a staging folder on rank 0, and remove it if the block fails.

    Every rank must enter the block.
    """
    output = StagedOutput(final)

    def begin() -> None:
        if final.is_dir() and final.suffix in FILE_SUFFIXES:
            raise CheckpointError(
                f"{final} is a folder.", "Its name is that of a file.", "name another file."
            )
        if final.is_file() and final.suffix not in FILE_SUFFIXES:
            raise CheckpointError(
                f"{final} is a file.",
                "An export is a folder.",
                "name a folder, or a file that ends in .pth.",
            )
        output.open()

    try:
        run_on_first_rank(comm, "export: the folder", begin)
        yield output
    finally:
        output.discard()  # does nothing after publishing


def _write(model: WholeModel, folder: Path, shards: dict[str, list[TensorInfo]]) -> None:
    """Gather every tensor, and write those of this rank's files.

    Every rank must call it.
    """
    comm = model.runtime.comm.whole
    # A file that is closed in an error is not completed
    with ExitStack() as stack:
        own_files = run_on_all(
            comm, "export: this rank's files", lambda: ShardFiles(folder, shards, stack)
        )
        with LongWork("writing weights", sum(info.nbytes for info in model.tensors)) as work:
            for name, start, values in model.values():
                own_files.put(name, start, values)
                work.advance(values.numel() * model.settings.dtype_for(values.dtype).itemsize)
                del values  # release the group before the next one is gathered
        found = run_and_gather(comm, "export: this rank's tensors", own_files.checksums)
        own_files.set_run(run_of(checksum for checksums in found for checksum in checksums))
        run_on_all(comm, "export: this rank's headers", stack.close)


def consolidated(runtime: Runtime, settings: ExportSettings) -> Plain | None:
    """Gather the whole state dict into the host memory of rank 0.

    Tied weights appear under each of their names.

    Args:
        runtime: Runtime that holds this rank's shards.
        settings: Dtype of the export, and whether to omit frozen parameters.

    Returns:
        The state dict on rank 0, None on the other ranks.

    Note:
        Collective: every rank must call it.
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


def save_torch(state: Plain | None, path: Path) -> None:
    """Write a state dict with torch.save into a new private file, and sync it.

    Args:
        state: State dict, which is None on other ranks than 0.
        path: File to create; it must not exist.
    """
    with files.describing_errors(f"writing '{path}'"), files.new_file(path) as stream:
        torch.save(state, stream)
