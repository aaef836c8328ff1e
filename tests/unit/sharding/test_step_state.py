"""Test the state of a step: between steps, in backward, and after an exception in backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
import torch

from deepseek_zero.sharding.step_state import PHASE_MOVES, Phase, StepState
from tests.in_process import Rank, run_ranks, sharded
from tests.models import Odd


def test_a_model_is_between_steps_until_a_forward_or_backward_is_counted() -> None:
    step = StepState()
    assert step.is_between_steps
    step.forwards = 1
    assert not step.is_between_steps
    step.forwards = 0
    step.backwards = 1
    assert not step.is_between_steps


def test_a_backward_is_active_only_while_autograd_runs_one() -> None:
    step = StepState()
    step.enter(Phase.BACKWARD)
    assert not step.is_in_backward  # autograd is not running, as after an exception
    seen = []
    leaf = torch.ones(2, requires_grad=True)
    output = leaf * 2
    output.register_hook(lambda grad: seen.append(step.is_in_backward))
    output.sum().backward()
    assert seen == [True]
    assert not step.is_in_backward


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


def test_a_phase_follows_its_table_of_transitions() -> None:
    def body(rank: Rank) -> None:
        runtime = sharded(rank, Odd(), stage=3)
        check(PHASE_MOVES, Phase, runtime.step, "_phase", runtime.step.enter)

    run_ranks(1, body)
