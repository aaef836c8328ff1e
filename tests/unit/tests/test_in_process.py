"""Ranks in one process run one at a time, in a reproducible order; deadlocks are detected."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from deepseek_zero.base.errors import ModelMismatchError, PeerError
from deepseek_zero.comm.agreement import AllRanks
from deepseek_zero.comm.collectives import scatter
from tests.in_process import Deadlock, Rank, World, run_ranks

SIZES = (1, 2, 3, 4)


def row(*values: int) -> torch.Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("reads_in_place", [False, True])
def test_collectives_return_the_sent_values(size: int, reads_in_place: bool) -> None:
    def body(rank: Rank) -> None:
        comm, me = rank.comm, rank.index
        assert comm.all_gather_rows(row(me, 10 * me), "numbers").tolist() == [
            [r, 10 * r] for r in range(size)
        ]
        assert comm.all_gather_text("x" * me, "texts") == ["x" * r for r in range(size)]
        mine = torch.full((3,), float(me))
        scatter(
            comm,
            [torch.full((3,), 7.0 + r) for r in range(size)] if me == size - 1 else [],
            mine,
            "s",
            size - 1,
        )
        assert mine.tolist() == [7.0 + me if me < size - 1 else me] * 3
        pieces, got = [torch.full((2,), 10.0 * me + r) for r in range(size)], list[Any]()
        boxes = [None if reads_in_place or r == me else torch.empty(2) for r in range(size)]
        if size > 1:
            comm.exchange(
                pieces,
                boxes,
                "reduce",
                "e",
                lambda received: got.extend(r.clone() for r in received),
            ).wait()
            assert [each.tolist() for each in got] == [[10.0 * r + me] * 2 for r in range(size)]

    run_ranks(size, body, reads_in_place=reads_in_place)


def test_a_group_of_ranks_has_collectives_of_its_own() -> None:
    def body(rank: Rank) -> tuple[Any, Any]:
        rows, columns = (
            rank.comm.split(((0, 1), (2, 3)), "rows"),
            rank.comm.split(((0, 2), (1, 3)), "columns"),
        )
        mine = row(rank.index)
        return rows.all_gather_rows(mine, "a").flatten().tolist(), columns.all_gather_rows(
            mine, "a"
        ).flatten().tolist()

    assert run_ranks(4, body, seed=3) == [
        ([0, 1], [0, 2]),
        ([0, 1], [1, 3]),
        ([2, 3], [0, 2]),
        ([2, 3], [1, 3]),
    ]


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_one_rank_runs_at_a_time_and_the_order_repeats(seed: int | None) -> None:
    def trace() -> list[int]:
        found, running = list[int](), list[int]()

        def body(rank: Rank) -> None:
            for step in range(4):
                running.append(rank.index)
                time.sleep(0.001)  # gives other threads a chance to run
                assert running == [rank.index]
                running.pop()
                found.append(rank.index)
                rank.comm.barrier(f"step {step}")

        run_ranks(3, body, seed=seed)
        return found

    assert trace() == trace()


def test_seeds_give_other_orders() -> None:
    def order(seed: int) -> tuple[int, ...]:
        found = list[int]()

        def body(rank: Rank) -> None:
            for step in range(3):
                rank.comm.barrier(f"step {step}")
                found.append(rank.index)

        run_ranks(3, body, seed=seed)
        return tuple(found)

    assert len({order(seed) for seed in range(8)}) > 3


def test_a_deadlock_is_detected_immediately_with_the_wait_of_each_rank() -> None:
    def body(rank: Rank) -> None:
        rank.comm.barrier("first")
        rank.comm.barrier("left" if rank.index < 2 else "right")

    began = time.monotonic()
    found = World[None](3).outcomes(body)
    assert time.monotonic() - began < 20
    assert all(isinstance(error, Deadlock) for error in found)
    for each in (
        "rank 0 waits for 'agree on left', number 1 of engine 0/rows",
        "rank 1 waits for 'agree on left', number 1 of engine 0/rows",
        "rank 2 waits for 'agree on right', number 1 of engine 0/rows",
    ):
        assert each in str(found[0])
    assert threading.active_count() < 20


def test_a_rank_that_ends_early_leaves_the_others_in_a_deadlock() -> None:
    def body(rank: Rank) -> None:
        if rank.index:
            rank.comm.barrier("for all")

    with pytest.raises(
        Deadlock, match=r"^rank 1 waits for 'agree on for all', number 0 of engine 0/rows$"
    ):
        run_ranks(2, body)


def test_the_first_error_is_raised_and_not_what_follows_from_it() -> None:
    def body(rank: Rank) -> None:
        if rank.index == 1:
            raise ModelMismatchError("what", "why", "fix")
        rank.comm.barrier("b")

    with pytest.raises(ModelMismatchError):
        run_ranks(3, body)


def test_receive_buffers_are_nan_until_the_wait() -> None:
    def body(rank: Rank) -> list[float]:
        full = torch.zeros(2 * rank.size)
        full.chunk(rank.size)[rank.index].fill_(1.0 + rank.index)
        pending = rank.comm.all_gather(full, "gather", "g")
        assert full.chunk(rank.size)[1 - rank.index].isnan().all()
        if rank.index == 0:
            full[0] = 9.0  # an error of the program: the buffer belongs to the transport
        pending.wait()
        return full.tolist()

    assert run_ranks(2, body) == [[9.0, 1.0, 2.0, 2.0]] * 2


def test_a_buffer_that_others_read_in_place_is_waited_for_before_it_is_written() -> None:
    def body(rank: Rank) -> list[float]:
        comm, mine, got = rank.comm, torch.full((2,), 1.0 + rank.index), list[float]()
        boxes = [None, None]
        pending = comm.exchange(
            [mine, mine], boxes, "reduce", "e", lambda each: got.append(float(sum(each).sum()))
        )
        pending.wait()
        comm.wait_until_read(mine)
        mine.fill_(100.0)
        return got

    assert run_ranks(2, body, reads_in_place=True) == [[6.0], [6.0]]


def test_waiting_ranks_find_evidence_after_some_time() -> None:
    """The library detects a rank that raised or is in another collective."""

    def strays(rank: Rank) -> None:
        rank.comm.barrier("left" if rank.index else "right")

    found = World[None](2, timeouts=20).outcomes(strays)
    assert any(
        isinstance(error, PeerError) and "ranks called different collectives" in str(error)
        for error in found
    )

    def fails(rank: Rank) -> None:
        with AllRanks(rank.comm, "acting"):
            if rank.index == 1:
                raise OSError("no room")

    first, second = World[None](2).outcomes(fails)
    assert isinstance(first, PeerError) and "rank 1 failed in 'acting': OSError: no room" in str(
        first
    )
    assert isinstance(second, OSError)
