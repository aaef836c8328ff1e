"""A run with complete checkpoints never restarts from scratch without a warning.

No save can damage the directory it is given.
"""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepseek_zero
from deepseek_zero.base.errors import CheckpointError
from deepseek_zero.base.log import logger
from tests.plain import here
from tests.tower import Tower, config, differences, moments, train, whole

LAYOUTS = ("slices", "deepspeed")


def build(layout: str = "slices", stage: int = 3, **top: Any) -> Any:
    torch.manual_seed(3)
    words = config(stage, checkpoint={"layout": layout}, **top)
    return deepseek_zero.initialize(model=Tower(33), config=words)[0]


@contextmanager
def warnings_of() -> Iterator[list[str]]:
    """Collect the warnings of rank 0."""
    said: list[str] = []

    class Listen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                said.append(record.getMessage())

    handler = Listen()
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def alone(action: Any) -> None:
    """Run an action on rank 0 while the other ranks wait."""
    dist.barrier()
    if here() == 0:
        action()
    dist.barrier()


@pytest.mark.ranks(2, timeout=120)
def test_a_resume_finds_complete_checkpoints_of_both_layouts_whatever_latest_says(
    tmp_path: Path,
) -> None:
    for layout in LAYOUTS:
        folder, engine = tmp_path / layout, build(layout)
        train(engine, 0, 1)
        engine.save_checkpoint(folder)
        train(engine, 1, 2)
        engine.save_checkpoint(folder, client_state={"epoch": 7})
        second = str(folder / "global_step2")
        other = build(layout)
        assert other.load_checkpoint(folder, tag="newest") == (second, {"epoch": 7})
        assert not differences(whole(other), whole(engine)) and not differences(
            moments(other), moments(engine)
        )
        for spoil in (
            lambda latest: latest.write_text(""),
            lambda latest: latest.write_text(" \n"),
            lambda latest: latest.unlink(),
        ):
            alone(lambda spoil=spoil, latest=folder / "latest": spoil(latest))
            with warnings_of() as said:
                assert build(layout).load_checkpoint(folder) == (second, {"epoch": 7})
            assert here() or any("latest" in each and "global_step2" in each for each in said)
        with warnings_of() as said:  # the path of the checkpoint instead of its directory
            assert build(layout).load_checkpoint(Path(second)) == (second, {"epoch": 7})
        assert here() or any(str(folder) in each for each in said)
        alone(lambda folder=folder: (folder / "latest").mkdir())
        with pytest.raises(CheckpointError, match=r"latest(.|\n)*What to do"):
            build(layout).load_checkpoint(folder)
        alone(lambda folder=folder: (folder / "latest").rmdir())
        alone(lambda folder=folder: (folder / "latest").write_text("gone"))
        with pytest.raises(
            CheckpointError, match=r"no checkpoint 'gone'(.|\n)*global_step1, global_step2"
        ):
            build(layout).load_checkpoint(folder)
        alone(lambda folder=folder: [damage(path) for path in folder.glob("global_step2/*")])
        with warnings_of() as said:
            assert build(layout).load_checkpoint(folder, tag="newest")[0] == str(
                folder / "global_step1"
            )
        assert here() or any("global_step2" in each and "passed over" in each for each in said)
        alone(lambda folder=folder: [damage(path) for path in folder.glob("global_step1/*")])
        alone(lambda folder=folder: (folder / "latest").unlink())
        for tag in (None, "newest"):
            with pytest.raises(CheckpointError, match="none of the 2 checkpoint"):
                build(layout).load_checkpoint(folder, tag=tag)
    assert build().load_checkpoint(tmp_path / "nowhere") == (None, None)


def damage(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


BAD = [
    "latest",
    "newest",
    "zero_to_fp32.py",
    " one",
    "one ",
    "one\n",
    "a\nb",
    "a\rb",
    "a\tb",
    "..",
    ".",
    "",
    "a/b",
    "/one",
    ".hidden",
    "x" * 250,
    "é" * 120,
    "a\0b",
    "\ud800",
    b"one",
    ["one"],
    True,
    object(),
]


@pytest.mark.ranks(2, timeout=120)
def test_a_tag_that_would_damage_the_directory_is_refused_before_any_change(
    tmp_path: Path,
) -> None:
    for layout in LAYOUTS:
        engine, folder = build(layout), tmp_path / layout
        engine.save_checkpoint(folder, tag="good")
        dist.barrier()
        before = sorted(path.relative_to(folder) for path in folder.rglob("*"))
        for tag in BAD:
            for wait in (True, False):
                with pytest.raises(CheckpointError, match=r"tag(.|\n)*What to do"):
                    engine.save_checkpoint(folder, tag=tag, wait=wait)
        dist.barrier()
        assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == before
        dist.barrier()
        assert engine.load_checkpoint(folder)[0] == str(folder / "good")
        for tag in (
            "global_step5",
            5,
            "5",
            "after pretraining",
            "epoch=1-step=5.ckpt",
            "pytorch_model",
            "über",
            0.5,
        ):
            engine.save_checkpoint(folder, tag=tag)
            assert engine.load_checkpoint(folder)[0] == str(folder / str(tag))


@pytest.mark.ranks(2)
def test_a_tag_does_not_replace_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    for layout in LAYOUTS:
        engine, folder = build(layout), tmp_path / layout
        alone(lambda folder=folder: (folder / "logs").mkdir(parents=True))
        alone(lambda folder=folder: (folder / "logs" / "mine.txt").write_text("mine"))
        alone(lambda folder=folder: (folder / "notes").write_text("mine"))
        alone(lambda folder=folder: (folder / "empty").mkdir())
        for tag in ("logs", "notes"):
            with pytest.raises(CheckpointError, match=rf"{tag}(.|\n)*is not a checkpoint"):
                engine.save_checkpoint(folder, tag=tag)
        dist.barrier()
        assert (
            (folder / "logs" / "mine.txt").read_text() == (folder / "notes").read_text() == "mine"
        )
        dist.barrier()
        engine.save_checkpoint(folder, tag="empty")
        engine.save_checkpoint(folder, tag="empty")  # replaces its previous checkpoint


SECOND = """
import sys, torch, deepseek_zero
engine = deepseek_zero.initialize(model=torch.nn.Linear(2, 2), config={
    "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"},
    "checkpoint": {"layout": sys.argv[2]}})[0]
try:
    engine.save_checkpoint(sys.argv[1], tag=sys.argv[3])
except deepseek_zero.DeepSeekZeroError as error:
    print("told:", error)
else:
    print("saved")
if len(sys.argv) > 4:  # and hold what it has until it is killed, with a child that outlives it
    import os, time
    if os.fork() == 0:
        os.close(1), os.close(2), time.sleep(20), os._exit(0)
    print("waits", flush=True)
    time.sleep(20)
"""


def second(folder: Path, layout: str, tag: str) -> str:
    """Save from another job and return its output."""
    words = [sys.executable, "-c", SECOND, str(folder), layout, tag]
    return subprocess.run(
        words, capture_output=True, text=True, check=True, env=own_environment()
    ).stdout


def own_environment() -> dict[str, str]:
    told = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in told}


@pytest.mark.slow
@pytest.mark.ranks(1, timeout=120)
def test_a_second_job_in_one_directory_is_refused_unless_the_first_has_ended(
    tmp_path: Path,
) -> None:
    for layout in LAYOUTS:
        folder, engine = tmp_path / layout, build(layout)
        engine.save_checkpoint(folder, tag="mine")
        build(layout).save_checkpoint(folder, tag="another engine of this job")
        for tag in ("mine", "theirs"):
            said = second(folder, layout, tag)
            assert f"another job writes into '{folder}': process {os.getpid()} on " in said
        assert (
            not (folder / "theirs").exists()
            and (folder / "latest").read_text() == "another engine of this job"
        )
        engine.save_checkpoint(tmp_path / "elsewhere" / layout, tag="mine")
        words = [sys.executable, "-c", SECOND, str(folder), layout, "theirs", "wait"]
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, text=True, env=own_environment()
        ) as other:
            assert other.stdout is not None
            heard = [other.stdout.readline()]
            while heard[-1] and "waits" not in heard[-1]:
                heard.append(other.stdout.readline())
            assert "saved" in "".join(heard), heard
            with pytest.raises(
                CheckpointError, match=rf"another job writes into .*process {other.pid} on"
            ):
                engine.save_checkpoint(folder, tag="mine")
            other.kill()
        engine.save_checkpoint(folder, tag="mine")
        engine.destroy()
        assert sorted(path.name for path in folder.iterdir() if path.suffix != ".py") == sorted(
            ["another engine of this job", "latest", "mine", "theirs"]
        )


@pytest.mark.ranks(1)
def test_without_file_locks_the_second_job_is_warned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("deepseek_zero.checkpoint.catalogue.fcntl.lockf", no_locks)
    engine = build()
    (tmp_path / ".writer").write_text('{"host": "node7", "process": "12", "job": "4711"}')
    with warnings_of() as said:
        engine.save_checkpoint(tmp_path, tag="one")
    assert any("process 12 on node7 (job 4711)" in each for each in said)
    os.utime(tmp_path / ".writer", (1, 1))
    (tmp_path / ".writer").write_text("not JSON")
    os.utime(tmp_path / ".writer", (1, 1))
    with warnings_of() as said:
        build().save_checkpoint(tmp_path, tag="two")
        engine.save_checkpoint(tmp_path, tag="three")
    assert not said


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tag", [None, "newest"])
def test_a_folder_without_checkpoints_is_a_warning_that_names_the_folder_that_is_meant(
    tmp_path: Path, tag: str | None
) -> None:
    engine = build()
    engine.save_checkpoint(tmp_path / "run" / "checkpoints")
    if here() == 0:
        (tmp_path / "run" / "checkpoint").mkdir()
    dist.barrier()
    meant = str(tmp_path / "run" / "checkpoints")
    for asked in (
        "run",
        "run/checkpoint5",
        "run/checkpoint",
        "runs/checkpoints",
        "run/checkpoints/global_step7",
    ):
        with warnings_of() as said:
            assert engine.load_checkpoint(tmp_path / asked, tag=tag) == (None, None)
        if here() == 0 and asked != "run/checkpoints/global_step7":
            assert len(said) == 1 and "training starts from the beginning" in said[0]
            assert f"Did you mean '{meant}'" in said[0], asked
    with warnings_of() as said:
        assert engine.load_checkpoint(tmp_path / "elsewhere", tag=tag) == (None, None)
    # Without a tag, no warning: a program finds no checkpoint at its first start.
    assert len(said) == (here() == 0 and tag is None)
    if said:
        assert (
            f"'{tmp_path / 'elsewhere'}' does not exist" in said[0]
            and "Did you mean" not in said[0]
        )
