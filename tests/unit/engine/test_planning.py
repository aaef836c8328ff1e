"""What a plan asks of hosts and optimizers, through engines whose ranks are threads and say that
they are on hosts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deepseek_zero
from deepseek_zero.base.device import CPU
from deepseek_zero.base.errors import UsageError
from deepseek_zero.config import Facts, resolve
from deepseek_zero.config.load import load
from deepseek_zero.engine.settings import step_settings_of
from deepseek_zero.optim.step_settings import TILE_NUMEL
from tests.compositions import engines_of_threads
from tests.in_process import Rank, run_ranks
from tests.models import batch_of, seeded

ONE_BIT: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": None,
    "optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 1}},
    "zero_optimization": {"stage": 1},
}


def test_between_hosts_momenta_are_exchanged_rank_by_rank_unless_an_order_by_host_is_stated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def train(rank: Rank, **keys: Any) -> list[float]:
        engine = here.start(rank, seeded(), ONE_BIT | keys)
        assert engine.runtime.settings.ranks_per_host == 1
        losses = []
        for step in range(3):
            batch = batch_of(step, 0, rank.index)
            losses.append(engine(batch.tokens, batch.targets))
            engine.backward(losses[-1])
            engine.step()
        engine.destroy()
        return [loss.item() for loss in losses]

    with engines_of_threads() as here, caplog.at_level("INFO", logger="deepseek_zero"):
        unstated = run_ranks(4, train, hosts=2)
        said = [
            line for line in caplog.messages if "OneBitAdam exchanges momenta rank by rank" in line
        ]
        assert len(said) == 4, "each thread is rank 0 of its process"
        assert unstated == run_ranks(4, train)
        with pytest.raises(
            UsageError, match=r'ranks_per_host above 1 \("ranks_per_host": 1 goes\)'
        ):
            run_ranks(4, lambda rank: train(rank, ranks_per_host=2), hosts=2)


def test_a_plan_of_several_hosts_has_the_order_that_a_run_of_momenta_takes() -> None:
    with torch.device("meta"):
        model = seeded()
    for name, expected in (("OneBitAdam", 1), ("AdamW", 2)):
        config = ONE_BIT | {"optimizer": {"type": name, "params": {"lr": 0.01}}}
        assert (
            deepseek_zero.plan(model, config, ranks=4, hosts=2).settings.ranks_per_host == expected
        )


def test_the_host_updates_in_the_tiles_of_a_cpu_whatever_device_trains() -> None:
    config = resolve(
        load({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}), Facts()
    )
    beside = step_settings_of(config, (), torch.device("cuda", 0))
    alone = step_settings_of(config, (), CPU)
    assert beside.host_tile_numel == alone.tile_numel == alone.host_tile_numel == TILE_NUMEL.cpu
    assert beside.tile_numel == TILE_NUMEL.accelerator
