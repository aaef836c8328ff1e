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
from .catalogue import is_one, latest_tag
from .deepspeed_read import read_deepspeed, read_state_dict
from .layouts import Layout, layout_of
from .load import plain_values
from .manifest import BUFFER, MANIFEST, WEIGHT, Manifest, checked_tag
from .reading import Reader
from .tensor_file import Entry, cast, dtype_named
from .verify import foreign_manifest, refuse, verify
from .weights import WeightFiles

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


@dataclass(frozen=True)
class Weights:
    """`Values` of an export, which has weights alone."""

    files: WeightFiles

    def has(self, kind: str, name: str, key: str = "") -> bool:
        return kind == WEIGHT and name in self.files.shapes

    def keys(self, kind: str, name: str) -> list[str]:
        return []

    def read(self, kind: str, name: str, key: str, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        return self.files.read(name, start, stop)

    def whole(self, name: str, key: str) -> Tensor:
        raise CheckpointError(f"'{name}' has no state '{key}': an export holds weights alone.")

    def of_rank(self, name: str, rank: int) -> Tensor:
        return self.files.whole(name).reshape(-1)


def open_source(path: Path, tag: str | None, stack: ExitStack, *, checks: bool = True) -> Source:
    """The checkpoint or export at `path`: one of them, or the folder of several that has `latest` (or `tag`) in it.

    checks: read every byte first, and raise where one is not what was written.
    """
    folder = folder_of(path, tag)
    if checks:
        refuse(folder, verify(folder, again=True))
    layout = layout_of(folder)
    if layout is Layout.SAFETENSORS:
        nothing: dict[str, Any] = {"groups": [], "trainer": {}, "client": {}}
        return Source(folder, foreign_manifest(folder, layout), nothing, Weights(WeightFiles(folder, stack)))
    if layout in (Layout.DEEPSPEED, Layout.TORCH):
        found = read_deepspeed(folder) if layout is Layout.DEEPSPEED else read_state_dict(folder)
        return Source(folder, found.manifest, found.plain, found)
    manifest = Manifest.read(folder / MANIFEST)
    return Source(folder, manifest, plain_values(folder, manifest), Reader(folder, manifest.chunks, stack))


def folder_of(path: Path, tag: str | None) -> Path:
    """Where a checkpoint lies: `path` itself if it is one, else the tag in it."""
    if tag is None and is_one(path):
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
    own: torch.dtype = dtype_named(facts["dtype"])
    wanted = dtype if dtype is not None and own.is_floating_point else own
    return Lazy(source, name, torch.Size(facts["shape"]), wanted)
