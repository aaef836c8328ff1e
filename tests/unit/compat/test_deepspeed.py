"""DeepSpeed's API on one rank: getters, messages, arguments, and missing names."""

from __future__ import annotations

import argparse
import base64
import json
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepseek_zero
from deepseek_zero import checkpointing, comm, utils
from deepseek_zero.activations import recompute
from deepseek_zero.activations.recompute import RecomputeSettings
from deepseek_zero.base.errors import ConfigError, NotBuiltError, UnknownNameError, UsageError
from deepseek_zero.compat.deepspeed.engine import (
    ATTRIBUTES,
    GETTERS,
    METHODS,
    DeepSpeedEngine,
)
from deepseek_zero.compat.deepspeed.missing import ENGINE, IN_THE_DROPIN, missing_names
from deepseek_zero.tiers.disk import DiskSettings
from deepseek_zero.tiers.tier import Tier
from tests.unit.config.test_auto import SEED_001, SEED_002

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 3,
    "gradient_clipping": 0.5,
    "steps_per_print": 7,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.25, "betas": [0.8, 0.9]}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_num_steps": 4, "warmup_min_lr": 0.25, "warmup_max_lr": 0.25},
    },
    "zero_optimization": {"stage": 2},
    "fp16": {"enabled": True, "initial_scale_power": 3, "loss_scale_window": 9, "hysteresis": 4},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 2)
        self.colour = "blue"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x)


def engine_with(config: Any = CONFIG, **given: Any) -> Any:
    return deepseek_zero.initialize(model=Net(), config=config, **given)[0]


def test_getters_return_the_configuration() -> None:
    engine = engine_with()
    told = {
        "train_batch_size": 6,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "get_batch_info": (6, 2, 3),
        "zero_optimization": True,
        "zero_optimization_stage": 2,
        "zero_optimization_partition_gradients": True,
        "zero_optimization_partition_weights": False,
        "fp16_enabled": True,
        "bfloat16_enabled": False,
        "gradient_clipping": 0.5,
        "dynamic_loss_scale": True,
        "initial_dynamic_scale": 8.0,
        "optimizer_name": "AdamW",
        "scheduler_name": "WarmupLR",
        "get_lr": [0.25],
        "get_mom": [(0.8, 0.9)],
        "steps_per_print": 7,
        "wall_clock_breakdown": False,
        "get_global_grad_norm": None,
    }
    assert {name: getattr(engine, name)() for name in told} == told
    arguments = engine.dynamic_loss_scale_args()
    assert (arguments["init_scale"], arguments["scale_window"], arguments["delayed_shift"]) == (
        8.0,
        9,
        4,
    )


def test_every_getter_and_attribute_works_with_and_without_an_optimizer() -> None:
    for engine in (engine_with(), engine_with({"train_batch_size": 2})):
        for name in GETTERS:
            getattr(engine, name)()
        for name in ATTRIBUTES:
            getattr(engine, name)
        assert all(callable(getattr(engine, name)) for name in METHODS)


def test_every_public_method_and_property_of_the_engine_has_a_docstring() -> None:
    ours = [cls for cls in DeepSpeedEngine.__mro__ if cls.__module__.startswith("deepseek_zero")]
    members = [member for cls in ours for member in vars(cls).items()]
    undocumented = [
        name
        for name, member in members
        if not name.startswith("_")
        and (callable(member) or isinstance(member, property | cached_property))
        and not member.__doc__
    ]
    assert not undocumented


@pytest.mark.parametrize("layout", ["slices", "deepspeed"])
def test_an_engine_names_the_sizes_of_the_run_that_saved(layout: str, tmp_path: Path) -> None:
    config = CONFIG | {"checkpoint": {"layout": layout}}
    engine_with(config).save_checkpoint(tmp_path)
    engine = engine_with(config)
    for module_only, expected in ((True, None), (False, 1)):
        engine.load_checkpoint(tmp_path, load_module_only=module_only)
        assert engine.loaded_checkpoint_dp_world_size == expected
        assert engine.loaded_checkpoint_mp_world_size == expected


def test_unknown_attributes_fall_through_to_the_model() -> None:
    engine = engine_with()
    assert engine.colour == "blue" and engine.line is engine.module.line
    with pytest.raises(AttributeError, match="nowhere"):
        _ = engine.nowhere


@pytest.mark.parametrize("name", sorted(missing_names(ENGINE)))
def test_unsupported_deepspeed_attributes_raise_an_error_that_hasattr_handles(name: str) -> None:
    engine = engine_with()
    assert not hasattr(engine, name)
    with pytest.raises(
        UnknownNameError, match=rf"engine.{name} is DeepSpeed's and is not built"
    ) as caught:
        getattr(engine, name)
    assert isinstance(caught.value, AttributeError) and isinstance(
        caught.value, NotImplementedError
    )
    assert "use one of" in str(caught.value)


def test_no_name_is_both_there_and_not() -> None:
    there = {*GETTERS, *ATTRIBUTES, *METHODS}
    assert not there & missing_names(ENGINE).keys()
    assert not GETTERS.keys() & ATTRIBUTES.keys()


@pytest.mark.parametrize(
    "way", ["config", "config_params", "path", "base64", "args", "args_dict", "deepscale"]
)
def test_the_configuration_is_accepted_in_every_form(way: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG)[:-1] + ",} // a comment")
    encoded = base64.urlsafe_b64encode(json.dumps(CONFIG).encode()).decode()
    given: dict[str, Any] = {
        "config": {"config": CONFIG},
        "config_params": {"config_params": CONFIG},
        "path": {"config": str(path)},
        "base64": {"config": encoded},
        "args": {"args": argparse.Namespace(deepspeed_config=str(path), local_rank=0)},
        "args_dict": {"args": argparse.Namespace(deepspeed_config=CONFIG)},
        "deepscale": {"args": argparse.Namespace(deepscale_config=str(path))},
    }[way]
    engine = deepseek_zero.initialize(model=Net(), **given)[0]
    assert engine.get_batch_info() == (6, 2, 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"config": CONFIG}, "initialize requires a model"),
        ({"model": "net"}, "no configuration was given"),
        (
            {
                "model": "net",
                "config": CONFIG,
                "args": argparse.Namespace(deepspeed_config="x.json"),
            },
            "the argument of initialize and the flag --deepspeed_config",
        ),
        (
            {
                "model": "net",
                "args": argparse.Namespace(deepspeed_config="x.json", deepscale_config="y.json"),
            },
            "--deepscale_config and --deepspeed_config",
        ),
        (
            {"model": "net", "config": CONFIG, "mpu": object()},
            r"initialize\(mpu=<object.*cannot be used",
        ),
    ],
)
def test_invalid_arguments_raise_an_error_with_the_reason(
    given: dict[str, Any], message: str
) -> None:
    if given.get("model"):
        given = {**given, "model": Net()}
    with pytest.raises((UsageError, ConfigError, NotBuiltError), match=message):
        deepseek_zero.initialize(**given)


def test_an_object_that_is_no_module_is_refused() -> None:
    with pytest.raises(UsageError, match="a model of type function cannot be wrapped"):
        deepseek_zero.initialize(model=engine_with, config=CONFIG)  # type: ignore[arg-type]


def test_config_arguments_are_deepspeeds() -> None:
    parser = deepseek_zero.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "a.json"])
    assert args.deepspeed is True and args.deepspeed_config == "a.json"
    assert args.deepscale is False and args.deepscale_config is None


def test_backward_returns_the_loss_over_the_accumulation_steps() -> None:
    engine = engine_with()
    loss = engine(torch.ones(2, 3)).float().sum()
    assert engine.backward(loss).item() == pytest.approx(loss.item() / 3)
    assert engine.backward(
        engine(torch.ones(2, 3)).float().sum(), scale_wrt_gas=False
    ).item() == pytest.approx(loss.item())


def test_a_step_looks_up_no_attribute_through_getattr(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asked = engine_with(), list[str]()
    look_up = type(engine).__getattr__

    def noted(self: Any, name: str) -> Any:
        asked.append(name)
        return look_up(self, name)

    monkeypatch.setattr(type(engine), "__getattr__", noted)
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 3)).sum())
        engine.step()
    assert engine.global_steps == 1 and asked == []
    assert engine.module.colour == "blue" and asked == ["module"]


def test_init_distributed_without_a_launcher_starts_a_group_of_one() -> None:
    deepseek_zero.init_distributed(
        "gloo", auto_mpi_discovery=False, distributed_port=1234, verbose=False, rank=-1
    )
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        # A second call changes nothing.
        comm.init_distributed(dist_backend=None, timeout=None, dist_init_required=None)
        engine = engine_with()
        engine.backward(engine(torch.ones(2, 3)).float().sum())
        engine.step()
        assert not engine.mesh.is_distributed
    finally:
        dist.destroy_process_group()


def test_init_distributed_refuses_other_arguments(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="bakend"):
        deepseek_zero.init_distributed(bakend="gloo")  # type: ignore[call-arg]
    with pytest.raises(NotBuiltError, match=r"mpi://x"):
        deepseek_zero.init_distributed(init_method="mpi://x")
    with pytest.raises(AssertionError, match="is not initialized, and dist_init_required is False"):
        deepseek_zero.init_distributed(dist_init_required=False)
    deepseek_zero.init_distributed(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        deepseek_zero.init_distributed(dist_init_required=False)  # a group exists now
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


def test_a_launchers_ranks_meet_over_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    deepseek_zero.init_distributed("gloo", init_method=f"file://{tmp_path}/store")
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    finally:
        dist.destroy_process_group()


def test_missing_deepspeed_names_raise_an_error_and_work_with_hasattr() -> None:
    for name in {*missing_names("deepspeed"), *IN_THE_DROPIN}:
        assert not hasattr(deepseek_zero, name)
    with pytest.raises(NotBuiltError, match=r"PipelineModule is DeepSpeed's and is not built"):
        _ = deepseek_zero.PipelineModule
    with pytest.raises(AttributeError, match="nonsense"):
        _ = deepseek_zero.nonsense
    assert {"initialize", "zero", "utils"} <= set(dir(deepseek_zero))


def test_comm_is_a_world_of_one_without_a_group() -> None:
    value, parts = torch.ones(2), [torch.zeros(2)]
    comm.all_reduce(value)
    comm.all_gather(parts, value)
    comm.barrier()
    assert (comm.get_rank(), comm.get_world_size(), comm.get_local_rank()) == (0, 1, 0)
    assert torch.equal(parts[0], value) and comm.is_initialized() is False
    assert comm.ReduceOp is torch.distributed.ReduceOp
    with pytest.raises(UnknownNameError, match=r"comm.mpi_discovery is not built"):
        _ = comm.mpi_discovery
    with pytest.raises(AttributeError):
        _ = comm.no_such_collective


def test_recomputation_gives_the_same_gradient_under_deepspeeds_names() -> None:
    line, x = nn.Linear(64, 64), torch.ones(64, 64, requires_grad=True)
    line(x * 2).square().sum().backward()
    plain, line.weight.grad = line.weight.grad, None
    assert not checkpointing.is_configured()
    checkpointing.configure(
        mpu_=None, partition_activations=False, checkpoint_in_cpu=True, profile=False
    )
    try:
        assert checkpointing.is_configured()
        checkpointing.non_reentrant_checkpoint(line, x * 2).square().sum().backward()
        assert torch.equal(plain, line.weight.grad)
        checkpointing.reset()
        assert checkpointing.is_configured()
    finally:
        recompute.release(recompute.current())
    checkpointing.reset()
    assert not checkpointing.is_configured()
    checkpointing.partition_activations_in_checkpoint(True)
    current = recompute.current()
    assert current is not None and current.settings.partitioned and current.partition is None
    recompute.release(current)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, RecomputeSettings()),
        ({"checkpoint_in_cpu": True}, RecomputeSettings(Tier.HOST)),
        (
            {"contiguous_checkpointing": True, "num_checkpoints": 4},
            RecomputeSettings(Tier.DEVICE, checkpoints=4),
        ),
        (
            {"contiguous_checkpointing": True, "checkpoint_in_cpu": True},
            RecomputeSettings(Tier.HOST),
        ),
        ({"partition_activations": True}, RecomputeSettings(partitioned=True)),
        ({"profile": True, "synchronize": True}, RecomputeSettings(profile=True)),
        (
            {"deepspeed_config": {"activation_checkpointing": {"cpu_checkpointing": True}}},
            RecomputeSettings(Tier.HOST),
        ),
        (
            {
                "deepspeed_config": {"activation_checkpointing": {"cpu_checkpointing": True}},
                "checkpoint_in_cpu": False,
            },
            RecomputeSettings(),
        ),
        (
            {
                "deepspeed_config": {
                    "activation_checkpointing": {"device": "nvme", "nvme_path": "/tmp"}
                }
            },
            RecomputeSettings(Tier.NVME, Path("/tmp"), DiskSettings(8, 1 << 20)),
        ),
    ],
)
def test_each_argument_of_configure_is_a_setting_and_omitted_ones_stay(
    given: dict[str, Any], expected: RecomputeSettings
) -> None:
    try:
        checkpointing.configure(None, **given)
        checkpointing.configure(None)
        current = recompute.current()
        assert current is not None and current.settings == expected
    finally:
        recompute.release(recompute.current())


def test_unknown_arguments_of_configure_are_errors() -> None:
    with pytest.raises(UsageError, match="no argument checkpoint_on_moon"):
        checkpointing.configure(None, checkpoint_on_moon=True)
    assert not checkpointing.is_configured()


def test_a_repeating_loader_never_ends() -> None:
    loader = utils.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]


def test_log_dist_logs_on_the_named_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    utils.log_dist("for zero", ranks=[0])
    utils.log_dist("for one", ranks=[1])
    utils.log_dist("for all")
    utils.see_memory_usage("quiet")
    utils.see_memory_usage("loud", force=True)
    told = capsys.readouterr().err
    assert "for zero" in told and "for one" not in told and "for all" in told
    assert "quiet" not in told and "loud: allocated" in told
    assert utils.logging.logger is utils.logger


def test_leaf_modules_are_gathered_as_one_unit(caplog: pytest.LogCaptureFixture) -> None:
    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.line(x)

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([Expert() for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.experts[0](x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixture = Mixture()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mixture(x)

    def units(model: nn.Module) -> list[str]:
        engine = deepseek_zero.initialize(
            model=model, config={"zero_optimization": {"stage": 3}, "train_batch_size": 1}
        )[0]
        return [unit.name for unit in engine.runtime.units[1:]]

    assert units(Model()) == ["mixture.experts.0", "mixture.experts.1", "mixture.experts.2"]
    marked = Model()
    assert (
        utils.set_z3_leaf_modules(marked, [Mixture])
        == utils.get_z3_leaf_modules(marked)
        == [marked.mixture]
    )
    assert marked.mixture._z3_leaf is True
    assert units(marked) == ["mixture"]
    utils.unset_z3_leaf_modules(marked, ["Mixture"])
    assert "Mixture is already wrapped" in caplog.text
    with pytest.raises(ValueError, match="no module of the model matches Typo"):
        utils.set_z3_leaf_modules(Model(), ["Typo"])
    assert utils.set_z3_leaf_modules_by_name(other := Model(), ["mixture"]) == ([other.mixture], [])
    assert utils.set_z3_leaf_modules_by_suffix(other, [".1"]) == ([other.mixture.experts[1]], [])
    with pytest.raises(ValueError, match="no module of the model matches gone"):
        utils.set_z3_leaf_modules_by_name(Model(), ["mixture", "gone"])
    assert utils.set_z3_leaf_modules_by_name(other, ["gone"], raise_if_not_found=False) == (
        [],
        ["gone"],
    )


@pytest.mark.parametrize("number", ["001", "002"])
def test_a_seeds_configuration_is_accepted_unchanged(number: str, tmp_path: Path) -> None:
    path = tmp_path / "deepspeed_config.json"
    path.write_text({"001": SEED_001, "002": SEED_002}[number], encoding="utf-8")
    engine = engine_with(str(path))
    assert (
        engine.zero_optimization_stage() == 3
        and engine.fp16_enabled()
        and engine.dynamic_loss_scale()
    )
    assert engine.zero_gather_16bit_weights_on_model_save() is True
    loss = engine(torch.ones(2, 3)).float().sum()  # fp32 inputs of an fp16 engine
    engine.backward(loss)
    engine.step()
    assert engine.global_steps == 1


def test_a_wrong_name_inside_a_property_is_not_taken_for_a_name_that_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_with(CONFIG)
    monkeypatch.setattr(engine, "mesh", object())
    with pytest.raises(AttributeError, match="'object' object has no attribute 'device'"):
        _ = engine.device


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_program_that_sets_the_boundary_updates_at_every_step(stage: int) -> None:
    def trained(managed: bool) -> torch.Tensor:
        torch.manual_seed(1)
        model, batches = nn.Linear(4, 4), torch.randn(4, 2, 4)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "managed_gradient_accumulation": managed,
        }
        engine = deepseek_zero.initialize(model=model, config=config)[0]
        for number, batch in enumerate(batches):
            engine.backward(engine(batch).square().sum())
            if managed or number % 2:
                engine.step()
                assert engine.was_step_applied() == bool(number % 2)
        assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (2, 4, 8)
        if not managed:
            with pytest.raises(
                AssertionError, match=r"set_gradient_accumulation_boundary\(\) has no meaning"
            ):
                engine.set_gradient_accumulation_boundary(True)
        found = torch.cat([value.flatten() for value in engine.module_state_dict().values()])
        engine.destroy()
        return found

    assert torch.equal(trained(True), trained(False))


def test_step_and_nested_contexts_are_refused_in_no_sync() -> None:
    engine = engine_with(
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 1}}
    )
    for name in ("no_sync", "coalesce_grad_reduction"):
        with getattr(engine, name)():
            engine.backward(engine(torch.ones(2, 3)).float().sum())
            with pytest.raises(AssertionError, match=f"step.. inside {name}"):
                engine.step()
            with pytest.raises(AssertionError, match="nested in"), engine.no_sync():
                pass
    engine.step()
    assert engine.global_steps == 1
