"""Test the communication logger of `deepspeed.comm`."""

from __future__ import annotations

import pytest
import torch

from deepseek_zero.compat.deepspeed.comms_logging import CommsLogger, trim_mean


def test_a_summary_of_calls_leaves_the_records_in_order() -> None:
    log = CommsLogger()
    log.comms_dict = {"all_reduce": {1024: [3, [3.0, 1.0, 2.0], [1.0, 3.0, 2.0], [1.0, 3.0, 2.0]]}}
    summary = log.get_operation_summary("all_reduce")
    assert (
        summary is not None
        and summary[1024]["avg_latency_ms"] == trim_mean([3.0, 1.0, 2.0], 0.1) == 2.0
    )
    assert log.get_raw_data()["all_reduce"][1024][1] == [3.0, 1.0, 2.0]


def test_the_configuration_logs_the_programs_own_calls(
    as_deepspeed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import deepspeed

    from deepseek_zero.compat.deepspeed import comm

    log = CommsLogger()
    monkeypatch.setattr(comm, "_comms_logger", lambda: log)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["all_reduce"]},
    }
    deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config)
    deepspeed.comm.all_reduce(torch.ones(2))
    deepspeed.comm.barrier()
    deepspeed.comm.destroy_process_group()
    assert log.get_operation_names() == ["all_reduce"]
