"""Batch sizes are completed as in DeepSpeed and conflicts raise its messages."""

from __future__ import annotations

from itertools import product

import pytest

from deepseek_zero.base.errors import ConfigError
from deepseek_zero.config import Batch, BatchRequest
from deepseek_zero.config import batch as sizes
from deepseek_zero.config.problems import Problem, as_error


def solve(request: BatchRequest) -> Batch:
    answer = sizes.solve(request)
    if isinstance(answer, Problem):
        raise as_error([answer], "the configuration")
    return answer


@pytest.mark.parametrize(
    "train, micro, steps, expected",
    [
        (32, 4, 2, (32, 4, 2)),
        (32, 4, None, (32, 4, 2)),
        (32, None, 2, (32, 4, 2)),
        (None, 4, 2, (32, 4, 2)),
        (32, None, None, (32, 8, 1)),
        (None, 4, None, (16, 4, 1)),
        (None, None, None, (4, 1, 1)),
        (None, None, 2, (8, 1, 2)),
    ],
)
def test_the_missing_members_are_solved_for(
    train: int | None, micro: int | None, steps: int | None, expected: tuple[int, int, int]
) -> None:
    batch = solve(BatchRequest(4, train, micro, steps))
    assert (batch.train, batch.micro, batch.accumulation) == expected
    assert batch.data_size == 4


def test_every_solution_for_the_batch_sizes_is_consistent() -> None:
    options = (None, 1, 2, 3, 4, 6, 12)
    closed = 0
    for ranks, train, micro, steps in product((1, 2, 3), options, options, options):
        try:
            batch = solve(BatchRequest(ranks, train, micro, steps))
        except ConfigError:
            continue
        assert batch.train == batch.micro * batch.accumulation * ranks
        assert (
            train in (None, batch.train)
            and micro in (None, batch.micro)
            and steps in (None, batch.accumulation)
        )
        closed += 1
    assert closed > 100


@pytest.mark.parametrize(
    "train, micro, steps, words",
    [
        (0, None, None, "Train batch size: 0 has to be greater than 0"),
        (-8, 1, 1, "Train batch size: -8 has to be greater than 0"),
        (2, None, None, "Micro batch size per gpu: 0 has to be greater than 0"),
        (8, -1, None, "Micro batch size per gpu: -1 has to be greater than 0"),
        (8, None, 0, "Gradient accumulation steps: 0 has to be greater than 0"),
        (2, 4, None, "Gradient accumulation steps: 0 has to be greater than 0"),
        (
            18,
            1,
            2,
            r"Check batch related parameters. train_batch_size is not equal to "
            r"micro_batch_per_gpu \* gradient_acc_step \* world_size 18 != 1 \* 2 \* 4",
        ),
        (10, None, None, r"world_size 10 != 2 \* 1 \* 4"),
    ],
)
def test_inconsistent_batch_sizes_raise_deepspeeds_error(
    train: int | None, micro: int | None, steps: int | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        solve(BatchRequest(4, train, micro, steps))
    assert "fix: " in str(error.value)


def test_the_loader_decides_the_micro_batch_when_nothing_is_stated() -> None:
    batch = solve(BatchRequest(2, loader=5))
    assert (batch.train, batch.micro, batch.accumulation) == (10, 5, 1)
    assert "data loader" in batch.why


def test_the_loader_sets_the_micro_batch_with_a_stated_accumulation() -> None:
    assert solve(BatchRequest(2, accumulation=3, loader=5)).train == 30


@pytest.mark.parametrize("micro_auto, expected", [(True, (4, 4)), (False, (16, 1))])
def test_an_auto_micro_batch_prefers_the_loader_to_a_division(
    micro_auto: bool, expected: tuple[int, int]
) -> None:
    batch = solve(BatchRequest(2, train=32, loader=4, micro_auto=micro_auto))
    assert (batch.micro, batch.accumulation) == expected


def test_a_loader_that_does_not_fit_the_train_batch_is_not_forced() -> None:
    assert solve(BatchRequest(2, train=32, loader=5, micro_auto=True)).micro == 16
