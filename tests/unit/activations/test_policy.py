"""Selective recomputation: gradients are unchanged, and kept results are computed only once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepseek_zero.activations import recompute
from deepseek_zero.activations.policy import operators_of
from deepseek_zero.activations.recompute import RecomputeSettings, checkpoint
from deepseek_zero.base.device import dispatch_mode
from deepseek_zero.base.errors import UsageError
from deepseek_zero.tiers.tier import Tier

HEADS, WIDTH, TOKENS = 2, 32, 40
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
POLICIES = (("full",), ("attention",), ("matmul",), ("addmm", "aten::tanh"))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.into(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts, is_causal=True)
        return x + F.dropout(torch.tanh(self.out(seen.transpose(1, 2).reshape(x.shape))), 0.3)


@contextmanager
def configured(
    policy: tuple[str, ...] | None, tier: Tier | None = None, path: Path | None = None
) -> Iterator[Any]:
    found = recompute.configure(RecomputeSettings(tier, path, policy=policy))
    try:
        yield found
    finally:
        recompute.release(found)


def gradients(run: Callable[..., Any], backwards: int = 1) -> list[Tensor]:
    torch.manual_seed(3)
    blocks = nn.ModuleList(Block() for _ in range(3))
    x = first = torch.randn(2, TOKENS, WIDTH, requires_grad=True)
    x = x * 1
    for block in blocks:
        x = run(block, x)
    loss = x.square().mean()
    for left in reversed(range(backwards)):
        loss.backward(retain_graph=left > 0)
    assert first.grad is not None
    return [
        loss.detach(),
        first.grad,
        *(param.grad for param in blocks.parameters() if param.grad is not None),
    ]


def straight(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


@pytest.mark.parametrize("tier", [None, Tier.HOST, Tier.NVME])
def test_gradients_have_the_bits_of_a_run_without(tier: Tier | None, tmp_path: Path) -> None:
    for backwards in (1, 2):
        expected = gradients(straight, backwards)
        for policy in POLICIES:
            with configured(policy, tier, tmp_path) as found:
                assert all(map(torch.equal, gradients(checkpoint, backwards), expected)), policy
                if found.parking is not None:
                    assert found.parking.used_bytes == 0
                    assert found.parking._arrived > 3 or policy == ("full",), (
                        "results wait where inputs do"
                    )


def calls(policy: tuple[str, ...]) -> Counter[Any]:
    """Count the calls of each operator in a step."""
    found: Counter[Any] = Counter()

    def count(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found[operator] += 1
        return operator(*args, **kwargs)

    with configured(policy), dispatch_mode(count):
        gradients(checkpoint)
    return found


def test_kept_results_are_computed_once() -> None:
    addmm, tanh = torch.ops.aten.addmm.default, torch.ops.aten.tanh.default
    found = {policy: calls(policy) for policy in POLICIES}
    assert [found[policy][FLASH] for policy in POLICIES] == [6, 3, 3, 6]
    assert [found[policy][addmm] for policy in POLICIES] == [12, 12, 6, 6]
    assert [found[policy][tanh] for policy in POLICIES] == [6, 6, 6, 3]


def test_random_results_are_not_kept() -> None:
    """If a policy kept random results, the recomputation would draw other numbers after them."""
    expected = gradients(straight)
    with configured(("native_dropout", "bernoulli_", "bernoulli")):
        assert all(map(torch.equal, gradients(checkpoint), expected))


def test_invalid_policies_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="'no_such_operator', and torch has no such operator"):
        operators_of(("attention", "no_such_operator"))

    def changes(x: Tensor) -> Tensor:
        return torch.tanh(x @ x.t()).mul_(2).exp()

    def changes_at_once(x: Tensor) -> Tensor:
        return (x @ x.t()).mul_(2).exp()

    x = torch.randn(4, 4, requires_grad=True)
    with configured(("mm",)):
        checkpoint(changes, x).sum().backward()
        with pytest.raises(UsageError, match=r"the result of aten.mm.default was changed in place"):
            checkpoint(changes_at_once, x).sum().backward()
