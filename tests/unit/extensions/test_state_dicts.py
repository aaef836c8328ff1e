"""A local state dict (`StateDicts.gathers` is false) does not communicate."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepseek_zero.extensions.gathered_parameters import GatheredParameters
from deepseek_zero.extensions.state_dicts import StateDicts
from tests.in_process import Rank, bare, run_ranks, sharded
from tests.models import Gpt, batch_of, seeded


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_may_take_a_local_state_dict(stage: int) -> None:
    plain = seeded(Gpt, blocks=2).state_dict()

    def body(rank: Rank) -> dict[str, torch.Tensor]:
        runtime = bare(rank, seeded(Gpt, blocks=2), stage=stage)
        StateDicts(runtime, gathers=False)
        found = runtime.model.state_dict() if rank.index == 1 else {}
        batch = batch_of(0, 0, rank.index)
        runtime.model(batch.tokens, batch.targets).backward()  # the ranks are still synchronized
        return found

    found = run_ranks(2, body)[1]
    assert list(found) == list(plain)
    for name, value in found.items():
        if stage < 3:
            assert torch.equal(value, plain[name])
        else:
            assert (
                value.shape == (0,)
                and value.dtype == plain[name].dtype
                and type(value) is torch.Tensor
            )


def test_gathered_parameters_are_whole_in_a_local_state_dict() -> None:
    plain = seeded(Gpt, blocks=2).state_dict()

    def body(rank: Rank) -> dict[str, torch.Tensor]:
        runtime = bare(rank, seeded(Gpt, blocks=2), stage=3)
        dicts = StateDicts(runtime, gathers=False)
        with GatheredParameters(runtime.model.blocks[0]):
            found = runtime.model.state_dict() if rank.index == 0 else {}
        with dicts.gathering():
            gathered = runtime.model.state_dict()
        assert all(torch.equal(gathered[name], plain[name]) for name in plain)
        assert all(type(each).__name__ == "ShardedParameter" for each in runtime.model.parameters())
        return found

    found = run_ranks(2, body)[0]
    whole = {name for name in plain if name.startswith("blocks.0.")}
    assert all(torch.equal(found[name], plain[name]) for name in whole)
    assert all(value.shape == (0,) for name, value in found.items() if name not in whole)


def test_the_parameters_themselves_stay_sharded_in_a_local_state_dict_with_keep_vars() -> None:
    def body(rank: Rank) -> None:
        model = seeded(Gpt, blocks=2)
        runtime = bare(rank, model, stage=3)
        StateDicts(runtime, gathers=False)
        kept = model.state_dict(keep_vars=True)
        params = dict(model.named_parameters(remove_duplicate=False))
        assert all(kept[name] is param for name, param in params.items())

    run_ranks(2, body)


class Outdated(nn.Linear):
    """Refuses the extra state of a state dict."""

    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None:
        raise ValueError(state)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_model_can_be_used_after_a_load_that_an_exception_ended(stage: int) -> None:
    def body(rank: Rank) -> None:
        model = nn.Sequential(nn.Linear(2, 2), Outdated(2, 2))
        runtime = sharded(rank, model, stage=stage)
        with pytest.raises(ValueError, match="1"):
            model.load_state_dict(model.state_dict())
        runtime.model(torch.ones(1, 2)).sum().backward()
        assert all(param.grad is not None for param in model.parameters())

    run_ranks(1, body)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_part_can_be_loaded_after_a_load_that_an_exception_ended(stage: int) -> None:
    def body(rank: Rank) -> None:
        model = nn.Sequential(nn.Linear(2, 2), Outdated(2, 2))
        runtime = sharded(rank, model, stage=stage)
        whole = model.state_dict()
        with pytest.raises(ValueError, match="1"):
            model.load_state_dict(whole)
        part = {"weight": torch.full((2, 2), 7.0), "bias": torch.zeros(2)}
        model[0].load_state_dict(part)
        (group,) = {id(each): each for each in runtime.groups}.values()
        assert (group.weight.memory == 7.0).sum() == 4
        assert torch.equal(model.state_dict()["0.weight"], part["weight"])

    run_ranks(1, body)


class Unready(nn.Linear):
    """Has an extra state that cannot be read at first."""

    is_ready = False

    def get_extra_state(self) -> int:
        if not self.is_ready:
            raise ValueError("not ready")
        return 1


def test_one_rank_may_repeat_a_local_state_dict_that_an_exception_ended() -> None:
    def body(rank: Rank) -> None:
        model = nn.Sequential(nn.Linear(2, 2), Unready(2, 2))
        runtime = bare(rank, model, stage=3)
        StateDicts(runtime, gathers=False)
        if rank.index == 0:
            with pytest.raises(ValueError, match="not ready"):
                model.state_dict()
            model[1].is_ready = True
            assert model.state_dict()["0.weight"].shape == (0,)
        assert all(type(each).__name__ == "ShardedParameter" for each in model.parameters())
        runtime.model(torch.ones(1, 2)).sum().backward()

    run_ranks(2, body)
