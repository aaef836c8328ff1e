"""Test engine features that exist only under the name deepspeed."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import warnings
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepseek_zero as dz
from deepseek_zero.activations import recompute
from deepseek_zero.base.errors import AtRestError, NotBuiltError, UsageError

HIDDEN = 6


@pytest.fixture(autouse=True)
def alone(as_deepspeed: None) -> Iterator[None]:
    """Enable the drop-in, and destroy the process group that `initialize` creates."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Model(nn.Module):
    """Two linear layers with a layer norm; the output is a mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Linear(HIDDEN, HIDDEN),
            nn.LayerNorm(HIDDEN),
            nn.Linear(HIDDEN, 1),
        )

    def forward(self, x: Tensor) -> Any:
        return self.last(self.norm(self.first(x)).relu()).float().square().mean()


def config(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    optimizer = {"type": "Adam", "params": {"lr": 0.1}}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "optimizer": optimizer,
    } | more


def built(given: dict[str, Any], model: nn.Module | None = None) -> Any:
    import deepspeed

    torch.manual_seed(5)
    model = Model() if model is None else model
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=given)[0]


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_torch_func_differentiates_an_engine_as_its_model(stage: int, accumulation: int) -> None:
    torch.manual_seed(5)
    plain = Model()
    engine = built(config(stage, gradient_accumulation_steps=accumulation), copy.deepcopy(plain))
    x = torch.randn(4, HIDDEN)
    torch.testing.assert_close(torch.func.grad(engine)(x[0]), torch.func.grad(plain)(x[0]))
    torch.testing.assert_close(torch.func.jacrev(engine)(x[0]), torch.func.grad(plain)(x[0]))
    each, same = (torch.func.vmap(torch.func.grad_and_value(model))(x) for model in (engine, plain))
    torch.testing.assert_close(each, same)
    for _ in range(accumulation):  # the transforms above do not change a normal training step
        engine.backward(engine(x))
        engine.step()
    plain(x).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    torch.optim.Adam(plain.parameters(), lr=0.1).step()
    for name, value in engine.module.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name])


def test_torch_func_is_refused_with_sharded_weights() -> None:
    with pytest.raises(NotBuiltError, match=r"torch\.func differentiates the forward of 'root'"):
        torch.func.grad(built(config(3)))(torch.ones(HIDDEN))


def test_masters_start_from_the_weights_and_sums_are_in_their_dtype() -> None:
    torch.manual_seed(5)
    plain = Model()
    engine = built(
        config(2, bf16={"enabled": True}, gradient_accumulation_steps=2), copy.deepcopy(plain)
    )
    assert engine.get_data_types() == (torch.bfloat16, torch.bfloat16)
    import deepspeed.utils

    for param, own in zip(engine.module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(deepspeed.utils.safe_get_full_fp32_param(param), own.bfloat16().float())
    assert {group.plan.grad.dtype for group in engine.runtime.trained_groups} == {torch.bfloat16}
    stated = config(2, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"})
    assert built(stated).get_data_types() == (torch.bfloat16, torch.float32)
    assert built(config(0, bf16={"enabled": True})).get_data_types() == (
        torch.bfloat16,
        torch.float32,
    )
    assert built(config(2)).get_data_types()[1] == torch.float32


def test_batch_norms_keep_the_values_they_have() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    nn.init.constant_(model[1].weight, 1.001)
    nn.init.constant_(model[0].weight, 1.001)
    engine = built(config(3, bf16={"enabled": True}), model)
    whole = engine.module_state_dict()
    assert (
        torch.equal(whole["1.weight"], torch.full((2,), 1.001))
        and whole["0.weight"].float()[0, 0] == 1.0
    )


class Positions(nn.Module):
    """Adds a table, which is a buffer, to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0, 1, HIDDEN))
        self.register_buffer("index", torch.arange(HIDDEN))

    def forward(self, x: Tensor) -> Any:
        return x + self.table[self.index]


@pytest.mark.parametrize("under_init", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_buffers_have_the_dtype_of_the_computation(
    dtype: torch.dtype, under_init: bool, tmp_path: Path
) -> None:
    import deepspeed

    modes = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    given = config(3, **({modes[dtype]: {"enabled": True}} if dtype in modes else {}))

    def engine_of() -> Any:
        with deepspeed.zero.Init(config_dict_or_path=given, enabled=under_init):
            layers = [nn.Linear(HIDDEN, HIDDEN), Positions(), nn.BatchNorm1d(HIDDEN)]
            model = nn.Sequential(*layers, nn.Linear(HIDDEN, 1))
        return built(given, model)

    engine = engine_of()
    loss = engine(torch.randn(4, HIDDEN, dtype=dtype)).float().square().mean()
    engine.backward(loss)
    engine.step()
    engine.save_checkpoint(tmp_path)
    whole = engine.module_state_dict()
    assert whole["1.table"].dtype == dtype and whole["1.index"].dtype == torch.int64
    # Running statistics stay in fp32, with the other values of a batch norm.
    assert whole["2.running_mean"].dtype == torch.float32
    loaded = engine_of()
    loaded.module[1].table.zero_()
    loaded.load_checkpoint(tmp_path)
    assert torch.equal(loaded.module[1].table, whole["1.table"])
    assert torch.equal(loaded.module[2].running_var, whole["2.running_var"])


def test_autocast_leaves_buffers_as_they_are() -> None:
    autocast = {"enabled": True, "dtype": "bfloat16"}
    engine = built(config(1, torch_autocast=autocast), nn.Sequential(Positions()).append(Model()))
    assert engine.module[0].table.dtype == torch.float32


def test_autocast_marks_the_parameters_of_layers_it_computes_in_16_bits() -> None:
    from deepspeed.runtime.torch_autocast import (
        get_all_comm_dtypes,
        get_comm_dtype,
        has_comm_dtype,
        sort_dtypes,
    )

    engine = built(config(3, torch_autocast={"enabled": True, "dtype": "bf16"}))
    assert get_comm_dtype(engine.module.first.weight) is torch.bfloat16 and not has_comm_dtype(
        engine.module.norm.weight
    )
    assert sort_dtypes(get_all_comm_dtypes(engine.module.parameters())) == [
        torch.bfloat16,
        torch.float32,
    ]
    named = {
        "enabled": True,
        "dtype": "bf16",
        "lower_precision_safe_modules": ["torch.nn.LayerNorm"],
    }
    engine = built(config(1, torch_autocast=named))
    assert not has_comm_dtype(engine.module.first.weight) and has_comm_dtype(
        engine.module.norm.bias
    )


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_parameter_is_gathered_and_partitioned_by_its_own_methods(is_wrapped: bool) -> None:
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    torch.manual_seed(5)
    plain, model = Model(), None
    torch.manual_seed(5)
    with deepspeed.zero.Init():
        model = Model()
    if is_wrapped:
        engine = built(config(3), model)
        model = engine.module
    weight, bias = model.first.weight, model.first.bias
    weight.all_gather_coalesced([weight, bias]).wait()
    assert torch.equal(weight.data, plain.first.weight) and torch.equal(bias.data, plain.first.bias)
    weight.partition([weight])
    weight.all_gather()
    assert weight.ds_status is ZeroParamStatus.AVAILABLE
    weight.data.zero_()
    weight.partition([weight, bias])
    assert weight.ds_status is bias.ds_status is ZeroParamStatus.NOT_AVAILABLE
    weight.all_gather()
    assert torch.equal(weight.data, plain.first.weight)  # the change was discarded
    weight.data.zero_()
    weight.partition(has_been_updated=True)
    with deepspeed.zero.GatheredParameters(weight):
        assert not weight.any()


def test_a_trained_leaf_module_needs_an_input_that_requires_a_gradient() -> None:
    import deepspeed

    model = Model()
    deepspeed.utils.set_z3_leaf_modules(model, [Model])
    engine = built(config(3), model)
    with pytest.raises(UsageError, match="leaf module Model got no input"):
        engine(torch.ones(1, HIDDEN))
    with torch.no_grad():
        engine(torch.ones(1, HIDDEN))
    engine.backward(engine(torch.ones(1, HIDDEN, requires_grad=True)))
    engine.destroy()
    assert not model._forward_pre_hooks


def test_a_loss_in_fp16_is_scaled_by_the_program_or_it_is_an_error() -> None:
    engine = built(config(1, fp16={"enabled": True, "initial_scale_power": 4}))
    x = torch.ones(1, HIDDEN)
    with pytest.raises(UsageError, match="Loss scaling is required"):
        engine(x).backward()
    with pytest.raises(AssertionError, match="must be a scalar tensor"):
        engine.scale(x)
    for differentiate in (engine.backward, lambda loss: engine.scale(loss).backward()):
        differentiate(engine(x))
        engine.step()
    assert engine.global_steps == 2


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_loss_of_several_models_in_fp16_needs_no_scaling_if_called_without_their_engines(
    stage: int,
) -> None:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    settings = config(stage, fp16={"enabled": True, "initial_scale_power": 4})
    plain = [built(settings), built(settings)]
    scaled = [built(settings), built(settings)]
    x = torch.ones(1, HIDDEN, dtype=torch.float16)
    for _ in range(2):
        torch.add(plain[0].module(x), plain[1].module(x) / 2).backward()
        scaled[0].scale(torch.add(scaled[0].module(x), scaled[1].module(x) / 2)).backward()
        for engine, reference in zip(plain, scaled, strict=True):
            for own, other in zip(
                engine.module.parameters(), reference.module.parameters(), strict=True
            ):
                grad = safe_get_full_grad(own)
                assert grad is not None and torch.equal(grad, safe_get_full_grad(other))
        for engine in [*plain, *scaled]:
            engine.step()
    for engine, reference in zip(plain, scaled, strict=True):
        for own, other in zip(
            engine.module.parameters(), reference.module.parameters(), strict=True
        ):
            assert torch.equal(safe_get_full_fp32_param(own), safe_get_full_fp32_param(other))
    with pytest.raises(UsageError, match="Loss scaling is required"):
        plain[0](x).backward()  # the engine's own forward


def test_a_parameter_that_is_added_later_is_unchanged(caplog: pytest.LogCaptureFixture) -> None:
    engine = built(config(3))
    engine.module.late = nn.Linear(2, 2)
    for _ in range(2):
        engine.backward(engine(torch.ones(1, HIDDEN)))
        engine.step()
    assert (
        "'late.weight' joined the model after initialize()" in caplog.text
        and engine.global_steps == 2
    )


def test_ds_tensor_of_a_persistent_parameter_is_this_ranks_part() -> None:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 100}
    engine = built(config(3, zero_optimization=zero))
    bias = engine.module.first.bias
    assert bias.ds_persist and bias.ds_tensor.numel() == bias.partition_numel() == HIDDEN


def test_the_linear_function_computes_in_autocasts_dtype() -> None:
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    weight, bias = torch.randn(3, 2, requires_grad=True), torch.randn(3, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = zero3_linear_wrap(torch.ones(1, 2), weight, bias)
    found.sum().backward()
    assert found.dtype is torch.bfloat16 and weight.grad.dtype is bias.grad.dtype is torch.float32


def test_an_offloaded_optimizer_must_be_deepspeeds_if_configured() -> None:
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.runtime.zero.utils import ZeRORuntimeException

    zero = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    told = {"train_batch_size": 1, "zero_optimization": zero, "zero_force_ds_cpu_optimizer": True}
    model = Model()
    with pytest.raises(ZeRORuntimeException, match="the offloaded optimizer is a SGD"):
        deepspeed.initialize(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=told
        )
    deepspeed.initialize(model=model, optimizer=DeepSpeedCPUAdam(model.parameters()), config=told)


def test_an_optimizer_shows_the_gradients_of_its_groups() -> None:
    engine = built(config(2))
    optimizer, x = engine.optimizer, torch.ones(1, HIDDEN)
    assert not optimizer.averaged_gradients
    engine.backward(engine(x))
    grads = optimizer.get_fp32_grad_partitions()
    assert list(grads) == [0] and len(grads[0]) == 6 == len(optimizer.accumulated_grads_in_cpu)
    (norm,) = optimizer._get_norm_groups()
    assert float(norm) == pytest.approx(float(torch.cat(list(grads[0].values())).norm()), rel=1e-6)
    assert torch.equal(
        optimizer.bit16_groups_flat[0], nn.utils.parameters_to_vector(engine.module.parameters())
    )
    (masters,) = optimizer.fp32_groups
    assert torch.equal(torch.cat(masters), optimizer.bit16_groups_flat[0].float())


def test_a_module_stores_its_parameters_in_deepspeeds_dict_on_request() -> None:
    from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict, ensure_zero_ordered_dict

    layer = nn.Linear(2, 2)
    before, weight = layer._parameters, layer.weight
    ensure_zero_ordered_dict(layer)
    kept = layer._parameters
    ensure_zero_ordered_dict(layer)
    assert (
        isinstance(kept, ZeROOrderedDict)
        and layer._parameters is kept
        and layer._original_parameters is before
    )
    assert layer.weight is weight and layer(torch.ones(1, 2)).shape == (1, 2)


def test_a_group_of_one_rank_under_a_launcher_with_several_is_reported() -> None:
    from deepspeed.runtime.zero.partition_parameters import (
        _contradicting_single_rank_pg_error as error,
    )

    assert "WORLD_SIZE=8" in str(error(1, None, {"WORLD_SIZE": "8"}))
    assert error(8, None, {"WORLD_SIZE": "8"}) is error(1, object(), {"WORLD_SIZE": "8"}) is None
    assert error(1, None, {"WORLD_SIZE": "no"}) is error(1, None, {}) is None


def test_a_model_can_be_wrapped_again_after_its_engine_was_deleted() -> None:
    model, given = Model(), config(0, fp16={"enabled": True, "initial_scale_power": 4})
    for _ in range(2):  # the engine of the first round is not destroyed explicitly
        engine = built(given, model)
        engine.backward(engine(torch.ones(2, HIDDEN).half()))
        engine.step()
        del engine
        gc.collect()


def test_a_list_of_layers_in_fp16_scales_its_loss_by_itself() -> None:
    from deepspeed.pipe import PipelineModule

    layers = [nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)]
    model = PipelineModule(
        layers, num_stages=1, loss_fn=lambda output, labels: (output - labels).square().mean()
    )
    engine = built(config(1, fp16={"enabled": True, "initial_scale_power": 4}), model)
    before = model.state_dict()["0.weight"].clone()
    batch = torch.ones(1, HIDDEN).half()
    assert float(engine.train_batch(iter([(batch, batch)]))) > 0
    assert not torch.equal(model.state_dict()["0.weight"], before)


def test_an_optimizer_maps_parameters_to_even_partitions() -> None:
    engine = built(config(1))
    optimizer = engine.optimizer
    params = list(engine.module.parameters())
    assert [optimizer.get_param_id(param) for param in params] == list(range(len(params)))
    with pytest.raises(UsageError, match="get_param_id"):
        optimizer.get_param_id(nn.Parameter(torch.ones(1)))
    assert optimizer.param_to_partition_ids == [{number: [0] for number in range(len(params))}]
    optimizer.runtime.comm_ctx.comm.size = (
        2  # each rank has 31 of 61 elements, so the first part ends inside the first matrix
    )
    assert optimizer.param_to_partition_ids == [{0: [0, 1], 1: [1], 2: [1], 3: [1], 4: [1], 5: [1]}]


@pytest.mark.parametrize("of_layers", [False, True])
def test_a_list_of_layers_reads_its_samples_in_order(of_layers: bool) -> None:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    data = [(torch.full((HIDDEN,), float(each)), torch.zeros(HIDDEN)) for each in range(8)]
    layer = nn.Linear(HIDDEN, HIDDEN)
    model = PipelineModule([layer], num_stages=1, loss_fn=nn.MSELoss()) if of_layers else layer
    given = {**config(0), "train_micro_batch_size_per_gpu": 2}
    loader = deepspeed.initialize(model=model, config=given, training_data=data)[2]
    read = [inputs[:, 0].tolist() for _ in range(2) for inputs, _ in loader]
    in_order = [[each, each + 1.0] for each in (0.0, 2.0, 4.0, 6.0)] * 2
    assert (read == in_order) is of_layers and len(read) == len(in_order)


def test_a_model_in_16_bits_can_run_inside_autocast() -> None:
    class Distance(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.mse_loss(super().forward(x), x)  # computed in fp32 by autocast

    model = Distance(HIDDEN, HIDDEN)
    both = {
        "bf16": {"enabled": True},
        "torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"},
    }
    x = torch.randn(2, HIDDEN).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        wanted = copy.deepcopy(model).bfloat16()(x)
    engine = built(config(1, **both), model)
    found = engine(x)
    assert found.dtype is torch.float32 and torch.equal(found, wanted)
    engine.backward(found)
    engine.step()
    assert {param.dtype for param in engine.module.parameters()} == {torch.bfloat16}


def test_a_backward_counts_the_parameters_that_it_reaches() -> None:
    from deepspeed.runtime.utils import count_used_parameters_in_backward

    used, idle, fixed = (
        nn.Parameter(torch.ones(2), requires_grad=each) for each in (True, True, False)
    )
    counts = []
    used.register_hook(
        lambda grad: counts.append(count_used_parameters_in_backward([used, idle, fixed]))
    )
    (used * fixed).sum().backward()
    assert counts == [1]
    with pytest.raises(RuntimeError, match="during backward"):
        count_used_parameters_in_backward([used])


def test_an_untested_optimizer_is_refused_if_configured() -> None:
    import deepspeed

    class Mine(torch.optim.SGD): ...

    told = {"train_batch_size": 1, "zero_optimization": {"stage": 1}}
    model = Model()
    for optimizer, key in ((Mine, {}), (torch.optim.SGD, {"zero_allow_untested_optimizer": False})):
        deepspeed.initialize(
            model=model, optimizer=optimizer(model.parameters(), lr=0.1), config=told | key
        )
    told["zero_allow_untested_optimizer"] = False
    with pytest.raises(AssertionError, match=r"and the optimizer is a .*Mine"):
        deepspeed.initialize(model=model, optimizer=Mine(model.parameters(), lr=0.1), config=told)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_backward_and_step_without_an_optimizer_are_assertion_errors(stage: int) -> None:
    import deepspeed

    words = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    engine = deepspeed.initialize(model=Model(), config=words)[0]
    loss = engine(torch.ones(2, HIDDEN))
    with pytest.raises(
        AssertionError, match="must provide optimizer during init in order to use backward"
    ):
        engine.backward(loss)
    with pytest.raises(AssertionError, match="no optimizer"):
        engine.step()


def test_the_log_level_can_be_read() -> None:
    from deepspeed.utils import logger
    from deepspeed.utils.logging import get_current_level, get_log_level_from_string, should_log_le

    before = logger.level
    try:
        logger.setLevel("WARNING")
        assert get_current_level() == get_log_level_from_string("warning")
        assert should_log_le("error") and not should_log_le("info")
    finally:
        logger.setLevel(before)
    engine = built(config(0, log_level="ERROR"))
    try:
        assert (
            engine.log_level() == "ERROR"
            and logger.getEffectiveLevel() == get_log_level_from_string("error")
        )
    finally:
        logger.setLevel(before)
    with pytest.raises(ValueError, match="no level of the log"):
        should_log_le("loud")


def test_a_zero_init_model_without_engine_raises_an_error_with_the_configuration_to_remove() -> (
    None
):
    import deepspeed

    with deepspeed.zero.Init():
        layer = nn.Linear(64, 64)
    with pytest.raises(AtRestError, match="unset_hf_deepspeed_config"):
        layer(torch.ones(1, 64))


def initialized(config: dict[str, Any], model: nn.Module | None = None, **more: Any) -> Any:
    model = model if model is not None else nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    return dz.initialize(model=model, config={"train_batch_size": 1, **config}, **more)[0]


def test_saving_without_a_folder_is_a_value_error(tmp_path: Path) -> None:
    engine = initialized({})
    for nowhere in (None, ""):
        with pytest.raises(ValueError, match="names no folder"):
            engine.save_checkpoint(nowhere)
    script = tmp_path / "script.py"
    script.touch(0o600)
    engine._change_recovery_script_permissions(script)
    assert script.stat().st_mode & 0o777 == 0o700
    engine._change_recovery_script_permissions(tmp_path / "missing")  # only writes a log message


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_hooks_registered_after_initialize_see_and_change_gradients(stage: int) -> None:
    plain, engine = built(config(stage)), built(config(stage))
    seen = {}

    def halve(name: str, param: Tensor) -> None:
        assert param.grad is not None
        seen[name] = param.grad.clone()
        param.grad.mul_(0.5)

    for name, param in engine.module.named_parameters():
        param.register_post_accumulate_grad_hook(partial(halve, name))
    x = torch.ones(2, HIDDEN)
    for each in (plain, engine):
        each.backward(each(x))
    for name, param in plain.module.named_parameters():
        expected = param.grad.full_tensor()
        assert torch.equal(seen[name], expected)
        assert torch.equal(engine.module.get_parameter(name).grad.full_tensor(), expected / 2)


def test_gradients_of_which_a_rank_has_all_elements_can_be_read() -> None:
    engine = built(config(0))
    engine.backward(engine(torch.ones(2, HIDDEN)))
    grad = engine.module.first.weight.grad
    whole = grad.full_tensor()
    assert torch.equal(grad.sum(), whole.sum()) and torch.equal(grad.std(0), whole.std(0))
    assert torch.isfinite(grad).all() and grad.abs().max().item() == whole.abs().max().item()
    assert torch.equal(torch.stack([grad, grad]).mean(0), whole)
    assert torch.equal(grad.clone().view(-1)[1:3], whole.view(-1)[1:3])
    with pytest.raises(AtRestError, match="'view' cannot use it"):
        grad.view(-1)  # a change of the view would not be noticed


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_state_dict_of_the_module_takes_the_arguments_of_torch(stage: int) -> None:
    engine = built(config(stage))
    names = [name for name, _ in engine.module.named_parameters()]
    engine.module.last.bias.requires_grad_(False)
    into: dict[str, Any] = {"other": 1}
    found = engine.module_state_dict(into, prefix="net.", exclude_frozen_parameters=True)
    assert found is into
    assert set(into) == {"other"} | {f"net.{name}" for name in names if name != "last.bias"}
    kept = engine.module_state_dict(keep_vars=True)
    assert kept["last.bias"].requires_grad is False
    assert kept["first.weight"].requires_grad or stage == 3  # gathered values are copies


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_settings_are_attributes_of_the_engine_and_of_its_optimizer(stage: int) -> None:
    given = config(stage, bf16={"enabled": True}, prescale_gradients=True)
    engine = built(given)
    optimizer = engine.optimizer
    assert engine.get_data_types()[0] is optimizer.dtype is torch.bfloat16
    assert optimizer.partition_gradients is (stage > 1) and not optimizer.postscale_gradients
    assert optimizer.reduce_bucket_size == engine.zero_reduce_bucket_size()
    assert optimizer.dp_process_group is engine.data_parallel_group is not None
    assert optimizer.module is engine.module and not optimizer.cpu_offload
    assert engine.param_names[engine.module.last.bias] == "last.bias"
    assert engine.dist_backend == dist.get_backend() and engine.num_experts == []
    assert not engine.zero_use_cpu_optimizer() and engine.zero_partial_offload() == 1.0
    assert not hasattr(optimizer, "no_such_setting") and engine._global_grad_norm is None
    optimizer.set_lr(0.25)
    assert optimizer.get_lr() == 0.25 and engine.get_lr() == [0.25]
    with torch.no_grad(), dz.zero.GatheredParameters(engine.module.last.bias, modifier_rank=0):
        engine.module.last.bias.fill_(3.0)
    optimizer.refresh_fp32_params()
    optimizer.set_lr(0.0)
    engine.backward(engine(torch.ones(2, HIDDEN, dtype=torch.bfloat16)))
    engine.step()
    assert engine.module_state_dict()["last.bias"].item() == 3.0


def test_a_loader_has_the_attributes_of_deepspeeds() -> None:
    engine = built(config(1))
    samples = [torch.ones(HIDDEN) for _ in range(4)]
    loader = engine.deepspeed_io(samples, collate_fn=torch.stack)
    loader.data_sampler.set_epoch(2)
    assert loader.dataset is samples and loader.collate_fn is torch.stack
    assert loader.data_sampler.epoch == 2 and len(list(loader)) == len(loader) == 4


@pytest.mark.parametrize("form", ["dict", "path"])
def test_config_of_an_engine_is_the_dict_of_the_program(form: str, tmp_path: Path) -> None:
    given = config(1, gradient_accumulation_steps="auto")
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(given), encoding="utf-8")
    engine = built(given if form == "dict" else str(path))
    engine.set_train_batch_size(3)
    assert isinstance(engine.config, dict) and engine.config == given == engine._config._param_dict
    assert json.loads(json.dumps(engine.config)) == {**engine.config} == given
    assert "fp16" not in engine.config and engine.config.get("bf16", {}) == {}
    assert copy.deepcopy(engine.config) == pickle.loads(pickle.dumps(engine.config)) == given
    assert (engine.config.gradient_accumulation_steps, engine._config.train_batch_size) == (3, 3)
    with pytest.raises(AttributeError, match="no_such_key"):
        engine.config.no_such_key  # noqa: B018


@pytest.mark.parametrize("stage", [1, 3])
def test_states_are_offloaded_by_the_optimizer_as_by_its_engine(stage: int) -> None:
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum

    engine = built(config(stage))
    engine.backward(engine(torch.ones(2, HIDDEN)))
    engine.step()
    kinds = [OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params]
    engine.optimizer.offload_states(
        include=kinds, device=OffloadDeviceEnum.cpu, pin_memory=True, non_blocking=True
    )
    assert engine.offloaded_states == set(kinds)
    engine.optimizer.reload_states(non_blocking=True)
    assert not engine.offloaded_states
    assert engine.config.zero_optimization.offload_optimizer.device == "none"
    engine.offload_states(include=OffloadStateTypeEnum.hp_params)
    assert engine.offloaded_states == {OffloadStateTypeEnum.hp_params}
    engine.reload_states()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_optimizer_returns_the_scaled_norm_between_backward_and_step(stage: int) -> None:
    engine = built(config(stage, fp16={"enabled": True, "initial_scale_power": 3}))
    engine.backward(engine(torch.ones(2, HIDDEN).half()))
    norm = float(engine.optimizer.scaled_global_norm())
    engine.step()
    assert norm == pytest.approx(8 * engine.get_global_grad_norm(), rel=1e-3)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_custom_load_fn_gets_the_whole_state_dict_and_loads_it(stage: int, tmp_path: Path) -> None:
    saved = built(config(stage))
    saved.backward(saved(torch.ones(2, HIDDEN)))
    saved.step()
    whole = saved.module_state_dict()
    saved.save_checkpoint(tmp_path, client_state={"epoch": 3})

    def load_without_bias(src: dict[str, Tensor], dst: nn.Module) -> None:
        src = {name: value for name, value in src.items() if name != "last.bias"}
        dst.load_state_dict({**src, "norm.bias": torch.full((HIDDEN,), 2.0)}, strict=False)

    engine = built(config(stage))
    _, client = engine.load_checkpoint(
        tmp_path, load_module_only=True, custom_load_fn=load_without_bias
    )
    found = engine.module_state_dict()
    assert client == {"epoch": 3} and torch.equal(found["first.weight"], whole["first.weight"])
    assert torch.equal(found["norm.bias"], torch.full((HIDDEN,), 2.0))
    engine.load_module_state_dict(whole, custom_load_fn=load_without_bias)
    engine.load_module_state_dict({"module": whole})
    assert torch.equal(engine.module_state_dict()["norm.bias"], whole["norm.bias"])


@pytest.mark.parametrize("stage", [0, 1])
def test_client_state_may_have_the_arguments_of_a_script(stage: int, tmp_path: Path) -> None:
    args = Namespace(lr=0.1, out=Path("a"), device=torch.device("cpu"), tags={1}, raw=b"x")
    state = {"args": args, "frozen": frozenset({"a"}), "sizes": Namespace(n=np.int64(3))}
    engine = built(config(stage))
    engine.save_checkpoint(tmp_path, client_state=state)
    assert engine.load_checkpoint(tmp_path)[1] == state


def test_a_callable_optimizer_gets_parameters_or_the_groups_that_were_passed() -> None:
    import deepspeed

    for grouped in (False, True):
        model = Model()
        seen: list[Any] = []

        def make(given: Any, seen: list[Any] = seen) -> torch.optim.Optimizer:
            seen += given
            return torch.optim.SGD(given, lr=0.1)

        own = list(model.parameters())
        given = [{"params": own, "lr": 0.5}] if grouped else own
        without = {key: value for key, value in config(1).items() if key != "optimizer"}
        deepspeed.initialize(model=model, optimizer=make, model_parameters=given, config=without)
        assert [type(each) for each in seen] == [dict if grouped else nn.Parameter] * len(given)


def test_workers_of_a_loader_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    loader = built(config(1)).deepspeed_io([torch.ones(HIDDEN)] * 3, num_local_io_workers=2)
    assert len(list(loader)) == 3 and "num_local_io_workers=2" in caplog.text


def test_checkpointing_takes_the_config_of_an_engine_with_an_unknown_key() -> None:
    engine = built(config(1, no_such_key=1, activation_checkpointing={"profile": True}))
    try:
        dz.checkpointing.configure(None, engine.config)
        found = recompute.current()
        assert found is not None and found.settings.profile
    finally:
        recompute.release(recompute.current())


@pytest.mark.parametrize(
    "given",
    [{"batch_size": 0}, {"batch_size": "2"}, {"data_sampler": 5}, {"collate_fn": "stack"}],
    ids=str,
)
def test_arguments_of_a_loader_that_cannot_be_used_are_named(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(UsageError, match=rf"deepspeed_io\({name}="):
        built(config(1)).deepspeed_io([torch.ones(HIDDEN)] * 3, **given)


@pytest.mark.parametrize("bf16", [False, True])
def test_the_path_of_optimizer_states_is_that_of_the_file(bf16: bool, tmp_path: Path) -> None:
    engine = built(config(1, bf16={"enabled": bf16}))
    engine.save_checkpoint(tmp_path, tag="first")
    assert Path(engine._get_optimizer_ckpt_name(str(tmp_path), "first")).exists()


def test_a_loader_of_an_unknown_route_is_shuffled() -> None:
    samples = [torch.full((1,), number) for number in range(12)]
    loader = built(config(1)).deepspeed_io(samples, batch_size=1, route="encode")
    found = [int(batch) for batch in loader]
    assert sorted(found) == list(range(12)) and found != list(range(12))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_submodules_of_torchscript_are_trained(stage: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated

        class Mix(torch.jit.ScriptModule):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(HIDDEN, HIDDEN)
                self.scale = nn.Parameter(torch.ones(HIDDEN))

            @torch.jit.script_method
            def forward(self, x: Tensor) -> Tensor:
                return self.inner(x * self.scale)

        model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), Mix(), nn.Linear(HIDDEN, 1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine = built(config(stage), model)
    assert not engine.has_moe_layers
    engine.backward(engine(torch.ones(2, HIDDEN)).square().mean())
    engine.step()
    after = engine.module_state_dict()
    assert after.keys() == before.keys()
    assert not any(torch.equal(after[name], before[name]) for name in before)


def test_getters_return_the_keys_of_the_zero_section() -> None:
    zero = {"stage": 2, "allgather_bucket_size": 1000, "zero_quantized_gradients": True}
    engine = built(config(2, zero_optimization=zero))
    assert engine.zero_allgather_bucket_size() == 1000 and engine.zero_quantized_gradients()
    assert engine.zero_reduce_scatter() and engine.zero_contiguous_gradients()
    assert engine.aio_config().queue_depth == 8


def test_the_configuration_is_read_under_deepspeeds_names() -> None:
    found = built(config(2, bf16={"enabled": True}))._config
    assert (found.zero_enabled, found.zero_optimization_stage, found.zero_config.stage) == (
        True,
        2,
        2,
    )
    assert found.optimizer_name == "Adam" and found.bfloat16_config.enabled
    assert found.train_batch_size == 1 and not found.float16_config.enabled
    with pytest.raises(ValueError, match="frozen"):
        found.train_batch_size = 2
    assert not hasattr(found, "no_such_key") and copy.copy(found).zero_enabled


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_optimizer_differentiates_a_loss_without_dividing_it(stage: int) -> None:
    found = []
    for scaled in (False, True):
        engine = built(config(stage, gradient_accumulation_steps=2, gradient_clipping=0.0))
        for _ in range(2):
            loss = engine(torch.ones(2, HIDDEN))
            if scaled:
                engine.backward(2 * loss)
            else:
                engine.optimizer.backward(loss)
            engine.step()
        found.append(engine.get_global_grad_norm())
    assert found[0] == pytest.approx(found[1], rel=1e-5)
