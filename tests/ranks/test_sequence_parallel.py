"""Sequence parallelism in the engine: losses, gradients and weights of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepseek_zero
from deepseek_zero.base.errors import NotBuiltError, UsageError
from deepseek_zero.parallel.sequence_model import own_tokens
from tests.shared_sequences import batch, config, same_training
from tests.unit.parallel.tiny import LENGTH, tiny

pytest.importorskip("transformers")
STEPS = 3


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ignores", [3, 5])
def test_every_stage_divides_by_the_ranks_once(stage: int, ignores: int) -> None:
    """Pitfall: a divisor without sp at some stages.

    With 5 labels ignored, the first rank has no valid token.
    """
    model = tiny("llama", num_key_value_heads=2)
    own = copy.deepcopy(model)
    engine = deepseek_zero.initialize(model=own, config=config(stage), mesh={"sp": 2})[0]
    assert (engine.mesh.sp, engine.mesh.data_size, engine.train_batch_size()) == (2, 1, 3)
    same_training(model, engine, [[batch(seed, ignores=ignores)] for seed in range(STEPS)])
    engine.destroy()


@pytest.mark.ranks(2)
def test_a_tied_head() -> None:
    model = tiny("qwen2")
    own = copy.deepcopy(model)
    engine = deepseek_zero.initialize(model=own, config=config(3, sequence_parallel_size=2))[0]
    same_training(model, engine, [[batch(seed)] for seed in range(STEPS)])
    engine.destroy()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_with_different_batches(stage: int) -> None:
    model = tiny("llama")
    own = copy.deepcopy(model)
    engine = deepseek_zero.initialize(
        model=own, config=config(stage), mesh={"sp": 2, "dp_shard": 2}
    )[0]
    assert engine.train_batch_size() == 6
    same_training(model, engine, [[batch(seed), batch(seed + 100)] for seed in range(STEPS)])
    engine.destroy()


@pytest.mark.ranks(2)
def test_bytes_of_a_step_are_those_of_the_formula() -> None:
    """Each attention sends (C - 1) / C of query, key, value and output, and again in backward."""
    model = tiny("llama")
    engine = deepseek_zero.initialize(model=model, config=config(3), mesh={"sp": 2})[0]
    text: Any = model.config
    heads = 2 * text.num_attention_heads + 2 * text.num_key_value_heads
    for step in range(2):
        engine.backward(engine(**own_tokens(batch(step), dist.get_rank(), 2)).loss)
        engine.step()
    one_way = 3 * (LENGTH // 2) * heads * text.head_dim * 4 // 2
    assert engine.runtime.comm.meter.sent_bytes["sp"] == 2 * text.num_hidden_layers * 2 * one_way
    engine.destroy()


@pytest.mark.ranks(2)
def test_models_without_exchanges_are_refused_by_name() -> None:
    with pytest.raises(NotBuiltError, match="the attention of Linear exchanges nothing"):
        deepseek_zero.initialize(model=nn.Linear(2, 2), config=config(1), mesh={"sp": 2})


@pytest.mark.ranks(2)
def test_batches_without_required_entries_are_refused_by_name() -> None:
    engine = deepseek_zero.initialize(model=tiny("llama"), config=config(1), mesh={"sp": 2})[0]
    own = own_tokens(batch(0), dist.get_rank(), 2)
    packed = own["position_ids"].clone()
    packed[:, -1] = 0
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"position_ids": None}, UsageError, "no position_ids"),
        ({"position_ids": packed}, NotBuiltError, "where this rank's tokens are"),
        ({"shift_labels": None, "labels": own["shift_labels"]}, UsageError, "no shift_labels"),
        ({"num_items_in_batch": 3}, NotBuiltError, "num_items_in_batch is not built"),
        ({"attention_mask": torch.ones(3, 1, 4, 4)}, NotBuiltError, r"not \(samples, tokens\)"),
    ]
    for change, error, words in cases:
        with pytest.raises(error, match=words):
            engine(**own | change)
    with pytest.raises(UsageError, match="7 tokens cannot be cut over 2"):
        own_tokens({"input_ids": torch.ones(1, 7)}, 0, 2)
    engine.destroy()
