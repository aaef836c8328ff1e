"""Test the communication logger of `deepspeed.comm`."""

from __future__ import annotations

import pytest
import torch

from deepseek_zero.compat.deepspeed.comms_logging import CommsLogger, calc_bw_log, trim_mean


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


def test_a_summary_is_printed_and_messages_are_inputs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = CommsLogger()
    monkeypatch.setattr("deepseek_zero.compat.deepspeed.comm.get_world_size", lambda: 4)
    whole = torch.ones(8)
    part = torch.ones(2)
    for name, given in (
        ("all_gather_into_tensor", (whole, part)),
        ("all_gather", ([part] * 4, part)),
        ("reduce_scatter_tensor", (part, whole)),
    ):
        log.timed(lambda *args, group: None, name, name, given, {"group": None})
    log.log_all()
    printed = capsys.readouterr().out
    assert "all_gather_into_tensor  8.0 B  count 1" in printed
    assert "all_gather  8.0 B  count 1" in printed
    assert "reduce_scatter_tensor  32.0 B  count 1" in printed
    assert calc_bw_log("all_gather", 8, 1.0) == calc_bw_log("reduce_scatter", 32, 1.0)
