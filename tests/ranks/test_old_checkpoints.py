"""Checkpoints written by commit bcf5641 (tests/data/checkpoints) load and continue to train.

Loaded values are compared bit by bit. Later steps have the same bits on the kind of machine that
wrote the files (same torch, same instruction set, and the same result of `probe`). Other kernels
round differently, so on other machines the comparison has a tolerance. OTHER_BITS always has one:
another formula computed the last elements of parameters whose length is not a multiple of 8
(docs/design/updates.md).
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from deepseek_zero.checkpoint.verify import verify
from tests.data.checkpoints.make import (
    CASES,
    CLIENT_STATE,
    EXPORTED,
    EXPORTS,
    STEPS_AFTER,
    Case,
    digest,
    exact_weights,
    machine,
    moments,
    start,
    train,
    whole_weights,
)

DATA = Path(__file__).parents[1] / "data" / "checkpoints"
# Relative and absolute tolerances on another machine. Three AdamW steps with a rate of 0.01 move a
# weight by at most 0.03. In 16 bits or quantized, a difference in the last bit can become one of a
# whole step.
EXACT, ROUNDED = 1e-5, 1e-2
OTHER_BITS = ("tp_pp",)
TO_ONE_RANK = (
    "stage0 split_master fp16 lifted_unit adafactor delayed differences feedback_int8 one_bit_adam "
    "replicas tiles tp_stage1 pp tp_pp deepspeed1 deepspeed3_bf16 universal".split()
)


def unpacked(name: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Unpack the files of a case into this rank's folder; return it and the expected values."""
    out = folder / str(dist.get_rank() if dist.is_initialized() else 0)
    with zipfile.ZipFile(DATA / f"{name}.zip") as packed:
        packed.extractall(out)
    return out, json.loads((out / "expected.json").read_text())


def tag_of(folder: Path) -> str:
    """Return the name of the only checkpoint in an unpacked folder."""
    (found,) = [path.name for path in folder.iterdir() if path.is_dir()]
    return found


def seed_for(name: str) -> int:
    """Return another seed than the saved model's, unless the file lacks some weights."""
    return 5 if name == "without_frozen" else 6


def assert_final(
    engine: Any,
    losses: list[float],
    case: Case,
    folder: Path,
    expected: dict[str, Any],
    *,
    same_bits: bool,
) -> None:
    """Check that losses and weights equal those of the uninterrupted run. Collective."""
    told = [float.fromhex(loss) for loss in expected["by_rank"][dist.get_rank()]["losses"]]
    found, final = whole_weights(engine), load_file(folder / "final.safetensors")
    assert found.keys() == final.keys()
    if dist.get_rank():  # the file has the running statistics of rank 0
        found.pop("norm.mean", None)
    if same_bits and machine() == expected["machine"]:
        assert losses == told
        assert [name for name in found if not torch.equal(found[name], final[name])] == []
        return
    is_low = any(value.dtype in (torch.bfloat16, torch.float16) for value in final.values())
    close = (
        ROUNDED if is_low or "compression" in case.zero or "OneBitAdam" in str(case.top) else EXACT
    )
    assert losses == pytest.approx(told, rel=close, abs=close)
    for name in found:
        torch.testing.assert_close(found[name], final[name], rtol=close, atol=close)


@pytest.mark.parametrize(("name", "world"), [(name, case.world) for name, case in CASES.items()])
@pytest.mark.ranks("world")
def test_a_checkpoint_of_commit_bcf5641_resumes(tmp_path: Path, name: str, world: int) -> None:
    case = CASES[name]
    folder, expected = unpacked(name, tmp_path)
    assert not verify(folder / tag_of(folder))
    engine = start(case, str(tmp_path), seed=seed_for(name))
    path, client = engine.load_checkpoint(str(folder), tag=tag_of(folder))
    assert path == str(folder / tag_of(folder))
    assert client.pop("tensor").equal(CLIENT_STATE["tensor"])
    assert client == {key: value for key, value in CLIENT_STATE.items() if key != "tensor"}
    assert engine.global_steps == case.saved_after
    states = exact_weights(engine) | moments(engine)
    told = expected["by_rank"][dist.get_rank()]["states"]
    if (
        folder / tag_of(folder) / "mp_rank_00_model_states.pt"
    ).exists():  # it has only the buffers of rank 0
        told["norm.mean"] = expected["by_rank"][0]["states"]["norm.mean"]
    assert {key: digest(value) for key, value in states.items()} == told
    losses = train(engine, case, case.saved_after, case.saved_after + STEPS_AFTER)
    assert_final(engine, losses, case, folder, expected, same_bits=name not in OTHER_BITS)


@pytest.mark.slow
@pytest.mark.parametrize("name", TO_ONE_RANK)
@pytest.mark.ranks(1)
def test_one_rank_at_stage_0_reads_what_several_ranks_of_bcf5641_wrote(
    tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    folder, expected = unpacked(name, tmp_path)
    alone = replace(case, stage=0, mesh=None, zero={})
    if name in ("one_bit_adam", "delayed"):  # their optimizer state needs its section
        alone = replace(case, mesh=None)
    engine = start(alone, str(tmp_path), seed=6)
    engine.load_checkpoint(str(folder), tag=tag_of(folder))
    live = {key: digest(value) for key, value in whole_weights(engine).items()}
    assert live == expected["live"]
    assert engine.global_steps == case.saved_after
    train(engine, alone, case.saved_after, case.saved_after + 1)


@pytest.mark.parametrize("kind", EXPORTS)
@pytest.mark.ranks(2)
def test_weights_that_bcf5641_exported_are_trained_from(tmp_path: Path, kind: str) -> None:
    folder, expected = unpacked("exports", tmp_path)
    engine = start(EXPORTED, str(tmp_path), seed=6)
    if kind.endswith((".pth", ".bin")):
        engine.module.load_state_dict(torch.load(folder / kind, weights_only=True))
    else:
        engine.load_weights(folder / kind)
    assert {key: digest(value) for key, value in whole_weights(engine).items()} == expected["live"]
    losses = train(engine, EXPORTED, 2, 2 + STEPS_AFTER)
    # The other kinds hold fp32 main weights, but the saved run started from bf16 weights
    if kind != "shards":
        assert_final(engine, losses, EXPORTED, folder, expected, same_bits=True)
