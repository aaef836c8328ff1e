"""The search finds the longest sequence within an eighth, in few trials without repetition."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.long_sequences import FINEST, GRAIN, Trials, longest

LIMIT = 3 << 30


def trials_of(base: int, each: int, journal: Path | None = None) -> tuple[Trials, list[int]]:
    """Return trials of a simulated process and the list of sequence lengths that were run.

    The process needs `base` bytes plus `each` bytes per token.
    """
    found, run = Trials("a way", {}, LIMIT, journal), list[int]()

    def held(tokens: int) -> dict[str, float] | None:
        run.append(tokens)
        resident = base + each * tokens
        return {"resident": resident, "seconds": 1.0} if resident <= LIMIT else None

    found._run = held  # type: ignore[method-assign]
    return found, run


@pytest.mark.parametrize("each", [1 << 16, 1 << 19, 1 << 21])
@pytest.mark.parametrize("start", [512, 2048])
def test_it_is_found_within_an_eighth_in_few_trials(each: int, start: int) -> None:
    trials, run = trials_of(800 << 20, each)
    fits = (LIMIT - (800 << 20)) // each
    found = longest(trials, start, 0, 1 << 20)
    assert found.tokens <= fits < found.tokens + found.tokens // FINEST + 2 * GRAIN
    assert len(run) == len(set(run)) <= 7
    assert trials.room() == pytest.approx(fits, abs=GRAIN) or len(trials.trained) == 1


def test_nothing_above_the_most_is_tried_and_a_journal_is_not_run_again(tmp_path: Path) -> None:
    trials, run = trials_of(800 << 20, 1 << 16, tmp_path / "journal.json")
    assert longest(trials, 4608, 6000, 20480).tokens == 20480 and run == [4608, 6912, 20480]
    assert longest(trials, 4608, 30000, 20480).tokens == 20480 and len(run) == 3
