"""Spans of files arrive complete and in order with every method of reading."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from deepseek_zero.checkpoint import readahead
from deepseek_zero.checkpoint.readahead import ByteRange, read_ahead

NUM_BYTES = 3 * 4096 + 77


@pytest.fixture(params=["direct", "cached", "slow", "refused", "nowhere"])
def file(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[int, bytes]]:
    """Return a file descriptor and the content of its file."""
    data = random.Random(1).randbytes(NUM_BYTES)
    path = tmp_path / "file"
    path.write_bytes(data)
    descriptor = os.open(path, os.O_RDONLY)
    monkeypatch.setattr(readahead, "BLOCK_BYTES", 4096)
    if request.param != "cached":
        monkeypatch.setattr(readahead, "is_cached", lambda *_: False)
    if request.param == "slow":
        monkeypatch.setattr(readahead, "FAST", float("inf"))
    if request.param == "refused":
        monkeypatch.setattr(readahead, "_O_DIRECT", os.O_DIRECTORY)
    if request.param == "nowhere":
        honest = os.preadv
        monkeypatch.setattr(
            os,
            "preadv",
            lambda file, *rest: honest(file, *rest) if file == descriptor else _refuse(),
        )
    yield descriptor, data
    os.close(descriptor)


def _refuse() -> int:
    raise OSError(22, "Invalid argument")


def test_spans_are_returned_in_order_and_complete(file: tuple[int, bytes]) -> None:
    descriptor, data = file
    ends = [0, 8, 8, 100, 4095, 4096, 9000, NUM_BYTES]
    spans = [ByteRange(descriptor, low, high, read_again=True) for low, high in pairwise(ends)]
    spans += [
        ByteRange(descriptor, 5000, 12000),
        ByteRange(descriptor, 16, 24),
        ByteRange(descriptor, 24, 24),
    ]
    found = dict.fromkeys(spans, b"")
    order = []
    for piece in read_ahead(spans):
        assert piece.start == piece.range.start + len(found[piece.range])
        found[piece.range] += piece.data.numpy().tobytes()
        order.append(spans.index(piece.range))
    assert order == sorted(order)
    assert all(values == data[span.start : span.stop] for span, values in found.items())


def test_a_truncated_file_is_an_error_for_reads_past_its_end_only(
    file: tuple[int, bytes],
) -> None:
    descriptor, data = file
    inside, outside = read_ahead(
        [
            ByteRange(descriptor, NUM_BYTES - 9, NUM_BYTES),
            ByteRange(descriptor, NUM_BYTES, NUM_BYTES + 8),
        ]
    )
    assert inside.data.numpy().tobytes() == data[-9:]
    with pytest.raises(OSError, match="the file ended early"):
        _ = outside.data
