"""Tensor, pipeline and sequence parallelism between two hosts (tests/hosts.py): each trains as one
process does.
"""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepseek_zero
from tests.compositions import MANY, batch, config_of, llama

LR = 0.01


def plain_losses(steps: int) -> list[float]:
    """The mean losses of plain PyTorch on one process."""
    model = llama(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    found = []
    for step in range(steps):
        losses = [model(**batch(step, micro, 0)).loss for micro in range(MANY)]
        loss = torch.stack(losses).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.ranks(2, hosts=2)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("axis", "top"),
    [
        ("tp", {}),
        ("pp", {}),
        ("sp", {}),
        ("sp", {"sequence_parallel": {"attention": "all_gather"}}),
    ],
)
def test_an_axis_between_two_hosts_trains_as_one_process(
    axis: str, top: dict[str, Any], stage: int
) -> None:
    assert socket.gethostname() == f"h{dist.get_rank()}"
    adamw = {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0}}
    config = config_of(stage, "fp32") | {"mesh": {axis: 2}, "optimizer": adamw} | top
    engine = deepseek_zero.initialize(model=llama(2), config=config)[0]
    losses = []
    for step in range(3):
        batches = iter([batch(step, micro, 0) for micro in range(MANY)])
        losses.append(float(engine.train_batch(batches)))
    assert losses == pytest.approx(plain_losses(3), rel=1e-5)
