"""Elastic batch sizes equal those of DeepSpeed, and invalid sections are refused."""

from __future__ import annotations

from typing import Any

import pytest

from deepseek_zero.compat.deepspeed import (
    elasticity,
)
from deepseek_zero.compat.deepspeed.elasticity import HIGHLY_COMPOSITE

ELASTIC: dict[str, Any] = {
    "enabled": True,
    "max_train_batch_size": 10_000,
    "micro_batch_sizes": [8, 12, 16, 17],
    "min_gpus": 32,
    "max_gpus": 1500,
    "version": 0.1,
}


def test_the_elastic_batch_is_deepspeeds() -> None:
    batch, ranks = elasticity.compute_elastic_config({"elasticity": ELASTIC})
    assert batch == 9792 and len(ranks) == 23  # the values of DeepSpeed's test
    for count in ranks:
        assert 32 <= count <= 1500 and any(
            batch % (count * size) == 0 for size in ELASTIC["micro_batch_sizes"]
        )
    assert elasticity.compute_elastic_config({"elasticity": ELASTIC}, world_size=64)[2] == 17
    # The least common multiple of these sizes exceeds the limit.
    narrow = ELASTIC | {
        "max_train_batch_size": 32,
        "micro_batch_sizes": [1, 2, 3, 7],
        "min_gpus": 1,
    }
    assert elasticity.compute_elastic_config({"elasticity": narrow}, world_size=4)[::2] == (24, 3)
    divisors = [sum(1 for d in range(1, n + 1) if n % d == 0) for n in HIGHLY_COMPOSITE[:20]]
    assert divisors == sorted(set(divisors))
    assert HIGHLY_COMPOSITE[-1] == 720_720


@pytest.mark.parametrize(
    ("changes", "beside", "world", "message"),
    [
        ({}, {}, 128, "world size 128 cannot train"),
        ({"enabled": False}, {}, 0, "elasticity.enabled is false"),
        ({"micro_batch_sizes": [0]}, {}, 0, "micro_batch_sizes is missing or not a list"),
        ({"max_train_batch_size": 4}, {}, 0, "exceeds max_train_batch_size 4"),
        ({}, {"train_batch_size": 4}, 0, "train_batch_size cannot be combined"),
        ({"max_batch": 1}, {}, 0, "no key max_batch"),
        ({"min_gpus": 2000}, {}, 0, "no number of ranks from elasticity.min_gpus 2000 to"),
    ],
)
def test_an_elastic_section_that_cannot_be(
    changes: Any, beside: Any, world: int, message: str
) -> None:
    with pytest.raises(elasticity.ElasticityError, match=message):
        elasticity.compute_elastic_config({"elasticity": ELASTIC | changes, **beside}, "", world)
