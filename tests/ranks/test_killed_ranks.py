"""After kill -9 of one rank of a mesh, all others raise an error that names its place.

This includes ranks that share no group with it.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch.distributed as dist

from deepseek_zero.base.errors import PeerError
from tests.pairwise import is_full
from tests.ranks.test_pipeline_engine import batches_of, config_of, engine_of, llama

SECONDS = 30
CUBE = {"pp": 2, "dp_shard": 2, "tp": 2}


def be_killed(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_during(axes: dict[str, int], dying: int, place: str, **keys: Any) -> None:
    """Train, kill one rank during a forward, and check the error on all other ranks."""
    engine = engine_of(llama(), axes, config_of(3, "fp32", **keys))
    engine.train_batch(batches_of(0, engine.mesh.data_index))
    if dist.get_rank() == dying:
        block = next(each for name, each in engine.module.named_modules() if name.endswith("mlp"))
        block.register_forward_pre_hook(be_killed)
    began = time.monotonic()
    with pytest.raises(PeerError) as caught:
        for step in range(1, 4):
            engine.train_batch(batches_of(step, engine.mesh.data_index))
    assert time.monotonic() - began < SECONDS
    assert f"rank {dying} ({place})" in str(caught.value), str(caught.value)
    assert caught.value.fix


def killed(ranks: int, dying: int) -> Any:
    return pytest.param(
        dying, marks=pytest.mark.ranks(ranks, dies=[dying], timeout=90), id=f"rank {dying}"
    )


@pytest.mark.parametrize("dying", [killed(4, 3)])
def test_a_rank_of_two_stages_of_two_parts_is_named_by_its_place_on_every_other(dying: int) -> None:
    dies_during({"pp": 2, "tp": 2}, dying, f"pp={dying // 2}, tp={dying % 2}")


@pytest.mark.skipif(
    not is_full(), reason="eight processes for each rank that dies: DEEPSEEK_ZERO_FULL=1 runs them"
)
@pytest.mark.parametrize("dying", [killed(8, rank) for rank in range(8)])
def test_any_rank_of_a_cube_is_named_by_its_place_on_every_other(dying: int) -> None:
    dies_during(CUBE, dying, f"pp={dying // 4}, dp_shard={dying // 2 % 2}, tp={dying % 2}")
