"""The state of a step: what is between steps, and what a backward that an exception ended is."""

from __future__ import annotations

import torch

from deepseek_zero.sharding.step_state import Phase, StepState


def test_a_model_is_between_steps_until_a_forward_or_backward_is_counted() -> None:
    step = StepState()
    assert step.is_between_steps
    step.forwards = 1
    assert not step.is_between_steps
    step.forwards = 0
    step.backwards = 1
    assert not step.is_between_steps


def test_a_backward_is_under_way_only_while_autograd_runs_one() -> None:
    step = StepState()
    step.enter(Phase.BACKWARD)
    assert not step.is_in_backward  # an exception has ended it
    seen = []
    leaf = torch.ones(2, requires_grad=True)
    output = leaf * 2
    output.register_hook(lambda grad: seen.append(step.is_in_backward))
    output.sum().backward()
    assert seen == [True]
    assert not step.is_in_backward
