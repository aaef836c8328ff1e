"""Gradients that enter a model other than through its outputs equal those of plain PyTorch.

Tensors leave the model through an attribute, a hook or a list, and parameters appear in the loss.
Each case runs with every call of backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepseek_zero
from deepseek_zero import DeepSeekZeRO3
from deepseek_zero.optimizer import ZeroOptimizer
from deepseek_zero.utils import safe_get_full_grad
from tests.plain import here, world
from tests.ranks.test_backward_calls import PRECISIONS, config, data, norm_of, one

WIDTH = 64


class Block(nn.Module):
    """Stores an auxiliary loss in an attribute, as MoE routers do, and its output in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.balance: Any = None
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        self.balance = (shares.mean(0) ** 2).sum()
        x = x + torch.tanh(self.up(x)) * shares.sum(-1, keepdim=True)
        self.kept = [x]
        return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(WIDTH, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def net() -> nn.Module:
    torch.manual_seed(8)
    return Net()


Loss = Callable[[Any, nn.Module, Tensor], Tensor]


def attribute(model: Any, module: Any, x: Tensor) -> Tensor:
    out = model(x)
    return one(out) + sum(block.balance.float() for block in module.blocks)


def state_in_a_list(model: Any, module: Any, x: Tensor) -> Tensor:
    out = model(x)
    return one(out) + module.blocks[0].kept[0].float().square().mean()


def hidden_state_alone(model: Any, module: Any, x: Tensor) -> Tensor:
    kept: list[Tensor] = []
    handle = module.blocks[1].up.register_forward_hook(
        lambda module, args, output: kept.append(output)
    )
    model(x)
    handle.remove()
    return kept[0].float().square().mean()


def root_inside(model: Any, module: Any, x: Tensor) -> Tensor:
    model(x)
    return module.blocks[1].balance


def weights(model: Any, module: Any, x: Tensor) -> Tensor:
    return one(model(x)) + sum(param.float().square().sum() for param in module.out.parameters())


def expected_of(loss: Loss, accumulation: int) -> dict[str, Tensor]:
    plain = net()
    for micro, rank in itertools.product(range(accumulation), range(world())):
        (loss(plain, plain, data(micro, rank)) / accumulation / world()).backward()
    return {
        name: torch.zeros_like(param) if param.grad is None else param.grad
        for name, param in plain.named_parameters()
    }


LOSSES: list[Loss] = [attribute, state_in_a_list, hidden_state_alone, root_inside, weights]
ACCUMULATION = 3


def start(stage: int, precision: str) -> Any:
    return deepseek_zero.initialize(model=net(), config=config(stage, precision, ACCUMULATION))[0]


def check_gradients(engine: Any, expected: dict[str, Tensor], precision: str, what: str) -> None:
    within, whole = PRECISIONS[precision][1], norm_of(expected)
    scale = engine.optimizer.loss_scale
    for name, param in engine.module.named_parameters():
        found = safe_get_full_grad(param)
        grad = torch.zeros_like(expected[name]) if found is None else found / scale
        far = float((grad - expected[name]).norm())
        assert far <= within * whole, (
            f"{what}: {name} is {far} from a gradient of {float(expected[name].norm())}"
        )
    engine.optimizer.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_tensor_that_leaves_the_model_outside_its_outputs_gets_the_factor(
    stage: int, precision: str
) -> None:
    engine = start(stage, precision)
    for loss in LOSSES:
        if loss is weights and stage == 3:
            continue  # a sharded parameter has no values to read
        expected = expected_of(loss, ACCUMULATION)
        for micro in range(ACCUMULATION):
            engine.set_gradient_accumulation_boundary(micro == ACCUMULATION - 1)
            loss(engine, engine.module, data(micro, here())).backward()
        check_gradients(engine, expected, precision, loss.__name__)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("partner", ["fp32", "fp16"])
def test_a_state_of_one_engine_that_another_one_is_given_gets_the_factor(partner: str) -> None:
    def joint(first: Any, second: Any, inside: Any, x: Tensor) -> Tensor:
        out = first(x)
        state = inside.blocks[0].kept[0].float()
        return one(second(state[:, :6])) + one(second(state[:, 6:12] * 2.0)) + one(out)

    plain = [net(), net()]
    for micro, rank in itertools.product(range(ACCUMULATION), range(world())):
        (joint(*plain, plain[0], data(micro, rank)) / ACCUMULATION / world()).backward()
    expected = [
        {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
        for model in plain
    ]
    for precision, other in (("fp16", partner), (partner, "fp16")):
        pair = [start(2, precision), start(2, other)]
        for way in (Tensor.backward, pair[0].backward, pair[1].backward):
            for micro in range(ACCUMULATION):
                for engine in pair:
                    engine.set_gradient_accumulation_boundary(micro == ACCUMULATION - 1)
                way(joint(*pair, pair[0].module, data(micro, here())))
            for engine, grads in zip(pair, expected, strict=True):
                check_gradients(engine, grads, "fp16", f"{precision} and {other}, {way}")


def test_an_input_keeps_the_gradient_of_plain_torch() -> None:
    x = data(0, 0).requires_grad_()
    plain = net()
    (expected,) = torch.autograd.grad(attribute(plain, plain, x), x)
    for precision in PRECISIONS:
        engine = start(1, precision)
        (found,) = torch.autograd.grad(attribute(engine, engine.module, x), x)
        assert float((found - expected).norm()) <= PRECISIONS[precision][1] * float(
            expected.norm()
        ), precision


def test_a_graph_that_is_kept_is_scaled_once() -> None:
    expected = expected_of(attribute, 1)
    engine = deepseek_zero.initialize(model=net(), config=config(0, "fp16", 2))[0]
    loss = attribute(engine, engine.module, data(0, 0))
    loss.backward(retain_graph=True)
    loss.backward()
    check_gradients(engine, expected, "fp16", "twice")


def test_a_model_without_an_engine_of_its_own_is_no_exception() -> None:
    expected = expected_of(attribute, ACCUMULATION)
    section = config(2, "fp16", ACCUMULATION)
    del section["optimizer"]
    model = net()
    DeepSeekZeRO3(model, **section)
    optimizer = ZeroOptimizer(model.parameters(), lr=1.0, optimizer_type="sgd")
    before = {name: value.float() for name, value in model.state_dict().items()}
    for micro in range(ACCUMULATION):
        attribute(model, model, data(micro, 0)).backward()
    optimizer.step()
    for name, value in model.state_dict().items():
        rounding = 2.0**-10 * float(before[name].norm())
        far = float((before[name] - value.float() - expected[name]).norm())
        assert far <= PRECISIONS["fp16"][1] * norm_of(expected) + rounding, name
