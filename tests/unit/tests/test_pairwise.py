"""The selected cases cover every pair of values, or the full product on request."""

from __future__ import annotations

import itertools

import pytest

from tests.pairwise import FULL, cases, pairs_of, pairwise

AXES = {"a": (0, 1, 2, 3), "b": ("x", "y"), "c": (True, False), "d": (1, 2, 3), "e": (0.0, 0.5)}


def test_every_pair_of_values_is_in_a_case() -> None:
    wanted = set().union(*map(pairs_of, itertools.product(*AXES.values())))
    assert set().union(*map(pairs_of, pairwise(AXES))) == wanted


def test_the_cases_are_few_and_the_same_at_every_call() -> None:
    assert pairwise(AXES) == pairwise(AXES)
    assert 12 <= len(pairwise(AXES)) <= 16 < 96


def test_the_environment_variable_selects_the_full_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FULL, raising=False)
    names, few = cases(AXES)
    monkeypatch.setenv(FULL, "1")
    assert cases(AXES) == ("a,b,c,d,e", list(itertools.product(*AXES.values())))
    assert names == "a,b,c,d,e" and set(few) < set(itertools.product(*AXES.values()))
