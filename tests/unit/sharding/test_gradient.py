"""Gradients of a parameter group: collected, reduced, accumulated, missing, edited, discarded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from deepseek_zero.base.errors import AtRestError
from deepseek_zero.precision.policy import Policy
from deepseek_zero.sharding.grad_edits import is_reduced
from deepseek_zero.sharding.grad_sum import squares_of
from deepseek_zero.sharding.param_group import ParamGroup
from deepseek_zero.sharding.sharded_gradient import ShardedGradient
from tests.in_process import Rank, build_one, run_ranks
from tests.models import Odd

SIZES = (1, 2, 3, 4)
SHAPES = {name: tuple(param.shape) for name, param in Odd().named_parameters()}
BF16 = Policy(torch.bfloat16)
on_ranks = pytest.mark.parametrize("size", SIZES)
on_stages = pytest.mark.parametrize("stage", range(4))
on_precisions = pytest.mark.parametrize("policy", [Policy(), BF16], ids=["fp32", "bf16"])


def summand(rank: int, backward: int, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the gradient of one rank's backward.

    The order of a sum of these changes its bits.
    """
    generator = torch.Generator().manual_seed(
        1000 * rank + 10 * backward + list(SHAPES).index(name)
    )
    return (torch.randn(SHAPES[name], generator=generator) * 10.0 ** (2 * rank - 2)).to(dtype)


def plain_sum(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Sum in fp32 in rank order and round once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(dtype)


def built(rank: Rank, stage: int, policy: Policy | None = None, **settings: Any) -> ParamGroup:
    """Return a gathered group without a gradient."""
    group = build_one(rank, Odd(), stage=stage, policy=policy or Policy(), **settings)
    group.gather("it").wait()
    group.point_to_unsharded()
    return group


def bring(
    group: ParamGroup, rank: Rank, backward: int, names: Sequence[str] = tuple(SHAPES)
) -> None:
    """Run a backward of this rank with gradients of these parameters."""
    for member in group.members:
        if member.name in names:
            member.param.grad = summand(rank.index, backward, member.name, group.plan.weight.dtype)
            group.gradient.summand.collect(member.param)
            assert member.param.grad is None


def whole(group: ParamGroup) -> dict[str, Tensor]:
    """Return the whole reduced gradient as a program reads it."""
    group.grad_view.show()
    return {
        member.name: member.param.grad.full_tensor().clone()
        for member in group.members
        if member.param.grad is not None
    }


def same(found: dict[str, Tensor], expected: Callable[[str], Tensor]) -> bool:
    return all(torch.equal(value, expected(name)) for name, value in found.items())


def everywhere(size: int, body: Callable[[Rank], Any]) -> None:
    """Run with ranks in order, in another order, and with reads from each other's memory."""
    run_ranks(size, body)
    run_ranks(size, body, seed=1)
    run_ranks(size, body, seed=2, reads_in_place=True)


@on_ranks
@on_stages
def test_an_empty_gradient_is_none(stage: int, size: int) -> None:
    def body(rank: Rank) -> None:
        gradient = built(rank, stage).gradient
        assert gradient.sum.reduced() is None
        assert gradient.sum.read(0, 1) is None
        assert not gradient.sum.is_reduced
        assert squares_of([gradient.sum]) == [[0.0] * size]
        assert not any(is_reduced(gradient.sum, number) for number in range(len(SHAPES)))
        gradient.discard()

    run_ranks(size, body)


@on_ranks
@on_stages
@on_precisions
def test_ranks_gradients_are_added_in_order(policy: Policy, stage: int, size: int) -> None:
    def body(rank: Rank) -> None:
        group = built(rank, stage, policy)
        gradient, dtype = group.gradient, group.plan.grad.dtype
        bring(group, rank, 0)
        assert not gradient.sum.is_reduced, "collected is not reduced"
        gradient.reduce("it").wait()
        assert gradient.sum.is_reduced
        assert all(is_reduced(gradient.sum, number) for number in range(len(SHAPES)))
        assert same(
            whole(group),
            lambda name: plain_sum(
                [summand(r, 0, name, group.plan.weight.dtype) for r in range(size)], dtype
            ),
        )
        mine = gradient.sum.reduced()
        assert mine.numel() == (
            group.layout.padded_numel if stage == 0 else group.layout.slice_numel
        )
        low = 0 if stage == 0 else group.layout.bounds(rank.index)[0]
        for start, stop in group.layout.gaps:
            assert not mine[max(0, start - low) : max(0, stop - low)].any(), "padding is zero"

    everywhere(size, body)


@on_ranks
@on_stages
def test_missing_gradients_of_a_rank_count_as_zeros(stage: int, size: int) -> None:
    def body(rank: Rank) -> None:
        group = built(rank, stage)
        bring(group, rank, 0, ["a"] if rank.index % 2 else ["b", "c"])
        group.gradient.reduce("it").wait()

        def expected(name: str) -> Tensor:
            has = [name == "a" if r % 2 else name in ("b", "c") for r in range(size)]
            zeros = torch.zeros(SHAPES[name])
            return plain_sum(
                [summand(r, 0, name) if has[r] else zeros for r in range(size)], torch.float32
            )

        assert same(whole(group), expected)

    everywhere(size, body)


@on_ranks
@on_stages
@on_precisions
def test_backwards_before_a_reduction_add_up_on_each_rank(
    policy: Policy, stage: int, size: int
) -> None:
    def body(rank: Rank) -> None:
        group = built(rank, stage, policy)
        travels = group.plan.weight.dtype
        for backward in range(3):
            bring(group, rank, backward)
        group.gradient.reduce("it").wait()

        def expected(name: str) -> Tensor:
            parts = []
            for r in range(size):
                total = summand(r, 0, name, group.plan.weight.dtype).to(travels)
                for backward in (1, 2):
                    total = total.add_(summand(r, backward, name, group.plan.weight.dtype))
                parts.append(total)
            return plain_sum(parts, group.plan.grad.dtype)

        assert same(whole(group), expected)

    everywhere(size, body)


@on_ranks
@on_stages
def test_a_sum_after_a_sum_is_added_to_it(stage: int, size: int) -> None:
    """Sharded gradients are added in every backward, partial ones after a reduction."""

    def body(rank: Rank) -> None:
        group = built(rank, stage)
        for backward in range(3):
            bring(group, rank, backward)
            group.gradient.reduce("it").wait()

        def expected(name: str) -> Tensor:
            sums = [
                plain_sum([summand(r, k, name) for r in range(size)], torch.float32)
                for k in range(3)
            ]
            return (sums[0] + sums[1]) + sums[2]

        assert same(whole(group), expected)

    everywhere(size, body)


@on_ranks
@on_stages
def test_a_gradient_that_arrives_during_a_reduction_is_not_lost(stage: int, size: int) -> None:
    """A late gradient is reduced separately."""

    def body(rank: Rank) -> None:
        group = built(rank, stage)
        bring(group, rank, 0)
        first = group.gradient.reduce("it")
        if rank.index == size - 1:
            bring(group, rank, 1, ["b"])
        first.wait()
        group.gradient.reduce("it, late").wait()

        def expected(name: str) -> Tensor:
            late = [torch.zeros(SHAPES[name])] * (size - 1)
            late.append(summand(size - 1, 1, name) if name == "b" else torch.zeros(SHAPES[name]))
            sums = plain_sum([summand(r, 0, name) for r in range(size)], torch.float32)
            return sums + plain_sum(late, torch.float32)

        assert same(whole(group), expected)

    everywhere(size, body)


@on_ranks
@on_stages
def test_a_gradient_is_visible_until_it_is_hidden(stage: int, size: int) -> None:
    def body(rank: Rank) -> None:
        group = built(rank, stage)
        param = group.members[0].param
        bring(group, rank, 0)
        group.gradient.reduce("it").wait()
        assert param.grad is None
        group.grad_view.show()
        shown = param.grad
        assert type(shown) is ShardedGradient
        assert shown.shape == param.shape
        group.grad_view.hide()
        assert param.grad is None
        with pytest.raises(AtRestError):
            shown.mul_(2.0)

    run_ranks(size, body)


@on_ranks
@on_stages
def test_a_dropped_gradient_is_missing_and_an_assigned_one_exists(stage: int, size: int) -> None:
    def body(rank: Rank) -> None:
        group = built(rank, stage)
        gradient, params = group.gradient, [member.param for member in group.members]
        bring(group, rank, 0)
        gradient.reduce("it").wait()
        group.grad_view.show()
        params[0].grad = None
        params[1].grad = None
        group.grad_view.take_assigned()
        found = [is_reduced(gradient.sum, number) for number in range(5)]
        assert found == [False, False, True, True, True]
        params[1].grad = torch.full(SHAPES["b"], 3.0)
        group.grad_view.take_assigned()
        found = [is_reduced(gradient.sum, number) for number in range(5)]
        assert found == [False, True, True, True, True]
        assert params[0].grad is None
        assert params[1].grad.full_tensor().eq(3.0).all()
        assert torch.equal(
            params[4].grad.full_tensor(),
            plain_sum([summand(r, 0, "e") for r in range(size)], torch.float32),
        )

    everywhere(size, body)


@on_ranks
@on_stages
def test_an_edit_changes_what_the_step_uses_and_each_slice_is_its_owners(
    stage: int, size: int
) -> None:
    def body(rank: Rank) -> None:
        group = built(rank, stage)
        gradient, params = group.gradient, [member.param for member in group.members]
        bring(group, rank, 0)
        gradient.reduce("it").wait()
        group.grad_view.show()
        params[0].grad.mul_(0.5)
        assert not gradient.is_edited, "by the same on every rank"
        params[1].grad = torch.full(SHAPES["b"], 1.0 + rank.index)
        group.grad_view.take_assigned()
        assert gradient.is_edited
        group.grad_view.edits.equalise("it").wait()
        found, layout = whole(group), group.layout
        assert torch.equal(
            found["a"], 0.5 * plain_sum([summand(r, 0, "a") for r in range(size)], torch.float32)
        )
        slot = layout.slots[1]
        owners = torch.arange(slot.start, slot.stop) // layout.slice_numel
        assert torch.equal(found["b"], owners + 1.0)

    everywhere(size, body)


@on_ranks
@on_stages
@pytest.mark.parametrize("order", [2.0, 1.0, float("inf"), 0.0])
def test_a_norm_is_over_all_ranks(order: float, stage: int, size: int) -> None:
    def body(rank: Rank) -> None:
        group = built(rank, stage)
        bring(group, rank, 0)
        group.gradient.reduce("it").wait()
        group.grad_view.show()
        total = plain_sum([summand(r, 0, "a") for r in range(size)], torch.float32)
        expected = float(torch.linalg.vector_norm(total.double(), order))
        assert float(group.members[0].param.grad.norm(order)) == pytest.approx(expected, rel=1e-6)
        squares = sum(
            sum(each)
            for each in rank.comm.all_gather_rows(
                torch.tensor(squares_of([group.gradient.sum])[0]), "squares"
            )
        )
        all_of_it = [
            plain_sum([summand(r, 0, n) for r in range(size)], torch.float32) for n in SHAPES
        ]
        exact = float(sum(each.double().square().sum() for each in all_of_it))
        assert float(squares) / (size if stage == 0 else 1) == pytest.approx(exact, rel=1e-6)

    run_ranks(size, body)


@on_ranks
@on_stages
def test_a_discarded_gradient_keeps_its_memory_but_no_values(stage: int, size: int) -> None:
    def body(rank: Rank) -> None:
        group = built(rank, stage)
        pool = group.comm_ctx.pool
        for step in range(3):
            bring(group, rank, step)
            if step == 1:  # between backward and reduction
                group.gradient.discard()
                bring(group, rank, step)
            group.gradient.reduce("it").wait()
            held = group.gradient.sum.buffer.memory.data_ptr()
            expected = [summand(r, step, "e") for r in range(size)]
            assert torch.equal(whole(group)["e"], plain_sum(expected, torch.float32))
            group.gradient.discard()
            assert group.members[0].param.grad is None
            assert group.gradient.sum.reduced() is None
            lent = pool.allocated_bytes - sum(each.nbytes for each in pool.idle())
            in_use = group.layout.padded_numel * 4 if stage == 3 and size > 1 else 0
            assert lent == in_use, "nothing is lent but the gathered weight"
        assert group.gradient.sum.buffer.memory.data_ptr() == held

    run_ranks(size, body)
    run_ranks(size, body, reads_in_place=True, seed=4)


@on_ranks
@on_stages
@pytest.mark.parametrize(
    "settings",
    [
        {"policy": Policy(torch.bfloat16, reduce=torch.float32)},
        {"prescale": True},
        {"predivide": 8.0},
    ],
    ids=["in fp32", "prescaled", "predivided"],
)
def test_the_message_dtype_of_gradients(settings: dict[str, Any], stage: int, size: int) -> None:
    def body(rank: Rank) -> None:
        group = built(rank, stage, **settings)
        gradient, own = group.gradient, group.plan.weight.dtype
        travels = group.plan.grad_wire.dtype
        bring(group, rank, 0)
        gradient.reduce("it").wait()
        before = {"prescale": float(size), "predivide": 8.0}.get(next(iter(settings)), 1.0)

        def expected(name: str) -> Tensor:
            parts = [summand(r, 0, name, own).to(travels) / before for r in range(size)]
            return plain_sum(parts, group.plan.grad.dtype)

        assert same(whole(group), expected)

    everywhere(size, body)
