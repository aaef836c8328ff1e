"""A checkpoint folder as one process reads it, whoever wrote it: names, shapes, flat ranges of every state.

Nothing is read before it is asked for, and never more than a stretch of one tensor at a time.  Called by convert.py,
engine/saving.py and facade/zero_to_fp32.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..base.errors import CheckpointError
from .catalogue import latest_tag
from .deepspeed_read import is_deepspeed, read_deepspeed
from .load import plain_values
from .manifest import BUFFER, MANIFEST, WEIGHT, Manifest, checked_tag
from .reading import Reader
from .tensor_file import Entry, cast

STRETCH = 1 << 24  # elements that are read at once


class Values(Protocol):
    """Flat ranges of the states of a checkpoint, by kind, parameter and the optimizer's name of the state."""

    def has(self, kind: str, name: str, key: str = "") -> bool: ...

    def keys(self, kind: str, name: str) -> list[str]: ...

    def read(self, kind: str, name: str, key: str, start: int, stop: int) -> Iterator[tuple[int, Tensor]]: ...

    def whole(self, name: str, key: str) -> Tensor: ...

    def of_rank(self, name: str, rank: int) -> Tensor: ...


@dataclass(frozen=True)
class Source:
    """An open checkpoint.  plain: {"groups": ..., "trainer": ..., "client": ...}, decoded."""

    folder: Path
    manifest: Manifest
    plain: dict[str, Any]
    values: Values

    @property
    def tied(self) -> dict[str, str]:
        """Further names of tied parameters -> the first one."""
        return {name: first for name, first in self.manifest.extra.get("names", {}).items() if name != first}


@dataclass(frozen=True)
class Lazy:
    """One weight or buffer of a checkpoint, read when it is asked for."""

    source: Source
    name: str
    shape: torch.Size
    dtype: torch.dtype

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        """Its elements in stretches, each with its place; flat, in the dtype they were saved in."""
        if self.name in self.source.manifest.buffers:
            yield 0, self.source.values.of_rank(self.name, 0)
            return
        numel = self.shape.numel()
        for low in range(0, numel, STRETCH):
            yield from self.source.values.read(WEIGHT, self.name, "", low, min(low + STRETCH, numel))

    def contiguous(self) -> Tensor:
        """The whole tensor; DeepSpeed's word for it."""
        whole = torch.empty(self.shape.numel(), dtype=self.dtype)
        for low, part in self.parts():
            whole[low : low + part.numel()] = cast(part.reshape(-1), self.dtype)
        return whole.view(self.shape)

    @property
    def entry(self) -> Entry:
        return Entry(self.name, tuple(self.shape), self.dtype)


def open_source(path: Path, tag: str | None, stack: ExitStack) -> Source:
    """The checkpoint at `path`: a folder of one, or the folder of several that has `latest` (or `tag`) in it."""
    folder = folder_of(path, tag)
    if (folder / MANIFEST).exists() or not is_deepspeed(folder):
        manifest = Manifest.read(folder / MANIFEST)
        return Source(folder, manifest, plain_values(folder, manifest), Reader(folder, manifest.chunks, stack))
    found = read_deepspeed(folder)
    return Source(folder, found.manifest, found.plain, found)


def folder_of(path: Path, tag: str | None) -> Path:
    """Where a checkpoint lies: `path` itself if it is one, else the tag in it."""
    if tag is None and ((path / MANIFEST).exists() or is_deepspeed(path)):
        return path
    chosen = tag if tag is not None else latest_tag(path)
    if not chosen:
        raise CheckpointError(
            f"{path} is no checkpoint and has no file `latest` that names one.",
            fix="name the folder that save_checkpoint was given, or a tag in it.",
        )
    return path / checked_tag(chosen)


def tensors_of(source: Source, dtype: torch.dtype | None = None, *, exclude_frozen: bool = False) -> dict[str, Lazy]:
    """Every weight and buffer by its first name.  dtype: of floating-point tensors; None: the most precise there is."""
    manifest = source.manifest
    found = {}
    for name, facts in manifest.parameters.items():
        is_there = source.values.has(WEIGHT, name) or not prod(facts["shape"])
        if is_there and (facts["trained"] or not exclude_frozen):
            found[name] = _lazy(source, name, facts, dtype)
    for name, facts in manifest.buffers.items():
        if source.values.has(BUFFER, name):
            found[name] = _lazy(source, name, facts, dtype)
    return found


def _lazy(source: Source, name: str, facts: dict[str, Any], dtype: torch.dtype | None) -> Lazy:
    own: torch.dtype = getattr(torch, facts["dtype"])
    wanted = dtype if dtype is not None and own.is_floating_point else own
    return Lazy(source, name, torch.Size(facts["shape"]), wanted)
