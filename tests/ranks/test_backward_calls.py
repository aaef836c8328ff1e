"""Every call of backward gives plain PyTorch's gradient, divided once and scaled once.

The tests cover each call with fp32, bf16 and fp16, accumulation 1 and 4, and stages 0 to 3. The
reference is this file's model in fp32, unsharded, on the data of all ranks. It divides each
micro-batch's loss by the accumulation.
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
from deepseek_zero.base.errors import UsageError
from deepseek_zero.optimizer import ZeroOptimizer
from deepseek_zero.utils import safe_get_full_grad
from tests.plain import here, world

SCALE_POWER = 8
PRECISIONS: dict[
    str, tuple[dict[str, Any], float]
] = {  # configuration, and gradient tolerance relative to the fp32 norm
    "fp32": ({}, 1e-5),
    "bf16": ({"bf16": {"enabled": True}}, 3e-2),
    "fp16": ({"fp16": {"enabled": True, "initial_scale_power": SCALE_POWER}}, 5e-3),
}
Loss = Callable[[Tensor], Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(6, 10), nn.Linear(10, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(10, 10), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


def net(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return Net()


def data(micro: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * micro + rank))


def config(stage: int, precision: str, accumulation: int = 1) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "steps_per_print": None,
        "optimizer": {
            "type": "SGD",
            "params": {"lr": 0.0},
        },  # the weights stay the same for every kind of call
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **PRECISIONS[precision][0],
    }


def start(stage: int, precision: str, accumulation: int = 1, seed: int = 3) -> Any:
    return deepseek_zero.initialize(model=net(seed), config=config(stage, precision, accumulation))[
        0
    ]


def one(out: Tensor) -> Tensor:
    return (out.float() - 1.0).square().mean()


def other(out: Tensor) -> Tensor:
    return out.float().abs().mean()


def both(out: Tensor) -> Tensor:
    return one(out) + other(out)


def gradient_of(loss: Loss, out: Tensor) -> Tensor:
    """Return the gradient of the loss by the output, as passed to `Tensor.backward`."""
    leaf = out.detach().requires_grad_()
    return torch.autograd.grad(loss(leaf), leaf)[0]


def by_loss(engine: Any, x: Tensor, accumulation: int) -> None:
    both(engine(x)).backward()


def by_engine(engine: Any, x: Tensor, accumulation: int) -> None:
    engine.backward(both(engine(x)))


def by_scale(engine: Any, x: Tensor, accumulation: int) -> None:
    engine.scale(both(engine(x))).backward()


def by_engine_undivided(engine: Any, x: Tensor, accumulation: int) -> None:
    engine.backward(both(engine(x)) / accumulation, scale_wrt_gas=False)


def by_scale_undivided(engine: Any, x: Tensor, accumulation: int) -> None:
    engine.scale(both(engine(x)) / accumulation, scale_wrt_gas=False).backward()


def by_tensor(engine: Any, x: Tensor, accumulation: int) -> None:
    out = engine(x)
    out.backward(gradient_of(both, out))


def by_autograd_of_a_tensor(engine: Any, x: Tensor, accumulation: int) -> None:
    out = engine(x)
    torch.autograd.backward([out], [gradient_of(both, out)])


def by_autograd_of_losses(engine: Any, x: Tensor, accumulation: int) -> None:
    out = engine(x)
    torch.autograd.backward([one(out), other(out)])


def by_autograd_of_scaled_losses(engine: Any, x: Tensor, accumulation: int) -> None:
    out = engine(x)
    torch.autograd.backward([engine.scale(one(out)), engine.scale(other(out))])


def by_losses_in_turn(engine: Any, x: Tensor, accumulation: int) -> None:
    out = engine(x)
    one(out).backward(retain_graph=True)
    other(out).backward()


def by_engine_in_turn(engine: Any, x: Tensor, accumulation: int) -> None:
    out = engine(x)
    engine.backward(one(out), retain_graph=True)
    engine.backward(other(out))


def by_scale_in_turn(engine: Any, x: Tensor, accumulation: int) -> None:
    out = engine(x)
    engine.scale(one(out)).backward(retain_graph=True)
    engine.scale(other(out)).backward()


def by_all_in_turn(engine: Any, x: Tensor, accumulation: int) -> None:
    out = engine(x)
    (one(out) / 2).backward(retain_graph=True)
    engine.scale(one(out) / 2).backward(retain_graph=True)
    engine.backward(other(out))


def by_two_forwards(engine: Any, x: Tensor, accumulation: int) -> None:
    engine.backward(one(engine(x)))
    other(engine(x)).backward()


def by_two_forwards_of_one_loss(engine: Any, x: Tensor, accumulation: int) -> None:
    engine.backward(one(engine(x)) + other(engine(x)))


def by_module(engine: Any, x: Tensor, accumulation: int) -> None:
    both(engine.module(x)).backward()


WAYS = [value for name, value in list(globals().items()) if name.startswith("by_")]


def plain_gradients(
    accumulation: int, loss: Callable[[nn.Module, Tensor], Tensor], seed: int = 3
) -> dict[str, Tensor]:
    model = net(seed)
    for micro, rank in itertools.product(range(accumulation), range(world())):
        (loss(model, data(micro, rank)) / accumulation / world()).backward()
    return {name: param.grad for name, param in model.named_parameters()}


def norm_of(grads: dict[str, Tensor]) -> float:
    return float(torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt())


def check(engine: Any, expected: dict[str, Tensor], precision: str, what: str) -> None:
    """Step, then compare norm and gradients with the expected ones. Collective."""
    within, whole = PRECISIONS[precision][1], norm_of(expected)
    scale = engine.optimizer.loss_scale
    found = {
        name: safe_get_full_grad(param) / scale for name, param in engine.module.named_parameters()
    }
    engine.optimizer.step()
    norm = engine.optimizer.last.norm
    assert norm == pytest.approx(whole, rel=within), f"{what}: norm {norm}, expected {whole}"
    for name, grad in expected.items():
        far = float((found[name] - grad).norm())
        assert far <= within * whole, (
            f"{what}: {name} is {far} from a gradient of {float(grad.norm())}"
        )


on_stages_and_precisions = pytest.mark.parametrize(
    ("stage", "precision"),
    list(itertools.product(range(4), PRECISIONS)),
    ids=lambda value: str(value),
)


@pytest.mark.ranks(2)
@on_stages_and_precisions
def test_every_way_to_backward_gives_the_gradient_of_plain_torch(
    stage: int, precision: str
) -> None:
    for accumulation in (1, 4):
        expected = plain_gradients(accumulation, lambda model, x: both(model(x)))
        engine = start(stage, precision, accumulation)
        for way in WAYS:
            for micro in range(accumulation):
                engine.set_gradient_accumulation_boundary(micro == accumulation - 1)
                way(engine, data(micro, here()), accumulation)
            check(engine, expected, precision, f"{way.__name__}, accumulation {accumulation}")
        engine.destroy()


# -- submodules, inputs, second derivatives


class Towers(nn.Module):
    """Two encoders that programs also call separately, as in contrastive models."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)])
        self.right = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) * self.right(x)


def of_parts(model: Any, x: Tensor) -> Tensor:
    """Return a loss over submodules that are called separately, in sequence and in parallel."""
    module = getattr(model, "module", model)
    left = module.left(x)
    return (left * module.right(left)).float().square().mean() + left.float().mean()


@pytest.mark.ranks(2)
@on_stages_and_precisions
def test_parts_of_a_model_that_are_called_by_themselves_get_the_factor_too(
    stage: int, precision: str
) -> None:
    for accumulation in (1, 4):
        torch.manual_seed(5)
        plain = Towers()
        for micro, rank in itertools.product(range(accumulation), range(world())):
            (of_parts(plain, data(micro, rank)) / accumulation / world()).backward()
        expected = {name: param.grad for name, param in plain.named_parameters()}
        torch.manual_seed(5)
        engine = deepseek_zero.initialize(
            model=Towers(), config=config(stage, precision, accumulation)
        )[0]
        dtype = next(iter(engine.parameters())).dtype
        for way in (
            Tensor.backward,
            engine.backward,
            lambda loss, e=engine: e.scale(loss).backward(),
        ):
            for micro in range(accumulation):
                engine.set_gradient_accumulation_boundary(micro == accumulation - 1)
                engine(data(9, here()))  # a forward of the whole model, without backward
                way(of_parts(engine, data(micro, here()).to(dtype)))
            check(engine, expected, precision, f"{way}, accumulation {accumulation}")
        engine.destroy()


@pytest.mark.ranks(2)
@on_stages_and_precisions
def test_an_input_gets_the_gradient_of_what_was_differentiated(stage: int, precision: str) -> None:
    x = data(0, here()).requires_grad_()
    both(net()(x)).backward()
    expected, within = x.grad, PRECISIONS[precision][1]
    engine = start(stage, precision, 4)
    batch = {"x": data(0, here()).requires_grad_()}
    both(
        engine(**batch)
    ).backward()  # as in plain torch: the engine's scale does not reach the input
    assert batch["x"].grad is not None
    assert float((batch["x"].grad - expected).norm()) <= within * float(expected.norm())
    engine.optimizer.zero_grad()
    batch["x"].grad = None
    engine.backward(both(engine(**batch)))  # as for the loss returned by engine.scale
    scale = engine.optimizer.loss_scale / 4
    assert float((batch["x"].grad / scale - expected).norm()) <= within * float(expected.norm())


def penalty(model: Any, x: Tensor) -> Tensor:
    """Return a loss over the model's outputs and their gradient."""
    x = x.clone().requires_grad_()
    out = model(x).float()
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return one(out) + (slope.float().norm(dim=1) - 1.0).square().mean()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_gradient_of_a_gradient_is_scaled_with_the_loss_or_refused(
    stage: int, precision: str
) -> None:
    for accumulation in (1, 4):
        expected = plain_gradients(accumulation, penalty)
        engine = start(stage, precision, accumulation)
        ways: list[Callable[[Tensor], Any]] = [
            engine.backward,
            lambda loss, e=engine: e.scale(loss).backward(),
        ]
        has_factor = accumulation > 1 or precision == "fp16"
        for number, way in enumerate([*ways, *([] if has_factor else [Tensor.backward])]):
            for micro in range(accumulation):
                engine.set_gradient_accumulation_boundary(micro == accumulation - 1)
                way(penalty(engine, data(micro, here())))
            check(engine, expected, precision, f"way {number}, accumulation {accumulation}")
        if has_factor:
            with pytest.raises(UsageError, match="gradient of a gradient"):
                penalty(engine, data(0, here())).backward()
        engine.destroy()


# -- several engines


def test_a_loss_is_not_scaled_twice() -> None:
    engine = start(0, "fp16", 4)
    loss = both(engine(data(0, 0)))
    with pytest.raises(UsageError, match="scaled a second time"):
        engine.backward(engine.scale(loss))


@pytest.mark.ranks(2)
@on_stages_and_precisions
def test_a_loss_over_two_engines_gives_both_the_gradient_of_plain_torch(
    stage: int, precision: str
) -> None:
    def joint(first: Any, second: Any, x: Tensor) -> Tensor:
        made = first(x).float()
        # The engines run in parallel and in sequence
        return both(second(made)) + other(second(x)) + one(made)

    for accumulation, partner in ((1, precision), (4, precision), (4, "fp32")):
        plain = [net(3), net(4)]
        for micro, rank in itertools.product(range(accumulation), range(world())):
            (joint(*plain, data(micro, rank)) / accumulation / world()).backward()
        expected = [
            {name: param.grad for name, param in model.named_parameters()} for model in plain
        ]
        pair = [start(stage, precision, accumulation, 3), start(stage, partner, accumulation, 4)]
        ways: list[Callable[[Tensor], Any]] = [
            lambda loss: loss.backward(),
            lambda loss, pair=pair: pair[0].backward(loss),
            lambda loss, pair=pair: pair[1].backward(loss),
            lambda loss, pair=pair: pair[0].scale(loss).backward(),
        ]
        for number, way in enumerate(ways):
            for micro in range(accumulation):
                for engine in pair:
                    engine.set_gradient_accumulation_boundary(micro == accumulation - 1)
                way(joint(*pair, data(micro, here())))
            for engine, grads, loose in zip(pair, expected, (precision, "bf16"), strict=True):
                check(
                    engine,
                    grads,
                    max(precision, loose, key=lambda name: PRECISIONS[name][1]),
                    f"way {number}",
                )


@pytest.mark.ranks(2)
def test_engines_whose_loss_scales_differ_each_get_their_own() -> None:
    expected = [plain_gradients(1, lambda model, x: both(model(x)), seed) for seed in (3, 4)]
    pair = [start(3, "fp16", 1, 3), start(3, "fp16", 1, 4)]
    pair[1].optimizer.scaler.scale = 32.0
    x = data(0, here())
    for number in range(3):
        loss = both(pair[0](x)) + both(pair[1](x))
        loss.backward() if number == 2 else pair[number].backward(loss)
        for engine, grads in zip(pair, expected, strict=True):
            check(engine, grads, "fp16", f"way {number}")
    losses = [engine.scale(both(engine(x))) for engine in pair]
    with pytest.raises(UsageError, match=r"losses scaled by (256|32) and by (256|32)"):
        sum(losses).backward()
    assert both(pair[0](x)).isfinite()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", range(4))
def test_two_alternating_models_train_like_plain_torch(stage: int) -> None:
    top = config(stage, "fp32") | {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engines = [deepseek_zero.initialize(model=net(seed), config=top)[0] for seed in (3, 4)]
    models = [net(3), net(4)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]

    def end_turn(steps: list[Any], mine: int) -> None:
        steps[mine].step()
        for each in steps:
            each.zero_grad()

    for turn in range(3):
        for maker, judge, back, steps in (
            (*models, [Tensor.backward] * 2, optimizers),
            (*engines, [engine.backward for engine in engines], engines),
        ):
            x = data(turn, 0)  # the same on every rank, so that the reference needs no ranks
            back[1](one(judge(x)) + other(judge(maker(x).detach())))
            end_turn(steps, 1)
            back[0](one(judge(maker(x))))
            end_turn(steps, 0)
    for engine, model in zip(engines, models, strict=True):
        for name, value in engine.module_state_dict().items():
            torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", range(4))
def test_a_backward_of_a_forward_before_the_last_step_is_reported_once(
    stage: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine = deepseek_zero.initialize(model=net(3), config=config(stage, "fp32"))[0]
    early = [one(engine(data(0, 0))) for _ in range(2)]
    engine.backward(one(engine(data(0, 0))))
    assert "before the last step()" not in caplog.text
    engine.step()
    for loss in early:
        engine.backward(loss)
    assert caplog.text.count("before the last step()") == 1


# -- the plain loop


@pytest.mark.ranks(2)
@on_stages_and_precisions
def test_the_plain_loop_divides_once_by_the_key_or_by_hand(stage: int, precision: str) -> None:
    expected = plain_gradients(4, lambda model, x: both(model(x)))
    within, whole = PRECISIONS[precision][1], norm_of(expected)
    for declared in (False, True):
        top = config(stage, precision, 4 if declared else 1)
        del top["optimizer"]
        model = net()
        DeepSeekZeRO3(model, **top)
        optimizer = ZeroOptimizer(model.parameters(), lr=1.0, optimizer_type="sgd")
        before = {name: value.float() for name, value in model.state_dict().items()}
        for micro in range(4):
            loss = both(model(data(micro, here())))
            (loss if declared else loss / 4).backward()
        optimizer.step()
        assert optimizer.sharded is not None and optimizer.sharded.last is not None
        assert optimizer.sharded.last.norm == pytest.approx(whole, rel=within)
        for name, value in model.state_dict().items():  # allow for the rounding of 16-bit weights
            moved = before[name] - value.float()
            rounding = 0.0 if precision == "fp32" else 2.0**-8 * float(before[name].norm())
            assert float((moved - expected[name]).norm()) <= within * whole + rounding, name
