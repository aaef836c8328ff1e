"""Writes a checkpoint: every rank its slices, then one rename, then `latest`.

A crash at any moment leaves the checkpoint before it loadable: files are written into a hidden directory and synced
to the disk, which takes its final name when every rank is done.  All ranks must see the same directory.  Called by
engine/saving.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..base.errors import CheckpointError
from ..base.log import log_once
from .manifest import LATEST, MANIFEST, VALUES, Chunk, Manifest, sync, together, write_durably
from .plain import encode
from .state import (
    Contents,
    buffer_chunk,
    dtype_name,
    exact_dtype,
    numbers,
    owned_moments,
    owned_weights,
    persistent_buffers,
)


@dataclass(frozen=True)
class SaveSettings:
    """latest: point `latest` at this checkpoint. tag_validation:  Ignore, Warn or Fail when ranks name different
    tags.
    """

    latest: bool = True
    exclude_frozen: bool = False
    tag_validation: str = "Warn"


def save(directory: Path, tag: str, contents: Contents, settings: SaveSettings) -> Path:
    """Write `directory/tag` and return it.  Collective; rank 0's tag, counters and client state count."""
    comm = contents.runtime.comm
    values: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}

    def look() -> str:
        plain.update(_plain(contents, values))
        return tag

    tag = _agreed_tag(together(comm, "saving: the values", look), settings.tag_validation)
    final, hidden = directory / tag, directory / f".{tag}.saving"
    together(comm, "saving: the directory", lambda: _prepare(final, hidden) if comm.rank == 0 else "")
    digests = together(comm, "saving: the buffers", lambda: json.dumps(_digests(contents)))
    common = json.loads(digests[0]) if comm.rank else {}
    indexes = together(comm, "saving: this rank's slices", lambda: _write_slices(hidden, contents, settings, common))
    together(
        comm,
        "saving: the manifest",
        lambda: _finish(hidden, final, contents, _Written(indexes, plain, values), settings) if comm.rank == 0 else "",
    )
    return final


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
    tag = tags[0]
    if not tag or tag.startswith(".") or Path(tag).name != tag:
        raise CheckpointError(
            f"{tag!r} cannot be a tag.", "A tag is the name of one directory.", "use letters, digits, '_' and '-'."
        )
    return tag


def _prepare(final: Path, hidden: Path) -> str:
    final.parent.mkdir(parents=True, exist_ok=True)
    if hidden.exists():  # a save that never finished
        shutil.rmtree(hidden)
    hidden.mkdir()
    return ""


def _write_slices(folder: Path, contents: Contents, settings: SaveSettings, common: dict[str, str]) -> str:
    """Write this rank's file; returns its index as JSON. common: digests of what rank 0 writes for all."""
    runtime = contents.runtime
    rank = runtime.comm.rank
    found = list(owned_weights(runtime, skip_frozen=settings.exclude_frozen))
    if contents.optimizer is not None:
        found += owned_moments(contents.optimizer, rank)
    for name, buffer in persistent_buffers(runtime.model).items():
        if common.get(name) != _digest(buffer):
            found.append((buffer_chunk(name, buffer, rank), buffer.detach().reshape(-1)))
    tensors = {chunk.entry: _own_copy(data) for chunk, data in found}
    path = folder / f"rank_{rank:05d}.safetensors"
    save_file(tensors, path)
    sync(path)
    scalars = numbers(contents.optimizer) if contents.optimizer is not None else {}
    chunks = [list(asdict(chunk).values()) for chunk, _ in found]
    return json.dumps({"chunks": chunks, "scalars": scalars})


def _digests(contents: Contents) -> dict[str, str]:
    """Running statistics differ between ranks, masks do not: what equals rank 0's is written once."""
    return {name: _digest(buffer) for name, buffer in persistent_buffers(contents.runtime.model).items()}


def _own_copy(data: Tensor) -> Tensor:
    """On the host, contiguous and alone in its storage, as safetensors wants it."""
    host = data.detach().to("cpu").contiguous()
    return host if host.untyped_storage().nbytes() == host.nbytes else host.clone()


def _digest(buffer: Tensor) -> str:
    data = buffer.detach().to("cpu").contiguous().reshape(-1)
    return hashlib.sha256(data.view(torch.uint8).numpy().tobytes()).hexdigest()[:16] if data.numel() else ""


@dataclass(frozen=True)
class _Written:
    """What rank 0 knows when every slice is on the disk."""

    indexes: list[str]
    plain: dict[str, Any]
    values: dict[str, Tensor]


def _finish(hidden: Path, final: Path, contents: Contents, written: _Written, settings: SaveSettings) -> str:
    """Rank 0: the manifest, the rename, `latest`."""
    missing = [rank for rank in range(len(written.indexes)) if not (hidden / f"rank_{rank:05d}.safetensors").exists()]
    if missing:
        raise CheckpointError(
            f"rank 0 does not see the files of ranks {missing} in {hidden}.",
            "All ranks write into one directory, which rank 0 completes.",
            "save to a file system that every rank shares.",
        )
    save_file(written.values, hidden / VALUES)
    sync(hidden / VALUES)
    _manifest(contents, written, settings).write(hidden / MANIFEST)
    sync(hidden)
    replaced = final.with_name(f".{final.name}.replaced")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(final, replaced)
    os.rename(hidden, final)
    sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    if settings.latest:
        pointer = final.parent / f".{LATEST}.saving"
        write_durably(pointer, final.name)
        os.replace(pointer, final.parent / LATEST)
        sync(final.parent)
    return ""


def _manifest(contents: Contents, written: _Written, settings: SaveSettings) -> Manifest:
    runtime, optimizer = contents.runtime, contents.optimizer
    indexes = [json.loads(index) for index in written.indexes]
    scalars: dict[str, dict[str, Any]] = {}
    for index in indexes:
        scalars.update(index["scalars"])
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
        chunks=[Chunk(*values) for index in indexes for values in index["chunks"]],
        optimizer=type(optimizer.inner).__name__ if optimizer is not None else None,
        scalars=scalars,
        excluded=[name for name, facts in parameters.items() if settings.exclude_frozen and not facts["trained"]],
        lifted=[unit.name for unit in runtime.units if unit.is_lifted],
        plain=written.plain,
    )
