"""Tensors in the arguments of modules are replaced in copies of their containers."""

from __future__ import annotations

from collections import UserDict, defaultdict
from dataclasses import InitVar, dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from deepseek_zero.base.nested import all_tensors, cast_inputs, map_inputs


@dataclass
class Batch:
    tokens: Tensor
    length: InitVar[int]
    weights: Tensor | None = field(init=False, default=None)
    later: Tensor = field(init=False)

    def __post_init__(self, length: int) -> None:
        self.source = f"{length} tokens"


@dataclass(frozen=True, slots=True)
class Frozen:
    tokens: Tensor


def test_a_dataclass_keeps_fields_that_its_constructor_does_not_take() -> None:
    batch = Batch(torch.ones(2), length=2)
    batch.weights = torch.full((2,), 3.0)
    found = cast_inputs(batch, torch.bfloat16)
    assert found is not batch
    assert batch.weights.dtype == torch.float32
    assert found.tokens.dtype == found.weights.dtype == torch.bfloat16
    assert found.weights.tolist() == [3.0, 3.0]
    assert found.source == "2 tokens"
    assert not hasattr(found, "later")


def test_an_unset_field_of_an_output_is_skipped() -> None:
    @dataclass
    class Output:
        cache: Tensor = field(init=False)
        logits: Tensor

    logits = torch.ones(2)
    (found,) = all_tensors(Output(logits))
    assert found is logits


def test_a_frozen_dataclass_with_slots_is_copied() -> None:
    batch = Frozen(torch.ones(2))
    found = map_inputs([batch], lambda tensor: tensor + 1)
    assert found[0].tokens.tolist() == [2.0, 2.0]
    assert batch.tokens.tolist() == [1.0, 1.0]


class Pair(tuple[Any, ...]):
    def __new__(cls, first: Any, second: Any) -> Pair:
        return super().__new__(cls, (first, second))


class Slotted(tuple[Any, ...]):
    __slots__ = ()


class Boxes(list[Any]):
    pass


class Options(dict[Any, Any]):
    pass


class Encoding(UserDict[Any, Any]):
    pass


@pytest.mark.parametrize(
    "value",
    [
        Pair(torch.ones(2), 7),
        Boxes([torch.ones(2), 7]),
        Options({0: torch.ones(2), 1: 7}),
        Encoding({0: torch.ones(2), 1: 7}),
        defaultdict(int, {0: torch.ones(2), 1: 7}),
        Slotted((torch.ones(2), 7)),
        torch.ones(2, 2).max(0),
    ],
)
def test_a_subclass_of_a_container_keeps_its_attributes(value: Any) -> None:
    if hasattr(value, "__dict__"):
        value.mode = "train"
    first = value[0]
    found = map_inputs(value, lambda tensor: tensor + 1)
    assert type(found) is type(value)
    if hasattr(value, "__dict__"):
        assert found.mode == "train"
    assert found[0].tolist() == [2.0, 2.0]
    assert value[0] is first


def test_a_shape_stays_one() -> None:
    assert map_inputs(torch.Size([2, 3]), torch.neg) == torch.Size([2, 3])
