"""A resume with another global batch logs a warning with both numbers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepseek_zero
from deepseek_zero.base.log import logger
from deepseek_zero.compat.deepspeed.checkpoint.reader import _batch


def build(layout: str, accumulation: int = 1, **batch: int) -> Any:
    torch.manual_seed(3)
    config = {
        **(
            batch
            or {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": accumulation}
        ),
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2},
        "checkpoint": {"layout": layout},
    }
    return deepseek_zero.initialize(model=nn.Linear(64, 64), config=config)[0]


@contextmanager
def warnings_of() -> Iterator[list[str]]:
    """Collect the warnings of the library on this rank."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


@pytest.mark.ranks(2, fresh=True)
@pytest.mark.parametrize("layout", ["slices", "deepspeed"])
def test_a_resume_on_one_rank_of_two_warns_that_the_batch_is_halved(
    layout: str, tmp_path: Path
) -> None:
    rank = dist.get_rank()
    engine = build(layout)
    engine.backward(engine(torch.ones(4, 64)).square().mean())
    engine.step()
    engine.save_checkpoint(tmp_path)
    with warnings_of() as lines:
        build(layout).load_checkpoint(tmp_path)
        assert not lines
        build(layout, accumulation=3).load_checkpoint(tmp_path)
        assert len(lines) == (rank == 0), "one line for all ranks"
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with warnings_of() as lines:
            build(layout, train_batch_size=8, train_micro_batch_size_per_gpu=4).load_checkpoint(
                tmp_path
            )
            build(layout).load_checkpoint(tmp_path, load_module_only=True)
            assert not lines
            build(layout).load_checkpoint(tmp_path)
        (line,) = lines
        assert (
            "global batch was 8 samples a step when the checkpoint was saved, and is 4 now" in line
        )
        assert "was 4 x 1 x 2 and is 4 x 1 x 1" in line and '"train_batch_size": 8' in line
        dist.destroy_process_group()
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "all"), 2), rank=rank, world_size=2
    )


@pytest.mark.parametrize(
    ("config", "ranks", "train"),
    [
        ({"train_batch_size": 8}, 2, 8),
        (
            {
                "train_batch_size": 8,
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 2,
            },
            2,
            8,
        ),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}, 2, 8),
        ({"train_micro_batch_size_per_gpu": 2}, 3, 6),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 5}, 3, 30),
        ({"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}, 3, None),
        ({"train_batch_size": 8}, None, None),
        ({"train_batch_size": 8}, 3, None),
        ({}, 2, None),
    ],
)
def test_the_batch_of_a_checkpoint_of_deepspeeds_is_read(
    config: dict[str, Any], ranks: int | None, train: int | None
) -> None:
    found = _batch({"ds_config": config, "dp_world_size": ranks})
    assert (found and found["train"]) == train
