"""Plain values and tensors survive the JSON format; unsupported values raise an error."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from deepseek_zero.base.errors import CheckpointError
from deepseek_zero.checkpoint.format import decode, encode
from deepseek_zero.checkpoint.numpy_values import from_plain, to_plain
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
        pytest.param(
            Namespace(lr=0.1, path=Path("a"), device=torch.device("cpu"), tags={"a", (1, 2)}),
            id="Namespace",  # the order of a set differs between the processes that collect tests
        ),
        frozenset({1}),
        [b"\0raw", 1j],
        {"__set__": [1]},
        __import__("random").Random(3).getstate(),
    ],
    ids=repr,
)
def test_a_plain_value_is_restored(value: Any) -> None:
    text = json.dumps(encode(value, "v", {}), allow_nan=False)
    assert decode(json.loads(text), {}) == value


def test_tensors_whose_names_join_to_the_same_path_stay_apart() -> None:
    tensors: dict[str, torch.Tensor] = {}
    value = {"a": {"b": torch.zeros(2)}, "a.b": torch.ones(2), "c": [np.zeros(1)]}
    value["c[0]"] = np.ones(1)
    found = decode(json.loads(json.dumps(encode(value, "v", tensors))), tensors)
    assert found["a"]["b"].tolist() == [0, 0]
    assert found["a.b"].tolist() == [1, 1]
    assert [found["c"][0].item(), found["c[0]"].item()] == [0, 1]


def test_nan_and_tensors_are_restored() -> None:
    tensors: dict[str, torch.Tensor] = {}
    value = {
        "rng": torch.get_rng_state(),
        "nested": [math.nan, {"half": torch.ones(2, dtype=torch.bfloat16)}],
    }
    back = decode(json.loads(json.dumps(encode(value, "client_state", tensors))), tensors)
    assert set(tensors) == {"client_state.rng", "client_state.nested[1].half"}
    assert torch.equal(back["rng"], value["rng"]) and math.isnan(back["nested"][0])
    assert back["nested"][1]["half"].dtype is torch.bfloat16


ARRAYS = {
    "random state": np.random.RandomState(3).get_state()[1],
    "scalar": np.array(2.5),
    "empty": np.zeros((0, 3), np.int16),
    "of bool": np.array([[True, False]]),
    "of text": np.array(["a", "long"]),
    "of times": np.array(["2026-11-26"], "datetime64[s]"),
    "big endian": np.arange(4, dtype=">i4"),
    "complex": np.arange(4).reshape(2, 2) * 1j,
    "with fields": np.array([(1, 2.5)], [("step", "<i8"), ("loss", "<f4")]),
    "not contiguous": np.arange(12).reshape(3, 4).T[::2],
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_is_restored_with_dtype_and_shape(name: str) -> None:
    tensors: dict[str, torch.Tensor] = {}
    value = {"nested": [(ARRAYS[name], 1)]}
    back = decode(
        json.loads(json.dumps(encode(value, "client_state", tensors), allow_nan=False)), tensors
    )
    found = back["nested"][0][0]
    assert (found.dtype, found.shape) == (ARRAYS[name].dtype, ARRAYS[name].shape)
    assert np.array_equal(found, ARRAYS[name]) and found.flags.writeable


@pytest.mark.parametrize(
    "value", [np.float64(0.5), np.int64(3), np.bool_(True), np.float32("nan"), np.str_("x")]
)
def test_a_numpy_scalar_is_restored_with_its_type(value: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    back = decode(
        json.loads(json.dumps(encode({"a": value}, "v", tensors), allow_nan=False)), tensors
    )["a"]
    assert type(back) is type(value) and back.tobytes() == value.tobytes()


def test_random_states_of_numpy_are_restored() -> None:
    generator, state = np.random.default_rng(5), np.random.RandomState(7)
    value = {
        "generator": generator.bit_generator.state,
        "state": state.get_state(),
        "old": np.random.MT19937(1).state,
    }
    expected = generator.random(3), state.rand(3)
    tensors: dict[str, torch.Tensor] = {}
    back = decode(json.loads(json.dumps(encode(value, "v", tensors))), tensors)
    generator.bit_generator.state = back["generator"]
    state.set_state(back["state"])
    assert np.array_equal(generator.random(3), expected[0]) and np.array_equal(
        state.rand(3), expected[1]
    )
    assert np.array_equal(back["old"]["state"]["key"], value["old"]["state"]["key"])


def test_an_array_whose_bytes_do_not_fit_is_refused() -> None:
    plain = to_plain(np.arange(3))
    with pytest.raises(ValueError, match="24 bytes"):
        from_plain({**plain, "shape": [4]})
    with pytest.raises(ValueError, match="object"):
        from_plain({**plain, "dtype": "|O"})


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"a": [0, {nn}]}, r"client_state.a\[1\]\[0\] is a builtins.module"),
        ({"f": print}, "client_state.f is a builtins.builtin_function_or_method"),
        ({"o": np.array([object()])}, "client_state.o is a numpy.ndarray"),
        ({"m": np.ma.masked_array([1], [True])}, "client_state.m is a numpy.ma"),
        ({"s": SimpleNamespace()}, "client_state.s is a types.SimpleNamespace"),
        ({(nn,): 1}, "key .* of client_state"),
    ],
)
def test_anything_else_is_named(value: Any, named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        encode(value, "client_state", {})


def test_persistent_buffers_are_those_of_a_state_dict() -> None:
    """Fails if torch renames its private set of non-persistent buffers."""
    net = nn.Sequential(nn.BatchNorm1d(2), nn.Module())
    net[1].register_buffer("kept", torch.ones(1))
    net[1].register_buffer("lost", torch.ones(1), persistent=False)
    names = set(net.state_dict()) - {name for name, _ in net.named_parameters()}
    assert set(persistent_buffers(net)) == names == {
        "0.running_mean", "0.running_var", "0.num_batches_tracked", "1.kept"
    }  # fmt: skip
