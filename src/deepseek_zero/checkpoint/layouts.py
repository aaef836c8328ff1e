"""Define how each layout of checkpoints is recognised, checked and opened.

    slices         a folder with manifest.json: a checkpoint in this library's own layout
    safetensors    a folder in the layout of Hugging Face, or one such file: weights only
    torch          one file written by torch.save (.pth, .pt, .bin): weights only

A higher package adds a layout by calling `register_layout` in a module that it contributes to the
topic `CHECKPOINT_LAYOUTS` (base/plugins.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from ..base.errors import CheckpointError
from ..base.plugins import CHECKPOINT_LAYOUTS, contributions
from .contents import Contents, Loaded, LoadSettings, SaveSettings
from .format import MANIFEST, STAGING_LOCK, FileRecord, Manifest, StateReader
from .hf_folder import INDEX, STEM, SafetensorsFolder, safetensors_files
from .numpy_values import Plain
from .safetensors_file import read_header
from .torch_file import parameter_facts, read_state_dict, torch_records


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint whose states can be read by name.

    Attributes:
        folder: Its path.
        manifest: Names, shapes and dtypes.
        plain: The decoded plain values, with the keys "groups", "trainer" and "client".
        values: Reads the tensors.
    """

    folder: Path
    manifest: Manifest
    plain: Plain
    values: StateReader

    @property
    def tied(self) -> dict[str, str]:
        """Map every further name of a tied parameter to its first name."""
        return {
            name: first
            for name, first in self.manifest.extra.get("names", {}).items()
            if name != first
        }


class CheckpointLayout(ABC):
    """A layout of checkpoints.

    Attributes:
        name: Identifies the layout.
        has_states: Whether it stores optimizer states and counters in addition to weights.
        patterns: Glob patterns of the names in a folder with states.
    """

    name: str
    has_states = False
    patterns: tuple[str, ...] = ()

    @abstractmethod
    def is_at(self, path: Path) -> bool:
        """Return whether `path` has this layout, even if some of its files are missing."""


class SlicesLayout(CheckpointLayout):
    """The library's own layout.

    It is implemented in read.py, verify.py, save.py and load.py.
    """

    name = "slices"
    has_states = True
    patterns = ("rank_*.safetensors", MANIFEST, STAGING_LOCK)

    def is_at(self, path: Path) -> bool:
        """Return whether `path` has a manifest or files of ranks."""
        return (path / MANIFEST).exists() or any(path.glob("rank_*.safetensors"))


class ForeignLayout(CheckpointLayout):
    """A layout without this library's manifest.

    All errors of its methods are of type `CheckpointError`.
    """

    @abstractmethod
    def files(self, path: Path) -> list[Path]:
        """Return the existing files that can be compared with checksums."""

    @abstractmethod
    def records(self, file: Path) -> list[FileRecord]:
        """Return the byte ranges of a file, with their checksums if it has any."""

    def manifest(self, path: Path) -> Manifest:
        """Return the names, shapes and dtypes as a `Manifest`."""
        with ExitStack() as stack:
            source = self.open_at(path, stack)
        source.manifest.plain = {"trainer": source.plain.get("trainer", {})}
        return source.manifest

    @abstractmethod
    def checksum_coverage(self, path: Path) -> str:
        """Return what is verified if not every chunk has a checksum.

        Returns:
            The explanation; empty if every chunk has a checksum.
        """

    @abstractmethod
    def open_at(self, path: Path, stack: ExitStack) -> OpenCheckpoint:
        """Open a checkpoint for reading.

        Args:
            path: Folder or file of the checkpoint.
            stack: Exit stack that closes the files when it is left.

        Returns:
            The open checkpoint, which reads ranges of states by name.
        """


class EngineLayout(ForeignLayout):
    """A foreign layout that an engine can save and load.

    Attributes:
        title: Name of the layout in messages.
    """

    has_states = True
    title: str

    @abstractmethod
    def unsupported_reason(self, contents: Contents) -> str:
        """Return why the layout cannot store this rank's states; empty if it can."""

    @abstractmethod
    def save(self, directory: Path, tag: str, contents: Contents, settings: SaveSettings) -> Path:
        """Write the checkpoint `directory/tag` to the disk.

        Args:
            directory: Directory of checkpoints.
            tag: Name of the new checkpoint.
            contents: States to save.
            settings: How to save them.

        Returns:
            The path of the checkpoint.

        Raises:
            CheckpointError: A rank cannot write. It is raised on every rank, and the previous
                checkpoint is kept.

        Note:
            Collective: every rank must call it.
        """

    @abstractmethod
    def load(self, directory: Path, tag: str, contents: Contents, settings: LoadSettings) -> Loaded:
        """Load the checkpoint `directory/tag` into an engine of any world size and stage.

        Args:
            directory: Directory of checkpoints.
            tag: Name of the checkpoint.
            contents: States to overwrite.
            settings: What to load and verify.

        Returns:
            The path, the counters and schedules of the run, and the `client_state`.

        Raises:
            CheckpointError: The checkpoint does not fit the engine, or `settings.verify` is set and
                it is damaged. It is raised on every rank, and the engine is unchanged.

        Note:
            Collective: every rank must call it.
        """


class SafetensorsLayout(ForeignLayout):
    """Safetensors files as Hugging Face writes them, or one such file: weights only."""

    name = "safetensors"

    def is_at(self, path: Path) -> bool:
        """Return whether `path` is a safetensors file or a folder with model files."""
        if path.is_file():
            return path.suffix == ".safetensors"
        return (path / INDEX).exists() or any(path.glob(f"{STEM}*.safetensors"))

    def files(self, path: Path) -> list[Path]:
        """Return the safetensors files that exist at `path`."""
        with suppress(CheckpointError):
            return [each for each in safetensors_files(path) if each.is_file()]
        return []

    def records(self, file: Path) -> list[FileRecord]:
        """Return the tensors of a file with their checksums.

        Only exports of this library have checksums; they are in the header.
        """
        header = read_header(file)
        return [
            FileRecord(name, at.start, at.stop, header.tensor_crcs.get(name))
            for name, at in header.locations.items()
        ]

    def checksum_coverage(self, path: Path) -> str:
        """Return a note that the files have no checksums; empty for this library's exports."""
        if all(read_header(each).tensor_crcs for each in self.files(path)):
            return ""
        return "another program wrote this, without checksums: its tensors were only read"

    def open_at(self, path: Path, stack: ExitStack) -> OpenCheckpoint:
        """Open the files for reading.

        Args:
            path: A safetensors file, or a folder of them.
            stack: Exit stack that closes the files when it is left.

        Returns:
            The open checkpoint, which has only weights.
        """
        folder = SafetensorsFolder(path, stack)
        if len(folder.runs) > 1:
            raise CheckpointError(
                f"the files of {path} are of different exports: "
                f"{', '.join(sorted(map(str, folder.runs)))}.",
                "An export that was cut off may have replaced some of an older one's.",
                "export again into an empty folder.",
            )
        parameters = {
            name: parameter_facts(at.shape, at.dtype, trained=True)
            for name, at in folder.locations.items()
        }
        run = next(iter(folder.runs), None) or ""
        manifest = Manifest(
            1, 0, {}, parameters, {}, [], None, {}, [], run=run, format="safetensors"
        )
        plain: Plain = {"groups": [], "trainer": {}, "client": {}}
        return OpenCheckpoint(path, manifest, plain, folder)


class TorchLayout(ForeignLayout):
    """One file written by torch.save: weights only."""

    name = "torch"

    def is_at(self, path: Path) -> bool:
        """Return whether `path` is a file without the suffix .safetensors."""
        return path.is_file() and path.suffix != ".safetensors"

    def files(self, path: Path) -> list[Path]:
        """Return a list that contains only `path`, because this layout is one file."""
        return [path]

    def records(self, file: Path) -> list[FileRecord]:
        """Return the records of the zip archive, with their CRC-32."""
        return torch_records(file)

    def checksum_coverage(self, path: Path) -> str:
        """Return a note that only torch's own checksums of the records exist."""
        return "torch's CRC-32 of each record is all this file has"

    def open_at(self, path: Path, stack: ExitStack) -> OpenCheckpoint:
        """Open the file for reading.

        Args:
            path: File that torch.save wrote.
            stack: Unused, because the tensors are mapped.

        Returns:
            The open checkpoint, which has only weights.
        """
        found = read_state_dict(path)
        return OpenCheckpoint(path, found.manifest, found.plain, found)


# -- registry

SLICES = SlicesLayout()
SAFETENSORS = SafetensorsLayout()
TORCH = TorchLayout()
_registered: dict[str, CheckpointLayout] = {}


def register_layout(layout: CheckpointLayout) -> None:
    """Register a layout in this process, unless its name is already registered."""
    _registered.setdefault(layout.name, layout)


def known_layouts() -> Sequence[CheckpointLayout]:
    """Return all layouts in the order in which `layout_of` tries them.

    Layouts with states come before layouts that contain only weights. The call imports the modules
    that contribute layouts, so that they can register them.
    """
    contributions(CHECKPOINT_LAYOUTS)
    return [SLICES, *_registered.values(), SAFETENSORS, TORCH]


def layout_of(path: Path) -> CheckpointLayout | None:
    """Return the layout of a checkpoint or export; None if the path is neither."""
    return next((layout for layout in known_layouts() if layout.is_at(path)), None)


def layout_named(name: str) -> CheckpointLayout:
    """Return the layout with the given name.

    Raises:
        CheckpointError: No layout of that name is registered.
    """
    known = {layout.name: layout for layout in known_layouts()}
    if name not in known:
        fix = f"choose one of: {', '.join(known)}."
        raise CheckpointError(f"no layout is called {name!r}.", fix=fix)
    return known[name]


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is a checkpoint with states, possibly incomplete."""
    layout = layout_of(path)
    return path.is_dir() and layout is not None and layout.has_states
