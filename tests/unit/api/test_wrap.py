"""The wrapper returned by DeepSeekZeRO3 behaves like the wrapped model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepseek_zero
from deepseek_zero import DeepSeekZeRO3, ZeroOptimizer
from deepseek_zero.base.errors import DeepSeekZeroError

SETTINGS = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(4, 4)  # Hugging Face's causal models have this attribute
        self.head = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor, *, twice: bool = False) -> torch.Tensor:
        out = self.head(torch.relu(self.model(x)))
        return out + out if twice else out

    def describe(self) -> str:
        return "a net"


def test_the_wrapper_computes_what_the_model_computes() -> None:
    net = Net()
    expected = copy.deepcopy(net)(x := torch.randn(3, 4), twice=True)
    model = deepseek_zero.DeepSeekZeRO3(net, **SETTINGS)
    assert torch.equal(model(x, twice=True), expected)
    assert model.module is net


def test_a_leaf_module_is_gathered_as_one_unit() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([Net(), Net()])

    def units(marked: bool) -> list[str]:
        net = nn.Module()
        net.mixture = Mixture()
        if marked:
            deepseek_zero.utils.set_z3_leaf_modules(net, [Mixture])
        return [
            unit.name for unit in deepseek_zero.DeepSeekZeRO3(net, **SETTINGS).runtime.units[1:]
        ]

    assert units(marked=False) == ["mixture.experts.0", "mixture.experts.1"]
    assert units(marked=True) == ["mixture"]


def test_the_wrapper_has_the_models_names() -> None:
    net = Net()
    model = deepseek_zero.DeepSeekZeRO3(net, **SETTINGS)
    assert list(map(id, model.parameters())) == list(map(id, net.parameters()))
    for names in ("named_parameters", "named_buffers", "named_modules"):
        assert [name for name, _ in getattr(model, names)()] == [
            name for name, _ in getattr(net, names)()
        ], names
    assert list(model.state_dict()) == list(net.state_dict())
    assert model.describe() == "a net"
    assert model.model is net.model
    assert model.get_submodule("model") is net.model
    inside = nn.Sequential(model)
    assert [name for name, _ in inside.named_parameters()] == [
        f"0.{name}" for name, _ in net.named_parameters()
    ]
    assert list(inside.state_dict()) == [f"0.{name}" for name in net.state_dict()]


def test_the_wrapper_trains_as_the_model_does_without_one() -> None:
    torch.manual_seed(3)
    net = Net()
    plain = copy.deepcopy(net)
    model = deepseek_zero.DeepSeekZeRO3(net, **SETTINGS)
    optimizer = deepseek_zero.ZeroOptimizer(model.parameters(), lr=0.1, optimizer_type="sgd")
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.randn(3, 4)
        for module, update in ((model, optimizer), (plain, reference)):
            update.zero_grad()
            module(x).square().mean().backward()
            update.step()
    for (name, ours), theirs in zip(
        model.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_modes_and_whole_weights_pass_through_the_wrapper() -> None:
    net = Net()
    model = deepseek_zero.DeepSeekZeRO3(net, **SETTINGS)
    assert not model.eval().training
    assert not net.head.training
    assert model.train() is model
    assert net.head.training
    seen: list[nn.Module] = []
    model.apply(seen.append)
    assert net in seen
    assert model.requires_grad_(True) is model
    ones = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    assert str(model.load_state_dict(ones)) == "<All keys matched successfully>"
    assert all(bool((value == 1).all()) for value in net.state_dict().values())


def test_an_unknown_attribute_is_named_with_its_class() -> None:
    model = deepseek_zero.DeepSeekZeRO3(Net(), **SETTINGS)
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'no_such_thing'"):
        model.no_such_thing  # noqa: B018


@pytest.mark.parametrize("door", ["deepseek", "deepspeed"])
def test_a_wrapper_is_not_wrapped_again(door: str) -> None:
    model = deepseek_zero.DeepSeekZeRO3(Net(), **SETTINGS)
    with pytest.raises(DeepSeekZeroError, match="already"):
        if door == "deepseek":
            deepseek_zero.DeepSeekZeRO3(model, **SETTINGS)
        else:
            deepseek_zero.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1})


@pytest.mark.parametrize("kind", ["adagrad", "adamw", "sgd", "lion"])
def test_an_optimizer_may_be_created_before_or_after_wrapping(kind: str) -> None:
    found = []
    for is_first in (True, False):
        torch.manual_seed(3)
        model = nn.Linear(8, 8)
        optimizer = ZeroOptimizer(model.parameters(), 0.1, kind) if is_first else None
        DeepSeekZeRO3(model, zero_optimization={"stage3_param_persistence_threshold": 0})
        if optimizer is None:
            optimizer = ZeroOptimizer(model.parameters(), 0.1, kind)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
        found.append(model.state_dict()["weight"])
    assert torch.equal(*found)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_hooks_of_the_optimizer_run_once_around_each_call(is_wrapped: bool) -> None:
    model, calls = nn.Linear(4, 2), []
    optimizer = ZeroOptimizer(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before step"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after step"))
    optimizer.register_state_dict_pre_hook(lambda *_: calls.append("before save"))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("after load"))
    if is_wrapped:
        DeepSeekZeRO3(model)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["before step", "after step", "before save", "after load"]


def state_after_a_step(
    stage: int, kind: str, width: int
) -> tuple[ZeroOptimizer, dict[str, object]]:
    model = nn.Linear(width, 2)
    DeepSeekZeRO3(model, stage=stage)
    optimizer = ZeroOptimizer(model.parameters(), lr=0.1, optimizer_type=kind)
    model(torch.ones(3, width)).sum().backward()
    optimizer.step()
    return optimizer, optimizer.state_dict()


@pytest.mark.parametrize(
    ("stage", "kind", "width", "difference"),
    [
        (1, "adamw", 4, "stage 1"),
        (2, "sgd", 4, "optimizer 'SGD'"),
        (2, "adamw", 6, "other parameters, shapes"),
    ],
)
def test_a_state_dict_of_another_optimizer_model_or_stage_is_refused(
    stage: int, kind: str, width: int, difference: str
) -> None:
    optimizer, own = state_after_a_step(2, "adamw", 4)
    _, foreign = state_after_a_step(stage, kind, width)
    with pytest.raises(DeepSeekZeroError, match=difference):
        optimizer.load_state_dict(foreign)
    optimizer.load_state_dict(own)


def test_a_state_dict_of_a_plain_optimizer_is_refused() -> None:
    optimizer, _ = state_after_a_step(2, "adamw", 4)
    plain = torch.optim.AdamW(nn.Linear(4, 2).parameters())
    with pytest.raises(DeepSeekZeroError, match="did not return"):
        optimizer.load_state_dict(plain.state_dict())


def test_a_state_dict_of_shards_is_refused_before_the_model_is_wrapped() -> None:
    _, state = state_after_a_step(1, "adamw", 4)
    optimizer = ZeroOptimizer(nn.Linear(4, 2).parameters(), lr=0.1, optimizer_type="adamw")
    with pytest.raises(DeepSeekZeroError, match="model is not wrapped") as raised:
        optimizer.load_state_dict(state)
    assert "slices of one rank" in str(raised.value)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("door", ["ZeroOptimizer", "engine"])
def test_a_copy_of_an_optimizer_is_refused_and_leaves_its_hooks(
    copied: Callable[[Any], Any], door: str
) -> None:
    model, calls = nn.Linear(4, 2), []
    optimizer: Any
    if door == "engine":
        config = {**SETTINGS, "train_micro_batch_size_per_gpu": 3}
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.1}}
        _, optimizer, *_ = deepseek_zero.initialize(model=model, config=config)
    else:
        DeepSeekZeRO3(model)
        optimizer = ZeroOptimizer(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: calls.append("after step"))
    with pytest.raises(DeepSeekZeroError, match="cannot be copied or pickled"):
        copied(optimizer)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    assert calls == ["after step"]


def test_functional_call_of_a_wrapped_model_is_refused_with_its_name() -> None:
    model = nn.Linear(4, 2)
    DeepSeekZeRO3(model, stage=1)
    values = {name: param * 0.9 for name, param in model.named_parameters()}
    with pytest.raises(DeepSeekZeroError, match="functional_call"):
        torch.func.functional_call(model, values, (torch.ones(3, 4),))


@pytest.mark.parametrize("kind", ["adam", "adamw", "sgd", "lion", "lamb", "muon"])
def test_a_step_runs_its_closure_once_with_gradients_and_returns_the_loss(kind: str) -> None:
    net = Net()
    group: dict[str, Any] = {"params": list(net.parameters())}
    if kind == "muon":
        group["use_muon"] = False
    optimizer = ZeroOptimizer([group], lr=0.1, optimizer_type=kind)
    before = copy.deepcopy(net.state_dict())
    losses = list[torch.Tensor]()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(3, 4)).square().sum()
        loss.backward()
        losses.append(loss)
        return loss

    with torch.no_grad():
        found = optimizer.step(closure)
    assert len(losses) == 1 and found is losses[0]
    assert not torch.equal(net.head.weight, before["head.weight"])
    assert optimizer.step() is None


@pytest.mark.parametrize("place", ["8bit", "nvme"])
def test_the_state_of_a_wrapped_model_has_the_moments(place: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optimizer": {"moments": "8bit"}}
    if place == "nvme":
        section = {"device": "nvme", "nvme_path": str(tmp_path)}
        settings = {"zero_optimization": {"stage": 3, "offload_optimizer": section}}
    net = Net()
    model = DeepSeekZeRO3(net, **settings)
    optimizer = ZeroOptimizer(model.parameters(), lr=0.1, betas=(0.5, 0.9))
    for _ in range(2):
        model(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    shards = optimizer.param_groups[0]["params"]
    assert sum(shard.numel() for shard in shards) >= sum(each.numel() for each in net.parameters())
    for shard in shards:
        moment = optimizer.state[shard]["exp_avg"]
        assert moment.shape == shard.shape and moment.isfinite().all() and moment.any()


def test_the_form_of_moments_is_not_compared_with_the_name_of_the_optimizer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = DeepSeekZeRO3(Net(), optimizer={"moments": "8bit"}, lr=0.5)
    optimizer = ZeroOptimizer(model.parameters(), lr=0.1)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    assert "was told lr=0.5, the optimizer has lr=0.1" in caplog.text
    assert "moments" not in caplog.text
