"""The layouts in which checkpoints and weights lie on a disk: how each is recognised, checked and
opened.

    slices         a folder with manifest.json: a checkpoint in this library's own layout
    safetensors    a folder as Hugging Face lays it out, or one such file: weights alone
    torch          one file of torch.save (.pth, .pt, .bin): weights alone

A package above that knows another layout makes an object of it and calls `register_layout` in a
module that it contributes to the topic `CHECKPOINT_LAYOUTS` (base/plugins.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from ..base.errors import CheckpointError
from ..base.plugins import CHECKPOINT_LAYOUTS, contributions
from .boxes import ParamPart
from .contents import Contents, Loaded, LoadSettings, SaveSettings
from .format import MANIFEST, WEIGHT, FileRecord, Manifest
from .hf_folder import INDEX, STEM, SafetensorsFolder, safetensors_files
from .safetensors_file import RUN_KEY, dtype_name, read_header
from .torch_file import read_state_dict, torch_records

# Kind, name, key, and elements [start, stop) of a part
StateRange = tuple[str, str, str, int, int, ParamPart | None]


class StateReader(Protocol):
    """Reads ranges of the states of a checkpoint, by kind, parameter and the optimizer's name of
    the state.

    Elements are counted in the order of a part of the parameter (boxes.py), or of the whole one
    (None).
    """

    def has(self, kind: str, name: str, key: str = "") -> bool:
        """Return whether there is anything of a state."""
        ...

    def keys(self, kind: str, name: str) -> list[str]:
        """Return the optimizer's names of the states of one parameter."""
        ...

    def read(
        self, kind: str, name: str, key: str, start: int, stop: int, part: ParamPart | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield (position, flat values) parts of the elements [start, stop), in order; each is
        valid until the next is asked for.  CheckpointError if some are missing.
        """
        ...

    def whole(self, name: str, key: str, part: ParamPart | None = None) -> Tensor:
        """Read an optimizer state with a shape of its own.  CheckpointError where the layout has
        none of that part.
        """
        ...

    def of_rank(self, name: str, rank: int) -> Tensor:
        """Read a rank's buffer, flat; rank 0's where that rank wrote none."""
        ...


@dataclass(frozen=True)
class OpenCheckpoint:
    """An open checkpoint.  plain: {"groups": ..., "trainer": ..., "client": ...}, decoded."""

    folder: Path
    manifest: Manifest
    plain: dict[str, Any]
    values: StateReader

    @property
    def tied(self) -> dict[str, str]:
        """Return the further names of tied parameters, each with the first one."""
        return {
            name: first
            for name, first in self.manifest.extra.get("names", {}).items()
            if name != first
        }


class CheckpointLayout(ABC):
    """One way to lay out a checkpoint.  has_states: it holds optimizer states and counters, not
    weights alone.
    """

    name: str
    has_states = False

    @abstractmethod
    def is_at(self, path: Path) -> bool:
        """Return whether `path` is a checkpoint in this layout, or one that lost some of its
        files.
        """


class SlicesLayout(CheckpointLayout):
    """This library's own layout, which read.py, verify.py, save.py and load.py implement."""

    name = "slices"
    has_states = True

    def is_at(self, path: Path) -> bool:
        return (path / MANIFEST).exists() or any(path.glob("rank_*.safetensors"))


class ForeignLayout(CheckpointLayout):
    """A layout without a manifest of ours.  Errors of its methods are CheckpointErrors."""

    @abstractmethod
    def files(self, path: Path) -> list[Path]:
        """Return the files that can be compared with checksums; missing ones are left out."""

    @abstractmethod
    def records(self, file: Path) -> list[FileRecord]:
        """Return the parts of a file, each with its checksum if it has one."""

    @abstractmethod
    def manifest(self, path: Path) -> Manifest:
        """Return names, shapes and dtypes, in the words of our manifest."""

    @abstractmethod
    def checksum_coverage(self, path: Path) -> str:
        """Say what a verdict rests on where not every chunk has a checksum of its own; empty where
        each has one.
        """

    @abstractmethod
    def open_at(self, path: Path, stack: ExitStack) -> OpenCheckpoint:
        """Open the checkpoint for reading until `stack` closes."""


class EngineLayout(ForeignLayout):
    """A foreign layout in which an engine can save, and from which it can load.  title: its name in
    a sentence.
    """

    has_states = True
    title: str

    @abstractmethod
    def unsupported_reason(self, contents: Contents) -> str:
        """Say which of this rank's states the layout has no place for; empty where it holds all."""

    @abstractmethod
    def save(self, directory: Path, tag: str, contents: Contents, settings: SaveSettings) -> Path:
        """Write `directory/tag` and return it when it is on the disk.  Collective.

        CheckpointError on every rank where one cannot write; the checkpoint before stays.
        """

    @abstractmethod
    def load(self, directory: Path, tag: str, contents: Contents, settings: LoadSettings) -> Loaded:
        """Fill an engine from `directory/tag`, at any world size and stage.  Collective.

        CheckpointError on every rank, and an unchanged engine, where the checkpoint does not fit or
        (settings.verify) is damaged.
        """


class SafetensorsLayout(ForeignLayout):
    name = "safetensors"

    def is_at(self, path: Path) -> bool:
        if path.is_file():
            return path.suffix == ".safetensors"
        return (path / INDEX).exists() or any(path.glob(f"{STEM}*.safetensors"))

    def files(self, path: Path) -> list[Path]:
        with suppress(CheckpointError):
            return [each for each in safetensors_files(path) if each.is_file()]
        return []

    def records(self, file: Path) -> list[FileRecord]:
        """Return the tensors with the CRC-32s that an export of ours has in its header; other
        programs' have none.
        """
        header = read_header(file)
        return [
            FileRecord(name, at.start, at.stop, header.tensor_crcs.get(name))
            for name, at in header.locations.items()
        ]

    def manifest(self, path: Path) -> Manifest:
        headers = {each: read_header(each) for each in safetensors_files(path)}
        runs = {header.metadata.get(RUN_KEY) for header in headers.values()}
        if len(runs) > 1:
            raise CheckpointError(
                f"the files of {path} are of different exports: "
                f"{', '.join(sorted(map(str, runs)))}.",
                "An export that was cut off may have replaced some of an older one's.",
                "export again into an empty folder.",
            )
        parameters: dict[str, dict[str, Any]] = {}
        for each, header in headers.items():
            for name, at in header.locations.items():
                if name in parameters:
                    raise CheckpointError(
                        f"'{name}' is in {each.name} and in another file of {path} too.",
                        fix="export again into an empty folder.",
                    )
                parameters[name] = {
                    "shape": list(at.shape),
                    "dtype": dtype_name(at.dtype),
                    "trained": True,
                }
        run = next(iter(runs), None) or ""
        return Manifest(
            1,
            0,
            {},
            parameters,
            {},
            [],
            None,
            {},
            [],
            plain={"trainer": {}},
            run=run,
            format="safetensors",
        )

    def checksum_coverage(self, path: Path) -> str:
        if all(read_header(each).tensor_crcs for each in self.files(path)):
            return ""
        return "another program wrote this, without checksums: its tensors were only read"

    def open_at(self, path: Path, stack: ExitStack) -> OpenCheckpoint:
        plain: dict[str, Any] = {"groups": [], "trainer": {}, "client": {}}
        return OpenCheckpoint(
            path, self.manifest(path), plain, WeightsReader(SafetensorsFolder(path, stack))
        )


class TorchLayout(ForeignLayout):
    name = "torch"

    def is_at(self, path: Path) -> bool:
        return path.is_file() and path.suffix != ".safetensors"

    def files(self, path: Path) -> list[Path]:
        return [path]

    def records(self, file: Path) -> list[FileRecord]:
        return torch_records(file)

    def manifest(self, path: Path) -> Manifest:
        manifest = read_state_dict(path).manifest
        manifest.plain = {"trainer": {}}
        return manifest

    def checksum_coverage(self, path: Path) -> str:
        return "torch's CRC-32 of each record is all this file has"

    def open_at(self, path: Path, stack: ExitStack) -> OpenCheckpoint:
        found = read_state_dict(path)
        return OpenCheckpoint(path, found.manifest, found.plain, found)


@dataclass(frozen=True)
class WeightsReader:
    """The `StateReader` of an export, which has weights alone."""

    files: SafetensorsFolder

    def has(self, kind: str, name: str, key: str = "") -> bool:
        return kind == WEIGHT and name in self.files.shapes

    def keys(self, kind: str, name: str) -> list[str]:
        return []

    def read(
        self, kind: str, name: str, key: str, start: int, stop: int, part: ParamPart | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        return self.files.read(name, start, stop, part)

    def whole(self, name: str, key: str, part: ParamPart | None = None) -> Tensor:
        raise CheckpointError(f"'{name}' has no state '{key}': an export holds weights alone.")

    def of_rank(self, name: str, rank: int) -> Tensor:
        return self.files.whole(name).reshape(-1)


# -- which there are

SLICES = SlicesLayout()
SAFETENSORS = SafetensorsLayout()
TORCH = TorchLayout()
_registered: list[CheckpointLayout] = []


def register_layout(layout: CheckpointLayout) -> None:
    """Have a layout recognised from now on, in this process; nothing where one of its name is
    known.
    """
    if layout.name not in {each.name for each in (SLICES, *_registered, SAFETENSORS, TORCH)}:
        _registered.append(layout)


def known_layouts() -> Sequence[CheckpointLayout]:
    """Return all layouts, in the order in which a path is compared with them: folders of states
    before weights.

    Imports the modules that contribute layouts, which register theirs.
    """
    contributions(CHECKPOINT_LAYOUTS)
    return [SLICES, *_registered, SAFETENSORS, TORCH]


def layout_of(path: Path) -> CheckpointLayout | None:
    """Return the layout of one checkpoint or export; None where the path is neither."""
    return next((layout for layout in known_layouts() if layout.is_at(path)), None)


def layout_named(name: str) -> CheckpointLayout:
    """Return the layout of that name.  CheckpointError where none is registered."""
    found = next((layout for layout in known_layouts() if layout.name == name), None)
    if found is None:
        known = ", ".join(layout.name for layout in known_layouts())
        raise CheckpointError(f"no layout is called {name!r}.", fix=f"choose one of: {known}.")
    return found


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is a checkpoint with states, or one that lost some of its files."""
    layout = layout_of(path)
    return path.is_dir() and layout is not None and layout.has_states
