"""Invalid arguments and configurations raise an error that names them before anything is built."""

from __future__ import annotations

import argparse
import base64
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import deepseek_zero as dz
from deepseek_zero.base.errors import LONGEST_SHOWN, DeepSeekZeroError, shown
from deepseek_zero.compat.deepspeed.arguments import add_tuning_arguments, get_config_from_args
from deepseek_zero.compat.deepspeed.before_initialize import tp_model_init
from deepseek_zero.optimizer import ZeroOptimizer
from deepseek_zero.optimizers.lr_schedules import resolve_schedule

ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


Case = tuple[Callable[[], Any], str]


def with_params(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}}


def initialize(config: Any = ADAMW, model: Any = None, **given: Any) -> Any:
    engine = dz.initialize(
        model=nn.Linear(3, 2) if model is None else model, config=config, **given
    )[0]
    engine.destroy()
    return engine


def zero3(**keywords: Any) -> Any:
    return dz.DeepSeekZeRO3(nn.Linear(3, 2), **keywords)


def circular() -> dict[str, Any]:
    given: dict[str, Any] = {}
    given["zero_optimization"] = given
    return given


def deep(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = {"compression_training": found}
    return found


ARGUMENTS: dict[str, Case] = {
    "model": (lambda: initialize(model=5), "model of type int"),
    "a class for a model": (lambda: initialize(model=nn.Linear), "model of type type"),
    "optimizer": (lambda: initialize(optimizer=5), r"initialize\(optimizer=5\)"),
    "an optimizer by name": (
        lambda: initialize(optimizer="AdamW"),
        r"initialize\(optimizer='AdamW'\).*\n.*\n.*config",
    ),
    "a factory of no optimizer": (
        lambda: initialize(optimizer=lambda params: 5),
        "returned 5, which is not a torch.optim",
    ),
    "model_parameters": (
        lambda: initialize(model_parameters=5),
        r"initialize\(model_parameters=5\)",
    ),
    "numbers for parameters": (
        lambda: initialize(model_parameters=[1]),
        r"model_parameters=.*1 is not a parameter",
    ),
    "a tensor for parameters": (
        lambda: initialize(model_parameters=torch.ones(2)),
        "model_parameters=",
    ),
    "one group": (lambda: initialize(model_parameters={"params": []}), "pass a list"),
    "a group without params": (lambda: initialize(model_parameters=[{"lr": 1.0}]), "'params'"),
    "no parameter at all": (lambda: initialize(model_parameters=[]), "nothing to train"),
    "training_data": (lambda: initialize(training_data=5), r"initialize\(training_data=5\)"),
    "a loader for data": (
        lambda: initialize(training_data=DataLoader(TensorDataset(torch.ones(4, 3)))),
        "pass its dataset",
    ),
    "collate_fn": (lambda: initialize(collate_fn=5), r"initialize\(collate_fn=5\)"),
    "lr_scheduler": (lambda: initialize(lr_scheduler=5), r"initialize\(lr_scheduler=5\)"),
    "a scheduler alone": (
        lambda: initialize(config={}, lr_scheduler=lambda optimizer: None),
        "without an optimizer",
    ),
    "a scheduler's section alone": (
        lambda: initialize(config={"scheduler": {"type": "WarmupLR", "params": {}}}),
        "without an optimizer",
    ),
    "mpu": (lambda: initialize(mpu=5), r"initialize\(mpu=5\) cannot be used"),
    "mesh_param": (lambda: initialize(mesh_param=4), r"initialize\(mesh_param=4\) cannot be used"),
    "tp_model_init": (lambda: tp_model_init(5, 2, None), r"tp_model_init\(model=5\)"),  # type: ignore[arg-type]
    "tp_model_init's size": (
        lambda: tp_model_init(nn.Linear(2, 2), 0, None),
        r"tp_model_init\(tp_size=0\)",
    ),
    "dist_init_required": (lambda: initialize(dist_init_required=5), "dist_init_required=5"),
    "distributed_port": (lambda: initialize(distributed_port="x"), "distributed_port='x'"),
    "a port beyond all": (lambda: initialize(distributed_port=99_999), "distributed_port=99999"),
    "zero_optimization": (
        lambda: zero3(zero_optimization=3),
        'zero_optimization = 3.*\n.*write {"stage": 3}',
    ),
    "two stages": (
        lambda: zero3(stage=2, zero_optimization={"stage": 3}),
        "stage=2 and zero_optimization",
    ),
    "the optimizer of the other door": (
        lambda: zero3(optimizer=5),
        r"DeepSeekZeRO3\(optimizer=5\)",
    ),
    "the section of the other door": (
        lambda: zero3(**ADAMW),
        r"DeepSeekZeRO3\(optimizer={.*ZeroOptimizer",
    ),
    "an optimizer nobody knows": (lambda: zero3(optimizer="adamm"), "did you mean"),
    "the rate of the other door": (lambda: zero3(lr="x"), r"DeepSeekZeRO3\(lr='x'\)"),
    "a dot beside its section": (lambda: zero3(**{"bf16": True, "bf16.enabled": True}), "bf16"),
    "no model": (lambda: dz.DeepSeekZeRO3(5), "model of type int"),  # type: ignore[arg-type]
    "ZeroOptimizer": (lambda: ZeroOptimizer(5), r"ZeroOptimizer\(params=5\)"),  # type: ignore[arg-type]
    "its rate": (lambda: ZeroOptimizer([nn.Parameter(torch.ones(2))], lr="x"), "'lr'"),  # type: ignore[arg-type]
    "its type": (
        lambda: ZeroOptimizer([nn.Parameter(torch.ones(2))], optimizer_type=5),
        "optimizer 5",
    ),  # type: ignore[arg-type]
    "Init's config": (
        lambda: dz.zero.Init(config_dict_or_path=5),
        r"zero.Init\(config_dict_or_path=5\)",
    ),
    "Init's old config": (lambda: dz.zero.Init(config=5), r"zero.Init\(config=5\)"),
    "Init's module": (lambda: dz.zero.Init(module=5), r"zero.Init\(module=5\)"),  # type: ignore[arg-type]
    "Init's dtype": (lambda: dz.zero.Init(dtype="bf16"), r"zero.Init\(dtype='bf16'\)"),  # type: ignore[arg-type]
    "a negative world": (lambda: dz.init_distributed(rank=0, world_size=-2), "world_size=-2"),
    "a negative rank": (lambda: dz.init_distributed(rank=-3, world_size=2), "rank=-3"),
    "a rank beyond the world": (lambda: dz.init_distributed(rank=2, world_size=2), "rank=2"),
    "a rank that is a word": (lambda: dz.init_distributed(rank="x"), "rank='x'"),
    "checkpointing's config": (
        lambda: dz.checkpointing.configure(deepspeed_config=5),
        "configuration cannot be an int: 5",
    ),
    "checkpointing's count": (
        lambda: dz.checkpointing.configure(num_checkpoints="x"),
        "num_checkpoints='x'",
    ),
}


CONFIGS: dict[str, tuple[Any, str]] = {
    "a number": (5, "a configuration cannot be an int: 5"),
    "bytes": (b"{}", "cannot be a bytes"),
    "a namespace": (SimpleNamespace(a=1), "cannot be a SimpleNamespace"),
    "a path that is not there": ("nowhere.json", "Received: nowhere.json"),
    "a Path that is not there": (Path("nowhere.json"), "Received: nowhere.json"),
    "a directory": ("/", "that is a directory"),
    "nothing": ("", "existing deepspeed config"),
    "broken JSON": ('{"a": 1,\n', "is not JSON"),
    "a list": ("[1]", "existing deepspeed config"),
    "duplicate keys": ('{"fp16": {}, "fp16": {}}', "Duplicate keys"),
    "not a number": ('{"gradient_clipping": NaN}', "must be finite"),
    "a huge integer": (
        '{"zero_optimization": {"reduce_bucket_size": 1' + "0" * 400 + "}}",
        "at most 64 bits",
    ),
    "an integer of thousands of digits": ('{"train_batch_size": ' + "9" * 5000 + "}", "JSON"),
    "a bool for a number": ({"train_batch_size": True}, "must be an integer, not true or false"),
    "brackets without end": ('{"a":' * 100_000, "JSON"),
    "itself": (circular(), "does it contain itself"),
    "deep nesting": (deep(5000), "nested deeper than 30 levels"),
    "a number for a key": ({1: 2}, "a key must be a string, not an int"),
    "a number for a parameter": ({"optimizer": {"type": "SGD", "params": {1: 2}}}, "string"),
    "a long value": ({"fp16": "x" * 100_000}, r"fp16 = 'x{60,}"),
    "a long key": ({"x" * 100_000: 1}, "no such key"),
    "a path with a null": ({"records": {"path": "a\0b"}}, "without null characters"),
    "half of a character": ({"records": {"path": "\ud800"}}, "without lone surrogates"),
    "one beta": (with_params("AdamW", betas=[0.9]), r"'betas' must be 2 numbers, not \(0.9,\)"),
    "three betas": (with_params("AdamW", betas=[0.9, 0.9, 0.9]), "'betas' must be 2 numbers"),
    "a beta": (with_params("AdamW", betas=0.9), "'betas' must be 2 numbers"),
    "betas by name": (with_params("AdamW", betas={"a": 1, "b": 2}), "'betas' must be 2 numbers"),
    "words for betas": (with_params("Lion", betas=["a", "b"]), "'betas' must be 2 numbers"),
    "a word for a rate": (with_params("SGD", lr="fast"), "'lr' must be a number"),
    "an object for a rate": (with_params("Lamb", lr={}), "'lr' must be a number"),
    "a word for a switch": (with_params("AdamW", amsgrad="yes"), "'amsgrad' must be true or false"),
    "switches that exclude each other": (with_params("AdamW", fused=True, foreach=True), "fused"),
    "a negative rate": (with_params("AdamW", lr=-1.0), "learning rate"),
    "a schedule of words": (
        {**ADAMW, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "soon"}}},
        "'warmup_num_steps' must be a number",
    ),
    "a schedule without its total": (
        {**ADAMW, "scheduler": {"type": "WarmupDecayLR", "params": {}}},
        "total_num_steps",
    ),
    "steps of no size": (
        {**ADAMW, "scheduler": {"type": "StepLR", "params": {"step_size": 0}}},
        "StepLR.*modulo by zero",
    ),
    "a word for a factor": (
        {**ADAMW, "scheduler": {"type": "ExponentialLR", "params": {"gamma": "x"}}},
        "ExponentialLR",
    ),
    "iterations without end": (with_params("Muon", ns_steps=2**62), "ns_steps from 1 to 99"),
    "a rate that is no number": (with_params("Lion", lr=float("nan")), "lr"),
    "a rate beyond fp32": (with_params("NAdam", lr=1e308), "without overflow"),
    "a graph on a CPU": (with_params("Adamax", capturable=True), "capturable"),
    "a list for a rate": (with_params("SGD", dampening=[]), "SGD refuses"),
    "a directory that cannot be": (
        {"records": {"path": __file__ + "/x"}},
        "records cannot be written",
    ),
    "a monitor's that cannot be": (
        {"csv_monitor": {"enabled": True, "output_path": __file__ + "/x"}},
        "records cannot be written",
    ),
    "milestones that are none": (
        {**ADAMW, "scheduler": {"type": "MultiStepLR", "params": {"milestones": 5}}},
        "MultiStepLR",
    ),
}


def refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(DeepSeekZeroError, match=f"(?s).*{words}") as error:
        call()
    assert max(map(len, str(error.value).splitlines())) < 1200
    assert len(str(error.value)) > 20


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_that_cannot_be_is_named(name: str) -> None:
    refused(*ARGUMENTS[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_an_impossible_configuration_is_named(name: str) -> None:
    given, words = CONFIGS[name]
    refused(lambda: initialize(config=given), words)


def test_a_schedule_without_total_steps_gets_the_number() -> None:
    engine = dz.initialize(
        model=nn.Linear(3, 2), config={**ADAMW, "scheduler": {"type": "ReduceLROnPlateau"}}
    )[0]
    engine.backward(engine(torch.ones(4, 3)).mean())
    refused(engine.step, "metrics")
    engine.destroy()


def test_a_profile_that_cannot_be_written_loses_no_step(capsys: pytest.CaptureFixture[str]) -> None:
    profile = {"enabled": True, "profile_step": 0, "output_file": __file__ + "/x"}
    engine = dz.initialize(model=nn.Linear(3, 2), config={**ADAMW, "flops_profiler": profile})[0]
    engine.backward(engine(torch.ones(4, 3)).mean())
    engine.step()
    engine.destroy()
    assert "flops_profiler.output_file cannot be written" in capsys.readouterr().err


def test_states_that_an_engine_cannot_save_or_load_are_named(tmp_path: Path) -> None:
    engine = dz.initialize(model=nn.Linear(3, 2), config=ADAMW)[0]
    calls: list[Case] = [
        (lambda: engine.save_checkpoint(5), r"save_checkpoint\(save_dir=5\)"),
        (lambda: engine.save_checkpoint(None), "save_dir=None"),
        (lambda: engine.save_checkpoint(tmp_path, client_state=5), "client_state=5"),
        (lambda: engine.save_checkpoint(tmp_path, client_state=[("a", 1)]), "client_state="),
        (lambda: engine.save_checkpoint(tmp_path, client_state={"a": object()}), "client_state"),
        (lambda: engine.load_checkpoint(5), r"load_checkpoint\(load_dir=5\)"),
        (lambda: engine.load_weights(5), r"load_weights\(path=5\)"),
        (lambda: engine.load_weights(tmp_path / "nowhere"), "nowhere"),
        (lambda: engine.export(5), r"export\(path=5\)"),
        (lambda: engine.export(tmp_path / "x", dtype="wide"), "wide"),
        (lambda: engine.export(tmp_path / "x", max_shard_bytes="big"), "max_shard_bytes='big'"),
        (lambda: engine.save_16bit_model(5), r"save_16bit_model\(save_dir=5\)"),
        (lambda: engine.save_16bit_model(tmp_path, 5), r"save_16bit_model\(save_filename=5\)"),
        (lambda: engine.load_module_state_dict(5), r"load_module_state_dict\(checkpoint=5\)"),
        (lambda: engine.load_module_state_dict({"module": 5}), r"checkpoint={'module': 5}"),
        (lambda: engine.set_train_batch_size("x"), "'x'"),
    ]
    for call, words in calls:
        refused(call, words)
    assert {path.name for path in tmp_path.iterdir()} <= {
        ".writer"
    }  # the lock file of the writer is created before the arguments are checked
    engine.destroy()


@pytest.mark.usefixtures("as_deepspeed")
def test_a_client_with_another_world_size_is_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = {"distributed_type": "DistributedType.DEEPSPEED", "num_processes": 2}
    state = SimpleNamespace(PartialState=SimpleNamespace(_shared_state=shared))
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    importlib.import_module("deepspeed")
    try:
        refused(initialize, "accelerate counted 2 processes, and this world has 1")
        for harmless in (
            {"num_processes": 1},
            {"num_processes": 2, "distributed_type": "DistributedType.NO"},
            {},
        ):
            shared |= harmless
            initialize()
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("as_deepspeed")
@pytest.mark.parametrize(
    ("said", "clips"),
    [
        ({"optimizer": {"type": "AdamW"}}, 1.0),
        ({"optimizer": {"type": "AdamW"}, "gradient_clipping": 0.0}, 0.0),
        ({"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 2}}}, 0.0),
    ],
)
def test_under_deepspeeds_name_gradients_are_clipped_by_its_default(
    said: dict[str, Any], clips: float
) -> None:
    importlib.import_module("deepspeed")
    try:
        engine = dz.initialize(model=nn.Linear(3, 2), config={"train_batch_size": 4, **said})[0]
        assert engine.gradient_clipping() == clips
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("door", ["initialize", "ZeroOptimizer"])
def test_a_second_grad_scaler_raises_an_error_about_the_loss_scale(door: str) -> None:
    model = nn.Linear(3, 2)
    if door == "initialize":
        engine, optimizer, *_ = dz.initialize(model=model, config=ADAMW)
    else:
        engine = dz.DeepSeekZeRO3(model)
        optimizer = ZeroOptimizer(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(engine(torch.ones(4, 3)).mean()).backward()
    refused(lambda: (scaler.unscale_(optimizer), scaler.step(optimizer)), "GradScaler")
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.step(optimizer)
    off.update()


def test_different_learning_rates_of_model_and_optimizer_are_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = nn.Linear(3, 2)
    dz.DeepSeekZeRO3(model, optimizer="adam", lr=1e-2)
    optimizer = ZeroOptimizer(model.parameters())
    model(torch.ones(4, 3)).mean().backward()
    optimizer.step()
    assert "DeepSeekZeRO3 was told lr=0.01, the optimizer has lr=0.001" in capsys.readouterr().err


def test_a_configuration_is_accepted_in_every_equivalent_form(tmp_path: Path) -> None:
    text = json.dumps(
        {
            "$schema": "https://example.org/schema.json",
            **ADAMW,
            "zero_optimization": {"sub_group_size": 0},
        }
    )
    (tmp_path / "config.json").write_text(text)

    class Given(dict):  # type: ignore[type-arg]
        pass

    forms = [text, tmp_path / "config.json", str(tmp_path / "config.json"), Given(json.loads(text))]
    forms += [base64.urlsafe_b64encode(text.encode()).decode(), json.loads(text)]
    for form in forms:
        assert initialize(config=form).config.optimizer.type == "AdamW"
    assert (
        initialize(config=None, config_params=forms[0]).config.zero_optimization.sub_group_size
        == 10**9
    )
    args = argparse.Namespace(deepspeed_config=str(forms[2]))
    assert initialize(config=None, args=args).config.optimizer.type == "AdamW"


def test_numbers_and_paths_of_other_libraries_are_read() -> None:
    given = {
        **with_params("AdamW", lr=np.float32(0.1), betas=np.array([0.9, 0.99]).tolist()),
        "train_batch_size": np.int64(4),
        "gradient_clipping": np.float64(1.5),
        "records": {"path": None, "every": np.int32(2)},
        "zero_optimization": {"offload_param": {"nvme_path": Path("states")}},
    }
    config = initialize(config=given).config
    assert (config.train_batch_size, config.gradient_clipping, config.records.every) == (4, 1.5, 2)
    assert config.zero_optimization.offload_param.nvme_path == "states"


def test_a_value_is_shown_as_repr_shows_it_and_cut() -> None:
    for value in ({}, [], (), (1,), {"a": [1, {"b": None}]}, "x", b"x", 1.5, None, {1: (2, 3)}):
        assert shown(value) == repr(value)

    class Bad:
        def __repr__(self) -> str:
            raise ValueError

    for value in (
        "x" * 10**6,
        [0] * 10**6,
        {n: n for n in range(10**5)},
        circular(),
        deep(5000),
        Bad(),
        10**5000,
    ):
        assert len(shown(value)) <= LONGEST_SHOWN


def test_an_optimizer_that_accelerate_wrapped_before_is_the_one_inside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """accelerate wraps the optimizer first if its ParallelismConfig has tensor-parallel ranks."""

    class AcceleratedOptimizer(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    monkeypatch.setitem(
        sys.modules,
        "accelerate.optimizer",
        SimpleNamespace(AcceleratedOptimizer=AcceleratedOptimizer),
    )
    model = torch.nn.Linear(2, 2)
    inside = torch.optim.AdamW(model.parameters(), lr=0.5)
    engine, *_ = dz.initialize(
        model=model, optimizer=AcceleratedOptimizer(inside), config={"train_batch_size": 1}
    )
    assert engine.client_optimizer is inside
    assert engine.get_lr() == [0.5]
    engine(torch.ones(1, 2)).sum().backward()
    engine.step()
    engine.destroy()


def parsed(*words: str) -> argparse.Namespace:
    return add_tuning_arguments(argparse.ArgumentParser()).parse_args(words)


def test_the_flags_become_a_scheduler_block() -> None:
    args = parsed(
        "--lr_schedule", "OneCycle", "--cycle_max_lr", "0.5", "--lr_range_test_staircase", "false"
    )
    block, problem = get_config_from_args(args)
    assert problem is None and block is not None and args.lr_range_test_staircase is False
    assert block["type"] == "OneCycle" and block["params"]["cycle_max_lr"] == 0.5
    assert "cycle_second_step_size" not in block["params"]  # -1 is the default of the flag
    schedule = resolve_schedule(
        block["type"], block["params"], SimpleNamespace(param_groups=[{"lr": 9.0}])
    )
    assert schedule.get_last_lr() == [0.01]


def test_a_total_of_the_scripts_own_reaches_the_schedule() -> None:
    args = parsed("--lr_schedule", "WarmupDecayLR")
    args.total_num_steps = 50
    block, _ = get_config_from_args(args)
    assert block is not None and block["params"]["total_num_steps"] == 50


def test_flags_without_a_supported_schedule_raise_an_error_with_the_reason() -> None:
    assert get_config_from_args(parsed()) == (None, "--lr_schedule not specified on command line")
    assert get_config_from_args(parsed("--lr_schedule", "Up")) == (
        None,
        "Up is not supported LR schedule",
    )
