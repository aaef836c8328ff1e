"""Writes a checkpoint: every rank its slices, then one rename, then `latest`.

A crash at any moment leaves the checkpoint before it loadable: files are written into a hidden directory and synced
to the disk, which takes its final name when every rank is done.  All ranks must see the same directory.  Called by
engine/saving.py.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.errors import CheckpointError
from ..base.log import log_first, log_once
from ..base.memory import no_collection
from . import files, rng
from .catalogue import is_checkpoint, remove_replaced, replaced_by
from .draft import Draft
from .manifest import BUFFER, LATEST, MANIFEST, RNG, VALUE, Chunk, Manifest, tag_to_save, together
from .plain import encode
from .state import (
    Batch,
    Contents,
    batches_of,
    dtype_name,
    exact_dtype,
    numbers,
    persistent_buffers,
    state_names,
    value_origin,
)
from .writing import Shard

AT_ONCE, BEHIND = "at once", "behind"


@dataclass(frozen=True)
class SaveSettings:
    """latest: point `latest` at this checkpoint.  tag_validation: Ignore, Warn or Fail when ranks name different tags.

    wait: return when the checkpoint is on the disk; else write behind the training, where all states rest in memory.
    snapshot_bytes: what each rank may copy meanwhile of states that a step is about to change.
    """

    latest: bool = True
    exclude_frozen: bool = False
    tag_validation: str = "Warn"
    wait: bool = True
    snapshot_bytes: int = 1 << 30


class Saving:
    """One checkpoint under way.  Making one, and `commit`, are collective; in between each rank writes its file."""

    def __init__(self, directory: Path, tag: str, contents: Contents, settings: SaveSettings) -> None:
        self.contents, self.settings = contents, settings
        self._comm = contents.runtime.comm
        self._tensors: dict[str, Tensor] = {}
        self._plain: dict[str, Any] = {}

        def look() -> str:
            self._plain = _plain(contents, self._tensors)
            return tag

        tag = _agreed_tag(together(self._comm, "saving: the values", look), settings.tag_validation)
        self._draft = Draft(directory / tag)
        self.final, self.hidden = self._draft.final, self._draft.path
        self.run = together(self._comm, "saving: the directory", self._prepare)[0]
        try:
            digests = together(self._comm, "saving: the buffers", lambda: json.dumps(_digests(contents)))
            self._scalars: dict[str, dict[str, Any]] = {}
            with no_collection():
                ways = together(self._comm, "saving: this rank's states", lambda: self._open(json.loads(digests[0])))
            if AT_ONCE in ways:
                if not settings.wait:
                    log_first(
                        "wait=False: states that rest on a disk belong to the thread that trains; all is written now."
                    )
                together(self._comm, "saving: this rank's slices", self._write)
            else:
                self.shard.start()
        except Exception:
            self._draft.abandon()
            raise

    @property
    def is_over(self) -> bool:
        """Whether this rank has written its file, or failed to."""
        return self.shard.is_over

    def commit(self) -> Path:
        """Wait for every rank's file, then make the checkpoint visible; it is on the disk when this returns."""
        try:
            indexes = together(self._comm, "saving: this rank's index", self._index)
            together(self._comm, "saving: the manifest", lambda: self._finish(indexes) if self._comm.rank == 0 else "")
        except Exception:
            self._draft.abandon()
            raise
        return self.final

    # -- this rank's part

    def _open(self, common: dict[str, str]) -> str:
        """Find what is to be written, and when. common: digests of the buffers that rank 0 writes for all."""
        contents, rank = self.contents, self._comm.rank
        batches = [*self._own_values(common), *self._states()]
        self._scalars = numbers(contents.optimizer) if contents.optimizer is not None else {}
        self._manifest = _manifest(contents, self.settings, self.run)
        path, metadata = self.hidden / f"rank_{rank:05d}.safetensors", {"run": self.run, "rank": str(rank)}
        self.shard = Shard(path, batches, metadata, self.settings.snapshot_bytes)
        return AT_ONCE if self.settings.wait or not self.shard.rests_in_place else BEHIND

    def _write(self) -> str:
        self.shard.write()
        return ""

    def _own_values(self, common: dict[str, str]) -> list[Batch]:
        """Copies of what changes between steps."""
        rank, runtime = self._comm.rank, self.contents.runtime
        found = [
            value_origin(BUFFER, name, buffer.detach().clone().reshape(-1), rank)
            for name, buffer in persistent_buffers(runtime.model).items()
            if rank == 0 or common.get(name) != _digest(buffer)
        ]
        own = {(RNG, name): value for name, value in rng.capture(runtime.route.pool.device).items()}
        if rank == 0:
            own |= {(VALUE, name): value for name, value in self._tensors.items()}
        return [Batch([*found, *(value_origin(kind, name, value, rank) for (kind, name), value in own.items())])]

    def _states(self) -> Iterator[Batch]:
        if self.contents.optimizer is not None:
            self.contents.optimizer.finish()
        return batches_of(self.contents, skip_frozen=self.settings.exclude_frozen)

    def _index(self) -> str:
        chunks = [list(asdict(chunk).values()) for chunk in self.shard.chunks()]
        with files.saying(f"syncing '{self.hidden}'"):
            files.sync_folder(self.hidden)
        return json.dumps({"chunks": chunks, "scalars": self._scalars, "head": self.shard.head_crc})

    # -- rank 0's part

    def _prepare(self) -> str:
        """A hidden directory of our own, locked while we write; the identity of this save."""
        if self._comm.rank:
            return ""
        refuse_others(self.final)
        self._draft.open()
        return secrets.token_hex(8)

    def _finish(self, indexes: list[str]) -> str:
        """The manifest, the rename, `latest`."""
        found = [json.loads(index) for index in indexes]
        missing = [rank for rank in range(len(found)) if not (self.hidden / f"rank_{rank:05d}.safetensors").exists()]
        if missing:
            raise CheckpointError(
                f"rank 0 does not see the files of ranks {missing} in {self.hidden}.",
                "All ranks write into one directory, which rank 0 completes.",
                "save to a file system that every rank shares.",
            )
        self._manifest.chunks = [Chunk(*values) for index in found for values in index["chunks"]]
        for index in found:
            self._manifest.scalars.update(index["scalars"])
        heads = {f"rank_{rank:05d}.safetensors": index["head"] for rank, index in enumerate(found)}
        self._manifest.extra["heads"] = heads
        self._manifest.plain = self._plain
        with files.saying(f"completing '{self.final}'"):
            files.write_text(self.hidden / MANIFEST, self._manifest.text())
            self._draft.finish()
            publish(self.hidden, self.final, latest=self.settings.latest)
        self._draft.close()
        return ""


def refuse_others(final: Path) -> None:
    """Raise if what has this checkpoint's name already is none: it would be gone."""
    if final.exists() and not is_checkpoint(final) and not (final.is_dir() and not any(final.iterdir())):
        raise CheckpointError(
            f"'{final}' is there already and is no checkpoint.",
            "A checkpoint takes the place of the one before under its tag, not that of something else.",
            "name another tag, or move it away.",
        )


def publish(hidden: Path, final: Path, *, latest: bool) -> None:
    """Give a finished folder its name, and `latest` that name.  What had it before stays hidden until somebody
    has time to `remove_replaced`: gigabytes take a while.
    """
    if final.exists():
        remove_replaced(final)
        files.rename(final, replaced_by(final))
    files.rename(hidden, final)
    files.sync_folder(final.parent)
    if latest:
        files.replace_text(final.parent / LATEST, final.name)


def save(directory: Path, tag: str, contents: Contents, settings: SaveSettings) -> Path:
    """Write `directory/tag` and return it.  Collective; rank 0's tag, counters and client state count."""
    return Saving(directory, tag, contents, settings).commit()


def _plain(contents: Contents, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The values that are not slices: hyper-parameters, counters, scaler and schedule, the caller's state."""
    groups: list[Any] = []
    if contents.optimizer is not None:
        for group in contents.optimizer.param_groups:
            groups.append({key: value for key, value in group.items() if key != "params"})
    return {
        "groups": encode(groups, "param_groups", tensors),
        "trainer": encode(contents.trainer, "trainer", tensors),
        "client": encode(contents.client, "client_state", tensors),
    }


def _agreed_tag(tags: list[str], validation: str) -> str:
    different = next((rank for rank, each in enumerate(tags) if each != tags[0]), None)
    if different is not None and validation != "Ignore":
        said = f"rank 0 saves under tag {tags[0]!r}, rank {different} under {tags[different]!r}"
        if validation == "Fail":
            raise CheckpointError(f"{said}.", "One checkpoint has one tag.", "pass the same tag on every rank.")
        log_once(f"{said}; rank 0's is used.")
    return tag_to_save(tags[0])


def _digests(contents: Contents) -> dict[str, str]:
    """Running statistics differ between ranks, masks do not: what equals rank 0's is written once."""
    return {name: _digest(buffer) for name, buffer in persistent_buffers(contents.runtime.model).items()}


def _digest(buffer: Tensor) -> str:
    data = buffer.detach().to("cpu").contiguous().reshape(-1)
    return hashlib.sha256(data.view(torch.uint8).numpy().tobytes()).hexdigest()[:16] if data.numel() else ""


def _manifest(contents: Contents, settings: SaveSettings, run: str) -> Manifest:
    """What is known before anything is written."""
    runtime, optimizer = contents.runtime, contents.optimizer
    plan = {}
    for unit in runtime.units:
        for number, group in enumerate(unit.groups):
            plan[f"{unit.name}/{number}"] = group.plan.rows()
    parameters = {
        member.name: {
            "shape": list(member.slot.shape),
            "dtype": dtype_name(exact_dtype(group)),
            "trained": group.trainable,
        }
        for group in runtime.groups
        for member in group.members
    }
    buffers = persistent_buffers(runtime.model)
    return Manifest(
        world_size=runtime.comm.size,
        stage=runtime.settings.stage,
        plan=plan,
        parameters=parameters,
        buffers={
            name: {"shape": list(value.shape), "dtype": dtype_name(value.dtype)} for name, value in buffers.items()
        },
        chunks=[],
        optimizer=type(optimizer.inner).__name__ if optimizer is not None else None,
        scalars={},
        excluded=[name for name, facts in parameters.items() if settings.exclude_frozen and not facts["trained"]],
        lifted=[unit.name for unit in runtime.units if unit.is_lifted],
        run=run,
        extra={"names": state_names(runtime.model), "groups": optimizer.names_by_group if optimizer else []},
    )
