"""Lightning with the drop-in on two ranks equals a plain run within rounding."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.running import BY_HAND, ONE, OURS, TWO, need_client, start, told

pytestmark = BY_HAND
PROGRAM = "program_lightning.py"


def on_two_ranks_and_plain(
    what: str, stage: int, folder: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the results of both runs after checking that ours is sharded."""
    need_client("lightning")
    plain = start([sys.executable], PROGRAM, what, -1, folder / "plain")
    ours, alone = told(start([*OURS, *TWO], PROGRAM, what, stage, folder)), told(plain)
    assert ours["world"] == 2 and ours["kinds"] == [
        "ShardedParameter" if stage == 3 else "Parameter"
    ]
    return ours, alone


@pytest.mark.parametrize("stage", [2, 3])
def test_lightning_fits_resumes_and_converts(stage: int, tmp_path: Path) -> None:
    ours, alone = on_two_ranks_and_plain("fit", stage, tmp_path)
    assert ours["steps"] == alone["steps"] == 8
    for key in ("loss", "val"):
        assert ours[key] == pytest.approx(alone[key], rel=1e-5), key
    assert ours["after"] == ours["val"][-1]
    resumed = told(start([*OURS, *TWO], PROGRAM, "resume", stage, tmp_path))
    assert resumed["loss"] == ours["loss"][8:] and resumed["val"] == ours["val"][1:]
    converted = told(start([*OURS, *ONE], PROGRAM, "convert", -1, tmp_path))
    assert converted["val"] == pytest.approx(ours["val"][-1], rel=1e-5)


@pytest.mark.parametrize("stage", [2, 3])
def test_fabric_trains_saves_and_loads(stage: int, tmp_path: Path) -> None:
    ours, alone = on_two_ranks_and_plain("fabric", stage, tmp_path)
    assert ours["first"] + ours["second"] == pytest.approx(
        alone["first"] + alone["second"], rel=1e-5
    )
    assert ours["again"] == ours["second"]
