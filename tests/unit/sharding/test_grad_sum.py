"""Test the states of a gradient sum and the transitions between them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
import torch

from deepseek_zero.base.mesh import Mesh
from deepseek_zero.extensions.deferred_update import end_hold, hold
from deepseek_zero.planner.spec import P
from deepseek_zero.sharding.grad_sum import GRAD_MOVES, GradState
from deepseek_zero.sharding.gradient import Gradient
from deepseek_zero.sharding.param_group import ParamGroup
from deepseek_zero.sharding.regroup import drop_gradient_buffers
from deepseek_zero.sharding.step_state import PHASE_MOVES, Phase
from deepseek_zero.sharding.unit import MOVES, UnitState
from tests.in_process import Rank, build_one, run_ranks, sharded
from tests.models import Odd


def check(
    table: set[Any], states: type[Enum], owner: Any, attribute: str, enter: Callable[[Any], None]
) -> None:
    for before, after in itertools.product(states, states):
        setattr(owner, attribute, before)
        if (before, after) in table:
            enter(after)
            assert getattr(owner, attribute) is after
        else:
            with pytest.raises(
                AssertionError, match=f"cannot go from {before.value} to {after.value}"
            ):
                enter(after)
            assert getattr(owner, attribute) is before


def test_a_gradient_follows_its_table_of_transitions() -> None:
    def body(rank: Rank) -> None:
        gradient = build_one(rank, Odd(), stage=3).gradient
        check(GRAD_MOVES, GradState, gradient.sum, "_state", gradient.sum.enter)

    run_ranks(1, body)


def test_every_state_is_reached_and_left() -> None:
    tables: list[tuple[set[Any], type[Enum]]] = [
        (MOVES, UnitState),
        (PHASE_MOVES, Phase),
        (GRAD_MOVES, GradState),
    ]
    for table, states in tables:
        assert {after for _, after in table} == {before for before, _ in table} == set(states)


@pytest.mark.parametrize("size", (1, 2, 3))
@pytest.mark.parametrize("stage", range(4))
def test_a_gradient_from_collecting_to_dropped(stage: int, size: int) -> None:
    def body(rank: Rank) -> None:
        group = build_one(rank, Odd(), stage=stage)
        group.gather("it").wait()
        group.point_to_unsharded()
        gradient = group.gradient
        assert gradient.sum.state is GradState.EMPTY
        bring(group)
        assert gradient.sum.state is GradState.COLLECTING
        pending = gradient.reduce("it")
        assert gradient.sum.state is GradState.REDUCING
        with pytest.raises(AssertionError, match="cannot go from reducing to held"):
            hold(gradient)
        pending.wait()
        assert gradient.sum.state is GradState.REDUCED
        bring(group)  # a second backward accumulates in place or in another buffer
        assert gradient.sum.state is (
            GradState.COLLECTING if group.plan.grad.placement is P else GradState.REDUCED
        )
        gradient.reduce("it").wait()
        assert_twos(gradient, size)
        hold(gradient)
        gradient.discard()  # as for all gradients after a step
        assert gradient.sum.state is GradState.HELD
        assert gradient.sum.is_full
        assert not gradient.sum.is_reduced
        assert_twos(gradient, size)
        end_hold(gradient)
        assert gradient.sum.state is GradState.EMPTY
        assert gradient.sum.reduced() is None
        with pytest.raises(AssertionError, match="cannot go from empty to empty"):
            end_hold(gradient)

    run_ranks(size, body)


@pytest.mark.parametrize("stage", range(4))
def test_with_replicas_a_sum_is_partial_until_their_sum(stage: int) -> None:
    def body(rank: Rank) -> None:
        runtime = sharded(
            rank, Odd(), Mesh(dp_replicate=2, dp_shard=2), stage=stage, accumulation=2
        )
        (group,) = runtime.trained_groups
        runtime.root.unshard()
        runtime.root.wait_for_unshard()
        gradient = group.gradient
        for _ in range(2):  # the second reduction follows the all-reduce of the first
            bring(group)
            gradient.reduce("it").wait()
            assert gradient.sum.state is GradState.INCOMPLETE
            assert gradient.sum.is_reduced
            with pytest.raises(AssertionError, match="cannot go from partially reduced to held"):
                hold(gradient)
            pending = gradient.reduction.complete("it")
            assert gradient.sum.state is GradState.REDUCING
            pending.wait()
            assert gradient.sum.state is GradState.REDUCED
        assert_twos(gradient, size=1)  # the mean
        gradient.reduction.complete("it, again").wait()
        assert_twos(gradient, size=1)  # the mean

    run_ranks(4, body)


def test_memory_of_a_gradient_that_is_there_is_not_freed() -> None:
    def body(rank: Rank) -> None:
        group = build_one(rank, Odd(), stage=1)
        bring(group)
        with pytest.raises(AssertionError, match="dropped with it"):
            drop_gradient_buffers(group.gradient)
        group.gradient.discard()
        drop_gradient_buffers(group.gradient)
        assert group.gradient.sum.buffer is None

    run_ranks(1, body)


def test_an_update_that_is_deferred_without_a_gradient_changes_nothing() -> None:
    def body(rank: Rank) -> None:
        gradient = build_one(rank, Odd(), stage=3).gradient
        hold(gradient)
        assert gradient.sum.absent == set(range(len(gradient.group.members)))

    run_ranks(2, body)


def bring(group: ParamGroup) -> None:
    """Run a backward with gradients of ones."""
    for member in group.members:
        member.param.grad = torch.ones(member.slot.shape)
        group.gradient.summand.collect(member.param)


def assert_twos(gradient: Gradient, size: int) -> None:
    """Check that the sum is that of two backwards of `size` ranks with gradients of ones."""
    values = gradient.sum.reduced()
    assert values is not None
    assert set(values.unique().tolist()) <= {0.0, 2.0 * size}  # 0: padding
    assert values.any()
