"""Names of benchmark cells are parsed, and model sizes match their names."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cells import CELLS, CONTEXT, SEQUENCES_PER_RANK, Cell
from benchmarks.model import Batches, build_model


@pytest.mark.parametrize(
    "cell",
    list(dict.fromkeys(cell for cells in CELLS.values() for cell in cells)),
    ids=lambda cell: cell.name,
)
def test_a_cell_is_read_back_from_its_name(cell: Cell) -> None:
    assert Cell.parse(cell.name) == cell


@pytest.mark.parametrize(
    "name", ["125m", "125m-fp16", "7b-fp32", "125m-fp32-acc1", "125m-fp32-4", "0x64-fp32"]
)
def test_a_name_that_is_no_cell_is_refused(name: str) -> None:
    with pytest.raises(ValueError):
        Cell.parse(name)


def test_a_shape_has_the_number_of_parameters_of_its_model() -> None:
    shape = Cell("3x128", "fp32").shape
    assert shape.numel == sum(param.numel() for param in build_model(shape).parameters())


@pytest.mark.parametrize(("size", "millions"), [("30m", 31.9), ("125m", 128.2), ("350m", 353.5)])
def test_sizes_are_as_large_as_they_are_called(size: str, millions: float) -> None:
    assert Cell(size, "fp32").shape.numel / 1e6 == pytest.approx(millions, abs=0.1)


def test_the_parts_of_the_ranks_make_the_whole_batch_of_the_one_process() -> None:
    cell = Cell("tiny", "fp32", 3)
    whole = Batches(cell, 2, 0, 1).of_step(5)
    parts = [Batches(cell, 2, rank, 2).of_step(5) for rank in range(2)]
    assert len(whole) == 3
    for number, (tokens, targets) in enumerate(whole):
        assert tokens.shape == (2 * SEQUENCES_PER_RANK, CONTEXT)
        assert torch.equal(tokens, torch.cat([part[number][0] for part in parts]))
        assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_steps_train_on_different_text() -> None:
    batches = Batches(Cell("tiny", "fp32"), 2, 0, 1)
    assert not torch.equal(batches.of_step(0)[0][0], batches.of_step(1)[0][0])
