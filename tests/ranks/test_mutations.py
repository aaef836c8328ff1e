"""A randomly damaged checkpoint or export loads correctly or raises an error of the library.

The error names the damage. Other values or other errors never occur. Each layout is damaged 150
times, with DEEPSEEK_ZERO_FULL=1 twenty times as often.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepseek_zero
from deepseek_zero.base.errors import DeepSeekZeroError
from tests.pairwise import is_full
from tests.tower import moments

COUNT = 3000 if is_full() else 150
BLOCK = 64


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 4, bias=False))


def start(seed: int, layout: str, stage: int = 3) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "checkpoint": {"layout": layout},
    }
    return deepseek_zero.initialize(model=model(seed), config=config)[0]


# -- damage to files


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def flip_bits(paths: list[Path], chance: random.Random) -> None:
    path = chance.choice(paths)
    data = bytearray(path.read_bytes())
    for _ in range(chance.choice((1, 1, 2, 8))):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def flip_in_the_head(paths: list[Path], chance: random.Random) -> None:
    path = chance.choice(paths)
    data = bytearray(path.read_bytes())
    data[chance.randrange(min(len(data), 600))] = chance.choice(
        (0, 32, 34, 48 + chance.randrange(10), 255)
    )
    path.write_bytes(data)


def truncate(paths: list[Path], chance: random.Random) -> None:
    path = chance.choice(paths)
    os.truncate(path, chance.choice((0, 1, 7, 8, chance.randrange(path.stat().st_size))))


def lengthen(paths: list[Path], chance: random.Random) -> None:
    with open(chance.choice(paths), "ab") as file:
        file.write(chance.randbytes(chance.choice((1, 8, 4096))))


def swap_blocks(paths: list[Path], chance: random.Random) -> None:
    path = chance.choice(paths)
    data = bytearray(path.read_bytes())
    places = [chance.randrange(max(len(data) // BLOCK, 1)) * BLOCK for _ in range(2)]
    first, second = (bytes(data[at : at + BLOCK]) for at in places)
    if len(first) == len(second):
        data[places[0] : places[0] + BLOCK], data[places[1] : places[1] + BLOCK] = second, first
    path.write_bytes(data)


def overwrite_block(paths: list[Path], chance: random.Random) -> None:
    path = chance.choice(paths)
    at = chance.randrange(path.stat().st_size)
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(
            chance.choice((bytes(BLOCK), chance.randbytes(BLOCK)))[: path.stat().st_size - at]
        )


def cut_out(paths: list[Path], chance: random.Random) -> None:
    path = chance.choice(paths)
    data = path.read_bytes()
    at = chance.randrange(len(data))
    path.write_bytes(data[:at] + data[at + chance.randrange(1, 100) :])


def delete(paths: list[Path], chance: random.Random) -> None:
    chance.choice(paths).unlink()


def rename(paths: list[Path], chance: random.Random) -> None:
    path = chance.choice(paths)
    path.rename(
        path.with_name(
            chance.choice((f"{path.name}.bak", "x" + path.name, path.name.replace("0", "1", 1)))
        )
    )


def swap_files(paths: list[Path], chance: random.Random) -> None:
    first, second = chance.choice(paths), chance.choice(paths)
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)


def copy_over(paths: list[Path], chance: random.Random) -> None:
    first, second = chance.choice(paths), chance.choice(paths)
    if first != second:
        shutil.copy(first, second)


def put_a_folder(paths: list[Path], chance: random.Random) -> None:
    path = chance.choice(paths)
    path.unlink()
    path.mkdir()


def edit_json(paths: list[Path], chance: random.Random) -> None:
    """Change or drop one value of a JSON file."""
    found = [path for path in paths if path.suffix == ".json"]
    if not found:
        flip_bits(paths, chance)
        return
    path = chance.choice(found)
    document = json.loads(path.read_text())
    at: Any = document
    while True:
        key = chance.choice(list(at) if isinstance(at, dict) else list(range(len(at))))
        if not isinstance(at[key], (dict, list)) or not at[key] or chance.random() < 0.1:
            break
        at = at[key]
    if chance.random() < 0.2 and isinstance(at, dict):
        del at[key]
    else:
        at[key] = chance.choice(
            (None, -1, 1 << 70, "x", "../x", [], {}, True, 0.5, [[["deep"]]], "a\0b")
        )
    path.write_text(json.dumps(document))


def of_another_save(paths: list[Path], chance: random.Random, other: Path, folder: Path) -> None:
    path = chance.choice(paths)
    twin = other / path.relative_to(folder)
    if twin.exists():
        shutil.copy(twin, path)


WAYS: list[Callable[[list[Path], random.Random], None]] = [
    flip_bits, flip_bits, flip_in_the_head, truncate, lengthen, swap_blocks, overwrite_block,
    cut_out, delete, rename, swap_files, copy_over, put_a_folder, edit_json, edit_json,
]  # fmt: skip


# -- checks


def differences(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    lonely = sorted(left.keys() ^ right.keys())
    return lonely + [
        name for name in left.keys() & right.keys() if not torch.equal(left[name], right[name])
    ]


def values_of(engine: Any) -> dict[str, Tensor]:
    return {
        **engine.module.state_dict(),
        **{f"moment {name}": value for name, value in moments(engine).items()},
    }


@pytest.mark.timeout(2400)
@pytest.mark.ranks(2, timeout=2400)
@pytest.mark.parametrize("layout", ["slices", "deepspeed", "cut", "file"])
def test_a_damaged_checkpoint_gives_correct_values_or_an_error_that_names_it(
    tmp_path: Path, layout: str
) -> None:
    import torch.distributed as dist

    is_export, kind = layout in ("cut", "file"), "deepspeed" if layout == "deepspeed" else "slices"
    engine, whole, other, broken = (
        start(1, kind),
        tmp_path / "whole",
        tmp_path / "other",
        tmp_path / "broken",
    )

    def make(into: Path) -> None:
        engine.backward(engine(torch.randn(4, 6)).square().mean())
        engine.step()
        if layout == "cut":
            engine.export(into / "out", dtype="fp32", max_shard_bytes=200)
        elif layout == "file":
            engine.export(into / "out.safetensors", dtype="fp32")
        else:
            engine.save_checkpoint(into, tag="out")

    make(other)
    make(whole)
    path = "out.safetensors" if layout == "file" else "out"
    told = engine.module.state_dict() if is_export else values_of(engine)
    target = start(2, kind)
    first = values_of(target)

    def load() -> dict[str, Tensor]:
        if is_export:
            target.load_weights(broken / path)
            return target.module.state_dict()
        target.load_checkpoint(broken, tag="out")
        return values_of(target)

    counts = {"right": 0, "named": 0}
    began = time.monotonic()
    for number in range(COUNT):
        chance = random.Random(f"{layout} {number}")
        if dist.get_rank() == 0:
            shutil.rmtree(broken, ignore_errors=True)
            shutil.copytree(whole, broken)
            paths = files_in(broken / path) if (broken / path).is_dir() else [broken / path]
            # A single file of another export is a complete export
            if chance.random() < 0.1 and layout != "file":
                of_another_save(paths, chance, other, broken)
            else:
                chance.choice(WAYS)(paths, chance)
        dist.barrier()
        before = told if counts["right"] else first
        try:
            found = load()
        except DeepSeekZeroError as error:
            counts["named"] += 1
            assert len(str(error)) < 4000, f"{number}: {len(str(error))} characters"
            if number % 5 == 0:
                now = target.module.state_dict() if is_export else values_of(target)
                expected = before if not is_export else {name: before[name] for name in told}
                assert not differences(now, expected), (
                    f"{number}: {error} came after something had changed"
                )
        else:
            counts["right"] += 1
            assert not differences(found, told), f"{number}: wrong values without a word"
        dist.barrier()
    assert min(counts.values()) > COUNT // 100, counts  # both results occurred
    assert time.monotonic() - began < (2000 if COUNT > 300 else 200)
