"""Extra states of modules are stored as plain values and tensors."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from deepseek_zero.checkpoint.extra_state import extra_states, restore_extra_states
from deepseek_zero.checkpoint.format import decode, encode


class Stateful(nn.Module):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def restored(state: Any) -> Any:
    """Save `state` with one model, restore it into another one and return the result."""
    tensors: dict[str, torch.Tensor] = {}
    first = nn.Sequential(nn.Linear(2, 2), Stateful(state))
    stored = encode(extra_states(first), "trainer", tensors)
    second = nn.Sequential(nn.Linear(2, 2), Stateful("new"))
    restore_extra_states(second, decode(stored, tensors))
    return second[1].state


@pytest.mark.parametrize("state", [7, None, {"n": 3, "names": ["a"]}, b"", b"\x00\xff", (1, 2.5)])
def test_a_plain_state_is_restored(state: Any) -> None:
    found = restored(state)
    assert found == state
    assert type(found) is type(state)


def test_tensors_and_streams_are_restored() -> None:
    assert torch.equal(restored({"scale": torch.ones(3)})["scale"], torch.ones(3))
    assert restored(io.BytesIO(b"recipe")).getvalue() == b"recipe"


def test_a_state_that_a_checkpoint_cannot_hold_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        "deepseek_zero.checkpoint.extra_state.log_once", lambda text, _: said.append(text)
    )
    assert restored(object()) == "new"
    assert len(said) == 1
    assert "the extra state of '1'" in said[0]


def test_modules_without_an_extra_state_have_none() -> None:
    assert extra_states(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))) == {}
