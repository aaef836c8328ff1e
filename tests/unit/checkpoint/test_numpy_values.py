"""Each rank restores its own client_state with numpy arrays; new ranks restore rank 0's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from deepseek_zero.compat.deepspeed.engine import DeepSpeedEngine
from tests.compositions import Here, config_of, engines_of_threads
from tests.in_process import Rank, run_ranks


def start(here: Here, rank: Rank, stage: int, layout: str) -> Any:
    torch.manual_seed(3)
    model = nn.Linear(64, 64)
    config = config_of(stage, "fp32") | {
        "gradient_accumulation_steps": 1,
        "checkpoint": {"layout": layout},
    }
    return here.start(
        rank,
        model,
        config,
        DeepSpeedEngine,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
    )


def on_ranks(ranks: int, body: Any) -> list[Any]:
    with engines_of_threads() as here:
        return run_ranks(ranks, lambda rank: body(here, rank), reads_in_place=True)


def save(folder: Path, stage: int, layout: str, client: Any) -> None:
    def body(here: Here, rank: Rank) -> None:
        engine = start(here, rank, stage, layout)
        engine.backward(engine(torch.ones(2, 64)).square().mean())
        engine.step()
        engine.save_checkpoint(folder, client_state=client(rank.index))
        engine.destroy()

    on_ranks(2, body)


def load(folder: Path, ranks: int, stage: int, layout: str) -> list[Any]:
    def body(here: Here, rank: Rank) -> Any:
        engine = start(here, rank, stage, layout)
        _, client = engine.load_checkpoint(folder)
        engine.destroy()
        return client

    return on_ranks(ranks, body)


LAYOUTS = [(0, "slices"), (3, "slices"), (0, "deepspeed"), (2, "deepspeed"), (3, "deepspeed")]


@pytest.mark.parametrize(("stage", "layout"), LAYOUTS)
def test_random_states_of_each_rank_are_restored(tmp_path: Path, stage: int, layout: str) -> None:
    states = [np.random.RandomState(seed) for seed in range(2)]
    extras = {"best": np.float32(0.5), "table": np.arange(6).reshape(2, 3), "epoch": 3}
    save(tmp_path, stage, layout, lambda rank: {"numpy": states[rank].get_state(), **extras})
    expected = [state.rand(3) for state in states]
    for rank, client in enumerate(load(tmp_path, 2, stage, layout)):
        again = np.random.RandomState()
        again.set_state(client["numpy"])
        assert np.array_equal(again.rand(3), expected[rank])
        assert type(client["best"]) is np.float32 and client["best"] == 0.5 and client["epoch"] == 3
        assert client["table"].dtype == np.int64 and client["table"].shape == (2, 3)


@pytest.mark.parametrize(("stage", "layout"), [(3, "slices"), (2, "deepspeed"), (3, "deepspeed")])
def test_ranks_without_values_and_other_worlds_get_those_of_rank_0(
    tmp_path: Path, stage: int, layout: str
) -> None:
    save(
        tmp_path / "a",
        stage,
        layout,
        lambda rank: {"epoch": 1, "tensor": torch.ones(2)} if rank == 0 else {},
    )
    for client in load(tmp_path / "a", 2, stage, layout):
        assert client["epoch"] == 1 and torch.equal(client["tensor"], torch.ones(2))
    save(
        tmp_path / "b", stage, layout, lambda rank: {"rank": rank, "tensor": torch.full((2,), rank)}
    )
    assert [client["rank"] for client in load(tmp_path / "b", 2, stage, layout)] == [0, 1]
    (one,) = load(tmp_path / "b", 1, stage, layout)
    assert one["rank"] == 0 and torch.equal(one["tensor"], torch.zeros(2, dtype=torch.int64))
