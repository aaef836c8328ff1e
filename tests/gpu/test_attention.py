"""Sparse attention on a GPU: compiled FlexAttention equals attention by its definition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from deepseek_zero.attention.attend import attend
from deepseek_zero.attention.flex import is_usable
from deepseek_zero.attention.layouts import BigBird, BSLongformer, Fixed
from deepseek_zero.attention.plan import Pattern
from tests.unit.attention.dense import apart, dense, tensors, with_gradients

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
UNI: dict[str, Any] = {"attention": "unidirectional"}


def on_gpu(given: Sequence[Tensor]) -> list[Tensor]:
    return [each.detach().cuda().requires_grad_(each.requires_grad) for each in given]


@pytest.mark.parametrize(
    "pattern",
    [
        Pattern.of(
            Fixed(block=16, different_layout_per_head=True, num_different_global_patterns=4, **UNI)
        ),
        Pattern.of(BigBird(block=32)),
        Pattern.of(BSLongformer(block=128, num_sliding_window_blocks=1, **UNI)),
        Pattern.of(None, is_causal=True, window=100),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_dense_attention(
    pattern: Pattern, dtype: torch.dtype
) -> None:
    given = tensors(2, 4, 2, 300, 300, 64, dtype)
    here = on_gpu(given)
    assert is_usable(here[0], here[2])
    exact = [each.detach().double().requires_grad_(each.requires_grad) for each in given]
    kept = (torch.arange(300) < torch.tensor([[300], [280]]))[:, None, None]
    for biases in ([], [kept]):
        found = with_gradients(
            attend(*here[:3], pattern, biases=[each.cuda() for each in biases]), here
        )
        expected = with_gradients(dense(*exact[:3], pattern, biases), exact)
        assert apart([each.cpu() for each in found], expected) < (
            2e-2 if dtype == torch.float32 else 5e-2
        )
        again = with_gradients(
            attend(*here[:3], pattern, biases=[each.cuda() for each in biases]), here
        )
        assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


def test_numbers_in_64_bits_go_by_tiles() -> None:
    given = on_gpu(tensors(1, 4, 2, 100, 100, 8))
    pattern = Pattern.of(BigBird(block=16, **UNI))
    found = with_gradients(attend(*given[:3], pattern), given)
    exact = [each.detach().cpu().requires_grad_(each.requires_grad) for each in given]
    assert (
        apart([each.cpu() for each in found], with_gradients(dense(*exact[:3], pattern), exact))
        < 1e-10
    )
