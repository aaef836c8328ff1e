"""Different settings raise on all ranks, with the key and both values, before anything is built."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import deepseek_zero
from deepseek_zero.base.errors import ModelMismatchError
from tests.plain import here

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": None,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.25}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    "zero_optimization": {"stage": 3},
}


def start(key: str, value: Any) -> Any:
    """Start an engine with a key that rank 1 sets to `value`."""
    config = {name: dict(part) if isinstance(part, dict) else part for name, part in CONFIG.items()}
    *sections, last = key.split(".")
    section = config
    for name in sections:
        section[name] = dict(section.get(name, {}))
        section = section[name]
    if here() == 1:
        section[last] = value
    return deepseek_zero.initialize(model=nn.Linear(64, 64), config=config)[0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("gradient_clipping", 2.0, "gradient_clipping: rank 0 has 0.0, rank 1 has 2.0"),
        ("bf16.enabled", True, "bf16.enabled: rank 0 has False, rank 1 has True"),
        ("zero_optimization.stage", 2, "zero_optimization.stage: rank 0 has 3, rank 1 has 2"),
        ("optimizer.type", "SGD", "optimizer.type: rank 0 has 'AdamW', rank 1 has 'SGD'"),
        ("optimizer.params.lr", 0.5, "optimizer.params.lr: rank 0 has 0.25, rank 1 has 0.5"),
        (
            "scheduler.params.warmup_num_steps",
            7,
            "scheduler.params.warmup_num_steps: rank 0 has 5, rank 1 has 7",
        ),
        (
            "checkpoint.layout",
            "slices",
            "checkpoint.layout: rank 0 has 'auto', rank 1 has 'slices'",
        ),
        (
            "checkpoint.save_on_signal",
            {"path": "a"},
            "checkpoint.save_on_signal.path: rank 0 has 'nothing'|save_on",
        ),
        (
            "train_micro_batch_size_per_gpu",
            4,
            "train_micro_batch_size_per_gpu: rank 0 has 2, rank 1 has 4",
        ),
    ],
)
def test_a_key_of_the_configuration_is_named_with_both_values(
    key: str, value: Any, said: str
) -> None:
    with pytest.raises(ModelMismatchError) as caught:
        start(key, value)
    assert any(part in str(caught.value) for part in said.split("|")), str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.ranks(2)
def test_settings_of_local_effect_may_differ_between_ranks() -> None:
    start("steps_per_print", 3).destroy()
    start("zero_optimization.offload_optimizer.nvme_path", "elsewhere").destroy()
    start("log_level", "info").destroy()


@pytest.mark.ranks(2)
def test_an_optimizer_of_the_program_is_compared_by_option_and_group() -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5 if here() else 0.25)
    config = {
        key: CONFIG[key]
        for key in ("train_micro_batch_size_per_gpu", "steps_per_print", "zero_optimization")
    }
    with pytest.raises(ModelMismatchError) as caught:
        deepseek_zero.initialize(model=model, optimizer=optimizer, config=config)
    assert "lr of parameter group 0: rank 0 has 0.25, rank 1 has 0.5" in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", range(4))
def test_a_learning_rate_that_differs_at_a_step_is_named_before_any_update(stage: int) -> None:
    """A schedule may read a loss that each rank has for itself (`ReduceLROnPlateau`)."""
    torch.manual_seed(0)
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    del config["scheduler"]
    engine = deepseek_zero.initialize(model=nn.Linear(64, 64), config=config)[0]
    group = engine.optimizer.param_groups[0]
    engine.backward(engine(torch.ones(2, 64)).square().mean())
    before = {name: value.clone() for name, value in engine.module.state_dict().items()}
    group["lr"] = 0.125 if here() else 0.25
    with pytest.raises(ModelMismatchError) as caught:
        engine.step()
    assert "lr of parameter group 0: rank 0 has 0.25, rank 1 has 0.125" in str(caught.value)
    for name, value in engine.module.state_dict().items():
        assert torch.equal(value, before[name])
    group["lr"] = 0.125
    engine.step()
    assert not torch.equal(engine.module.state_dict()["weight"], before["weight"])


@pytest.mark.ranks(2)
def test_numbers_of_an_optimizer_that_cannot_be_compared_do_not_end_a_step() -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25))
    config = {"train_micro_batch_size_per_gpu": 2, "steps_per_print": None}
    engine = deepseek_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.backward(engine(torch.ones(2, 64)).square().mean())
    engine.step()
