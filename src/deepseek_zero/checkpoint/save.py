"""Write a checkpoint: one file per rank, then one rename, then the file `latest`.

Files are written to a hidden directory and synced, and the directory is renamed after every rank
has finished. A crash at any moment therefore leaves the previous checkpoint loadable. All ranks
must see the same directory, or each rank names its own; in that case the checkpoint is the union of
all folders. A rank's file is written immediately or during training (background_write.py).
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.errors import CheckpointError, UsageError
from ..base.lazy import no_collection
from ..base.log import log_first, log_once
from ..base.mesh import AXES
from ..planner.describe import describe_states
from . import files
from .background_write import BackgroundWrite
from .catalogue import keep_other_files, remove_replaced, replaced_path
from .contents import Contents, SaveSettings
from .format import (
    BUFFER,
    CLIENT,
    LATEST,
    MANIFEST,
    RNG,
    VALUE,
    Manifest,
    SavedChunk,
    encode,
    rank_file,
    tag_to_save,
)
from .layouts import is_checkpoint
from .lockstep import run_and_gather, run_on_first_rank
from .numpy_values import Plain, with_python_numbers
from .piece import ModelPiece, earlier_stages, names_of, persistent_buffers, whole_names
from .rng import capture_rng
from .safetensors_file import dtype_name
from .staging import StagedOutput
from .state import WriteGroup, exact_dtype, optimizer_scalars, package_of, value_item, write_groups
from .torch_file import parameter_facts

NOW = "at once"
IN_BACKGROUND = "behind"
# Fields of a manifest that describe one stage
STAGE_FACTS = ("plan", "parameters", "buffers", "excluded", "lifted")
RANK_FILE = re.compile(r"rank_\d+\.safetensors")


class PendingSave:
    """Saves a checkpoint in two collective steps.

    The constructor starts the save, and `commit` completes it. If `settings.wait` is false, a rank
    may write its file in the background between the two steps.

    Args:
        directory: Directory of checkpoints.
        tag: Name of the checkpoint. If ranks pass different tags, the tag of rank 0 is used unless
            `settings.tag_validation` is "Fail".
        contents: States of the engine to save.
        settings: What to write, and whether the constructor waits until it is written.

    Raises:
        CheckpointError: A rank cannot write, a buffer is sparse, the tag is not a valid name, or
            the tags differ and `settings.tag_validation` is "Fail". It is raised on every rank, and
            the previous checkpoint stays loadable.

    Note:
        Collective: every rank must call the constructor.
    """

    def __init__(
        self, directory: Path, tag: str, contents: Contents, settings: SaveSettings
    ) -> None:
        self.contents = contents
        self.settings = settings
        self._comm = contents.runtime.comm.whole
        self._tensors: dict[str, Tensor] = {}
        self._plain: Plain = {}
        self._own_client: Any = None  # encoded client state if it differs from rank 0's
        self._own_tensors: dict[str, Tensor] = {}
        self._elsewhere: frozenset[str] = frozenset()  # names that an earlier stage writes

        def encode_values() -> str:
            self._plain = _encoded_values(contents, self._tensors)
            return tag

        tag = _agreed_tag(
            run_and_gather(self._comm, "saving: the values", encode_values), settings.tag_validation
        )
        self._staged = StagedOutput(directory / tag)
        self.final = self._staged.final
        self.hidden = self._staged.path
        try:
            self.run = run_and_gather(self._comm, "saving: the directory", self._open_staging)[0]
            held = run_and_gather(self._comm, "saving: what ranks hold", self._held)
            if contents.client and held[self._comm.rank]["client"] != held[0]["client"]:
                self._own_client = encode(
                    contents.client, f"{CLIENT} of rank {self._comm.rank}", self._own_tensors
                )
            # The first rank that has a buffer, and its digest there
            first = {
                name: (rank, digest)
                for rank, each in reversed(list(enumerate(held)))
                for name, digest in each["buffers"].items()
            }
            for rank in earlier_stages(contents.runtime.plan.mesh):
                self._elsewhere |= frozenset(held[rank]["parameters"])
            with no_collection():
                ways = run_and_gather(
                    self._comm, "saving: this rank's states", lambda: self._plan_write(first)
                )
            if NOW in ways:
                if not settings.wait:
                    log_first(
                        "wait=False: states on a disk cannot be read by another thread, so the "
                        "checkpoint is written now."
                    )
                run_and_gather(self._comm, "saving: this rank's slices", self.write.write)
            else:
                self.write.start()
        except BaseException:  # also Ctrl-C: the lock would refuse the next save of this process
            self._staged.discard()
            raise

    def commit(self) -> Path:
        """Wait for the files of all ranks, publish the checkpoint and return its folder.

        All data is on the disk when this method returns. If an error occurs, the written files are
        removed.

        Raises:
            CheckpointError: A rank could not write. It is raised on every rank.

        Note:
            Collective: every rank must call it.
        """
        try:
            indexes = run_and_gather(self._comm, "saving: this rank's index", self._index)
            if self.settings.folders:
                # Every folder is complete before the first one replaces its previous checkpoint
                run_and_gather(
                    self._comm, "saving: the folders", lambda: self._complete_folder(indexes)
                )
                run_and_gather(self._comm, "saving: the other folders", self._publish_part)
            run_on_first_rank(self._comm, "saving: the manifest", lambda: self._finish(indexes))
        except BaseException:
            self._staged.discard()
            raise
        return self.final

    # -- this rank's file

    def _held(self) -> Plain:
        """Return this rank's parameter names, and digests of its buffers and of the client state.

        The names are only needed with several stages. A buffer with equal values on several ranks
        is written once. Running statistics differ between ranks, masks do not.
        """
        runtime = self.contents.runtime
        buffers = persistent_buffers(runtime.model)
        _refuse_sparse(buffers)
        digest = hashlib.sha256(json.dumps(self._plain["client"]).encode())
        for name, tensor in self._tensors.items():
            if name.startswith(CLIENT):
                digest.update(_digest(tensor).encode())
        return {
            "buffers": {name: _digest(buffer) for name, buffer in buffers.items()},
            "parameters": names_of(runtime) if "pp" in runtime.comm.along else [],
            "client": digest.hexdigest()[:16],
        }

    def _plan_write(self, first: dict[str, tuple[int, str]]) -> str:
        """Collect what this rank writes, and decide whether to write it in the background.

        `first` maps each buffer to the first rank that has it and its digest there. That rank
        writes the buffer for all ranks with equal values.
        """
        contents = self.contents
        optimizer = contents.optimizer
        rank = self._comm.rank
        values = self._values_now(first)
        if optimizer is not None:
            optimizer.finish()
        states = write_groups(
            contents, skip_frozen=self.settings.exclude_frozen, elsewhere=self._elsewhere
        )
        groups = [values, *states]
        self._scalars = optimizer_scalars(optimizer) if optimizer is not None else {}
        self._manifest = _manifest(contents, self.settings, self.run)
        coordinates = contents.runtime.plan.mesh.coordinates.items()
        here = " ".join(f"{axis}={place}" for axis, place in coordinates)
        metadata = {"run": self.run, "rank": str(rank), "coordinates": here}
        path = self.hidden / rank_file(rank)
        self.write = BackgroundWrite(path, groups, metadata, self.settings.snapshot_bytes)
        return NOW if self.settings.wait or not self.write.is_resident else IN_BACKGROUND

    def _values_now(self, first: dict[str, tuple[int, str]]) -> WriteGroup:
        """Copy the values that change between steps: buffers, random states, plain values."""
        rank = self._comm.rank
        runtime = self.contents.runtime
        found: list[tuple[str, str, Tensor]] = []
        for name, buffer in persistent_buffers(runtime.model).items():
            if rank == first[name][0] or first[name][1] != _digest(buffer):
                found.append((BUFFER, name, buffer.detach().clone().reshape(-1)))
        for name, state in capture_rng(runtime.comm_ctx.pool.device).items():
            found.append((RNG, name, state))
        for name, value in (self._tensors if rank == 0 else self._own_tensors).items():
            found.append((VALUE, name, value))
        return WriteGroup([value_item(kind, name, value, rank) for kind, name, value in found])

    def _index(self) -> Plain:
        """Wait for this rank's file and describe it.

        The description has the chunks, the optimizer's scalars, the checksum of the header, the
        facts of the stage and the client state.
        """
        chunks = [chunk.to_json() for chunk in self.write.chunks()]
        with files.describing_errors(f"syncing '{self.hidden}'"):
            files.sync_folder(self.hidden)
        coordinates = self.contents.runtime.plan.mesh.coordinates | {"pp": 0}
        stage = None
        if not any(coordinates.values()):  # the first rank of a stage describes it
            stage = {name: getattr(self._manifest, name) for name in STAGE_FACTS}
            stage["groups"] = self._manifest.extra["groups"]
        return {
            "chunks": chunks,
            "scalars": self._scalars,
            "head": self.write.head_crc,
            "stage": stage,
            "client": self._own_client,
        }

    # -- folders: rank 0's has the manifest. If ranks name several folders, the first rank of each
    # folder opens and completes it.

    @property
    def _sharers(self) -> list[int]:
        """Return the ranks that write into this rank's folder."""
        folders = self.settings.folders
        if not folders:
            return list(range(self._comm.size))
        return [rank for rank, folder in enumerate(folders) if folder == folders[self._comm.rank]]

    def _open_staging(self) -> str:
        """Open the hidden directory on its first rank; return a new identity of the save."""
        if not self.completes_folder:
            return ""
        if self._comm.rank == 0 or not _has_only_rank_files(self.final):
            refuse_foreign_files(self.final)
        self._staged.open()
        return secrets.token_hex(8)

    @property
    def completes_folder(self) -> bool:
        """Whether this rank is the first one that writes into its folder."""
        return self._comm.rank == self._sharers[0]

    def _complete_folder(self, found: list[Plain]) -> None:
        """Check that all files of a folder are here, and add the manifest to rank 0's folder.

        `found` has the results of `_index` by rank.
        """
        if self.completes_folder:
            self._refuse_missing()
        if self._comm.rank == 0:
            self._write_manifest(found)

    def _publish_part(self) -> None:
        """Publish a folder other than rank 0's; it contains only files of ranks."""
        if self.completes_folder and self._comm.rank != 0:
            self._publish(latest=False)

    def _refuse_missing(self) -> None:
        """Raise CheckpointError if this rank does not see all files of its folder."""
        missing = [rank for rank in self._sharers if not (self.hidden / rank_file(rank)).exists()]
        if missing:
            raise CheckpointError(
                f"rank {self._comm.rank} does not see the files of ranks {missing} in "
                f"{self.hidden}.",
                "All ranks that name one directory write into it, and the first of them completes "
                "it.",
                "save to a file system that every rank shares, or give each rank its own directory "
                "and merge them afterwards.",
            )

    def _finish(self, found: list[Plain]) -> None:
        """Complete rank 0's folder unless that is done, rename it, and write `latest`."""
        if not self.settings.folders:
            self._complete_folder(found)
        self._publish(latest=self.settings.latest)

    def _write_manifest(self, found: list[Plain]) -> None:
        manifest = self._manifest
        clients = {}
        heads = {}
        for rank, index in enumerate(found):
            manifest.chunks += [SavedChunk.from_json(values) for values in index["chunks"]]
            manifest.scalars.update(index["scalars"])
            heads[rank_file(rank)] = index["head"]
            if index["client"] is not None:
                clients[str(rank)] = index["client"]
            if index["stage"] is not None:
                _add_stage(manifest, index["stage"])
        manifest.extra["heads"] = heads
        if clients:
            manifest.extra["clients"] = clients
        manifest.plain = self._plain
        with files.describing_errors(f"completing '{self.final}'"):
            files.write_text(self.hidden / MANIFEST, manifest.text())

    def _publish(self, *, latest: bool) -> None:
        with files.describing_errors(f"completing '{self.final}'"):
            self._staged.finish()
            publish(self.hidden, self.final, latest=latest)
        self._staged.unlock()


def refuse_foreign_files(final: Path) -> None:
    """Raise an error if `final` exists and publishing would remove other files.

    Raises:
        CheckpointError: `final` is neither a checkpoint nor an empty folder.
    """
    if (
        final.exists()
        and not is_checkpoint(final)
        and not (final.is_dir() and not any(final.iterdir()))
    ):
        raise CheckpointError(
            f"'{final}' exists already and is not a checkpoint.",
            "A checkpoint replaces the previous one with its tag, and no other file.",
            "name another tag, or move it away.",
        )


def _has_only_rank_files(final: Path) -> bool:
    """Return whether a folder exists and contains only files of ranks, or nothing."""
    return final.is_dir() and all(RANK_FILE.fullmatch(each.name) for each in final.iterdir())


def publish(hidden: Path, final: Path, *, latest: bool) -> None:
    """Rename a finished folder, and optionally write its name into `latest`.

    The previous checkpoint of the same tag is kept under a hidden name until `remove_replaced`,
    because removing gigabytes takes time. Files that the program has added to it are moved at once,
    before the program can write them again.

    Args:
        hidden: Finished folder under its hidden name.
        final: Path to rename it to.
        latest: Whether to write the name into `latest`.
    """
    if final.exists():
        remove_replaced(final)
        files.rename(final, replaced_path(final))
    files.rename(hidden, final)
    files.sync_folder(final.parent)
    if replaced_path(final).exists():
        with suppress(OSError):  # the removal tries it again
            keep_other_files(replaced_path(final), final)
    if latest:
        files.replace_text(final.parent / LATEST, final.name)


def save(directory: Path, tag: str, contents: Contents, settings: SaveSettings) -> Path:
    """Write the checkpoint `directory/tag`.

    Rank 0's tag, counters and client state are saved.

    Args:
        directory: Directory of checkpoints.
        tag: Name of the checkpoint.
        contents: States of the engine to save.
        settings: What to write, and whether to return before the files are complete.

    Returns:
        The path of the checkpoint.

    Raises:
        CheckpointError: A rank cannot write. It is raised on every rank.

    Note:
        Collective: every rank must call it.
    """
    return PendingSave(directory, tag, contents, settings).commit()


def _encoded_values(contents: Contents, tensors: dict[str, Tensor]) -> Plain:
    """Encode hyperparameters, trainer state and client state."""
    groups: list[Any] = []
    if contents.optimizer is not None:
        for group in contents.optimizer.param_groups:
            groups.append({key: value for key, value in group.items() if key != "params"})
    return {
        "groups": encode(with_python_numbers(groups), "param_groups", tensors),
        "trainer": encode(with_python_numbers(contents.trainer), "trainer", tensors),
        "client": encode(contents.client, CLIENT, tensors),
    }


class DifferentTagsError(CheckpointError, UsageError):
    """Raised if ranks pass different tags for one checkpoint."""


def _agreed_tag(tags: list[str], validation: str) -> str:
    """Return rank 0's tag.

    Raises CheckpointError if it is invalid, or if ranks differ and `validation` is "Fail".
    """
    different = next((rank for rank, each in enumerate(tags) if each != tags[0]), None)
    if different is not None and validation != "Ignore":
        message = f"rank 0 saves under tag {tags[0]!r}, rank {different} under {tags[different]!r}"
        if validation == "Fail":
            raise DifferentTagsError(
                f"{message}.", "One checkpoint has one tag.", "pass the same tag on every rank."
            )
        log_once(f"{message}; rank 0's is used.", logging.WARNING)
    return tag_to_save(tags[0])


def _refuse_sparse(buffers: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if a buffer is sparse, because the files hold dense tensors."""
    for name, buffer in buffers.items():
        if buffer.layout is not torch.strided:
            raise CheckpointError(
                f"the buffer '{name}' is a sparse tensor ({buffer.layout}), which a checkpoint "
                "cannot hold.",
                "Checkpoints hold dense tensors.",
                "register it with persistent=False and build it with the model, or register its "
                "indices and values as dense buffers.",
            )


def _digest(buffer: Tensor) -> str:
    data = buffer.detach().to("cpu").contiguous().reshape(-1)
    return (
        hashlib.sha256(data.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        if data.numel()
        else ""
    )


def _manifest(contents: Contents, settings: SaveSettings, run: str) -> Manifest:
    """Create the manifest with everything that is known before writing."""
    runtime = contents.runtime
    optimizer = contents.optimizer
    plan = {
        f"{unit.name}/{number}": describe_states(group.plan)
        for unit in runtime.units
        for number, group in enumerate(unit.groups)
    }
    piece = ModelPiece.of(runtime)
    parameters = {
        piece.name(member): parameter_facts(
            piece.shape(member), exact_dtype(group), trained=group.trainable
        )
        for group in runtime.groups
        for member in group.members
    }
    extra: Plain = {
        "optimizer_package": None,
        "names": whole_names(runtime.model),
        "groups": [],
        "mesh": dict(zip(AXES, runtime.plan.mesh.sizes, strict=True)),
        "ranks_per_host": runtime.settings.ranks_per_host,
    }
    optimizer_name = None
    if optimizer is not None:
        optimizer_name = type(optimizer.inner).__name__
        extra["optimizer_package"] = package_of(optimizer.inner)
        for names in optimizer.shard_set.names_by_group:
            whole = (piece.names.get(name, name) for name in names)
            extra["groups"].append(list(dict.fromkeys(whole)))
    compression = runtime.settings.compression
    if compression.left_open:
        codecs = {state: getattr(compression, state) for state in compression.left_open}
        extra["codes"] = {
            state: [codec.bits, codec.block] if codec is not None else None
            for state, codec in codecs.items()
        }
    excluded = []
    if settings.exclude_frozen:
        excluded = [name for name, facts in parameters.items() if not facts["trained"]]
    return Manifest(
        world_size=runtime.comm.whole.size,
        stage=runtime.settings.stage,
        plan=plan,
        parameters=parameters,
        buffers={
            name: {"shape": list(value.shape), "dtype": dtype_name(value.dtype)}
            for name, value in persistent_buffers(runtime.model).items()
        },
        chunks=[],
        optimizer=optimizer_name,
        scalars={},
        excluded=excluded,
        lifted=[unit.name for unit in runtime.units if unit.is_promoted],
        run=run,
        extra=extra,
    )


def _add_stage(manifest: Manifest, facts: Plain) -> None:
    """Add the facts of a stage, in the order of the stages, to the first stage's manifest.

    A tied parameter belongs to the first stage that has it.
    """
    for mine, others in (
        (manifest.plan, facts["plan"]),
        (manifest.parameters, facts["parameters"]),
        (manifest.buffers, facts["buffers"]),
    ):
        mine |= {name: value for name, value in others.items() if name not in mine}
    names = [(manifest.excluded, facts["excluded"]), (manifest.lifted, facts["lifted"])]
    names += zip(manifest.extra["groups"], facts["groups"], strict=True)
    for own, more in names:
        own += [name for name in more if name not in own]
