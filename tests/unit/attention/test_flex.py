"""FlexAttention's block masks, and the results of its uncompiled version on a CPU.

tests/gpu tests the compiled version.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepseek_zero.attention import flex
from deepseek_zero.attention.flex import SIDE, attend_flex
from deepseek_zero.attention.layouts import BSLongformer, Fixed, LocalSlidingWindow
from deepseek_zero.attention.plan import Pattern
from tests.unit.attention.dense import apart, dense, tensors

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
UNI: dict[str, Any] = {"attention": "unidirectional"}


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(flex, "compiled", lambda: flex_attention)


@pytest.mark.parametrize(
    "pattern",
    [
        Pattern.of(
            Fixed(block=16, different_layout_per_head=True, num_different_global_patterns=4, **UNI)
        ),
        Pattern.of(BSLongformer(block=SIDE, num_sliding_window_blocks=1, **UNI)),
        Pattern.of(LocalSlidingWindow(block=48), window=100),
    ],
)
def test_a_block_mask_shows_what_the_pattern_does(pattern: Pattern) -> None:
    query, key, value = (
        each.detach() for each in tensors(2, 4, 2, 140, 260, 16, torch.float32)[:3]
    )
    kept = (torch.arange(260) < torch.tensor([[260], [240]]))[:, None, None]
    for biases in ([], [kept, torch.randn(1, 4, 140, 260)]):
        found = attend_flex(query, key, value, pattern, 0.25, biases, 0)
        assert apart([found], [dense(query, key, value, pattern, biases, 0.25)]) < 5e-6, len(biases)


def test_a_mask_rule_is_evaluated_only_for_blocks_that_are_partly_visible() -> None:
    query, key, value = (
        each.detach() for each in tensors(1, 2, 2, 256, 256, 16, torch.float32)[:3]
    )

    def same_half(sample: Any, query: Any, key: Any) -> Any:
        return (query < 100) == (key < 100)

    found = attend_flex(query, key, value, Pattern(ahead=0), 0.25, [same_half], 0)
    place = torch.arange(256)
    halves = same_half(None, place[:, None], place[None])[None, None]
    assert apart([found], [dense(query, key, value, Pattern(ahead=0), [halves], 0.25)]) < 5e-6
