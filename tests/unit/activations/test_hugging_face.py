"""Transformers models with gradient checkpointing use this library's recomputation.

The configuration decides whether checkpointed inputs are offloaded.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import deepseek_zero
from deepseek_zero.base.errors import NotBuiltError
from tests.unit.parallel.tiny import batch, tiny

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")
LAYERS = 2


def grown() -> dict[str, torch.Tensor]:
    """Return a batch whose activations are large enough to be offloaded."""
    return {name: value.repeat(1, 4) for name, value in batch().items()}


def train(section: dict[str, Any], *, enable: str) -> tuple[list[torch.Tensor], Any]:
    """Train two steps and return the losses with the weights, and the number of offloaded inputs.

    Args:
        section: The `activation_checkpointing` section of the configuration.
        enable: Whether to enable the model's gradient checkpointing before or after `initialize`.
    """
    own: Any = copy.deepcopy(tiny("llama"))
    if enable == "before":
        own.gradient_checkpointing_enable()
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "activation_checkpointing": section,
    }
    engine, *_ = deepseek_zero.initialize(model=own, config=config)
    if enable == "after":
        own.gradient_checkpointing_enable({"use_reentrant": True})
    found = []
    for _ in range(2):
        loss = engine(**grown()).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.detach())
    found += [value.clone() for value in engine.module.state_dict().values()]
    recompute = engine.parts.recompute
    parked = (
        recompute.parking._arrived if recompute is not None and recompute.parking is not None else 0
    )
    engine.destroy()
    return found, parked


def test_inputs_are_offloaded_only_if_configured() -> None:
    expected, parked = train({}, enable="before")
    assert parked == 0
    for section, enable, arrived in (
        ({"device": "cpu"}, "before", 2 * LAYERS),
        ({"device": "cpu"}, "after", 2 * LAYERS),
        ({"device": "cpu"}, "never", 0),
        ({"device": "cpu", "policy": "full"}, "never", 2 * LAYERS),
        ({"device": "cpu", "policy": ["attention"]}, "never", 2 * LAYERS * 2),
        ({"policy": "matmul"}, "never", 0),
    ):
        found, parked = train(section, enable=enable)
        assert all(map(torch.equal, found, expected)), section
        assert parked == arrived, section


def test_hooks_on_a_layer_run_once_and_those_inside_it_again() -> None:
    own: Any = copy.deepcopy(tiny("llama"))
    layer, ran = own.model.layers[1], list[str]()
    for name, module in (("layer", layer), ("mlp", layer.mlp)):
        module.register_forward_pre_hook(lambda _, args, name=name: ran.append(name))
    layer.register_forward_pre_hook(lambda _, args: (args[0] * 2, *args[1:]))
    plain = copy.deepcopy(own)
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "activation_checkpointing": {"policy": "full", "device": "cpu"},
    }
    engine, *_ = deepseek_zero.initialize(model=own, config=config)
    engine.backward(engine(**grown()).loss)
    assert ran == ["layer", "mlp", "mlp"]
    loss = plain(**grown()).loss
    loss.backward()
    found = deepseek_zero.utils.safe_get_full_grad(own.model.embed_tokens.weight)
    torch.testing.assert_close(found, plain.model.embed_tokens.weight.grad)
    engine.destroy()


def test_a_model_that_cannot_recompute_its_layers_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = tiny("llama")
    monkeypatch.setattr(type(own), "supports_gradient_checkpointing", False)
    with pytest.raises(
        NotBuiltError, match="layers of LlamaForCausalLM do not recompute themselves"
    ):
        deepseek_zero.initialize(
            model=own,
            config={
                "train_micro_batch_size_per_gpu": 3,
                "activation_checkpointing": {"policy": "full"},
            },
        )
