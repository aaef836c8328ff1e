"""The pool of test ranks: real process groups, and failures, hangs or deaths reported by rank."""

from __future__ import annotations

import os
import pickle
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.rank_pool import Outcome, RankPool, Task


@pytest.mark.ranks("world")
@pytest.mark.parametrize("world", [1, 2])
def test_a_marked_body_runs_on_every_rank_of_its_world(world: int) -> None:
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size() == world == int(os.environ["WORLD_SIZE"])
    assert torch.get_num_threads() == 1


@pytest.mark.ranks(2)
def test_tmp_path_is_one_folder_for_all_ranks(tmp_path: Path) -> None:
    (tmp_path / str(dist.get_rank())).write_text("here")
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("turn", [1, 2])
def test_every_test_starts_from_the_same_seed_on_every_rank(turn: int) -> None:
    drawn = torch.rand(1)
    torch.manual_seed(1234)
    assert torch.equal(drawn, torch.rand(1)), turn


@pytest.mark.ranks(2)
def test_warnings_are_errors_on_every_rank() -> None:
    with pytest.raises(UserWarning, match="heard"):
        warnings.warn("heard", stacklevel=1)


@pytest.mark.ranks(2, dies=[1])
def test_an_expected_death_of_a_rank_does_not_fail_the_others() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_failure_on_one_rank_is_reported_with_its_values_without_waiting_for_the_other() -> None:
    outcome = _outcome(_rank_1_fails_while_rank_0_waits, timeout=60)
    assert "assert 4 == 5" in outcome.answers[1].text
    assert "all_reduce" in outcome.silent[0]


def test_a_rank_that_hangs_is_named_with_its_stack() -> None:
    outcome = _outcome(_rank_1_hangs, timeout=5)  # rank 0 has this time to answer
    assert outcome.failed
    assert outcome.answers[0].kind == "ok"
    assert "_rank_1_hangs" in outcome.silent[1]


def test_an_unexpected_death_is_named_with_its_exit_code() -> None:
    assert _outcome(_rank_0_exits, timeout=60, size=1).dead == {0: 7}


def test_a_crash_in_c_code_is_named_with_its_stack() -> None:
    outcome = _outcome(_rank_0_crashes, timeout=60, size=1)
    assert outcome.dead == {0: -signal.SIGSEGV}
    assert "_rank_0_crashes" in outcome.crashes[0]


def _outcome(function: Callable[[], None], timeout: float, size: int = 2) -> Outcome:
    pool = RankPool(size)
    try:
        return pool.run(
            Task(__name__, __file__, function.__name__, pickle.dumps({}), pickle.dumps([])), timeout
        )
    finally:
        pool.close()


def _rank_1_fails_while_rank_0_waits() -> None:
    if dist.get_rank() == 1:
        value = 4
        assert value == 5
    dist.all_reduce(torch.ones(1))


def _rank_1_hangs() -> None:
    if dist.get_rank() == 1:
        time.sleep(120)


def _rank_0_exits() -> None:
    if dist.get_rank() == 0:
        os._exit(7)


def _rank_0_crashes() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("turn", [1, 2])
def test_patches_of_a_rank_end_with_its_test(turn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert os.sep == "/"
    monkeypatch.setattr(os, "sep", "patched")
