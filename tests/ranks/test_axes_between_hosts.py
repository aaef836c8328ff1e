"""Tensor, pipeline and sequence parallelism, and sparse attention, between two hosts.

Each trains as one process does. tests/hosts.py simulates the hosts.
"""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepseek_zero
from deepseek_zero.attention.layouts import LocalSlidingWindow
from deepseek_zero.attention.plan import Pattern
from tests.compositions import MANY, batch, config_of, llama
from tests.unit.attention.dense import seen_of
from tests.unit.parallel.tiny import tiny

LR = 0.01


def plain_losses(steps: int) -> list[float]:
    """Return the mean losses of plain PyTorch in one process."""
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


@pytest.mark.ranks(2, hosts=2)
def test_sparse_attention_between_two_hosts_trains_as_one_process() -> None:
    window = {"block": 4, "num_sliding_window_blocks": 3, "attention": "unidirectional"}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "sparse_attention": {"mode": "localslidingwindow", **window},
    }
    engine = deepseek_zero.initialize(model=tiny("llama"), config=config)[0]
    assert engine.sparse_attention is not None
    plain: Any = tiny("llama")
    plain.set_attn_implementation("eager")
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    pattern = Pattern.of(LocalSlidingWindow(**window), is_causal=True)
    length = 24
    seen = seen_of(pattern, plain.config.num_attention_heads, length, length)[None]
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(2, plain.config.vocab_size, (2, 2, length), generator=generator)
        expected = [plain(input_ids=ids, attention_mask=mask, labels=ids).loss for ids in tokens]
        ids = tokens[dist.get_rank()]
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        assert loss.item() == pytest.approx(expected[dist.get_rank()].item(), rel=1e-5)
        torch.stack(expected).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
