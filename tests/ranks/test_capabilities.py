"""Every fallback to a slower method is logged once and listed in explain(), with its ranks."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepseek_zero
from deepseek_zero.base.log import log_first
from deepseek_zero.comm.transports import shared_memory
from deepseek_zero.tiers import disk

OPEN = os.open


def engine_on(path: Path, **more: Any) -> Any:
    offload = {"device": "nvme", "nvme_path": str(path)}
    config = {
        **more,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_optimizer": offload,
        },
    }
    torch.manual_seed(0)
    return deepseek_zero.initialize(model=nn.Linear(8, 8), config=config)[0]


class Heard(logging.Handler):
    """Collects the messages that the library logs on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def refuses_direct_io(path: Any, flags: int, *rest: Any, **names: Any) -> int:
    """Replace `os.open` on a file system without O_DIRECT."""
    if flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, "Invalid argument")
    return OPEN(path, flags, *rest, **names)


@pytest.mark.ranks(2)
def test_a_file_system_without_direct_io_is_logged(tmp_path: Path) -> None:
    log_first.cache_clear()
    heard, rank, logger = Heard(), dist.get_rank(), logging.getLogger("deepseek_zero")
    level = logger.level
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    try:
        with patch.object(disk.os, "open", refuses_direct_io if rank == 1 else OPEN):
            engines = [engine_on(tmp_path) for _ in range(2)]
    finally:
        logger.removeHandler(heard)
        logger.setLevel(level)
    line = next(
        line.strip()
        for line in engines[0].explain().splitlines()
        if "through the page cache" in line
    )
    assert line.endswith("[rank 1]"), line
    said = [text for text in heard.texts if "slower methods" in text]
    assert len(said) == (1 if rank == 0 else 0), "once, by the rank that speaks for all"
    assert all(line in text for text in said)


def transport_of(engine: Any) -> str:
    return next(line.strip() for line in engine.explain().splitlines() if "between ranks" in line)


@pytest.mark.ranks(2)
def test_the_transport_is_logged_with_the_reason_for_a_slower_one(tmp_path: Path) -> None:
    assert transport_of(engine_on(tmp_path)) == "between ranks: shared memory"
    assert (
        transport_of(engine_on(tmp_path, transport="gloo"))
        == "between ranks: gloo, as the configuration says"
    )


@pytest.mark.ranks(2, fresh=True)
def test_ranks_that_cannot_connect_on_a_host_log_why_they_use_gloo(tmp_path: Path) -> None:
    def forbidden() -> Any:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with patch.object(
        shared_memory, "_listen", forbidden if dist.get_rank() == 1 else shared_memory._listen
    ):
        engine = engine_on(tmp_path)
    why = "ranks of this host cannot share memory: [Errno 1] Operation not permitted"
    assert transport_of(engine) == f"between ranks: gloo ({why})"
