"""Test which ranks are merged if a checkpoint is loaded with another shape."""

from __future__ import annotations

from deepseek_zero.compat.deepspeed import (
    checkpoint_shapes,
)


def test_reshaping_a_checkpoint_lists_the_ranks_that_are_merged() -> None:
    source, target = (
        checkpoint_shapes.model_3d_desc(2, 2, 2),
        checkpoint_shapes.model_3d_desc(1, 2, 2),
    )
    maps = source.reshape(target)
    assert [each.get_data(0, 0) for each in maps] == [[0, 4], [2, 6]]
    assert target.can_reshape(source)[0] is False
