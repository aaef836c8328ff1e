"""A second copy of the weights is made where a gather would read it; elsewhere the key is named with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from deepseek_zero.base.mesh import Mesh
from deepseek_zero.engine.planning import with_useful_copies
from deepseek_zero.planner.spec import PlanSettings
from deepseek_zero.tiers.tier import Tier

MESH = Mesh(dp_replicate=2, dp_shard=4).on_world(8)


@pytest.mark.parametrize(
    ("settings", "in_place", "words"),
    [
        ({"secondary_ranks": 2}, True, "a gather moves nothing"),
        ({"secondary_ranks": 2, "stage": 2}, False, "stage 2 keeps whole weights"),
        ({"secondary_ranks": 2, "weight_tier": Tier.HOST}, False, "offload_param has the weights leave the device"),
        ({"secondary_ranks": 4}, False, "no smaller group is left"),
        ({"secondary_ranks": 8}, False, "no smaller group is left"),
    ],
)
def test_where_no_copy_would_be_read_there_is_none(
    settings: dict[str, Any], in_place: bool, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="deepseek_zero"):
        found = with_useful_copies(PlanSettings(**settings), MESH, in_place=in_place)
    assert found.secondary_ranks == 1
    assert any("zero_hpz_partition_size = " in line and words in line for line in caplog.messages)


def test_elsewhere_the_settings_stay_and_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="deepseek_zero"):
        for size in (1, 2, 3):
            settings = PlanSettings(secondary_ranks=size)
            assert with_useful_copies(settings, MESH, in_place=size == 1) is settings
    assert not caplog.messages
