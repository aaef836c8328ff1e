"""Checkpoints in a directory are verified, selected for loading and pruned.

The tests damage real checkpoints, for example by truncation.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import deepseek_zero
from deepseek_zero.base.errors import CheckpointError
from deepseek_zero.checkpoint import catalogue, files, readahead, verify
from deepseek_zero.checkpoint import format as manifest
from deepseek_zero.checkpoint.catalogue import CheckpointInfo, Retention
from deepseek_zero.checkpoint.format import Manifest
from deepseek_zero.checkpoint.safetensors_file import read_header
from deepseek_zero.engine import saving
from tests.crash import flip

# Communicator of a single rank.
ALONE: Any = SimpleNamespace(rank=0, size=1, all_gather_text=lambda text, what: [text])

RANK_0 = "rank_00000.safetensors"
TAGS = ["global_step3", "global_step2", "global_step1"]


def build(**checkpoint: Any) -> Any:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3},
        "checkpoint": checkpoint,
    }
    return deepseek_zero.initialize(model=model, config=config)[0]


def step(engine: Any) -> None:
    engine.backward(engine(torch.randn(4, 6)).square().mean())
    engine.step()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save three checkpoints of one run."""
    directory = tmp_path_factory.mktemp("run")
    engine = build()
    for _ in range(3):
        step(engine)
        engine.save_checkpoint(directory)
    return directory


@pytest.fixture
def directory(pristine: Path, tmp_path: Path) -> Path:
    """Copy the checkpoints, so that a test can damage them."""
    return shutil.copytree(pristine, tmp_path / "run")


def tags_of(directory: Path) -> list[str]:
    return [entry.tag for entry in catalogue.checkpoints(directory)]


def test_checkpoints_are_listed_by_step_whatever_their_names_and_times(directory: Path) -> None:
    (directory / "global_step1").rename(directory / "zz")
    os.utime(directory / "global_step3" / "manifest.json", (1, 1))
    (directory / "logs").mkdir()
    entries = catalogue.checkpoints(directory)
    assert [(entry.tag, entry.step, entry.is_complete) for entry in entries] == [
        ("global_step3", 3, True),
        ("global_step2", 2, True),
        ("zz", 1, True),
    ]
    assert catalogue.newest_good(ALONE, directory) == "global_step3"


# -- damage


def cut(folder: Path) -> None:
    os.truncate(folder / RANK_0, (folder / RANK_0).stat().st_size - 100)


def cut_to_nothing(folder: Path) -> None:
    os.truncate(folder / RANK_0, 0)


def lengthen(folder: Path) -> None:
    with open(folder / RANK_0, "ab") as file:
        file.write(b"x")


def lose_a_shard(folder: Path) -> None:
    (folder / RANK_0).unlink()


def lose_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def cut_the_manifest(folder: Path) -> None:
    os.truncate(folder / "manifest.json", 500)


def spoil_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('["not", "a", "manifest"]')


def put_a_folder_where_the_manifest_was(folder: Path) -> None:
    """A broken disk has the same effect: the path exists, and reading it fails."""
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").mkdir()


def change_a_shape(folder: Path) -> None:
    document = json.loads((folder / "manifest.json").read_text())
    document["parameters"]["2.weight"]["shape"] = [2, 6]
    (folder / "manifest.json").write_text(json.dumps(document))


def flip_a_byte_of_a_header(folder: Path) -> None:
    at = (folder / RANK_0).read_bytes().index(b"2.weight")
    flip(folder / RANK_0, at)


def overwrite_a_header(folder: Path) -> None:
    with open(folder / RANK_0, "r+b") as file:
        file.write(b"\0" * 64)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            cut,
            r"rank_00000.safetensors is [\d,]+ bytes long instead of [\d,]+: it was cut short",
        ),
        (cut_to_nothing, "rank_00000.safetensors ends inside its header, at 0 bytes"),
        (lengthen, "something was added to it"),
        (lose_a_shard, "rank_00000.safetensors is missing"),
        (lose_the_manifest, "manifest.json is missing"),
        (cut_the_manifest, "manifest.json cannot be used: .* cannot be understood"),
        (spoil_the_manifest, "manifest.json cannot be used: .* cannot be understood"),
        (
            put_a_folder_where_the_manifest_was,
            "manifest.json cannot be used: .* cannot be read: Is a directory",
        ),
        (
            change_a_shape,
            "manifest.json(, '2.weight': the weight ends at element 10 of 12| cannot be used: "
            ".*not what was written)",
        ),
        (flip_a_byte_of_a_header, r"rank_00000.safetensors, '2.weight': .* is not in the file"),
        (overwrite_a_header, r"rank_00000.safetensors .* cannot be understood"),
    ],
)
def test_a_damaged_checkpoint_is_detected_without_reading_tensors_and_the_older_one_is_loaded(
    directory: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], said: str
) -> None:
    damage(directory / "global_step3")
    _, faults = verify.check_headers(directory / "global_step3")
    assert any(_matches(said, str(fault)) for fault in faults), faults
    assert [str(fault) for fault in verify.verify(directory / "global_step3")] == [
        str(fault) for fault in faults
    ]
    assert sorted(tags_of(directory), reverse=True) == TAGS
    assert catalogue.newest_good(ALONE, directory) == "global_step2"
    assert _matches("global_step3 is passed over.*" + said, capsys.readouterr().err)


def _matches(pattern: str, text: str) -> bool:
    return re.search(pattern, text) is not None


def with_facts_of(monkeypatch: pytest.MonkeyPatch, folder: Path, run: str = "") -> None:
    """Patch the manifest with the checksums of the files and with `run`."""
    known = Manifest.read(folder / "manifest.json")
    for chunk in known.chunks:
        place = read_header(folder / chunk.file).locations[chunk.tensor_name]
        object.__setattr__(
            chunk, "crc", zlib.crc32((folder / chunk.file).read_bytes()[place.start : place.stop])
        )
    object.__setattr__(known, "run", run)
    known.extra.pop("heads", None)  # the test rewrites headers in an older format
    monkeypatch.setattr(Manifest, "read", lambda path: known)


def test_one_flipped_bit_is_found_and_named(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = directory / "global_step3"
    with_facts_of(monkeypatch, folder)
    monkeypatch.setattr(readahead, "BLOCK_BYTES", 8)
    assert verify.verify(folder) == []
    chunk = next(
        each
        for each in Manifest.read(folder / "manifest.json").chunks
        if (each.kind, each.key) == ("moment", "exp_avg")
    )
    flip(folder / RANK_0, read_header(folder / RANK_0).locations[chunk.tensor_name].start + 9)
    assert verify.check_headers(folder)[1] == []
    (fault,) = verify.verify(folder)
    assert (fault.file, fault.tensor) == (RANK_0, chunk.name)
    assert (
        "moment exp_avg, elements 0 to" in fault.problem
        and "differs from what was saved" in fault.problem
    )


def test_a_shard_of_another_save_is_recognised(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = directory / "global_step3"
    with_facts_of(monkeypatch, folder, run="this one")
    save_file(load_file(folder / RANK_0), folder / RANK_0, metadata={"run": "this one"})
    assert verify.check_headers(folder)[1] == []
    save_file(load_file(folder / RANK_0), folder / RANK_0, metadata={"run": "that one"})
    (fault,) = verify.verify(folder)
    assert str(fault) == f"{RANK_0} is of another save: it has that one, the manifest this one"


def test_a_read_error_names_file_and_tensor(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = directory / "global_step3"
    places = sorted(read_header(folder / RANK_0).locations.values(), key=lambda place: place.start)
    honest, lost = os.preadv, places[1].start

    def fails_there(descriptor: int, buffers: Any, offset: int, *flags: int) -> int:
        if (
            offset <= lost < offset + len(buffers[0])
            and Path(os.readlink(f"/proc/self/fd/{descriptor}")).name == RANK_0
        ):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return honest(descriptor, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", fails_there)
    (fault,) = verify.verify(folder)
    assert fault.file == RANK_0 and fault.tensor
    assert fault.problem == "cannot be read: Input/output error"


def test_several_readers_share_the_files_and_find_the_same(directory: Path) -> None:
    folder = directory / "global_step3"
    for number in (7, 8):
        shutil.copy(folder / RANK_0, folder / f"rank_{number:05d}.safetensors")
        os.truncate(folder / f"rank_{number:05d}.safetensors", 100)
    found = [verify.verify(folder, verify.FileSubset(rank, 3)) for rank in range(3)]
    assert sorted(str(fault) for each in found for fault in each) == sorted(
        map(str, verify.verify(folder))
    )
    assert max(map(len, found)) == 1


def test_none_is_none_and_none_that_is_good_an_error(directory: Path, tmp_path: Path) -> None:
    assert catalogue.newest_good(ALONE, tmp_path / "nowhere") is None
    for tag in TAGS:
        cut(directory / tag)
    with pytest.raises(CheckpointError, match=r"none of the 3 checkpoint\(s\)(.|\n)*What to do"):
        catalogue.newest_good(ALONE, directory)


def test_loading_the_latest_checkpoint_loads_the_latest_valid_one(
    directory: Path, tmp_path: Path
) -> None:
    engine = build()
    assert engine.load_checkpoint(tmp_path / "nowhere", tag="newest") == (None, None)
    cut(directory / "global_step3")
    assert (directory / "latest").read_text() == "global_step3"
    path, _ = engine.load_checkpoint(directory, tag="newest")
    assert (path, engine.global_steps) == (str(directory / "global_step2"), 2)


def test_loading_a_file_raises_an_error_that_names_it(directory: Path) -> None:
    file = directory / "global_step3" / RANK_0
    for tag in (None, "newest"):
        with pytest.raises(CheckpointError, match="got the file"):
            build().load_checkpoint(file, tag=tag)


def test_the_newest_checkpoint_of_a_checkpoint_is_itself(directory: Path) -> None:
    path, _ = build().load_checkpoint(directory / "global_step2", tag="newest")
    assert path == str(directory / "global_step2")


# -- leftovers


def test_a_save_in_progress_is_kept_and_an_abandoned_one_is_removed(directory: Path) -> None:
    saving = directory / ".global_step4.saving"
    saving.mkdir()
    with open(saving / ".writing", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert [one.is_in_use for one in catalogue.leftovers(directory)] == [True]
        assert catalogue.clean(directory) == [] and saving.exists()
    assert catalogue.clean(directory) == [saving]
    assert sorted(path.name for path in directory.iterdir()) == [
        "global_step1",
        "global_step2",
        "global_step3",
        "latest",
    ]


def test_without_a_lock_only_old_folders_count_as_abandoned(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving, pointer = directory / ".global_step4.saving", directory / ".latest.saving"
    saving.mkdir()
    pointer.touch()
    assert catalogue.clean(directory) == []
    long_ago = time.time() - 2 * catalogue.STALE_SAVE_SECONDS
    os.utime(saving, (long_ago, long_ago))
    os.utime(pointer, (long_ago, long_ago))
    assert sorted(catalogue.clean(directory, dry_run=True)) == sorted([saving, pointer])
    (saving / ".writing").touch()
    monkeypatch.setattr(fcntl, "flock", _no_locks_here)
    assert catalogue.clean(directory) == [pointer], "where nobody can tell, nothing is removed"


def _no_locks_here(*_: Any) -> None:
    raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))


def test_a_tag_with_a_hidden_name_after_a_crash_is_listed_loaded_and_renamed(
    directory: Path,
) -> None:
    replaced = directory / ".global_step3.replaced"
    (directory / "global_step3").rename(replaced)
    assert tags_of(directory) == TAGS
    assert catalogue.newest_good(ALONE, directory) == "global_step3"
    engine = build()
    path, _ = engine.load_checkpoint(directory, tag="newest")
    assert (path, engine.global_steps) == (str(replaced), 3)
    assert catalogue.clean(directory) == [replaced]
    assert (directory / "global_step3" / "manifest.json").exists() and not replaced.exists()


def test_a_hidden_tag_of_a_running_save_is_not_renamed(directory: Path) -> None:
    replaced, saving = directory / ".global_step3.replaced", directory / ".global_step3.saving"
    (directory / "global_step3").rename(replaced)
    saving.mkdir()
    with open(saving / ".writing", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert catalogue.clean(directory) == [] and replaced.exists()


# -- pruning


def entry(tag: str, at: int, *, good: bool = True, readable: bool = True) -> CheckpointInfo:
    known = (
        Manifest(1, 3, {}, {}, {}, [], None, {}, [], plain={"trainer": {"global_steps": at}})
        if readable
        else None
    )
    return CheckpointInfo(
        tag,
        Path(tag),
        known,
        0.0,
        () if good and readable else (verify.Fault("file", "is missing"),),
    )


SIX = [
    entry(name, at)
    for name, at in [("f", 60), ("e", 50), ("d", 40), ("c", 30), ("b", 20), ("a", 10)]
]


@pytest.mark.parametrize(
    ("entries", "latest", "keep", "gone"),
    [
        (SIX, "f", Retention(), ""),
        (SIX, "f", Retention(2), "dcba"),
        (SIX, "f", Retention(2, every=20), "ca"),
        (SIX, "b", Retention(1), "edca"),
        (SIX, "gone", Retention(6), ""),
        ([entry("f", 60, good=False), *SIX[1:]], "f", Retention(1), "dcba"),
        ([SIX[0], entry("e", 50, good=False), *SIX[2:]], "f", Retention(2), "ecba"),
        ([SIX[0], *SIX[2:], entry("x", -1, readable=False)], "f", Retention(1), "dcba"),
        ([entry("b", 20, good=False), entry("a", 10, good=False)], None, Retention(1), ""),
    ],
)
def test_outdated_checkpoints_are_selected(
    entries: list[CheckpointInfo], latest: str | None, keep: Retention, gone: str
) -> None:
    assert "".join(each.tag for each in catalogue.outdated(entries, latest, keep)) == gone


def test_a_crash_while_removing_leaves_a_hidden_name_that_the_next_call_removes(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", _power_cut)
        with pytest.raises(KeyboardInterrupt):
            catalogue.prune(directory, Retention(1))
    assert tags_of(directory) == ["global_step3", "global_step1"]
    assert (directory / ".global_step2.pruned").exists()
    done = catalogue.prune(directory, Retention(1))
    assert [each.tag for each in done.removed] == ["global_step1"]
    assert sorted(path.name for path in directory.iterdir()) == ["global_step3", "latest"]


def _power_cut(path: Path, **_: Any) -> None:
    if Path(path).exists():
        raise KeyboardInterrupt


@pytest.mark.parametrize("layout", ["slices", "deepspeed"])
def test_files_of_the_program_stay_if_their_tag_is_saved_again(tmp_path: Path, layout: str) -> None:
    engine = build(layout=layout)
    for text in ("first", "second"):
        engine.save_checkpoint(tmp_path, tag="last")
        theirs = tmp_path / "last" / "tokenizer"
        theirs.mkdir(exist_ok=True)
        (theirs / f"{text}.json").write_text(text)
    engine.save_checkpoint(tmp_path, tag="last")
    assert sorted(path.name for path in theirs.iterdir()) == ["first.json", "second.json"]
    assert not catalogue.leftovers(tmp_path)


def test_files_of_the_program_are_kept_before_a_save_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "apply_retention", lambda *_: None)  # of another thread
    engine = build()
    engine.save_checkpoint(tmp_path, tag="last")
    notes = tmp_path / "last" / "notes.txt"
    notes.write_text("kept")
    engine.save_checkpoint(tmp_path, tag="last")
    assert notes.read_text() == "kept"
    notes.unlink()
    catalogue.remove_replaced(notes.parent)
    assert not notes.exists()


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_that_the_program_writes_meanwhile_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_links: bool
) -> None:
    replaced = tmp_path / ".last.replaced"
    for folder in (replaced, tmp_path / "last"):
        folder.mkdir()
    for name in ("a.txt", "b.txt"):
        (replaced / name).write_text("older")
    link = files.link

    def write_before(source: Path, target: Path) -> None:
        if not has_links:
            raise PermissionError
        if source.name == "a.txt":
            target.write_text("newer")
        link(source, target)

    monkeypatch.setattr(files, "link", write_before)
    catalogue.remove_replaced(tmp_path / "last")
    assert (tmp_path / "last" / "a.txt").read_text() == ("newer" if has_links else "older")
    assert (tmp_path / "last" / "b.txt").read_text() == "older"
    assert not replaced.exists()


def test_files_of_the_program_are_not_removed_with_leftovers(directory: Path) -> None:
    replaced = directory / ".global_step3.replaced"
    shutil.copytree(directory / "global_step3", replaced)
    (replaced / "notes.txt").write_text("kept")
    assert catalogue.clean(directory) == [replaced]
    assert (directory / "global_step3" / "notes.txt").read_text() == "kept"


def test_an_engine_keeps_the_values_of_its_configuration(tmp_path: Path) -> None:
    engine = build(keep_last=2, keep_every=3)
    for _ in range(7):
        step(engine)
        engine.save_checkpoint(tmp_path)
    assert tags_of(tmp_path) == ["global_step7", "global_step6", "global_step3"]


def test_a_directory_without_write_access_is_a_warning_and_loses_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = build(keep_last=1)
    engine.save_checkpoint(tmp_path, tag="one")
    step(engine)
    monkeypatch.setattr(catalogue, "_remove", _refuse)
    engine.save_checkpoint(tmp_path, tag="two")
    assert tags_of(tmp_path) == ["two", "one"]
    assert "could not be removed: [Errno 30] Read-only file system" in capsys.readouterr().err


def _refuse(*_: Any) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_folder_of_the_same_shape_that_is_no_checkpoint_of_ours_is_never_removed(
    directory: Path,
) -> None:
    foreign = directory / "theirs"
    foreign.mkdir()
    (foreign / manifest.MANIFEST).write_text('{"format": "something else"}')
    catalogue.prune(directory, Retention(1))
    assert sorted(tags_of(directory)) == ["global_step3", "theirs"]
