"""A straggler is named together with its slow phase; ranks of one host pay nothing for it."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepseek_zero
from deepseek_zero.engine.stragglers import WINDOW, WINDOWS

SLEEP_SECONDS, STEPS = 0.01, 31


class Sleepy(nn.Module):
    """A layer whose forward takes longer on rank `slow`, or on no rank if None."""

    def __init__(self, slow: int | None) -> None:
        super().__init__()
        self.layer, self.slow = nn.Linear(64, 64), slow

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(SLEEP_SECONDS * (1 + 2 * (dist.get_rank() == self.slow)))
        return self.layer(x).square().mean()


def lines_of(slow: int | None, where: str = "computing") -> list[str]:
    """Return rank 0's log lines about stragglers in a short run; an empty list on other ranks."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "steps_per_print": None,
    }
    torch.manual_seed(0)
    engine, *_ = deepseek_zero.initialize(
        model=Sleepy(slow if where == "computing" else None), config=config
    )
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("deepseek_zero").addHandler(handler)
    for _ in range(STEPS):
        if where == "data loading and user code" and dist.get_rank() == slow:
            time.sleep(3 * SLEEP_SECONDS)
        engine.backward(engine(torch.ones(2, 64)))
        engine.step()
    logging.getLogger("deepseek_zero").removeHandler(handler)
    engine.destroy()
    return [each for each in said if "is slow" in each]


@pytest.mark.ranks(3, hosts=3)
@pytest.mark.parametrize("where", ["computing", "data loading and user code"])
def test_a_slow_rank_is_named_within_thirty_steps_with_what_it_did(where: str) -> None:
    found = lines_of(1, where)
    assert [
        f"step {WINDOWS * WINDOW}: rank 1 is slow, and the others wait for it: {where} took" in each
        for each in found
    ] == ([True] if dist.get_rank() == 0 else [])


@pytest.mark.ranks(3, hosts=3)
def test_ranks_that_are_alike_are_not_named() -> None:
    assert lines_of(None) == []


@pytest.mark.ranks(2)
def test_ranks_of_one_host_send_it_no_message() -> None:
    engine, *_ = deepseek_zero.initialize(model=Sleepy(None), config={"optimizer": {"type": "SGD"}})
    assert engine.parts.step_fields.stragglers is None
    engine.destroy()
