"""Test the random number generators of tensor-parallel ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepseek_zero.parallel import streams
from deepseek_zero.parallel.apply import has_dropout, may_draw
from tests.in_process import Rank, run_ranks
from tests.unit.parallel.tiny import tiny


def test_ranks_continue_with_the_state_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks are threads of one process, so each gets a fake generator state."""
    states = {rank: torch.full((8,), rank, dtype=torch.uint8) for rank in range(3)}

    def body(rank: Rank) -> list[str]:
        device = rank.comm.device
        monkeypatch.setattr(streams, "_generator_state", lambda device: states[device.rank])
        monkeypatch.setattr(
            streams,
            "_set_generator_state",
            lambda state, device: states.update({device.rank: state}),
        )
        rank.comm.device = Device(device.type, rank.index)  # type: ignore[assignment]
        for _ in range(2):
            streams.align_generators(rank.comm)
        rank.comm.device = device
        return [name for _, name in rank.world.issued[rank.index] if "generators" in name]

    issued = run_ranks(3, body)
    assert all(torch.equal(states[rank], torch.zeros(8, dtype=torch.uint8)) for rank in range(3))
    assert len(issued[0]) == 3, issued[0]


class Device:
    """A fake device with the number of its rank."""

    def __init__(self, kind: str, rank: int) -> None:
        self.type, self.rank = kind, rank


class Drops(nn.Module):
    def __init__(self, **attributes: float) -> None:
        super().__init__()
        vars(self).update(attributes)


def test_modules_that_may_use_random_numbers_are_found_by_name_and_configuration() -> None:
    assert not has_dropout(nn.Linear(2, 2)) and not has_dropout(nn.Dropout(0.0))
    assert has_dropout(nn.Dropout(0.1)) and has_dropout(nn.RReLU())
    assert has_dropout(Drops(drop_path_rate=0.2)) and has_dropout(Drops(layerdrop=0.2))
    assert not has_dropout(Drops(scale=0.2, drop_path=0.0))
    model = tiny("gpt2")
    assert not has_dropout(model) and may_draw(
        model
    )  # the configuration has summary_first_dropout = 0.1
