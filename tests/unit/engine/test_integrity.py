"""Checksums of all ranks are compared to find the ranks that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from deepseek_zero.engine.integrity import Table, differences, found_in


def tables(**states: Sequence[Sequence[int] | None]) -> dict[int, Table]:
    """Return the checksums of each rank.

    states: for each rank its checksum per block, or None if the rank does not have the state.
    """
    (ranks,) = {len(each) for each in states.values()}
    return {
        rank: {
            name: [(value, f"{name} of 'p{block}'") for block, value in enumerate(sums)]
            for name, each in states.items()
            if (sums := each[rank]) is not None
        }
        for rank in range(ranks)
    }


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (tables(weight=[[1, 2], [1, 2], [1, 2]]), []),
        (
            tables(weight=[[1, 2], [1, 3], [1, 2]]),
            ["weight of 'p1' differs on rank 1 from ranks 0, 2"],
        ),
        (
            tables(weight=[[9], [1], [1], [8]]),
            ["weight of 'p0' differs between ranks 0, 1, 2, 3, without a majority"],
        ),
        (
            tables(weight=[[9], [1], [1], [8], [1]]),
            ["weight of 'p0' differs on ranks 0, 3 from ranks 1, 2, 4"],
        ),
        (
            tables(weight=[[1], [2]]),
            ["weight of 'p0' differs between ranks 0, 1, without a majority"],
        ),
        (
            tables(weight=[[1, 5, 6], [1, 2, 3], [1, 2, 3]]),
            ["weight of 'p1' (and 1 MiB more) differs on rank 0 from ranks 1, 2"],
        ),
        (
            tables(weight=[[1], [1], [1]], gradient=[[4], None, [4]]),
            [],
        ),  # only the ranks that have the state are compared
        (
            tables(weight=[[1], [1], [2]], master=[[1], [3], [1]]),
            [
                "weight of 'p0' differs on rank 2 from ranks 0, 1",
                "master of 'p0' differs on rank 1 from ranks 0, 2",
            ],
        ),
        ({5: tables(weight=[[1]])[0]}, []),
    ],
)
def test_differences_are_reported_for_the_minority_of_ranks(
    found: Mapping[int, Table], expected: list[str]
) -> None:
    assert differences(found) == expected


def test_pieces_are_compared_among_themselves_and_replicas_their_slices() -> None:
    whole = tables(weight=[[1], [1], [7], [7]])  # two parts of a model
    slices = tables(moment=[[1], [2], [1], [3]])  # ranks 0 and 2 share a slice, 1 and 3 too
    heard = [
        (whole[rank], slices[rank], [] if rank != 3 else ["master of 'a'"]) for rank in range(4)
    ]
    assert found_in(heard, ((0, 1), (2, 3)), ((0, 2), (1, 3))) == [
        "master of 'a' changed on rank 3 although nothing wrote it",
        "moment of 'p0' differs between ranks 1, 3, without a majority",
    ]
