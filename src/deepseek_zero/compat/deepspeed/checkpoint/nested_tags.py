"""Tags with "/", as in DeepSpeed: the folder of a checkpoint is below the directory's folders."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ....checkpoint import files
from ....checkpoint.catalogue import latest_tag
from ....checkpoint.format import LATEST, checked_tag
from .writer import SCRIPT_NAME


def split_tag(directory: Path, tag: Any) -> tuple[Path, Any]:
    """Return the directory and the name of a checkpoint whose tag may contain "/".

    Args:
        directory: Directory of the checkpoints.
        tag: The tag, which is returned unchanged if it has no "/".

    Raises:
        CheckpointError: The tag names a folder outside of the directory, or a hidden one.
    """
    text = str(tag) if isinstance(tag, str | os.PathLike) else ""
    *parents, name = text.split("/")
    if not parents:
        return directory, tag
    if not all(part and part[0] != "." and part.isprintable() for part in parents):
        checked_tag(text)  # raises
    return directory.joinpath(*parents), name


def nested_latest(directory: Path) -> str | None:
    """Return the tag in the file `latest` if it contains "/", else None.

    Raises:
        CheckpointError: The file cannot be read.
    """
    tag = latest_tag(directory)
    return tag if tag is not None and "/" in tag else None


def complete(directory: Path, tag: Any, *, latest: bool) -> None:
    """Move the files next to a new checkpoint to the directory of all checkpoints.

    Args:
        directory: Directory of the checkpoints.
        tag: The tag of the checkpoint, which contains "/".
        latest: Whether to write the tag to the file `latest`.

    Raises:
        CheckpointError: The disk returned an error.
    """
    path = directory / str(tag)
    with files.describing_errors(f"completing '{path}'"):
        if (script := path.with_name(SCRIPT_NAME)).exists():
            files.rename(script, directory / SCRIPT_NAME)
        if latest:
            files.replace_text(directory / LATEST, str(tag))
