"""Evidence from windows of steps decides when units are promoted to fp32 and demoted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import deepseek_zero
from deepseek_zero.base.errors import NotBuiltError
from deepseek_zero.extensions.adaptive_precision import (
    BAD,
    GOOD,
    LARGEST,
    AdaptivePrecision,
    Evidence,
)
from deepseek_zero.optim.verdict import StepFlags, StepResult, Verdict

FINE = Evidence(100, 100, 0, 1.0)
LOSING = Evidence(100, 100, 11, 1.0)
BETWEEN = Evidence(100, 100, 8, 1.0)  # neither promotes nor demotes
VANISHED = Evidence(100, 0, 0, 0.0)
ABSENT = Evidence(0, 0, 0, 0.0)
HUGE = Evidence(100, 100, 0, 2 * LARGEST)
FINITE = Verdict(1.0, (), StepFlags(), False, {})
NOT_FINITE = Verdict(float("inf"), (), StepFlags(), False, {})


def result(verdict: Verdict, step: int) -> StepResult:
    """Return the result of a step under loss scaling."""
    overflow = not verdict.is_finite
    return StepResult(verdict.norm, overflow, verdict, overflow=overflow, number=step)


class Run:
    """A runtime with two fake units; each test supplies their evidence."""

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        self.units = [self._unit("root"), self._unit("block")]
        self.settings = SimpleNamespace(policy=SimpleNamespace(compute=dtype))
        self.adaptive = AdaptivePrecision(self, window=1)  # type: ignore[arg-type]
        self.adaptive._promote = self.promote  # type: ignore[method-assign]

    @staticmethod
    def _unit(name: str) -> Any:
        planned = SimpleNamespace(explain=lambda number: [])
        return SimpleNamespace(
            name=name, trained=[None], is_promoted=False, number=0, planned=planned
        )

    def promote(self, unit: Any, *, to_fp32: bool) -> None:
        assert unit.is_promoted != to_fp32
        unit.is_promoted = to_fp32

    def play(
        self, windows: Sequence[Evidence], *, root: Evidence = FINE, named: bool = False
    ) -> list[bool]:
        """Return whether the block is promoted after each window."""
        found = []
        for evidence in windows:
            self.adaptive._look = lambda evidence=evidence: [root, evidence]  # type: ignore[method-assign]
            step = len(found) + 1
            if named:  # a skipped step precedes the measured one
                self.adaptive.before_update(NOT_FINITE)
                self.adaptive.after_update(result(NOT_FINITE, step), self.units[1])
            self.adaptive.before_update(FINITE)
            self.adaptive.after_update(result(FINITE, step), None)
            found.append(self.units[1].is_promoted)
        return found


@pytest.mark.parametrize("bad", [LOSING, VANISHED])
def test_two_bad_windows_in_a_row_promote(bad: Evidence) -> None:
    run = Run()
    assert run.play([bad, FINE, bad, BETWEEN, bad]) == [False] * 5
    assert run.play([bad]) == [True]
    assert run.adaptive.promoted == ["block"] and len(run.adaptive.decisions) == 1


def test_eight_good_windows_in_a_row_demote_and_each_new_promotion_doubles_them() -> None:
    run = Run()
    run.play([LOSING] * BAD)
    assert run.play([FINE] * (GOOD - 1) + [BETWEEN] + [FINE] * GOOD) == [True] * (2 * GOOD - 1) + [
        False
    ]
    assert run.play([LOSING] * BAD) == [False, True]
    assert run.play([FINE] * 2 * GOOD) == [True] * (2 * GOOD - 1) + [False]


@pytest.mark.parametrize("evidence", [LOSING, BETWEEN, HUGE, VANISHED, ABSENT])
def test_a_unit_stays_promoted_without_evidence_that_16_bits_suffice(
    evidence: Evidence,
) -> None:
    run = Run()
    run.play([LOSING] * BAD)
    assert run.play([evidence] * 3 * GOOD) == [True] * 3 * GOOD


def test_a_unit_or_run_without_gradients_is_unchanged() -> None:
    assert not any(Run().play([ABSENT] * 4))
    assert not any(Run().play([VANISHED] * 4, root=VANISHED))


def test_windows_in_which_a_skipped_step_named_a_unit_are_bad() -> None:
    run = Run(torch.bfloat16)
    assert run.play([FINE, FINE], named=True) == [False, True]
    assert run.play([FINE] * 2 * GOOD, named=True) == [True] * 2 * GOOD
    assert run.play([FINE] * GOOD) == [True] * (GOOD - 1) + [False]


def test_bf16_has_the_range_of_fp32() -> None:
    assert not any(Run(torch.bfloat16).play([LOSING, VANISHED] * 4))


def test_decisions_continue_from_a_saved_state() -> None:
    windows = [LOSING] * 3 + [FINE] * 12 + [LOSING] * 3
    whole = Run().play(windows)
    for place in range(len(windows)):
        run, again = Run(), Run()
        before = run.play(windows[:place])
        again.units[1].is_promoted = run.units[1].is_promoted
        again.adaptive.load_state_dict(run.adaptive.state_dict())
        assert before + again.play(windows[place:]) == whole
        assert [each.is_promoted for each in again.adaptive.decisions] == [True, False, True]


def test_stages_are_refused_by_name() -> None:
    config = {"precision": "auto", "bf16": {"enabled": True}}
    with pytest.raises(NotBuiltError, match="precision auto on a mesh with stages"):
        deepseek_zero.plan(torch.nn.Linear(2, 2), config, ranks=2, mesh={"pp": 2})


def test_codes_without_error_feedback_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    told = "it does not read their quantization error"
    for more in ({}, {"zero_quantized_gradients": True}):
        config = {
            "precision": "auto",
            "fp16": {"enabled": True},
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        }
        config |= {"zero_optimization": {"stage": 2, **more}}
        deepseek_zero.initialize(model=torch.nn.Linear(2, 2), config=config)[0].destroy()
        assert (told in caplog.text) is bool(more)


@pytest.mark.parametrize("moments", [True, False])
def test_decisions_are_loaded_with_the_precision_of_units_with_and_without_moments(
    moments: bool, tmp_path: Path
) -> None:
    def start() -> Any:
        torch.manual_seed(0)
        return deepseek_zero.initialize(
            model=torch.nn.Linear(2, 2),
            config={
                "precision": "auto",
                "zero_optimization": {"stage": 3},
                "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            },
        )[0]

    saved = start()
    for _ in range(2):
        saved.backward(saved(torch.ones(1, 2)).sum())
        saved.step()
    saved.save_checkpoint(tmp_path)
    loaded = start()
    loaded.load_checkpoint(tmp_path, load_optimizer_states=moments)
    found = [each.optimizer.policy(AdaptivePrecision).state_dict() for each in (saved, loaded)]
    assert found[0] == found[1] and found[0]["steps"] == 2
