"""Define the format of a checkpoint directory.

    <directory>/latest                           text: the tag to load
    <directory>/<tag>/manifest.json              names, shapes, chunks, counters, client state
    <directory>/<tag>/rank_00000.safetensors     rank 0's chunks, one tensor each

A chunk is a range [start, stop) of one state of one parameter or of a part of it (boxes.py). Names
and shapes are those of the whole model, so ranks of any mesh can read the chunks. Python values and
tensors are encoded as JSON without pickle, so reading a checkpoint never executes code:

    None, bool, int, str, float, list, dict with text keys: themselves
    tuple, other dicts, inf and nan     {"__tuple__": ...}, {"__items__": ...}, {"__float__": ...}
    tensor                              {"__tensor__": path}, the elements in a safetensors file
    numpy array or scalar               {"__ndarray__": ..., "dtype": ..., "shape": ...,
                                        "is_scalar": ...}
    types in `OBJECTS`                  {"__set__": [...]} and so on
"""

from __future__ import annotations

import json
import math
import os
import zlib
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import CheckpointError, brief
from .boxes import ParamPart, PlacedValues
from .numpy_values import ARRAY, Plain, from_plain, is_storable, to_plain
from .safetensors_file import dtype_named

FORMAT = "deepseek-zero checkpoint"
VERSION = 2
SPLIT_VERSION = 3  # version of a manifest with chunks of parts, which older releases cannot read
LATEST = "latest"
MANIFEST = "manifest.json"
STAGING_LOCK = ".writing"  # a file in a hidden folder that the saving job locks
NEWEST = "newest"  # special tag: load the newest undamaged checkpoint
# DeepSpeed's counterpart of `latest` for converted checkpoints
LATEST_UNIVERSAL = "latest_universal"
# Names with another meaning in a directory
RESERVED_TAGS = (LATEST, NEWEST, LATEST_UNIVERSAL, "zero_to_fp32.py")
MAX_TAG_BYTES = 200  # below a file system's limit of 255, because hidden names are longer
# Kinds of chunk. A weight is saved in its most precise form: the main weight if there is one. The
# live weight is its cast.
WEIGHT = "weight"
BUFFER = "buffer"
MOMENT = "moment"
WHOLE = "whole"
# Separates the key of a whole state from the name of a tensor inside a tensor subclass
INNER = "::"
CLIENT = "client_state"  # prefix of the paths of the caller's values
# a live weight that is updated by differences, so it is not the cast of its main weight
REPLICA = "replica"
OWN = "own"  # error feedback of a rank's gradients or momenta, specific to that rank
# A tensor among the manifest's plain values, and the state of a random generator, specific to each
# rank
VALUE = "value"
RNG = "rng"


def rank_file(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank_{rank:05d}.safetensors"


@dataclass(frozen=True)
class FileRecord:
    """A named byte range [start, stop) of a file; `crc` is None if it has no CRC-32."""

    name: str
    start: int
    stop: int
    crc: int | None


@dataclass(frozen=True)
class StateRange:
    """Elements [start, stop) of one state of one parameter or buffer.

    Attributes:
        kind: Kind of state, for example "weight", "buffer" or "moment".
        name: Name in the whole model.
        key: The optimizer's name of a moment; empty for other kinds.
        start: First element.
        stop: Index after the last element of the range.
        part: The part in whose order elements are counted; None means the whole parameter.
    """

    kind: str
    name: str
    key: str
    start: int
    stop: int
    part: ParamPart | None = field(default=None, kw_only=True)

    def missing_from(self, folder: Path, reached: int) -> CheckpointError:
        """Return the error for elements of this range that no file of a folder contains.

        Args:
            folder: Folder of the checkpoint, for the message.
            reached: The first missing element.

        Returns:
            The error, which the caller raises.
        """
        what = f"elements {reached} to {self.stop} of '{self.name}' ({self.kind} {self.key})"
        return missing_elements(folder, what)


@dataclass(frozen=True)
class SavedChunk(StateRange):
    """A range of a state in the file of a rank.

    Kind "own" belongs to a whole parameter group and has the name of its first parameter; the key
    contains the state and a checksum of the group's layout. Kind "whole" is an optimizer state with
    another shape than its parameter (Adafactor's rows), which is never divided. Kind "owed" belongs
    to a gradient whose update is delayed by one step.

    Attributes:
        rank: Global rank whose file has the chunk.
        crc: zlib's CRC-32 of its bytes in the file; None if it was not computed.
    """

    rank: int
    crc: int | None = None

    def to_json(self) -> list[Any]:
        """Return the chunk as a list of its fields; the part is omitted if it is None."""
        found = [self.kind, self.name, self.key, self.start, self.stop, self.rank, self.crc]
        return found if self.part is None else [*found, self.part.to_json()]

    @classmethod
    def from_json(cls, values: list[Any]) -> SavedChunk:
        """Return the chunk that a manifest stores as `values`."""
        part = ParamPart.from_json(values[7]) if len(values) > 7 else None
        return cls(*values[:7], part=part)

    @property
    def file(self) -> str:
        """Return the name of the file that contains the chunk."""
        return rank_file(self.rank)

    @property
    def tensor_name(self) -> str:
        """Return the name of the chunk's tensor in its file."""
        return f"{self.kind}|{self.key}|{self.start}|{self.name}"


class StateReader(ABC):
    """Read ranges of a checkpoint's states by kind, parameter name and optimizer key.

    Attributes:
        states: The places of each state's elements, by kind and name and then by optimizer key.
    """

    states: Mapping[tuple[str, str], Mapping[str, Any]]

    def has(self, kind: str, name: str, key: str = "") -> bool:
        """Return whether the checkpoint contains any elements of a state.

        Args:
            kind: Kind of state, such as `WEIGHT` or `MOMENT`.
            name: Name of the parameter or buffer.
            key: The optimizer's name of the state; empty for other kinds.

        Returns:
            True if `read` can return at least one element of the state.
        """
        return key in self.states.get((kind, name), ())

    def keys(self, kind: str, name: str) -> list[str]:
        """Return the optimizer's names of the states of one parameter.

        Args:
            kind: Kind of state, for example "weight", "buffer" or "moment".
            name: Name of the parameter.

        Returns:
            The names, for example "exp_avg".
        """
        return list(self.states.get((kind, name), ()))

    @abstractmethod
    def read(self, wanted: StateRange) -> PlacedValues:
        """Yield the elements of a range, in order.

        Args:
            wanted: State and elements to read.

        Yields:
            Pairs of position and flat values; each is valid until the next one is requested.

        Raises:
            CheckpointError: Elements are missing or cannot be read.
        """

    def whole(self, name: str, key: str, part: ParamPart | None = None) -> Tensor:
        """Return an optimizer state that has a shape different from its parameter.

        Args:
            name: Name of the parameter.
            key: The optimizer's name of the state.
            part: The part of the parameter that the state belongs to; None means all of it.

        Returns:
            The state in its own shape, read into new memory.

        Raises:
            CheckpointError: The checkpoint does not contain the state for this part.
        """
        raise CheckpointError(f"'{name}' has no state '{key}' with another shape.")

    @abstractmethod
    def of_rank(self, name: str, rank: int) -> Tensor:
        """Return the buffer that a rank saved, as a flat tensor.

        Args:
            name: Name of the buffer.
            rank: The rank that saved it. If that rank saved no value, that of the first rank that
                did is returned.

        Returns:
            A 1-D tensor with the dtype in which the buffer was saved.
        """


@dataclass
class Manifest:
    """Names, shapes, chunks and counters of a checkpoint, stored as JSON next to the tensors.

    Keys that were added during version 2 are in `extra`, so that older releases still read the
    file:

        names            maps names of the state dict to first names
        groups           the names of each optimizer group
        heads            checksums of the files' headers
        mesh             sizes of the axes
        ranks_per_host   ranks whose sums are formed first
        codes            bits and block of codecs chosen by measurement, by state; null for none
        clients          encoded client states that differ from rank 0's, by rank

    Attributes:
        world_size: Number of ranks that saved.
        stage: ZeRO stage of the run.
        plan: For each group of a unit, a description of its placement by state.
        parameters: Shape, dtype and `trained` of each parameter.
        buffers: Shape and dtype of each buffer.
        chunks: All chunks of all files.
        optimizer: Name of the optimizer's class.
        scalars: The optimizer's numbers of each parameter.
        excluded: Parameters that were not saved.
        lifted: Units that precision "auto" computes in fp32.
        plain: Encoded plain values, with the keys "groups", "trainer" and "client".
        run: Identity of the save, which is also stored in every file.
        format: Name of the format.
        version: Version of the format.
        extra: Keys that version 2 added, with their values.
    """

    world_size: int
    stage: int
    plan: dict[str, dict[str, str]]
    parameters: dict[str, Plain]
    buffers: dict[str, Plain]
    chunks: list[SavedChunk]
    optimizer: str | None
    scalars: dict[str, Plain]
    excluded: list[str]
    lifted: list[str] = field(default_factory=list)
    plain: Any = None
    run: str = ""
    format: str = FORMAT
    version: int = VERSION
    extra: Plain = field(default_factory=dict)

    @property
    def mesh(self) -> dict[str, int] | None:
        """Return the sizes of the mesh axes of the run that saved; None if unknown.

        States are found by name. A load needs the mesh only to choose the random states and buffers
        that a rank continues.
        """
        return self.extra.get("mesh")

    @property
    def ranks_per_host(self) -> int:
        """Return how many ranks of a host are summed before hosts; 1 for sums in rank order."""
        return self.extra.get("ranks_per_host") or 1

    def text(self) -> str:
        """Return the manifest as JSON, including its own checksum."""
        document = asdict(replace(self, chunks=[]))
        document["chunks"] = [chunk.to_json() for chunk in self.chunks]
        document["version"] = (
            SPLIT_VERSION if any(chunk.part is not None for chunk in self.chunks) else VERSION
        )
        return json.dumps({**document, "crc": _crc(document)}, allow_nan=False)

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read a manifest from its file and check it.

        Returns:
            The names, shapes, chunks and counters of the checkpoint.

        Raises:
            CheckpointError: The file is missing, damaged, or of an unknown version.
        """
        try:
            return cls._parse(path, json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise CheckpointError(
                f"{path.parent} holds no {MANIFEST}.",
                "It is no checkpoint of this library, or was never finished.",
                "name the directory that save_checkpoint was given, and a tag in it.",
            ) from None
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read: {error.strerror or error}.",
                "The disk, or what leads to it, is at fault.",
                "look at the disk (dmesg, smartctl), or load another tag.",
            ) from error
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{path} cannot be understood: {brief(error)}.",
                "The file is damaged.",
                "load another tag.",
            ) from None

    @classmethod
    def _parse(cls, path: Path, document: Plain) -> Manifest:
        if document.get("format") != FORMAT or document.get("version") not in (
            VERSION,
            SPLIT_VERSION,
        ):
            raise CheckpointError(
                f"{path} is {document.get('format')!r} version {document.get('version')!r}.",
                f"This version reads {FORMAT!r} versions {VERSION} and {SPLIT_VERSION}.",
                "load it with the version of the library that wrote it.",
            )
        if document.pop("crc", None) != _crc(document):
            raise CheckpointError(
                f"{path} is not what was written.", "Its checksum differs.", "load another tag."
            )
        document["chunks"] = [SavedChunk.from_json(values) for values in document["chunks"]]
        return cls(**document)


def _crc(document: Plain) -> int:
    return zlib.crc32(json.dumps(document, allow_nan=False).encode())


def checked_tag(tag: Any) -> str:
    """Return a tag as text if it is a valid folder name.

    Raises:
        CheckpointError: It is not.
    """
    is_plain = isinstance(tag, (str, int, float, os.PathLike)) and not isinstance(tag, bool)
    text = str(tag) if is_plain else ""
    if not text or text.startswith(".") or Path(text).name != text:
        why = "A tag is the name of one folder."
        fix = "use letters, digits, '_' and '-'."
        parent, _, name = text.rpartition("/")
        if name and parent and not name.startswith("."):
            fix = f"name the directory '<directory>/{parent}' and the tag {name!r}."
        raise _invalid_tag(tag, why, fix)
    if not text.isprintable() or len(text.encode(errors="replace")) > MAX_TAG_BYTES:
        why = f"It has characters that no name should have, or more than {MAX_TAG_BYTES} bytes."
        raise _invalid_tag(tag, why, "use fewer letters, digits, '_' and '-'.")
    return text


def tag_to_save(tag: Any) -> str:
    """Return a tag as `checked_tag` does, refusing tags that a load would misread.

    Raises:
        CheckpointError: The tag is invalid, reserved, or has surrounding blanks.
    """
    text = checked_tag(tag)
    if text in RESERVED_TAGS:
        raise _invalid_tag(
            tag,
            f"'{text}' is a reserved name in a directory of checkpoints.",
            "name another.",
        )
    if text != text.strip():
        raise _invalid_tag(
            tag,
            "It begins or ends with a blank, which the file `latest` does not keep.",
            "leave it out.",
        )
    return text


def _invalid_tag(tag: Any, why: str, fix: str) -> CheckpointError:
    shown = repr(tag)
    if len(shown) > 80:
        shown = f"{shown[:80]}..."
    return CheckpointError(f"{shown} cannot be a tag.", why, fix)


def missing_elements(folder: Path, what: str) -> CheckpointError:
    """Return the error for elements that no file contains.

    Args:
        folder: Folder of the checkpoint, for the message.
        what: Description of the elements, as the subject of the message.

    Returns:
        The error, which the caller raises.
    """
    return CheckpointError(
        f"{what} are in no file of {folder}.", "The checkpoint is incomplete.", "load another tag."
    )


# Other types that are stored: key, function that returns plain values, function that reads them
OBJECTS: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    Namespace: ("__namespace__", vars, lambda values: Namespace(**values)),
    set: ("__set__", list, set),
    frozenset: ("__frozenset__", list, frozenset),
    bytes: ("__bytes__", bytes.hex, bytes.fromhex),
    complex: ("__complex__", repr, complex),
    type(Path()): ("__path__", str, Path),
    torch.device: ("__device__", str, torch.device),
}
_READ = {key: read for key, _, read in OBJECTS.values()}
RESERVED_KEYS = (
    *("__tuple__", "__items__", "__float__", "__tensor__", "__dtype__", ARRAY),
    *_READ,
)


def encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON values, and copy its tensors into `tensors`.

    Args:
        value: Nested containers of plain values, tensors and numpy arrays.
        path: Names the value in errors; prefix of the tensors' names.
        tensors: Receives a CPU copy of each tensor, by path.

    Returns:
        Values that `json.dumps` accepts. Each tensor is replaced by its key in `tensors`.

    Raises:
        CheckpointError: The value contains an object of another type.
    """
    if is_storable(value):
        return {key: encode(item, path, tensors) for key, item in to_plain(value).items()}
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"__float__": repr(float(value))}
    if type(value) in (Tensor, nn.Parameter):
        if value.layout is not torch.strided:
            raise CheckpointError(
                f"{path} is a sparse tensor ({value.layout}), which a checkpoint cannot hold.",
                "Checkpoints hold dense tensors.",
                "save its indices and values, or value.to_dense().",
            )
        while path in tensors:  # {"a": {"b": x}, "a.b": y} has two values with one path
            path += "'"
        tensors[path] = value.detach().to("cpu", copy=True).contiguous()
        return {"__tensor__": path}
    if isinstance(value, torch.dtype):
        return {"__dtype__": str(value).removeprefix("torch.")}
    if type(value) in OBJECTS:
        key, parts, _ = OBJECTS[type(value)]
        return {key: encode(parts(value), path, tensors)}
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, tensors)
    if isinstance(value, (list, tuple)):
        items = [encode(item, f"{path}[{number}]", tensors) for number, item in enumerate(value)]
        return items if isinstance(value, list) else {"__tuple__": items}
    raise CheckpointError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint "
        "cannot hold.",
        "Checkpoints hold plain values and tensors, so that reading one never runs code.",
        "save it as numbers, text, lists, dicts, tensors or numpy arrays of numbers.",
    )


def _encode_mapping(value: Mapping[Any, Any], path: str, tensors: dict[str, Tensor]) -> Any:
    if all(isinstance(key, str) and key not in RESERVED_KEYS for key in value):
        return {key: encode(item, f"{path}.{key}", tensors) for key, item in value.items()}
    pairs = []
    for key, item in value.items():
        pairs.append(
            [
                encode(key, f"key {key!r} of {path}", tensors),
                encode(item, f"{path}[{key!r}]", tensors),
            ]
        )
    return {"__items__": pairs}


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that `encode` converted to JSON values.

    Args:
        value: JSON values that `encode` returned.
        tensors: Tensors by path, as `encode` stored them.

    Returns:
        The value, with its tensors taken from `tensors`.
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"__tuple__": items}:
            return tuple(decode(item, tensors) for item in items)
        case {"__items__": pairs}:
            return {decode(key, tensors): decode(item, tensors) for key, item in pairs}
        case {"__float__": text}:
            return float(text)
        case {"__tensor__": path}:
            return tensors[path]
        case {"__dtype__": name}:
            return dtype_named(name)
    found = {key: decode(item, tensors) for key, item in value.items()}
    if "__ndarray__" in found:
        return from_plain(found)
    read = _READ.get(next(iter(found))) if len(found) == 1 else None
    return found if read is None else read(*found.values())
