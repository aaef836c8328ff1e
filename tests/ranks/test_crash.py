"""A crash between any two operations of a save leaves the old or the new checkpoint complete."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepseek_zero
from deepseek_zero.checkpoint.catalogue import latest_tag, tag_folder
from deepseek_zero.checkpoint.convert import convert_to_safetensors
from deepseek_zero.checkpoint.format import MANIFEST, Manifest
from deepseek_zero.checkpoint.layouts import layout_of
from deepseek_zero.checkpoint.verify import check_headers, verify
from tests.crash import Disk, Recorder, names_in

KILLS = 200 if os.environ.get("DEEPSEEK_ZERO_FULL") else 20


def engine_of() -> Any:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    return deepseek_zero.initialize(model=model, config=config)[0]


def step(engine: Any) -> None:
    engine.backward(engine(torch.ones(2, 5)).square().mean())
    engine.step()


def newest(directory: Path) -> str | None:
    """Verify the checkpoint that `latest` names and return its identity, or None without one."""
    tag = latest_tag(directory)
    if tag is None:
        return None
    folder = tag_folder(directory, tag)
    faults = verify(folder)
    assert not faults, faults
    return Manifest.read(folder / MANIFEST).run


@pytest.mark.ranks(1)
@pytest.mark.parametrize("wait", [True, False])
def test_every_prefix_of_a_save_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path: Path, wait: bool
) -> None:
    root, left = tmp_path / "saved", tmp_path / "left"
    root.mkdir()
    engine, recorder = engine_of(), Recorder(root)
    known: list[str | None] = [None]
    ends = [0]
    with recorder.recording():
        for tag in ("one", "two", "two", "one"):
            step(engine)
            engine.save_checkpoint(root, tag=tag, wait=wait)
            engine.finish_saving()
            known.append(newest(root))
            ends.append(len(recorder.operations))
    assert len(set(known)) == 5
    disk, number = Disk(root), 0
    for count, operation in enumerate(recorder.operations, 1):
        number = next(save for save, end in enumerate(ends) if count <= end) - 1
        disk.apply(operation)
        for kept, seeds in ((1.0, 1), (0.0, 1), (0.5, 3)):
            for seed in range(seeds):
                disk.leave(left, random.Random(1000 * count + seed), kept)
                found = newest(left)
                assert found in known[number : number + 2], (
                    f"after {count} operations ({operation[0]}), kept {kept}"
                )
                shutil.rmtree(left)
    assert number == 3


@pytest.mark.ranks(1)
def test_every_prefix_of_an_export_or_conversion_leaves_a_complete_one_or_is_detected(
    tmp_path: Path,
) -> None:
    """A crash during an export or conversion leaves a complete result or a detectable mixture.

    DeepSpeed's layout and single files are replaced atomically. Files of an existing folder are
    replaced one by one, so a mixture of two exports must be detected.
    """
    root, left = tmp_path / "made", tmp_path / "left"
    root.mkdir()
    engine = engine_of()
    section = engine.config.checkpoint.model_copy(update={"layout": "deepspeed"})
    engine.config = engine.config.model_copy(update={"checkpoint": section})

    def convert(into: Path) -> None:
        engine.save_checkpoint(root / "source")
        convert_to_safetensors(root / "source", into, max_shard_bytes=60)

    ways: dict[str, Callable[[Path], object]] = {
        "theirs": lambda path: engine.save_checkpoint(path, tag="it"),
        "whole": lambda path: engine.export(path),
        "cut": lambda path: engine.export(path, max_shard_bytes=60),
        "converted": convert,
        "one.safetensors": lambda path: engine.export(path),
        "one.pth": lambda path: engine.export(path),
    }
    for name, make in ways.items():
        recorder, known = Recorder(root), [""]
        ends = [0]
        place = Path("it") if name == "theirs" else Path()
        with recorder.recording():
            for _ in range(2):
                step(engine)
                make(root / name)
                found = check_headers(root / name / place)[0]
                assert found is not None
                known.append(found.run or str(weights_of(root / name)))
                ends.append(len(recorder.operations))
            engine.parts.saver.close()
        recorder.operations = recorder.operations[: ends[-1]]
        assert len(set(known)) == 3
        disk, told = Disk(root), set[str]()
        for count, operation in enumerate(recorder.operations, 1):
            number = next(save for save, end in enumerate(ends) if count <= end) - 1
            disk.apply(operation)
            # The other operations do not change existing files
            if operation[0] not in ("write", "create", "sync"):
                for kept in (1.0, 0.0, 0.5):
                    disk.leave(left, random.Random(count), kept)
                    path = tag_folder(left / name, "it") if name == "theirs" else left / name
                    said = f"{name} after {count} operations ({operation[0]}), kept {kept}"
                    if layout_of(path) is None:
                        assert known[number] == "", said
                    elif faults := verify(path):
                        assert name in ("cut", "converted"), f"{said}: {faults}"
                        told.add(str(faults[0]))
                    else:
                        manifest = check_headers(path)[0]
                        assert manifest is not None
                        assert (manifest.run or str(weights_of(path))) in known[
                            number : number + 2
                        ], said
                    shutil.rmtree(left)
        assert not told or any("different exports" in each for each in told), name


def weights_of(path: Path) -> dict[str, list[float]]:
    """Read a torch.save file, which has no identity."""
    state = torch.load(path, weights_only=True)
    return {name: value.reshape(-1).tolist() for name, value in state.items()}


@pytest.mark.ranks(2)
def test_an_interrupted_save_does_not_prevent_the_next(tmp_path: Path) -> None:
    """The next save cleans up after a kill of rank 0, whatever operation it interrupted."""
    root, left = tmp_path / "saved", tmp_path / "left"
    engine, recorder = engine_of(), Recorder(root)
    if dist.get_rank() == 0:
        root.mkdir()
    dist.barrier()
    with recorder.recording():
        engine.save_checkpoint(root, tag="one")
        engine.save_checkpoint(root, tag="one")
    disk = Disk(root)
    counts = [0]
    if dist.get_rank() == 0:
        counts = [len(recorder.operations)]
    dist.broadcast_object_list(counts)
    for count in range(counts[0]):
        if dist.get_rank() == 0:
            disk.apply(recorder.operations[count])
            if count % 7 == 0:
                disk.leave(left, None, 1.0)
        if count % 7 == 0:
            dist.barrier()
            engine.save_checkpoint(left, tag="one")
            engine.load_checkpoint(left)
            assert names_in(left) == ["latest", "one"]
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(left)
            dist.barrier()


@pytest.mark.slow  # a minute
@pytest.mark.timeout(10 * KILLS + 60)
def test_kill_9_at_any_moment_leaves_a_checkpoint_that_loads(tmp_path: Path) -> None:
    script = Path(__file__).parent.parent / "killed_saves.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), str(KILLS), "1"],
        capture_output=True,
        text=True,
        timeout=10 * KILLS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["hung"] == 0
    assert found["different"] > KILLS // 2, "most lives got as far as a checkpoint of their own"
    assert found["leftovers"] > 0, "no kill came in the middle of a save"
