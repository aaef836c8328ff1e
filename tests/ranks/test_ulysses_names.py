"""DeepSpeed's recipe for sequence parallelism, unmodified.

It uses register, initialize(mpu=), the data loader adapter and the loss of DeepSpeed's
documentation.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import Tensor

import deepseek_zero
from deepseek_zero.base.errors import UsageError
from deepseek_zero.compat.deepspeed import groups
from deepseek_zero.compat.deepspeed.sequence_ulysses import (
    UlyssesSPAttentionHF,
    UlyssesSPDataLoaderAdapter,
    _as_bytes,
    _from_bytes,
)
from tests.shared_sequences import config, same_step
from tests.unit.parallel.tiny import VOCABULARY, tiny

pytest.importorskip("transformers")


def batches(rank: int, length: int) -> list[dict[str, Tensor]]:
    """Return the batches of one rank; half of the labels are ignored, so one rank has no valid
    token.
    """
    draws = torch.Generator().manual_seed(rank)
    found = []
    for _ in range(2):
        tokens = torch.randint(VOCABULARY, (3, length), generator=draws)
        labels = tokens.clone()
        labels[:, : length // 2 + 1] = -100
        found.append(
            {"input_ids": tokens, "labels": labels, "attention_mask": torch.ones_like(tokens)}
        )
    return found


def weighed(loss: Tensor, shift_labels: Tensor, group: Any) -> Tensor:
    """Return the loss over the tokens of all ranks, as in DeepSpeed's documentation and the
    Trainer.
    """
    losses = torch.stack(differentiable.all_gather(loss, group=group))
    tokens = torch.stack(differentiable.all_gather((shift_labels != -100).sum(), group=group))
    total: Tensor = (torch.where(tokens > 0, losses, 0.0) * tokens).sum() / tokens.sum().clamp(
        min=1
    )
    return total


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional")
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("length", [8, 7])
def test_the_recipe_trains_as_one_process(stage: int, length: int) -> None:
    model = tiny("llama")
    own = copy.deepcopy(model)
    mpu = UlyssesSPAttentionHF.register_with_transformers(own, "sdpa", 2, 3, disable_in_eval=True)
    assert mpu is not None
    group, rank = mpu.get_sequence_parallel_group(), mpu.get_sequence_parallel_rank()
    assert (mpu.get_sequence_parallel_world_size(), rank) == (2, dist.get_rank())
    engine = deepseek_zero.initialize(model=own, config=config(stage), mpu=mpu)[0]
    assert engine.mesh.sp == groups._get_sequence_parallel_world_size() == 2
    adapter = UlyssesSPDataLoaderAdapter(batches(rank, length), rank, group, 2, torch.device("cpu"))
    assert len(adapter) == 4
    whole = [batches(each, length)[number] for number in range(2) for each in range(2)]
    for expected, inputs in zip(whole, adapter, strict=True):
        reference = model(**expected, use_cache=False).loss
        loss = weighed(engine(**inputs, use_cache=False).loss, inputs["shift_labels"], group)
        assert abs(loss.item() / reference.item() - 1) < 1e-6
        same_step(model, [reference], engine, loss)
    engine.eval()
    model.eval()
    with torch.no_grad():  # each rank runs whole sequences
        assert abs(engine(**whole[0]).loss.item() / model(**whole[0]).loss.item() - 1) < 1e-6
    engine.destroy()


def test_invalid_registrations_raise_deepspeeds_errors() -> None:
    model, register = tiny("llama"), UlyssesSPAttentionHF.register_with_transformers
    assert register(model, "sdpa", 1, 1) is None
    for arguments, words in [
        ((model, "sdpa", 3, 1), "Attention head count 4 is not divisible by SP size 3"),
        (
            (model, "flash_attention_2", 2, 1),
            "does not match model config attn_implementation='sdpa'",
        ),
        (
            (tiny("llama", attn_implementation="eager"), "eager", 2, 1),
            "eager attn_implementation isn't currently",
        ),
        ((model, "sdpa", 2, 1, 7, False), "Sequence length 7 is not divisible by SP size 2"),
        ((model, "sdpa", 2, 1, None, False), "`seq_length` needs to be set"),
    ]:
        with pytest.raises(ValueError, match=words):
            register(*arguments)  # type: ignore[arg-type]


def test_a_batch_is_unpacked_unchanged_from_its_bytes() -> None:
    batch = {
        "input_ids": torch.arange(6).view(2, 3),
        "mask": torch.tensor([True, False]),
        "weight": torch.tensor(0.5, dtype=torch.bfloat16),
        "none": torch.empty(0, 3),
        "packed": [("first", 3), None, 1.5],
    }
    found = _from_bytes(_as_bytes(batch))
    assert found["packed"] == batch["packed"]
    for name in ("input_ids", "mask", "weight", "none"):
        assert found[name].dtype == batch[name].dtype and torch.equal(found[name], batch[name])  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"batch.made is a builtins.object") as caught:
        _as_bytes({"made": object()})
    assert "never as pickles" in str(caught.value)
