"""Plain values survive JSON, tensors beside it; anything else is named."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from deepseek_zero.base.errors import CheckpointError
from deepseek_zero.checkpoint.format import decode, encode
from deepseek_zero.checkpoint.piece import persistent_buffers


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        2**80,
        0.1,
        "text",
        [1, (2, [3.5])],
        {"a": {"b": ()}},
        {1: "int key", (2, 3): "tuple key"},
        {"__tuple__": "looks like a mark"},
        math.inf,
        torch.bfloat16,
        OrderedDict(x=1),
        __import__("random").Random(3).getstate(),
    ],
    ids=repr,
)
def test_a_plain_value_comes_back(value: Any) -> None:
    text = json.dumps(encode(value, "v", {}), allow_nan=False)
    assert decode(json.loads(text), {}) == value


def test_nan_and_tensors_come_back() -> None:
    tensors: dict[str, torch.Tensor] = {}
    value = {"rng": torch.get_rng_state(), "nested": [math.nan, {"half": torch.ones(2, dtype=torch.bfloat16)}]}
    back = decode(json.loads(json.dumps(encode(value, "client_state", tensors))), tensors)
    assert set(tensors) == {"client_state.rng", "client_state.nested[1].half"}
    assert torch.equal(back["rng"], value["rng"]) and math.isnan(back["nested"][0])
    assert back["nested"][1]["half"].dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"a": [0, {1}]}, r"client_state.a\[1\] is a builtins.set"),
        ({"f": print}, "client_state.f is a builtins.builtin_function_or_method"),
        ({"b": b"raw"}, "client_state.b is a builtins.bytes"),
        ({(nn,): 1}, "key .* of client_state"),
    ],
)
def test_anything_else_is_named(value: Any, named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        encode(value, "client_state", {})


def test_persistent_buffers_are_those_of_a_state_dict() -> None:
    """Fails loudly if torch renames the set it keeps them in."""
    net = nn.Sequential(nn.BatchNorm1d(2), nn.Module())
    net[1].register_buffer("kept", torch.ones(1))
    net[1].register_buffer("lost", torch.ones(1), persistent=False)
    names = set(net.state_dict()) - {name for name, _ in net.named_parameters()}
    assert set(persistent_buffers(net)) == names == {
        "0.running_mean", "0.running_var", "0.num_batches_tracked", "1.kept"
    }  # fmt: skip
