"""TRL's trainers with the drop-in, at stage 3 on two ranks, equal plain runs within rounding."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.clients.running import BY_HAND, OURS, TWO, need_client, start, told

pytestmark = BY_HAND


@pytest.mark.parametrize("words", [[], ["peft"]], ids=["", "peft"])
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_trl_trains_generates_and_resumes(kind: str, words: list[str], tmp_path: Path) -> None:
    need_client("trl", "datasets", "peft")
    program = "program_trl.py"
    base = start([sys.executable], program, "base", -1, tmp_path)
    _, errors = base.communicate(timeout=200)
    assert base.returncode == 0, errors[-4000:]
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "base").symlink_to(tmp_path / "base")
    plain = start([sys.executable], program, kind, -1, tmp_path / "plain", *words)
    ours, alone = told(start([*OURS, *TWO], program, kind, 3, tmp_path, *words)), told(plain)
    # With adapters, DPO uses the model without them as the reference.
    models = 1 if kind == "sft" or words else 2
    assert ours["world"] == 2 and ours["kinds"] == [["ShardedParameter"]] * models
    for key in ("loss", "norm"):
        assert ours[key] == pytest.approx(alone[key], rel=1e-4), key
    assert ours["generated"] == alone["generated"]
    resumed = told(start([*OURS, *TWO], program, kind, 3, tmp_path, *words, "resume"))
    assert resumed["loss"] == ours["loss"] and resumed["generated"] == ours["generated"]
