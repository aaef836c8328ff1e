"""A process that was probably meant to be one of several is warned once when it starts to train, or
refused.
"""

from __future__ import annotations

import pytest
from torch import nn

import deepseek_zero
from deepseek_zero.base.errors import UsageError
from deepseek_zero.base.log import log_first

CONFIG = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}


def test_a_pod_is_warned_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log_first.cache_clear()
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    with caplog.at_level("WARNING"):
        for _ in range(2):
            deepseek_zero.initialize(model=nn.Linear(4, 4), config=CONFIG)
    lines = [
        record.getMessage()
        for record in caplog.records
        if "JOB_COMPLETION_INDEX=1" in record.getMessage()
    ]
    assert len(lines) == 1 and "--node-rank $JOB_COMPLETION_INDEX" in lines[0]


def test_a_slurm_job_of_several_machines_and_tasks_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    with pytest.raises(
        UsageError, match="SLURM_JOB_NUM_NODES=2 and SLURM_NTASKS=4, but this process has no rank"
    ):
        deepseek_zero.initialize(model=nn.Linear(4, 4), config=CONFIG)
