"""Models whose sequences several ranks share, under the engine: losses, gradients and weights of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepseek_zero
from deepseek_zero.base.errors import NotBuiltError, UsageError
from deepseek_zero.compat.deepspeed.parameters import safe_get_full_grad
from deepseek_zero.parallel.sequence_model import own_tokens
from tests.unit.parallel.tiny import LENGTH, VOCABULARY, tiny

pytest.importorskip("transformers")
STEPS = 3


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }


def batch(seed: int, *, ignores: int = 3) -> dict[str, Tensor]:
    """Tokens and labels, of which the first so many are ignored."""
    tokens = torch.randint(VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(seed))
    labels = tokens.clone()
    labels[:, :ignores] = -100
    return {"input_ids": tokens, "labels": labels}


def close(found: Tensor, expected: Tensor) -> bool:
    expected = expected.detach()
    return bool((found - expected).abs().max() <= 1e-6 * max(1.0, float(expected.abs().max())))


def compare(model: nn.Module, engine: Any, batches: list[list[dict[str, Tensor]]]) -> None:
    """Train both; each step's batches are those of the data coordinates. Same losses, gradients and weights."""
    mesh = engine.mesh
    for step in batches:
        losses = [model(**each, use_cache=False).loss for each in step]
        model.zero_grad()
        torch.stack(losses).mean().backward()
        own = own_tokens(step[mesh.data_index], mesh.coordinates["sp"], mesh.sp)
        loss = engine(**own, use_cache=False).loss
        assert abs(loss.item() / losses[mesh.data_index].item() - 1) < 1e-6
        engine.backward(loss)
        parts = dict(engine.module.named_parameters())
        for name, parameter in model.named_parameters():
            found = safe_get_full_grad(parts[name])
            assert found is not None and parameter.grad is not None and close(found, parameter.grad), name
        engine.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]
    whole = engine.module.state_dict()
    assert all(close(whole[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ignores", [3, 5])
def test_every_stage_divides_by_the_ranks_once(stage: int, ignores: int) -> None:
    """Pitfall: a divisor without sp at some stages. With 5 labels ignored the first rank has no valid token at all."""
    model = tiny("llama", num_key_value_heads=2)
    own = copy.deepcopy(model)
    engine = deepseek_zero.initialize(model=own, config=config(stage), mesh={"sp": 2})[0]
    assert (engine.mesh.sp, engine.mesh.data_size, engine.train_batch_size()) == (2, 1, 3)
    compare(model, engine, [[batch(seed, ignores=ignores)] for seed in range(STEPS)])
    engine.destroy()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "options"), [("llama", {"num_key_value_heads": 1}), ("gpt2", {}), ("qwen2", {}), ("gpt_neox", {})]
)
def test_unmodified_models(name: str, options: dict[str, Any]) -> None:
    model = tiny(name, **options)
    if name == "llama":
        assert model.config.num_key_value_heads == 1  # type: ignore[union-attr]
    own = copy.deepcopy(model)
    engine = deepseek_zero.initialize(model=own, config=config(3, sequence_parallel_size=2))[0]
    compare(model, engine, [[batch(seed)] for seed in range(STEPS)])
    engine.destroy()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", [1, 3])
def test_with_ranks_that_see_other_batches(stage: int) -> None:
    model = tiny("llama")
    own = copy.deepcopy(model)
    engine = deepseek_zero.initialize(model=own, config=config(stage), mesh={"sp": 2, "dp_shard": 2})[0]
    assert engine.train_batch_size() == 6
    compare(model, engine, [[batch(seed), batch(seed + 100)] for seed in range(STEPS)])
    engine.destroy()


@pytest.mark.ranks(2)
def test_bytes_of_a_step_are_those_of_the_formula() -> None:
    """(C - 1) / C of query, key, value and output of each attention, and the same in backward."""
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
def test_padding_behind_sequences_may_be_masked() -> None:
    model = tiny("llama")
    own = copy.deepcopy(model)
    engine = deepseek_zero.initialize(model=own, config=config(3), mesh={"sp": 2})[0]
    padded = batch(1)
    padded["attention_mask"] = torch.ones(3, LENGTH, dtype=torch.long)
    padded["attention_mask"][1, 3:] = 0
    padded["attention_mask"][2, 6:] = 0
    padded["labels"][padded["attention_mask"] == 0] = -100
    compare(model, engine, [[padded]])
    padded["attention_mask"] = padded["attention_mask"].flip(1)
    with pytest.raises(NotBuiltError, match="leaves out tokens before others"):
        engine(**own_tokens(padded, dist.get_rank(), 2))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "llama",
            {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 3},
            "3 attention heads cannot be cut",
        ),
        ("llama", {"attention_dropout": 0.1}, "drop something in training"),
        ("llama", {"attn_implementation": "eager"}, "attention 'eager' needs masks"),
        ("gemma2", {}, "sliding_attention"),
    ],
)
def test_models_that_are_not_built_are_refused_by_name(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(NotBuiltError, match=words):
        deepseek_zero.initialize(model=tiny(name, **options), config=config(1), mesh={"sp": 2})


@pytest.mark.ranks(2)
def test_models_without_exchanges_are_refused_by_name() -> None:
    with pytest.raises(NotBuiltError, match="the attention of Linear exchanges nothing"):
        deepseek_zero.initialize(model=nn.Linear(2, 2), config=config(1), mesh={"sp": 2})


@pytest.mark.ranks(2)
def test_batches_that_say_too_little_are_refused_by_name() -> None:
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
