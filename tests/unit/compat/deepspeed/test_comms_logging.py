"""Test the communication logger of `deepspeed.comm`."""

from __future__ import annotations

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
