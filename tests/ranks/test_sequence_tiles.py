"""Sequence tiling in the engine, with unmodified models patched as in DeepSpeed's documentation.

Gradients are reduced once.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import deepseek_zero
from deepseek_zero.compat.deepspeed.sequence_tiles import TiledFusedLogitsLoss, TiledMLP
from tests.shared_sequences import batch, by_hand, config, same_gradients, same_step
from tests.unit.parallel.tiny import tiny

pytest.importorskip("transformers")


def tile_the_mlps(model: Any) -> None:
    for layer in model.model.layers:
        plain = type(layer.mlp).forward

        def tiled(x: Tensor, mlp: Any = layer.mlp, plain: Any = plain) -> Tensor:
            weights = [mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight]
            return TiledMLP.apply(plain, mlp, x, 4, weights)

        layer.mlp.forward = tiled


TILES, CALLS = 3, list[int]()  # tiles of the loss, and tokens per call of the loss function


def loss_of(module: Any, hidden: Tensor, labels: Tensor) -> Tensor:
    CALLS.append(len(labels))
    return F.cross_entropy(
        module.lm_head(hidden).float(), labels, ignore_index=-100, reduction="sum"
    )


class Tiled(nn.Module):
    """A causal model whose loss is computed in tiles, without logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.inner.model(input_ids=input_ids, use_cache=False).last_hidden_state
        shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
        weights = [self.inner.lm_head.weight]
        total = TiledFusedLogitsLoss.apply(
            loss_of, self.inner, hidden, shifted, None, TILES, weights, "sum"
        )
        return total / (shifted != -100).sum()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_tiled_models_train_as_untiled_ones_and_send_as_much(stage: int, accumulation: int) -> None:
    """Losses are means over a rank's tokens; gradients are means over micro-batches and ranks."""
    plain, sent = tiny("llama"), []
    CALLS.clear()
    for tiles in (False, True):
        own: Any = Tiled(copy.deepcopy(plain)) if tiles else copy.deepcopy(plain)
        if tiles:
            tile_the_mlps(own.inner)
        engine = deepseek_zero.initialize(
            model=own, config=config(stage, gradient_accumulation_steps=accumulation)
        )[0]
        model = copy.deepcopy(plain)
        for step in range(2):
            model.zero_grad()
            for micro in range(accumulation):
                numbers = [10 * step + 2 * micro + rank for rank in range(2)]
                for number in numbers:
                    (model(**batch(number), use_cache=False).loss / 2 / accumulation).backward()
                found = engine(**batch(numbers[dist.get_rank()]))
                engine.backward(found if tiles else found.loss)
                if micro + 1 < accumulation:
                    engine.step()
            same_gradients(model, engine, "inner." if tiles else "")
            engine.step()
            by_hand(model)
        sent.append(dict(engine.runtime.comm.meter.sent_bytes))
        engine.destroy()
    assert sent[0] == sent[1] and sent[0]["reduce_scatter"] > 0
    assert len(CALLS) == TILES * 2 * accumulation, "each tile is computed once"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_tiled_loss_outside_of_the_engine(stage: int) -> None:
    """As in ALST's trainers, the head is called separately and recomputed in backward."""
    plain = tiny("llama")
    CALLS.clear()
    own: Any = copy.deepcopy(plain)
    engine = deepseek_zero.initialize(model=own, config=config(stage))[0]
    for number in range(2):
        given = batch(number)
        wanted = plain(**given, use_cache=False).loss
        shifted = F.pad(given["labels"], (0, 1), value=-100)[:, 1:]
        hidden = engine(
            given["input_ids"], output_hidden_states=True, use_cache=False
        ).hidden_states[-1]
        loss = TiledFusedLogitsLoss.apply(
            loss_of, own, hidden, shifted, None, TILES, [own.lm_head.weight], "sum"
        )
        loss = loss / (shifted != -100).sum()
        assert abs(loss.item() / wanted.item() - 1) < 1e-6
        same_step(plain, [wanted], engine, loss)
    assert len(CALLS) == 2 * 2 * TILES
    engine.destroy()
