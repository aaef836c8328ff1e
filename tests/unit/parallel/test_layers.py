"""Layers that are split over tensor-parallel ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from deepseek_zero.parallel.layers import LayerPart, look_up
from deepseek_zero.planner.split import Split

ROWS, RANKS = 12, 3


def embeddings_of(ids: Tensor, coordinate: int) -> Tensor:
    """Return the embeddings of the indices on one of three ranks."""
    table = torch.arange(2.0 * ROWS).view(ROWS, 2)
    part = LayerPart("tokens", Split.even((ROWS, 2), 0, RANKS))
    return look_up(table.chunk(RANKS)[coordinate], part, coordinate, ids, None)


@pytest.mark.parametrize("index", [-1, -7, ROWS, ROWS + 5])
def test_an_index_outside_of_the_vocabulary_raises_on_every_rank(index: int) -> None:
    ids = torch.tensor([[0, 5], [index, ROWS - 1]])
    with pytest.raises(IndexError) as expected:
        nn.Embedding(ROWS, 2)(ids)
    for coordinate in range(RANKS):
        with pytest.raises(IndexError) as found:
            embeddings_of(ids, coordinate)
        assert str(found.value) == str(expected.value)
