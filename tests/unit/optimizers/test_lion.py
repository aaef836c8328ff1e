"""Lion is compared with a scalar implementation of the paper, and with updates of slices."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from deepseek_zero.base.device import PerDevice
from deepseek_zero.base.errors import ConfigError
from deepseek_zero.optimizers import lion
from deepseek_zero.optimizers.lion import Lion


def slow_lion(
    weight: list[float],
    grads: list[list[float]],
    lr: float,
    betas: tuple[float, float],
    decay: float,
):
    """Compute program 1 of the paper, one float at a time."""
    momentum = [0.0] * len(weight)
    for grad in grads:
        for i, g in enumerate(grad):
            blend = betas[0] * momentum[i] + (1 - betas[0]) * g
            sign = math.copysign(1.0, blend) if blend else 0.0
            weight[i] = weight[i] - lr * (sign + decay * weight[i])
            momentum[i] = betas[1] * momentum[i] + (1 - betas[1]) * g
    return weight, momentum


def train(weights: list[Tensor], grads: list[list[Tensor]], **settings: object) -> Lion:
    optimizer = Lion(weights, **settings)
    for step in grads:
        for weight, grad in zip(weights, step, strict=True):
            weight.grad = grad.clone()
        optimizer.step()
    return optimizer


def test_lion_follows_the_paper() -> None:
    start, grads = torch.randn(7, 5), [torch.randn(7, 5) for _ in range(6)]
    weight = start.clone()
    optimizer = train(
        [weight], [[grad] for grad in grads], lr=0.03, betas=(0.8, 0.95), weight_decay=0.1
    )
    plain = [grad.flatten().tolist() for grad in grads]
    expected, momentum = slow_lion(start.flatten().tolist(), plain, 0.03, (0.8, 0.95), 0.1)
    torch.testing.assert_close(weight.flatten(), torch.tensor(expected))
    torch.testing.assert_close(optimizer.state[weight]["exp_avg"].flatten(), torch.tensor(momentum))


@pytest.mark.parametrize("cuts", [(1, 2, 3), (37, 1000), (512,)])
def test_slices_give_the_same_bits_as_the_whole(cuts: tuple[int, ...]) -> None:
    start, grads = torch.randn(1031), [torch.randn(1031) for _ in range(4)]
    whole = start.clone()
    train([whole], [[grad] for grad in grads], lr=0.01, weight_decay=0.1)
    slices = [shard.clone() for shard in start.tensor_split(cuts)]
    train(slices, [list(grad.tensor_split(cuts)) for grad in grads], lr=0.01, weight_decay=0.1)
    assert torch.equal(torch.cat(slices), whole)


def test_the_tile_size_does_not_change_results(monkeypatch: pytest.MonkeyPatch) -> None:
    start, grad = torch.randn(3, 100), torch.randn(3, 100)
    whole, tiled = start.clone(), start.clone()
    train([whole], [[grad]])
    monkeypatch.setattr(lion, "_TILE_NUMEL", PerDevice(cpu=64, accelerator=64))
    train([tiled], [[grad]])
    assert torch.equal(tiled, whole)


def test_a_transposed_parameter_is_updated_in_place() -> None:
    start, grad = torch.randn(4, 6), torch.randn(4, 6)
    plain, transposed = start.clone(), start.t().contiguous().t()
    train([plain], [[grad]])
    train([transposed], [[grad]])
    assert torch.equal(plain, transposed)


def test_groups_have_their_own_rate_and_gradients_stay() -> None:
    slow, fast, idle = torch.ones(3), torch.ones(3), torch.ones(3)
    optimizer = Lion(
        [{"params": [slow], "lr": 0.1}, {"params": [fast], "lr": 0.2}, {"params": [idle]}]
    )
    slow.grad, fast.grad = torch.full((3,), 5.0), torch.full((3,), -5.0)
    optimizer.step()
    assert torch.equal(slow, torch.full((3,), 0.9)) and torch.equal(fast, torch.full((3,), 1.2))
    assert torch.equal(idle, torch.ones(3)) and torch.equal(slow.grad, torch.full((3,), 5.0))


def test_a_saved_state_resumes_with_the_same_bits() -> None:
    start, grads = torch.randn(9), [torch.randn(9) for _ in range(4)]
    straight = start.clone()
    train([straight], [[grad] for grad in grads])
    resumed = start.clone()
    saved = train([resumed], [[grad] for grad in grads[:2]]).state_dict()
    optimizer = Lion([resumed])
    optimizer.load_state_dict(saved)
    for grad in grads[2:]:
        resumed.grad = grad
        optimizer.step()
    assert torch.equal(resumed, straight)


@pytest.mark.parametrize(
    "settings", [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"betas": (0.9,)}, {"weight_decay": -0.1}]
)
def test_impossible_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="Lion cannot use"):
        Lion([torch.ones(1)], **settings)
