"""Context parallelism with gathered keys and values, and loops and loaders that cut batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

import deepseek_zero
from deepseek_zero.base.errors import NotBuiltError, UsageError
from deepseek_zero.compat.deepspeed.sequence_ulysses import UlyssesSPAttentionHF
from deepseek_zero.parallel.sequence_model import own_part, own_tokens
from tests.shared_sequences import batch, by_hand, config, same_training, same_weights
from tests.unit.parallel.tiny import LENGTH, VOCABULARY, tiny

pytest.importorskip("transformers")
THREE = {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 12}
GATHERS: dict[str, Any] = {"sequence_parallel": {"attention": "all_gather"}}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_heads_that_ranks_do_not_divide_are_gathered(stage: int) -> None:
    """With 5 labels ignored, the two ranks have different numbers of valid tokens."""
    model = tiny("llama", **THREE)
    own = copy.deepcopy(model)
    engine = deepseek_zero.initialize(model=own, config=config(stage), mesh={"sp": 2})[0]
    same_training(model, engine, [[batch(seed, ignores=5)] for seed in range(2)])
    engine.destroy()


@pytest.mark.ranks(2)
def test_lengths_that_do_not_fit_zig_zag_are_reported() -> None:
    own = tiny("llama")
    engine = deepseek_zero.initialize(model=own, config=config(1, **GATHERS), mesh={"sp": 2})[0]
    with pytest.raises(NotBuiltError, match=r'own_tokens.batch, coordinate, ranks, "all_gather"'):
        engine(**own_tokens(batch(0), dist.get_rank(), 2))
    with pytest.raises(UsageError, match=r"(?s)6 tokens cannot be cut over 2 .* pad it to 8"):
        own_part(own, {"input_ids": torch.ones(1, 6)})
    engine.destroy()


@pytest.mark.ranks(2)
def test_a_recipe_that_cuts_in_order_is_not_gathered() -> None:
    own = tiny("llama")
    mpu = UlyssesSPAttentionHF.register_with_transformers(own, "sdpa", 2, 3)
    with pytest.raises(UsageError, match=r"sequence_parallel\.attention is all_gather"):
        deepseek_zero.initialize(model=own, config=config(1, **GATHERS), mpu=mpu)


# -- loops and loaders that cut batches


class Sentences(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        tokens = torch.randint(
            VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(number)
        )
        return {"input_ids": tokens, "labels": tokens.clone()}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("attention", ["ulysses", "all_gather"])
def test_train_batch_cuts_its_batches(attention: str) -> None:
    """All ranks along sp pass either the same whole sequences or their parts."""
    model = tiny("llama")
    own = copy.deepcopy(model)
    said = config(2, gradient_accumulation_steps=2, sequence_parallel={"attention": attention})
    engine = deepseek_zero.initialize(model=own, config=said, mesh={"sp": 2})[0]
    for step in range(2):
        given = [batch(10 * step + micro) for micro in range(2)]
        mine = [own_part(own, each) for each in given] if step else given
        loss = engine.train_batch(iter(mine))
        model.zero_grad()
        expected = torch.stack([model(**each).loss for each in given]).mean()
        expected.backward()
        by_hand(model)
        assert abs(loss.item() / expected.item() - 1) < 1e-6
    same_weights(model, engine)
    wanted = torch.stack([model(**batch(number)).loss for number in (7, 8)]).mean()
    assert abs(engine.eval_batch(iter([batch(7), batch(8)])).item() / wanted.item() - 1) < 1e-6
    engine.destroy()


@pytest.mark.ranks(2)
def test_the_engines_loader_cuts_batches() -> None:
    model = tiny("llama", **THREE)
    own, data = copy.deepcopy(model), Sentences()
    engine, _, loader, _ = deepseek_zero.initialize(
        model=own, config=config(3), mesh={"sp": 2}, training_data=data
    )
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
    for step, given in zip(range(2), loader, strict=False):
        assert given["input_ids"].shape == (3, LENGTH // 2) and "labels" not in given
        whole = torch.stack(
            [data[number]["input_ids"] for number in order[3 * step : 3 * step + 3]]
        )
        expected = model(input_ids=whole, labels=whole).loss
        loss = engine(**given).loss
        assert abs(loss.item() / expected.item() - 1) < 1e-6
        engine.backward(loss)
        engine.step()
        model.zero_grad()
        expected.backward()
        by_hand(model)
    same_weights(model, engine)
    assert torch.isfinite(engine.train_batch())
    engine.destroy()
