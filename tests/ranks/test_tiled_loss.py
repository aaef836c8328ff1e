"""Tiled loss in the engine gives the losses, gradients and weights of the unmodified model.

Tests every axis.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import deepseek_zero
from deepseek_zero.base.errors import NotBuiltError
from deepseek_zero.utils import safe_get_full_grad
from tests.shared_sequences import batch, close, config, same_gradients, same_training
from tests.unit.parallel.tiny import tiny

pytest.importorskip("transformers")
TILED = {"activation_checkpointing": {"tiled_loss": 5, "tiled_mlp": 3}}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("axis", "stage"), [("dp_shard", 0), ("dp_shard", 3), ("sp", 3)])
def test_it_trains_as_the_whole_loss_does(axis: str, stage: int) -> None:
    """Ranks ignore different numbers of labels; the head of qwen2 is tied to its embedding."""
    for name in ("llama", "qwen2"):
        model = tiny(name)
        engine = deepseek_zero.initialize(
            model=copy.deepcopy(model), config=config(stage, **TILED), mesh={axis: 2}
        )[0]
        batches = [
            [batch(10 * step + index, ignores=3 * index) for index in range(2)] for step in range(2)
        ]
        same_training(
            model, engine, batches if axis == "dp_shard" else [step[:1] for step in batches]
        )
        engine.destroy()


SEQUENCE = {"tensor_parallel": {"sequence": True}}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("more", [{}, SEQUENCE], ids=["tokens whole", "tokens sharded"])
def test_along_tp_it_is_the_split_loss(more: dict[str, Any]) -> None:
    recomputes = {"policy": "attention", "partition_activations": True}
    tiles = {"tiled_loss": 5} if more else {"tiled_loss": 5, "tiled_mlp": 3}
    found = []
    for section in ({}, {"activation_checkpointing": tiles | recomputes}):
        engine = deepseek_zero.initialize(
            model=tiny("llama"), config=config(1, **section, **more), mesh={"tp": 2}
        )[0]
        losses = []
        for step in range(3):
            loss = engine(**batch(step)).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        found.append((torch.stack(losses), engine.module.state_dict()))
        engine.destroy()
    (plain, weights), (tiled, others) = found
    assert close(tiled, plain) and all(close(others[name], each) for name, each in weights.items())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_any_factor_on_the_loss_reaches_every_gradient(stage: int) -> None:
    """Factors are the accumulation, a loss scale and a factor in the program.

    Each gradient is sent once, as without tiles.
    """
    sent = []
    for section in ({}, {"activation_checkpointing": {"tiled_loss": 5}}):
        model = tiny("llama")
        engine: Any = deepseek_zero.initialize(
            model=copy.deepcopy(model),
            config=config(stage, gradient_accumulation_steps=2, **section),
        )[0]
        index = engine.mesh.data_index
        for micro in range(2):
            for rank in range(2):
                (model(**batch(2 * micro + rank)).loss * 0.5 / 2 / 2).backward()
            engine.backward(engine(**batch(2 * micro + index)).loss * 0.5)
            if micro == 0:
                engine.step()
        same_gradients(model, engine)
        engine.step()
        meter = engine.runtime.comm.meter
        sent.append([meter.sent_bytes[kind] for kind in ("reduce_scatter", "all_gather")])
        engine.destroy()
    assert sent[0] == sent[1] and all(sent[0])


@pytest.mark.ranks(2)
def test_fp16_under_its_loss_scale_is_as_near_to_fp32_as_without_tiles() -> None:
    given = batch(1)
    exact = tiny("llama")
    exact(**given).loss.backward()
    far = []
    for section in ({}, TILED):
        fp16 = {"fp16": {"enabled": True, "initial_scale_power": 12}}
        engine = deepseek_zero.initialize(model=tiny("llama"), config=config(2, **fp16, **section))[
            0
        ]
        engine.backward(engine(**given).loss)
        parts = dict(engine.module.named_parameters())
        found = {name: safe_get_full_grad(part) for name, part in parts.items()}
        far.append(
            max(
                float((found[name].float() - each.grad).abs().max() / each.grad.abs().max())  # type: ignore[union-attr]
                for name, each in exact.named_parameters()
            )
        )
        engine.destroy()
    assert far[1] <= 1.2 * far[0], far


@pytest.mark.ranks(2)
def test_unsupported_features_are_refused_by_name() -> None:
    with pytest.raises(
        NotBuiltError, match=r"tiled_loss and tiled_mlp on a mesh with stages \(pp\)"
    ):
        deepseek_zero.initialize(model=tiny("llama"), config=config(0, **TILED), mesh={"pp": 2})
    with pytest.raises(
        NotBuiltError, match=r'tiled_mlp beside "tensor_parallel": {"sequence": true}'
    ):
        deepseek_zero.initialize(
            model=tiny("llama"), config=config(0, **TILED, **SEQUENCE), mesh={"tp": 2}
        )
