"""Test how a reduction is split into messages."""

from __future__ import annotations

from deepseek_zero.planner.messages import messages_of


def test_messages_have_the_least_size_of_a_bucket_a_slice_and_a_codec_limit() -> None:
    assert messages_of(5 << 20, 2, 1 << 62) == (5 << 20, 1)
    assert messages_of(5 << 20, 2, 1 << 22) == (1 << 21, 2)
    assert messages_of(5 << 20, 2, 1 << 62, 1 << 20) == (1 << 20, 2)
    assert messages_of(1 << 12, 2, 1 << 62, 1 << 20) == (1 << 12, 1)
