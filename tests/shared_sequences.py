"""Compare training on sequences that ranks share with one process on whole sequences.

Losses, gradients and weights must be the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepseek_zero.parallel.sequence_model import own_part
from deepseek_zero.utils import safe_get_full_grad
from tests.unit.parallel.tiny import LENGTH, VOCABULARY

RATE = 0.1


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }


def batch(seed: int, *, ignores: int = 3) -> dict[str, Tensor]:
    """Return tokens and labels, of which the first `ignores` per row are ignored."""
    tokens = torch.randint(VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(seed))
    labels = tokens.clone()
    labels[:, :ignores] = -100
    return {"input_ids": tokens, "labels": labels}


def close(found: Tensor, expected: Tensor) -> bool:
    expected = expected.detach()
    return bool((found - expected).abs().max() <= 1e-6 * max(1.0, float(expected.abs().max())))


def same_gradients(model: nn.Module, engine: Any, prefix: str = "") -> None:
    """Compare every gradient with the single process's within 1e-6. prefix: of engine names."""
    parts = dict(engine.module.named_parameters())
    for name, parameter in model.named_parameters():
        found = safe_get_full_grad(parts[prefix + name])
        assert found is not None and parameter.grad is not None and close(found, parameter.grad), (
            name
        )


def same_step(model: nn.Module, expected: Sequence[Tensor], engine: Any, loss: Tensor) -> None:
    """Compare an engine step with an SGD step by hand on the mean loss of all ranks."""
    model.zero_grad()
    torch.stack(tuple(expected)).mean().backward()
    engine.backward(loss)
    same_gradients(model, engine)
    engine.step()
    by_hand(model)


def by_hand(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=RATE)  # type: ignore[arg-type]


def same_training(model: nn.Module, engine: Any, batches: list[list[dict[str, Tensor]]]) -> None:
    """Train both and compare losses, gradients and weights. batches: by step and coordinate."""
    for step in batches:
        losses = [model(**each).loss for each in step]
        index = engine.mesh.data_index
        loss = engine(**own_part(engine.module, step[index])).loss
        assert abs(loss.item() / losses[index].item() - 1) < 1e-6
        same_step(model, losses, engine, loss)
    same_weights(model, engine)


def same_weights(model: nn.Module, engine: Any) -> None:
    whole = engine.module.state_dict()
    assert all(close(whole[name], parameter) for name, parameter in model.named_parameters())
