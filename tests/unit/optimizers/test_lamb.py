"""LAMB is compared with algorithm 2 of the paper in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepseek_zero.base.errors import ConfigError
from deepseek_zero.optimizers.lamb import Lamb


def slow_lamb(weight: Tensor, grads: list[Tensor], settings: dict) -> Tensor:
    """Algorithm 2 of the paper in float64."""
    weight = weight.double()
    beta1, beta2 = settings["betas"]
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    for step, grad in enumerate((g.double() for g in grads), start=1):
        mean = beta1 * mean + (1 - beta1) * grad
        square = beta2 * square + (1 - beta2) * grad**2
        corrected = settings.get("bias_correction", True)
        m = mean / (1 - beta1**step) if corrected else mean
        v = square / (1 - beta2**step) if corrected else square
        update = m / (v**0.5 + settings["eps"]) + settings["weight_decay"] * weight
        norms = float((weight**2).sum() ** 0.5), float((update**2).sum() ** 0.5)
        ratio = min(max(norms[0] / norms[1], 0.01), 10.0) if all(norms) else 1.0
        weight = weight - settings["lr"] * ratio * update
    return weight


def train(weights: list[Tensor], grads: list[list[Tensor]], settings: dict) -> Lamb:
    optimizer = Lamb(weights, **settings)
    for step in grads:
        for weight, grad in zip(weights, step, strict=True):
            weight.grad = grad.clone()
        optimizer.step()
    return optimizer


SETTINGS = {"lr": 0.05, "betas": (0.8, 0.97), "eps": 1e-6, "weight_decay": 0.1}


@pytest.mark.parametrize("bias_correction", [True, False])
def test_lamb_follows_the_paper_tensor_by_tensor(bias_correction: bool) -> None:
    settings = {**SETTINGS, "bias_correction": bias_correction}
    starts = [
        torch.randn(6, 4),
        torch.randn(5) * 0.01,
        torch.randn(2, 3, 2) * 100,
        torch.tensor(1.5),
    ]
    grads = [[torch.randn_like(start) for start in starts] for _ in range(5)]
    weights = [start.clone() for start in starts]
    train(weights, grads, settings)
    for i, weight in enumerate(weights):
        expected = slow_lamb(starts[i], [step[i] for step in grads], settings)
        torch.testing.assert_close(weight.double(), expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(("scale", "expected"), [(1000.0, 10.0), (1e-6, 0.01)])
def test_the_trust_ratio_is_bounded(scale: float, expected: float) -> None:
    start = torch.full((4,), scale)
    weight = start.clone()
    train([weight], [[torch.ones(4)]], {"lr": 1.0, "eps": 0.0})
    torch.testing.assert_close(start - weight, torch.full((4,), expected), rtol=1e-3, atol=0)


def test_a_zero_tensor_moves_with_ratio_one() -> None:
    weight = torch.zeros(4)
    train([weight], [[torch.ones(4)]], {"lr": 0.5, "eps": 0.0})
    torch.testing.assert_close(weight, torch.full((4,), -0.5))


def test_a_zero_update_leaves_the_weight() -> None:
    weight = torch.ones(4)
    train([weight], [[torch.zeros(4)]], {"lr": 0.5})
    assert torch.equal(weight, torch.ones(4))


def test_halves_of_a_tensor_differ_from_the_whole_so_it_must_not_be_cut() -> None:
    start, grad = torch.cat([torch.ones(4), torch.full((4,), 9.0)]), torch.randn(8)
    whole, halves = start.clone(), [half.clone() for half in start.split(4)]
    train([whole], [[grad]], SETTINGS)
    train(halves, [list(grad.split(4))], SETTINGS)
    assert not torch.allclose(torch.cat(halves), whole) and Lamb.granularity == "tensor"


def test_a_saved_state_resumes_with_the_same_bits() -> None:
    start, grads = torch.randn(3, 3), [torch.randn(3, 3) for _ in range(4)]
    straight, resumed = start.clone(), start.clone()
    train([straight], [[grad] for grad in grads], SETTINGS)
    saved = train([resumed], [[grad] for grad in grads[:2]], SETTINGS).state_dict()
    optimizer = Lamb([resumed], **SETTINGS)
    optimizer.load_state_dict(saved)
    for grad in grads[2:]:
        resumed.grad = grad
        optimizer.step()
    assert torch.equal(resumed, straight)


@pytest.mark.parametrize(
    "settings",
    [{"lr": -1.0}, {"min_coeff": 2.0, "max_coeff": 1.0}, {"betas": (0.9, 1.0)}, {"betas": (0.9,)}],
)
def test_impossible_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="Lamb cannot use"):
        Lamb([torch.ones(1)], **settings)
