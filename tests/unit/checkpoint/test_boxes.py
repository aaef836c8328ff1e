"""A range of a part maps to boxes of the whole parameter; any part is assembled from others."""

from __future__ import annotations

import itertools
import random
from contextlib import ExitStack
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepseek_zero.base.errors import CheckpointError
from deepseek_zero.checkpoint.boxes import ParamPart, assemble, boxes_of, first_gap, flat_boxes
from deepseek_zero.checkpoint.format import WEIGHT, Manifest, SavedChunk, StateRange
from deepseek_zero.checkpoint.read import CheckpointReader
from deepseek_zero.checkpoint.safetensors_file import TensorInfo, encode_header
from deepseek_zero.checkpoint.verify import _missing_elements
from deepseek_zero.planner.layout import Shape
from deepseek_zero.planner.split import Split
from tests.split_model import cut

SPLITS = {
    "rows": Split.even((6, 5), 0, 2),
    "columns": Split.even((5, 6), 1, 3),
    "three blocks of rows": Split.even((12, 3), 0, 2, blocks=3),
    "three blocks of columns": Split.even((3, 12), 1, 2, blocks=3),
    "uneven": Split("split", (7, 3), 0, (((0, 1),), ((1, 5),), ((5, 7),))),
    "shared": Split("split", (4, 3), 0, (((0, 2),), ((0, 2),), ((2, 4),), ((2, 4),))),
    "overlapping": Split("split", (4, 3), 0, (((0, 3),), ((1, 4),))),
    "padded": Split("split", (5, 2), 0, (((0, 3),), ((3, 6),))),
    "inner": Split.even((2, 3, 4, 5), 2, 2),
    "vector": Split.even((9,), 0, 3),
}
WAYS = {  # several splits of one parameter
    "rows": Split.even((6, 5), 0, 2),
    "whole": Split.whole("equal", (6, 5), 2),
    "columns": Split.even((6, 5), 1, 5),
    "blocks": Split.even((6, 5), 0, 3, blocks=2),
}
over = pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)


def numbered(shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of distinct nonzero values."""
    return torch.arange(1.0, prod(shape) + 1).view(shape)


@over
def test_each_element_of_a_range_is_in_one_box_and_padding_in_none(split: Split) -> None:
    whole = numbered(split.shape)
    for coordinate in range(len(split.ranges)):
        part = ParamPart(split.shape, split.dim, split.ranges[coordinate])
        local = cut(whole, split, coordinate).reshape(-1)
        for start, stop in itertools.combinations(range(part.numel + 1), 2):
            found = torch.zeros(stop - start)
            parts = boxes_of(part, start, stop)
            for box in parts:
                region = tuple(
                    slice(low, high) for low, high in zip(box.low, box.high, strict=True)
                )
                found.as_strided(box.size, box.strides, box.at).add_(whole[region])
            assert torch.equal(found, local[start:stop])
            assert len(parts) <= (2 * len(split.shape) - 1) * len(part.ranges)


def test_a_scalar_is_one_box() -> None:
    (box,) = boxes_of(ParamPart.whole(()), 0, 1)
    assert (box.size, box.at, box.numel) == ((), 0, 1)


@over
def test_a_part_is_read_from_flat_ranges_of_the_whole(split: Split) -> None:
    whole = numbered(split.shape).reshape(-1)

    for coordinate in range(len(split.ranges)):
        part = ParamPart.of(split, coordinate)
        assert part is not None
        start, stop = part.numel // 3, part.numel
        found = torch.zeros(stop - start)
        middle = whole.numel() // 2
        sources = [(ParamPart.whole(split.shape), at, whole[at:][:middle]) for at in (0, middle)]
        sources.append((ParamPart.whole(split.shape), whole.numel() - 1, whole[-1:]))
        for at, values in assemble(part, start, stop, sources, AssertionError("missing")):
            found[at - start : at - start + values.numel()] = values
        assert torch.equal(
            found, cut(whole.view(split.shape), split, coordinate).reshape(-1)[start:stop]
        )


class Saved:
    """A checkpoint of one weight that is split into parts and then into even slices.

    Each rank's file contains one slice.
    """

    def __init__(self, folder: Path, split: Split, slices: int) -> None:
        self.folder, self.split = folder, split
        self.whole = numbered(split.shape)
        self.chunks: list[SavedChunk] = []
        for coordinate in range(len(split.ranges)):
            if not split.is_counted_at(coordinate):
                continue
            local = cut(self.whole, split, coordinate).reshape(-1)
            edges = [local.numel() * number // slices for number in range(slices + 1)]
            for start, stop in itertools.pairwise(edges):
                if start < stop:
                    self._write(
                        SavedChunk(
                            WEIGHT,
                            "w",
                            "",
                            start,
                            stop,
                            len(self.chunks),
                            part=ParamPart.of(split, coordinate),
                        ),
                        local,
                    )

    def _write(self, chunk: SavedChunk, local: Tensor) -> None:
        values = local[chunk.start : chunk.stop]
        header = encode_header(
            [TensorInfo(chunk.tensor_name, tuple(values.shape), values.dtype)], {}
        )
        (self.folder / chunk.file).write_bytes(header + values.numpy().tobytes())
        self.chunks.append(chunk)

    @property
    def manifest(self) -> Manifest:
        facts = {"w": {"shape": list(self.split.shape), "dtype": "float32", "trained": True}}
        return Manifest(2, 3, {}, facts, {}, self.chunks, None, {}, [])


def read_all(saved: Saved, part: ParamPart | None, stack: ExitStack, cuts: int = 2) -> Tensor:
    reader = CheckpointReader(saved.folder, saved.chunks, stack)
    total = saved.whole.numel() if part is None else part.numel
    found = torch.full((total,), float("nan"))
    for number in range(cuts):
        start, stop = (total * each // cuts for each in (number, number + 1))
        for at, values in reader.read(StateRange(WEIGHT, "w", "", start, stop, part=part)):
            found[at : at + values.numel()] = values
    return found


@pytest.mark.parametrize("slices", [1, 2, 5])
@pytest.mark.parametrize("saved_split", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("read_split", WAYS.values(), ids=WAYS)
def test_any_part_is_read_from_any_others(
    tmp_path: Path, saved_split: Split, read_split: Split, slices: int
) -> None:
    saved = Saved(tmp_path, saved_split, slices)
    with ExitStack() as stack:
        for coordinate in range(len(read_split.ranges)):
            found = read_all(saved, ParamPart.of(read_split, coordinate), stack)
            assert torch.equal(found, cut(saved.whole, read_split, coordinate).reshape(-1))


@over
@pytest.mark.parametrize("slices", [1, 3])
def test_the_whole_is_read_from_parts_and_a_gap_is_an_error(
    tmp_path: Path, split: Split, slices: int
) -> None:
    saved = Saved(tmp_path, split, slices)
    with ExitStack() as stack:
        assert torch.equal(read_all(saved, None, stack), saved.whole.reshape(-1))
        assert not list(_missing_elements(saved.manifest))
        lacking = saved.chunks.pop(len(saved.chunks) // 2)
        has_others = any(chunk.part == lacking.part for chunk in saved.chunks)
        (fault,) = _missing_elements(saved.manifest)
        assert ("ends at element" if has_others else "lacks index") in str(fault)
        if split is not SPLITS["overlapping"]:
            with pytest.raises(CheckpointError, match="are in no file"):
                read_all(saved, None, stack)


def test_a_gap_between_parts_is_found() -> None:
    parts = [ParamPart((8, 2), 0, ((0, 2), (4, 6))), ParamPart((8, 2), 0, ((6, 8),))]
    assert first_gap(parts) == 2
    assert first_gap([*parts, ParamPart((8, 2), 0, ((2, 5),))]) is None


def test_a_manifest_with_parts_has_its_own_version_and_is_read_back(tmp_path: Path) -> None:
    saved = Saved(tmp_path, SPLITS["three blocks of columns"], 2)
    path = tmp_path / "manifest.json"
    path.write_text(saved.manifest.text())
    found = Manifest.read(path)
    assert found.version == 3 and found.chunks == saved.chunks
    whole = Saved(tmp_path, Split.whole("equal", (6, 5), 2), 2)
    path.write_text(whole.manifest.text())
    assert Manifest.read(path).version == 2 and '"w", "", 0, 15, 0, null]' in path.read_text()


SHAPES: list[Shape] = [
    (),
    (0,),
    (1,),
    (7,),
    (5, 3),
    (1, 9),
    (4, 1, 6),
    (2, 3, 4, 5),
    (3, 0, 2),
    (1025,),
    (33, 65),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boxes_cover_every_element_once_whatever_the_cut(shape: Shape) -> None:
    numel = prod(shape)
    cuts = [
        (0, numel),
        (0, 0),
        (numel, numel),
        (numel // 3, numel),
        (0, numel - numel // 5),
        (numel // 4, numel // 2),
    ]
    for start, stop in cuts:
        _assert_boxes_are_exact(shape, start, stop)


@pytest.mark.parametrize("seed", range(60))
def test_boxes_cover_every_element_once_for_random_shapes_and_cuts(seed: int) -> None:
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 5) for _ in range(draw.randint(0, 5)))
    start, stop = sorted(draw.randint(0, prod(shape)) for _ in range(2))
    _assert_boxes_are_exact(shape, start, stop)


def _assert_boxes_are_exact(shape: Shape, start: int, stop: int) -> None:
    """Check that the boxes of a tensor of flat positions yield the range [start, stop) in order."""
    positions = torch.arange(prod(shape)).reshape(shape)
    found: list[int] = []
    for offset, size, flat_start in flat_boxes(shape, start, stop):
        part = positions[
            tuple(slice(low, low + length) for low, length in zip(offset, size, strict=True))
        ]
        assert part.shape == size
        assert part.reshape(-1)[0] == flat_start
        found += part.reshape(-1).tolist()
    assert found == list(range(start, stop))
