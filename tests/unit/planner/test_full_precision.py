"""Parameters and buffers that a model declares as fp32 stay fp32, with their values, under a 16-bit
policy.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepseek_zero
from deepseek_zero.compat.deepspeed import zero as drop_in
from deepseek_zero.planner.auto_wrap_policy import full_precision_names


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 64) / 8)
        self.e_score_correction_bias = nn.Parameter(torch.randn(4))
        self.register_buffer("counts", torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = nn.functional.linear(x.float(), self.weight.float()).sigmoid()
        return (
            (scores + self.e_score_correction_bias + self.counts).sum(-1, keepdim=True).to(x.dtype)
        )


class Block(nn.Module):
    _keep_in_fp32_modules_strict = ("router.e_score_correction_bias",)

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.wo = nn.Linear(64, 64)
        self.two = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.wo((x * self.router(x)).to(self.wo.weight.dtype)).to(x.dtype))


class Net(nn.Module):
    _keep_in_fp32_modules = ("wo",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


DECLARED = {
    f"blocks.{number}.{name}"
    for number in range(2)
    for name in ("router.e_score_correction_bias", "wo.weight", "wo.bias")
}


def test_names_are_matched_by_whole_parts_inside_the_module_that_declares_them() -> None:
    assert full_precision_names(Net()) == DECLARED


@pytest.mark.parametrize("under_init", [False, True])
@pytest.mark.parametrize("stage", range(4))
def test_what_is_declared_as_fp32_stays_so(stage: int, under_init: bool) -> None:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": None,
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    torch.manual_seed(1)
    plain = Net()
    torch.manual_seed(1)
    if under_init:
        with deepseek_zero.zero.Init(config_dict_or_path=config):
            model = Net()
    else:
        model = Net()
    engine = deepseek_zero.initialize(model=model, config=config)[0]
    weights = engine.module_state_dict()
    for name, value in plain.named_parameters():
        expected = value.detach() if name in DECLARED else value.detach().to(torch.bfloat16)
        assert weights[name].dtype == expected.dtype, name
        torch.testing.assert_close(
            weights[name], expected, rtol=0 if name in DECLARED else 1e-2, atol=0
        )
    assert engine.module.blocks[0].router.counts.dtype == torch.float32
    engine.backward(engine(torch.ones(2, 64)).float().square().mean())
    engine.step()
    moved = engine.module_state_dict()
    assert all(
        not torch.equal(moved[name], weights[name]) for name in DECLARED
    )  # 16 bits would lose such a step


@pytest.mark.parametrize("name", ["deepseek_zero", "deepspeed"])
def test_what_is_declared_as_fp32_keeps_its_start_values_when_the_rest_is_cast(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drop_in, "init_distributed", lambda: None)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": None,
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3},
    }
    torch.manual_seed(1)
    plain = Net()
    constructor = nn.Module.__init__
    torch.manual_seed(1)
    if name == "deepspeed":
        context = drop_in.DropInInit(config_dict_or_path=config)
    else:
        context = deepseek_zero.zero.Init(dtype=torch.bfloat16)
    with context:
        model = Net()
    assert nn.Module.__init__ is constructor
    for key, param in model.named_parameters():
        assert param.dtype == (torch.float32 if key in DECLARED else torch.bfloat16), key
    weights = deepseek_zero.initialize(model=model, config=config)[0].module_state_dict()
    for key, value in plain.named_parameters():
        expected = value if key in DECLARED else value.to(torch.bfloat16)
        assert torch.equal(weights[key], expected), key


def test_a_constructor_that_fails_leaves_the_modules_of_torch_as_they_were() -> None:
    constructor = nn.Module.__init__
    with pytest.raises(ZeroDivisionError), deepseek_zero.zero.Init(dtype=torch.bfloat16):
        Net()
        raise ZeroDivisionError
    assert nn.Module.__init__ is constructor


@pytest.mark.parametrize("context", [deepseek_zero.zero.Init, drop_in.DropInInit])
def test_a_context_that_is_not_enabled_changes_nothing(context: Any) -> None:
    with context(enabled=False, dtype=torch.bfloat16):
        model = Net()
    assert {param.dtype for param in model.parameters()} == {torch.float32}
