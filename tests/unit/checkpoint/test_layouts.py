"""Registered foreign layouts are recognized, checked and opened; the library's own has priority."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from contextlib import ExitStack
from pathlib import Path

import pytest

from deepseek_zero.base.errors import CheckpointError
from deepseek_zero.checkpoint import layouts
from deepseek_zero.checkpoint.catalogue import tags_in
from deepseek_zero.checkpoint.format import FileRecord, Manifest
from deepseek_zero.checkpoint.layouts import (
    SLICES,
    ForeignLayout,
    OpenCheckpoint,
    layout_named,
    register_layout,
)
from deepseek_zero.checkpoint.read import open_checkpoint
from deepseek_zero.checkpoint.torch_file import MappedCheckpoint
from deepseek_zero.checkpoint.verify import check_headers, checksum_coverage, verify

VALUES = b"1 2 3"


class Plain(ForeignLayout):
    """A layout with a file of numbers and a file with their checksum."""

    name, has_states = "plain", True

    def is_at(self, path: Path) -> bool:
        return (path / "crc.json").exists()

    def files(self, path: Path) -> list[Path]:
        return [path / "values.txt"]

    def records(self, file: Path) -> list[FileRecord]:
        return [
            FileRecord("values", 0, len(VALUES), json.loads((file.parent / "crc.json").read_text()))
        ]

    def manifest(self, path: Path) -> Manifest:
        return Manifest(1, 0, {}, {}, {}, [], None, {}, [], format="plain")

    def checksum_coverage(self, path: Path) -> str:
        return "one sum"

    def open_at(self, path: Path, stack: ExitStack) -> OpenCheckpoint:
        return OpenCheckpoint(
            path, self.manifest(path), {}, MappedCheckpoint(path, self.manifest(path), buffers=[{}])
        )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(layouts, "_registered", {})
    monkeypatch.setattr(layouts, "contributions", lambda topic: [])
    folder = tmp_path / "step1"
    folder.mkdir()
    (folder / "values.txt").write_bytes(VALUES)
    (folder / "crc.json").write_text(json.dumps(zlib.crc32(VALUES)))
    return folder


def test_an_unknown_layout_is_no_checkpoint(folder: Path) -> None:
    assert tags_in(folder.parent) == []
    with pytest.raises(CheckpointError, match="no layout is called 'plain'"):
        layout_named("plain")


def test_a_registered_layout_is_recognised_checked_and_opened(folder: Path) -> None:
    register_layout(Plain())
    register_layout(Plain())
    assert [layout.name for layout in layouts.known_layouts()] == [
        "slices",
        "plain",
        "safetensors",
        "torch",
    ]
    assert tags_in(folder.parent) == ["step1"]
    manifest, faults = check_headers(folder)
    assert manifest is not None and manifest.format == "plain" and not faults
    assert not verify(folder) and checksum_coverage(folder) == "one sum"
    with ExitStack() as stack:
        assert open_checkpoint(folder.parent, "step1", stack).manifest.format == "plain"
    (folder / "values.txt").write_bytes(b"1 2 4")
    (fault,) = verify(folder)
    assert fault.tensor == "values" and "differs from what was saved" in fault.problem


def test_deepspeeds_layout_is_registered_on_every_import_path() -> None:
    code = (
        "from deepseek_zero.checkpoint import layouts; print([each.name for each in "
        "layouts.known_layouts()])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['slices', 'deepspeed', 'safetensors', 'torch']"


def test_the_librarys_layout_precedes_registered_ones(folder: Path) -> None:
    register_layout(Plain())
    (folder / "manifest.json").write_text("{}")
    assert layouts.layout_of(folder) is SLICES
