"""`move` performs every transition between placements and sums in rank order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from deepseek_zero.comm.collectives import ordered_sum
from deepseek_zero.planner.layout import FlatLayout, even_layout
from deepseek_zero.planner.messages import SUM_TILE_NUMEL
from deepseek_zero.planner.spec import TRANSITIONS, Movement, P, Placement, R, S, Spec
from deepseek_zero.sharding.buffer import FlatBuffer
from deepseek_zero.sharding.comm_context import CommContext
from deepseek_zero.sharding.move import move
from deepseek_zero.sharding.pool import Pool
from tests.in_process import CPU, Rank, World, run_ranks

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SIZES = (1, 2, 3, 4)
SHAPES = [(2500,), (3, 701), (), (0, 5), (997,)]
NAMES = ["a", "b", "c", "d", "e"]


def layout_over(ranks: int) -> FlatLayout:
    return even_layout(NAMES, SHAPES, ranks)


def values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Return values with a sum that depends on the order of summation."""
    generator = torch.Generator().manual_seed(100 + rank)
    return (torch.randn(numel, generator=generator) * 10.0 ** (3 * rank - 3)).to(dtype)


def plain_sum(
    parts: Sequence[Tensor], divisor: float, dtype: torch.dtype, onto: Tensor | None = None
) -> Tensor:
    """Sum in fp32 in rank order, then divide and cast."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    total = total / divisor
    return total.to(dtype) if onto is None else (onto.float() + total).to(dtype)


def context(rank: Rank, bucket_numel: int = 1 << 40, divisor: float = 1.0) -> CommContext:
    pool = Pool(CPU, rank.comm, SUM_TILE_NUMEL.on(CPU))
    return CommContext(rank.comm, pool, bucket_numel, divisor)


def buffer(
    layout: FlatLayout, placement: Placement, dtype: torch.dtype, whole: Tensor, rank: int
) -> FlatBuffer:
    """Return a buffer with this rank's part of the values."""
    spec = Spec(placement, dtype)
    held = whole[slice(*layout.bounds(rank))] if placement is S else whole
    return FlatBuffer(layout, spec, held.to(dtype).clone())


def moved(
    rank: Rank,
    kinds: tuple[Placement, Placement],
    dtypes: tuple[torch.dtype, torch.dtype],
    divisor: float,
    add: bool,
) -> Tensor:
    """Return the target after a move, and check that all pool buffers were returned."""
    layout = layout_over(rank.size)
    ctx = context(rank, 1024 * rank.size, divisor)
    source = buffer(
        layout, kinds[0], dtypes[0], values(rank.index, layout.padded_numel, dtypes[0]), rank.index
    )
    target = buffer(
        layout, kinds[1], dtypes[1], values(9, layout.padded_numel, dtypes[1]), rank.index
    )
    pending = move(source, target, ctx, "it", add=add)
    pending.wait()
    pending.wait()
    idle = ctx.pool.idle()
    assert sum(each.nbytes for each in idle) == ctx.pool.allocated_bytes
    lent = [each for each in idle if each.dtype == dtypes[0]]
    assert all(each.numel() <= max(1024 * (rank.size - 1), 1 << 18) for each in lent), (
        "what travels has a bound"
    )
    return target.memory


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("reads_in_place", [False, True], ids=["copied", "in place"])
@pytest.mark.parametrize(
    "dtypes", [(FP32, FP32), (BF16, BF16), (FP32, BF16), (BF16, FP32), (FP16, FP32)], ids=str
)
@pytest.mark.parametrize(
    "kinds", TRANSITIONS, ids=lambda kinds: f"{kinds[0].value} to {kinds[1].value}"
)
def test_every_transition(
    kinds: tuple[Placement, Placement],
    dtypes: tuple[torch.dtype, torch.dtype],
    reads_in_place: bool,
    size: int,
) -> None:
    layout, divisor = layout_over(size), 3.0
    numel, cuts = layout.padded_numel, [slice(*layout.bounds(rank)) for rank in range(size)]
    found = run_ranks(
        size, lambda rank: moved(rank, kinds, dtypes, divisor, False), reads_in_place=reads_in_place
    )
    held = [values(rank, numel, dtypes[0]) for rank in range(size)]
    total = plain_sum(held, divisor, dtypes[1])
    for rank, got in enumerate(found):
        match TRANSITIONS[kinds]:
            case Movement.ALL_GATHER:
                expected = torch.cat([held[owner][cut] for owner, cut in enumerate(cuts)])
            case Movement.REDUCE_SCATTER:
                expected = total[cuts[rank]]
            case Movement.ALL_REDUCE:
                expected = total
            case Movement.LOCAL_SLICE:
                expected = held[rank][cuts[rank]]
            case Movement.NOTHING:
                expected = held[rank][cuts[rank]] if kinds[0] is S else held[rank]
        assert torch.equal(got, expected.to(dtypes[1])), f"rank {rank}"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("reads_in_place", [False, True], ids=["copied", "in place"])
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, FP32), (BF16, BF16)], ids=str)
def test_a_sum_is_added_to_what_is_there(
    dtypes: tuple[torch.dtype, torch.dtype], reads_in_place: bool, size: int
) -> None:
    layout = layout_over(size)
    found = run_ranks(
        size, lambda rank: moved(rank, (P, S), dtypes, 2.0, True), reads_in_place=reads_in_place
    )
    held = [values(rank, layout.padded_numel, dtypes[0]) for rank in range(size)]
    expected = plain_sum(held, 2.0, dtypes[1], onto=values(9, layout.padded_numel, dtypes[1]))
    assert torch.equal(torch.cat(found), expected)


@pytest.mark.parametrize("size", (2, 3))
@pytest.mark.parametrize("divisor", [1.0, 2.0, 3.0])
def test_it_is_the_ordered_sum_for_any_order_of_arrival(size: int, divisor: float) -> None:
    layout, scratch = layout_over(size), torch.empty(1000)
    held = [values(rank, layout.padded_numel, FP32) for rank in range(size)]
    expected = torch.empty(layout.padded_numel)
    ordered_sum(held, expected, scratch, divisor=divisor)
    assert torch.equal(expected, plain_sum(held, divisor, FP32))
    assert not torch.equal(expected, plain_sum(held[::-1], divisor, FP32)) or size == 2, (
        "the order can be seen"
    )
    for seed in range(6):
        found = run_ranks(
            size, lambda rank: moved(rank, (P, S), (FP32, FP32), divisor, False), seed=seed
        )
        assert torch.equal(torch.cat(found), expected)


@pytest.mark.parametrize(
    ("bucket", "messages"), [(1 << 40, 1), (2048 * 2, 2), (1024 * 2, 3), (1, 3)]
)
def test_a_reduction_is_sent_in_messages_of_one_size(bucket: int, messages: int) -> None:
    def body(rank: Rank) -> list[str]:
        layout = layout_over(2)
        ctx = context(rank, bucket)
        source = buffer(layout, P, FP32, values(rank.index, layout.padded_numel, FP32), rank.index)
        target = FlatBuffer.empty(layout, Spec(S, FP32), CPU)
        assert layout.slice_numel == 3072
        move(source, target, ctx, "it").wait()
        return rank.issued("engine 0/reduce")

    assert run_ranks(2, body) == [["reduce it"] * messages] * 2


def test_at_most_two_messages_are_in_flight() -> None:
    def body(rank: Rank) -> None:
        layout = layout_over(2)
        source = buffer(layout, P, FP32, values(rank.index, layout.padded_numel, FP32), rank.index)
        pending = move(
            source, FlatBuffer.empty(layout, Spec(S, FP32), CPU), context(rank, 2048), "it"
        )
        assert len(rank.issued("engine 0/reduce")) == 2
        pending.wait()
        assert len(rank.issued("engine 0/reduce")) == 3

    run_ranks(2, body)


@pytest.mark.parametrize("reads_in_place", [False, True], ids=["copied", "in place"])
def test_a_partial_gradient_is_reduced_in_place(reads_in_place: bool) -> None:
    def body(rank: Rank) -> Tensor:
        layout = layout_over(rank.size)
        held = values(rank.index, layout.padded_numel, FP32)
        source = FlatBuffer(layout, Spec(P, FP32), held)
        move(
            source,
            FlatBuffer(layout, Spec(S, FP32), source.slice_of(rank.index)),
            context(rank),
            "it",
        ).wait()
        return source.slice_of(rank.index).clone()

    numel = layout_over(3).padded_numel
    expected = plain_sum([values(rank, numel, FP32) for rank in range(3)], 1.0, FP32)
    assert torch.equal(
        torch.cat(run_ranks(3, body, reads_in_place=reads_in_place, seed=1)), expected
    )


def test_a_pool_reuses_no_buffer_that_another_rank_still_reads() -> None:
    def body(rank: Rank) -> Tensor:
        layout, ctx = layout_over(2), context(rank)
        found = torch.zeros(layout.slice_numel)
        for step in range(3):
            lent = ctx.pool.take(layout.padded_numel, FP32)
            lent.copy_(values(rank.index, layout.padded_numel, FP32) * (step + 1))
            target = FlatBuffer(layout, Spec(S, FP32), found)
            move(
                FlatBuffer(layout, Spec(P, FP32), lent), target, ctx, f"step {step}", add=True
            ).wait()
            ctx.pool.give(lent)
        assert ctx.pool.allocated_bytes < 2 * layout.padded_numel * 4 + (1 << 20) + 1
        return found

    def expected() -> Tensor:
        numel, total = layout_over(2).padded_numel, None
        for step in range(3):
            parts = [values(rank, numel, FP32) * (step + 1) for rank in range(2)]
            total = plain_sum(parts, 1.0, FP32, onto=torch.zeros(numel) if total is None else total)
        return total

    for seed in range(4):
        assert torch.equal(
            torch.cat(run_ranks(2, body, reads_in_place=True, seed=seed)), expected()
        )


def test_moves_of_one_lane_in_another_order_are_a_deadlock() -> None:
    def body(rank: Rank) -> None:
        layout = layout_over(2)
        for name in ("a", "b") if rank.index else ("b", "a"):
            source = FlatBuffer.empty(layout, Spec(S, FP32), CPU)
            move(source, FlatBuffer.empty(layout, Spec(R, FP32), CPU), context(rank), name).wait()

    first, _ = World[None](2).outcomes(body)
    assert "rank 0 waits for 'gather b', number 0 of engine 0/gather" in str(first)
    assert "rank 1 waits for 'gather a', number 0 of engine 0/gather" in str(first)
