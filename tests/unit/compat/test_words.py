"""What programs borrow of DeepSpeed's packages beside an engine: classes of the configuration,
arithmetic, commands.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from deepseek_zero.compat.deepspeed import (
    autotp,
    checkpoint_shapes,
    linear,
    moe,
    monitors,
    multinode_runner,
    ops,
)
from deepseek_zero.compat.deepspeed import config_classes as classes
from deepseek_zero.compat.deepspeed import runtime_utils as arithmetic
from deepseek_zero.compat.deepspeed.comms_logging import CommsLogger, trim_mean


def test_a_configuration_makes_its_batch_whole_and_refuses_what_contradicts_it() -> None:
    config = classes.DeepSpeedConfig({"train_batch_size": 8, "gradient_accumulation_steps": 2})
    assert config.train_micro_batch_size_per_gpu == 4 and config.gradient_clipping == 1.0
    assert config.zero_config.overlap_comm is False and config.zero_optimization_stage == 0
    with pytest.raises(AssertionError, match="8 != 3"):
        classes.DeepSpeedConfig({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3})
    with pytest.raises(ValueError, match="not supported with ZeRO stage 3"):
        classes.DeepSpeedConfig(
            {
                "train_batch_size": 1,
                "gradient_allreduce_op": "sum",
                "zero_optimization": {"stage": 3},
            }
        )


def test_sections_have_deepspeeds_names_and_pydantics_errors() -> None:
    zero = classes.DeepSpeedZeroConfig(stage=3, stage3_prefetch_bucket_size=7, cpu_offload=True)
    assert zero.prefetch_bucket_size == 7 and zero.overlap_comm is True
    assert zero.offload_optimizer is not None and zero.offload_optimizer.device == "cpu"
    with pytest.raises(ValidationError):
        classes.DeepSpeedZeroConfig(stag=3)
    with pytest.raises(AssertionError, match="together"):
        classes.DeepSpeedZeroConfig(cpu_offload=True, offload_optimizer={"device": "cpu"})
    with pytest.raises(ValidationError, match="must be a number"):
        classes.DeepSpeedFP16Config(loss_scale=[])
    assert (
        classes.DeepSpeedFP16Config(
            enabled=True, loss_scale=2, loss_scale_window=0
        ).loss_scale_window
        == 0
    )


def test_a_monitor_writes_what_its_section_says(tmp_path: Path) -> None:
    section = classes.CSVConfig(enabled=True, output_path=str(tmp_path), job_name="job")
    monitor = monitors.csvMonitor(section)
    monitor.write_events([("Train/loss", 0.5, 3)])
    monitor.writer.close()
    assert (tmp_path / "job" / "Train_loss.csv").read_text().split() == ["step,loss", "3,0.5"]
    assert not monitors.MonitorMaster(classes.get_monitor_config({})).enabled


def test_norms_and_overflow_of_gradients() -> None:
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))]
    for param, value in zip(params, (3.0, 4.0), strict=True):
        param.grad = torch.tensor([value, 0.0])
    assert arithmetic.get_flattened_grad_norm(params) == arithmetic.get_global_norm([3, 4]) == 5.0
    assert float(arithmetic.clip_grad_norm_(params, 1.0)) == 5.0
    assert torch.allclose(
        torch.stack([param.grad[0] for param in params if param.grad is not None]).norm(),
        torch.ones(()),
    )
    checker = arithmetic.CheckOverflow([params])
    assert not checker.check()
    params[0].grad = torch.tensor([float("inf"), 0.0])
    assert checker.check() and arithmetic.get_flattened_grad_norm(params) == -1.0
    assert arithmetic.call_to_str("f", 1, a="b") == "f(1, a='b')" and arithmetic.prefix_sum_inc(
        [3, 4]
    ) == [3, 7]


def test_experts_parameters_go_into_groups_of_their_own() -> None:
    shared, expert, large = (nn.Parameter(torch.zeros(size)) for size in (1, 2, 3))
    for param in (expert, large):
        param.allreduce, param.group_name = False, "ep"  # type: ignore[attr-defined]
    group = {"params": [shared, expert, large], "name": "all"}
    found = moe.split_params_into_different_moe_groups_for_optimizer(group, max_group_size=3)
    assert [[param.numel() for param in each["params"]] for each in found] == [[1], [2], [3]]
    assert [moe.is_moe_param_group(each) for each in found] == [False, True, True]


def test_commands_for_several_machines_name_the_program_and_the_hosts() -> None:
    hosts = {"a": 2, "b": 2}
    args = multinode_runner.parse_args(
        ["--launcher_args", "-mca btl_tcp_if_include eth1", "train.py", "--lr", "1"]
    )
    info = multinode_runner.encode_world_info(hosts)
    command = multinode_runner.OpenMPIRunner(args, info, hosts).get_cmd({}, hosts)
    assert (
        command[:3] == ["mpirun", "-n", "4"]
        and "eth0" not in command
        and command[-3:] == ["train.py", "--lr", "1"]
    )
    pdsh, _, environment = multinode_runner.PDSHRunner(args, info).get_cmd({}, hosts)
    assert "a,b" in pdsh and environment["PDSH_RCMD_TYPE"] == "ssh"
    slots = {"a": [0, 1], "b": [0, 1]}
    assert multinode_runner.parse_resource_filter(slots, exclude_str="a:0") == {
        "a": [1],
        "b": [0, 1],
    }
    with pytest.raises(ValueError, match="not found"):
        multinode_runner.parse_resource_filter(slots, include_str="c")


def test_transformers_plans_become_specifications() -> None:
    specs = (
        autotp.TPPlanConverter.convert({"layers.*.q_proj": "colwise", "lm_head": "colwise_rep"})
        or []
    )
    assert re.match(specs[0].patterns[0], "model.layers.1.q_proj.weight") and specs[1].gather_output
    with pytest.raises(ValueError, match="local_colwise"):
        autotp.TPPlanConverter.convert({"q": "local_colwise"})


def test_a_checkpoints_shape_says_which_ranks_are_joined() -> None:
    source, target = (
        checkpoint_shapes.model_3d_desc(2, 2, 2),
        checkpoint_shapes.model_3d_desc(1, 2, 2),
    )
    maps = source.reshape(target)
    assert [each.get_data(0, 0) for each in maps] == [[0, 4], [2, 6]]
    assert target.can_reshape(source)[0] is False


def test_the_linear_has_the_gradients_of_torchs() -> None:
    x, layer = torch.randn(3, 2, 4), linear.LinearModuleForZeroStage3(4, 5)
    layer(x).square().sum().backward()
    found, layer.weight.grad = layer.weight.grad, None
    nn.functional.linear(x, layer.weight, layer.bias).square().sum().backward()
    assert found is not None and layer.weight.grad is not None
    torch.testing.assert_close(found, layer.weight.grad)


def test_optimizer_classes_make_torchs_and_know_them() -> None:
    made: Any = ops.FusedAdam([nn.Parameter(torch.zeros(1))], lr=0.5)
    assert (
        isinstance(made, torch.optim.AdamW)
        and isinstance(made, ops.FusedAdam)
        and made.defaults["lr"] == 0.5
    )
    assert not isinstance(made, ops.FusedLamb) and not isinstance(
        torch.optim.SGD([torch.zeros(1)]), ops.FusedAdam
    )


def test_a_summary_of_calls_leaves_the_records_in_order() -> None:
    log = CommsLogger()
    log.comms_dict = {"all_reduce": {1024: [3, [3.0, 1.0, 2.0], [1.0, 3.0, 2.0], [1.0, 3.0, 2.0]]}}
    summary = log.get_operation_summary("all_reduce")
    assert (
        summary is not None
        and summary[1024]["avg_latency_ms"] == trim_mean([3.0, 1.0, 2.0], 0.1) == 2.0
    )
    assert log.get_raw_data()["all_reduce"][1024][1] == [3.0, 1.0, 2.0]
