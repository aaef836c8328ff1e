"""What the drop-in gives beside the engine: estimators, elasticity, timers, profiler, loss scalers,
builders.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from deepseek_zero import comm
from deepseek_zero.base.errors import NotBuiltError, UsageError
from deepseek_zero.compat.deepspeed import (
    elasticity,
    estimators,
    groups,
    loss_scaler,
    ops,
    profiling,
    utils,
)
from deepseek_zero.compat.deepspeed.accelerator import get_accelerator, set_accelerator
from deepseek_zero.compat.deepspeed.elasticity import highly_composite
from deepseek_zero.compat.deepspeed.utils import OnDevice, log_dist_once
from deepseek_zero.planner.memory import mixed_precision_adam_bytes

# -- memory estimators

PARAMS = 8_000_000


def test_the_estimators_count_what_our_plans_hold() -> None:
    # bf16, in bytes: weight 2, gradient 2, what the master has beyond the weight 2, moments 8
    host, device, layer = estimators.estimate_zero3_model_states_mem_needs(
        PARAMS, 1000, 4, 2, cpu_offload=False, cpu_offload_params=False
    )
    assert layer == 4000 and device == 14 * PARAMS // 8 + layer and host == 4 * 1000 * 4
    host, device, _ = estimators.estimate_zero3_model_states_mem_needs(PARAMS, 1000, 4, 2)
    assert device == layer  # weights and states lie on the host
    assert host == pytest.approx(4 * 14 * PARAMS / 8, rel=0.01)
    host, device = estimators.estimate_zero2_model_states_mem_needs(PARAMS, 4, 2, cpu_offload=False)
    assert device == 2 * PARAMS + 12 * PARAMS // 8 < mixed_precision_adam_bytes(PARAMS, 8, 2)
    assert host == 4 * PARAMS * 4  # each rank builds the model


def test_the_estimators_print_deepspeeds_table(capsys: pytest.CaptureFixture[str]) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 2000))
    estimators.estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=8)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "HW: Setup with 1 node, 8 GPUs per node."
    assert lines[2] == "SW: Model with 3M total params, 2M largest layer params."
    assert len(lines) == 10 and lines[-1].endswith(
        "| offload_param=none, offload_optimizer=none, zero_init=0"
    )
    estimators.estimate_zero2_model_states_mem_needs_all_cold(10**9)
    assert (
        capsys.readouterr().out.splitlines()[-1] == "    3.73GB |  13.04GB | offload_optimizer=none"
    )


# -- elasticity

ELASTIC: dict[str, Any] = {
    "enabled": True,
    "max_train_batch_size": 10_000,
    "micro_batch_sizes": [8, 12, 16, 17],
    "min_gpus": 32,
    "max_gpus": 1500,
    "version": 0.1,
}


def test_the_elastic_batch_is_deepspeeds() -> None:
    batch, ranks = elasticity.compute_elastic_config({"elasticity": ELASTIC})
    assert batch == 9792 and len(ranks) == 23  # the figures of DeepSpeed's own test
    for count in ranks:
        assert 32 <= count <= 1500 and any(
            batch % (count * size) == 0 for size in ELASTIC["micro_batch_sizes"]
        )
    assert elasticity.compute_elastic_config({"elasticity": ELASTIC}, world_size=64)[2] == 17
    # The least common multiple of these is over the limit.
    narrow = ELASTIC | {
        "max_train_batch_size": 32,
        "micro_batch_sizes": [1, 2, 3, 7],
        "min_gpus": 1,
    }
    assert elasticity.compute_elastic_config({"elasticity": narrow}, world_size=4)[::2] == (24, 3)
    assert highly_composite()[:12] == (1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240)
    assert 720_720 in highly_composite()


@pytest.mark.parametrize(
    ("changes", "beside", "world", "message"),
    [
        ({}, {}, 128, "world size 128 cannot train"),
        ({"enabled": False}, {}, 0, "elasticity.enabled is false"),
        ({"micro_batch_sizes": [0]}, {}, 0, "micro_batch_sizes is missing or not a list"),
        ({"max_train_batch_size": 4}, {}, 0, "exceeds max_train_batch_size 4"),
        ({}, {"train_batch_size": 4}, 0, "train_batch_size cannot be combined"),
        ({"max_batch": 1}, {}, 0, "no key max_batch"),
    ],
)
def test_an_elastic_section_that_cannot_be(
    changes: Any, beside: Any, world: int, message: str
) -> None:
    with pytest.raises(elasticity.ElasticityError, match=message):
        elasticity.compute_elastic_config({"elasticity": ELASTIC | changes, **beside}, "", world)


# -- loss scalers


def test_the_dynamic_scaler_follows_the_rule() -> None:
    scaler = loss_scaler.CreateLossScaler(
        torch.half,
        0,
        True,
        {
            "init_scale": 16,
            "scale_window": 2,
            "min_scale": 4,
            "delayed_shift": 2,
            "consecutive_hysteresis": False,
        },
    )
    seen = []
    for overflow in (True, True, False, False, False, True, True):
        scaler.update_scale(overflow)
        seen.append(scaler.loss_scale)
    # the first overflow is forgiven; two good steps after the last one double it, and forgive once
    # more
    assert seen == [16, 8, 8, 8, 16, 16, 8]
    with pytest.raises(RuntimeError, match="already at minimum"):
        for _ in range(4):
            scaler.update_scale(True)
    assert loss_scaler.CreateLossScaler(torch.bfloat16, 128, True, None).loss_scale == 1.0
    value = torch.ones((), requires_grad=True)
    loss_scaler.LossScaler(8).backward(value * 2)
    assert value.grad == 16


# -- what looks at a run


def test_the_profiler_counts_a_forward_by_module(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    found = profiling.get_model_profile(model, (3, 4), as_string=False)
    assert found == (2 * 3 * (4 * 8 + 8 * 2), 3 * (4 * 8 + 8 * 2), 58)
    text = capsys.readouterr().out
    assert (
        "0: Linear, 40 parameters, 192FLOPS (66.7%)" in text and "2: Linear, 18 parameters" in text
    )
    profiler = profiling.FlopsProfiler(model)
    with pytest.raises(UsageError, match="has not watched"):
        profiler.get_total_flops()
    profiler.start_profile()
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()  # backward is not counted
    profiler.stop_profile()
    model(torch.ones(3, 4))
    assert profiler.get_total_flops() == 2 * found[0] and profiler.get_total_duration() > 0
    profiler.end_profile()
    assert not model._forward_hooks and not model[0]._forward_hooks


def test_timers_speak_milliseconds(caplog: pytest.LogCaptureFixture) -> None:
    wall = profiling.SynchronizedWallClockTimer()
    wall("step").start()
    wall("step").stop()
    assert wall.has_timer("step") and not wall.has_timer("other")
    assert (
        0 <= wall("step").elapsed(reset=False) == wall("step").mean()
        and wall.get_mean(["step"])["step"] >= 0
    )
    assert wall("step").elapsed() == 0
    pace = profiling.ThroughputTimer(None, batch_size=4, start_step=1)
    for _ in range(3):
        assert pace.avg_samples_per_sec() < 0 or pace.global_step_count > 1
        pace.start()
        pace.stop(global_step=True)
    assert pace.avg_samples_per_sec() > 0
    profiling.NoopTimer()("anything").start()


def test_small_words(caplog: pytest.LogCaptureFixture) -> None:
    with OnDevice(dtype=torch.bfloat16):
        layer = nn.Linear(2, 2)
    assert layer.weight.device.type == "meta" and layer.weight.dtype is torch.bfloat16
    assert (
        torch.get_default_dtype() is torch.float32 and nn.Linear(2, 2).weight.device.type == "cpu"
    )
    moved = utils.move_to_device(
        {"a": [torch.ones(1), 3], "b": (torch.ones(1, dtype=torch.int8),)}, "meta"
    )
    assert moved["a"][0].device.type == moved["b"][0].device.type == "meta" and moved["a"][1] == 3
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1)))
    utils.recursive_setattr(model, "0.0.bias", None)
    assert utils.recursive_getattr(model, "0.0") is model[0][0] and model[0][0].bias is None
    assert utils.required_torch_version(2.1) and not utils.required_torch_version(min_version=99.0)
    assert utils.parse_range_list("0,2-4") == [0, 2, 3, 4]
    with pytest.raises(ValueError, match="does not rise"):
        utils.parse_range_list("3,1")
    utils.set_random_seed(3)
    first = torch.rand(2)
    utils.set_random_seed(3)
    assert torch.equal(torch.rand(2), first)
    log_dist_once("said once")
    log_dist_once("said once")


# -- where ranks stand, and what devices answer


def test_groups_and_collectives_of_a_world_of_one() -> None:
    assert groups.get_data_parallel_world_size() == 1 and groups._get_sequence_parallel_rank() == 0
    assert (
        groups._get_data_parallel_group_ranks() == [0]
        and groups._get_sequence_parallel_group() is None
    )
    with pytest.raises(NotBuiltError, match="ep_size=2"):
        groups.initialize(ep_size=2)
    value, out = torch.arange(3.0), torch.zeros(3)
    comm.allgather_fn(out, value)
    comm.all_reduce_coalesced([value])
    comm.inference_all_reduce(value)
    assert torch.equal(out, value) and comm.has_all_gather_into_tensor()
    comm.configure(enabled=True)
    try:
        comm.all_reduce(torch.ones(256), log_name="mine")
        comm.barrier(prof=True)
        assert (
            comm.get_logged_comm_ops() == ["mine", "barrier"]
            and comm.get_comm_operation_count() == 2
        )
        summary = comm.log_summary(return_dict=True)
        assert summary is not None and summary["summary"]["mine"][1024]["count"] == 1
        comm.reset_log()
        assert not comm.has_comm_data()
    finally:
        comm.configure(enabled=False)


def test_the_accelerator_answers_for_its_device() -> None:
    found = get_accelerator()
    assert found.device(0).type == found.device_name() == torch.empty(0).device.type
    assert found.device_count() >= 1 and found.total_memory() > found.available_memory() > 0
    assert found.on_accelerator(torch.ones(1)) and found.random() is torch.random
    with found.stream(found.Stream()):
        found.synchronize()
    assert torch.equal(found.get_rng_state(), torch.get_rng_state())
    assert not hasattr(found, "capture_to_graph") and "synchronize" in dir(found)
    set_accelerator(found)
    with pytest.raises(NotBuiltError, match="CUDA_VISIBLE_DEVICES"):
        set_accelerator(object())


# -- what is refused


def test_builders_say_what_serves_and_build_nothing() -> None:
    builder = ops.AsyncIOBuilder
    assert (
        builder.NAME == "async_io"
        and builder().is_compatible()
        and ops.__compatible_ops__[builder.NAME]
    )
    assert (
        ops.__compatible_ops__["sparse_attn"]
        and not ops.__compatible_ops__["random_ltd"]
        and ops.ALL_OPS["cpu_adam"] is ops.CPUAdamBuilder
    )
    with pytest.raises(NotBuiltError, match=r"CPUAdamBuilder.load\(\)"):
        ops.CPUAdamBuilder().load()


def test_a_file_of_the_transports_is_imported_without_deepspeeds_words() -> None:
    program = (
        "import sys; from deepseek_zero.comm import context; assert 'deepseek_zero.compat' not in "
        "sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
    )
