"""Tensors in the arguments of modules are replaced in copies of their containers."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field

import torch
from torch import Tensor

from deepseek_zero.base.nested import cast_inputs, map_inputs


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


def test_a_frozen_dataclass_with_slots_is_copied() -> None:
    batch = Frozen(torch.ones(2))
    found = map_inputs([batch], lambda tensor: tensor + 1)
    assert found[0].tokens.tolist() == [2.0, 2.0]
    assert batch.tokens.tolist() == [1.0, 1.0]
