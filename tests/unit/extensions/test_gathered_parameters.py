"""`GatheredParameters` refuses ranks that do not exist, and its own block inside itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deepseek_zero.base.errors import UsageError
from deepseek_zero.extensions.gathered_parameters import GatheredParameters
from deepseek_zero.extensions.zero_init import Init
from tests.in_process import Rank, bare, run_ranks
from tests.models import Gpt, seeded


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("modifier_rank", [2, -1, "0"])
def test_a_modifier_rank_that_does_not_exist_is_refused(stage: int, modifier_rank: Any) -> None:
    def body(rank: Rank) -> None:
        runtime = bare(rank, seeded(Gpt, blocks=1), stage=stage)
        weight = runtime.model.blocks[0].up.weight
        with (
            pytest.raises(UsageError, match=r"0 to 1\."),
            GatheredParameters(weight, modifier_rank=modifier_rank),
            torch.no_grad(),
        ):
            weight.fill_(float(rank.index))
        with GatheredParameters(weight):  # nothing is left gathered
            assert weight.std() > 0

    run_ranks(2, body)


def test_a_modifier_rank_that_does_not_exist_is_refused_under_init() -> None:
    with Init():
        model = nn.Sequential(nn.Linear(2, 2))
    context = GatheredParameters(model, modifier_rank=1)
    with pytest.raises(UsageError, match=r"0 to 0\."), context:
        pass


def test_the_bias_of_a_layer_without_one_is_ignored() -> None:
    with GatheredParameters(nn.Linear(2, 2, bias=False).bias, modifier_rank=0):
        pass


def test_one_object_is_not_entered_twice_at_a_time() -> None:
    def body(rank: Rank) -> None:
        runtime = bare(rank, seeded(Gpt, blocks=1), stage=3)
        weight = runtime.model.blocks[0].up.weight
        context = GatheredParameters(weight, modifier_rank=0)
        for value in (1.0, 2.0):
            with context:
                with pytest.raises(UsageError, match="inside its own block"), context:
                    pass
                with torch.no_grad():
                    weight.fill_(value)
            with GatheredParameters(weight):
                assert bool((weight == value).all())
            assert not any(group.is_in_block for group in runtime.groups)

    run_ranks(2, body)
