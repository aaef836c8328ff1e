"""Tensor parallelism in the engine gives the bits of one process with a virtual axis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import deepseek_zero
from deepseek_zero.parallel.apply import virtual
from deepseek_zero.parallel.plans import ParallelSettings
from tests.reference import OPTIMIZERS


def llama() -> nn.Module:
    torch.manual_seed(3)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes))


def config_of(stage: int, dtype: str, accumulation: int = 1, **zero: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "steps_per_print": None,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
    }
    return found | ({dtype: {"enabled": True}} if dtype != "fp32" else {})


def tokens_of(step: int, micro: int, data: int) -> torch.Tensor:
    return torch.randint(
        0, 96, (2, 8), generator=torch.Generator().manual_seed(100 * step + 10 * micro + data)
    )


def train(engine: Any, steps: int, accumulation: int) -> list[torch.Tensor]:
    return [loss for step in range(steps) for loss in train_at(engine, step, accumulation)]


def train_at(engine: Any, step: int, accumulation: int) -> list[torch.Tensor]:
    losses = []
    for micro in range(accumulation):
        tokens = tokens_of(step, micro, engine.mesh.data_index)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return losses


def engine_of(model: nn.Module, mesh: dict[str, int] | None, config: dict[str, Any]) -> Any:
    optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
    return deepseek_zero.initialize(model=model, optimizer=optimizer, config=config, mesh=mesh)[0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_two_ranks_of_one_axis_train_to_the_bits_of_the_virtual_axis(
    stage: int, dtype: str, accumulation: int
) -> None:
    engine = engine_of(llama(), {"tp": 2}, config_of(stage, dtype, accumulation))
    losses = train(engine, 3, accumulation)
    # Both ranks of the reference have the same batch: the mean of two equal gradients is exact.
    reference = engine_of(
        virtual(llama(), 2), {"dp_replicate": 2}, config_of(stage, dtype, accumulation)
    )
    reference.mesh = engine.mesh
    expected = train(reference, 3, accumulation)
    assert all(map(torch.equal, losses, expected))
    assert engine.get_global_grad_norm() == pytest.approx(
        reference.get_global_grad_norm(), rel=1e-6
    )
    assert_parts_of(reference.module.state_dict(), engine)


@pytest.mark.ranks(2, timeout=240)
@pytest.mark.parametrize(("stage", "dtype"), [(0, "bf16"), (3, "fp32")])
def test_sharded_tokens_train_to_the_bits_of_the_virtual_axis(stage: int, dtype: str) -> None:
    """Gradients of norms are partial sums along the axis and are reduced once per step."""
    config = config_of(stage, dtype) | {"tensor_parallel": {"sequence": True}}
    engine = engine_of(llama(), {"tp": 2}, config)
    losses = train(engine, 3, 1)
    whole = virtual(llama(), 2, ParallelSettings(sequence=True))
    reference = engine_of(whole, {"dp_replicate": 2}, config_of(stage, dtype))
    reference.mesh = engine.mesh
    assert all(map(torch.equal, losses, train(reference, 3, 1)))
    assert engine.get_global_grad_norm() == pytest.approx(
        reference.get_global_grad_norm(), rel=1e-6
    )
    assert_parts_of(reference.module.state_dict(), engine)


@pytest.mark.ranks(4, timeout=240)
def test_sharded_tokens_cross_the_stages_of_a_pipeline() -> None:
    """Pipeline messages hold only this rank's tokens, in evaluation all tokens.

    The losses equal those of a run with unsharded tokens.
    """
    losses: dict[bool, list[torch.Tensor]] = {}
    sent: dict[bool, int] = {}
    for shards in (True, False):
        config = config_of(3, "fp32", 2) | {"tensor_parallel": {"sequence": shards}}
        engine = engine_of(llama(), {"pp": 2, "tp": 2}, config)

        def batches(step: int) -> Iterator[dict[str, torch.Tensor]]:
            for micro in range(2):
                tokens = tokens_of(step, micro, 0)
                yield {"input_ids": tokens, "labels": tokens}

        losses[shards] = [engine.train_batch(batches(step)) for step in range(3)]
        before = engine.runtime.comm.meter.sent_bytes["send"]
        losses[shards].append(engine.train_batch(batches(3)))
        sent[shards] = engine.runtime.comm.meter.sent_bytes["send"] - before
        losses[shards].append(engine.eval_batch(batches(9)))
        losses[shards].append(engine.train_batch(batches(4)))
        engine.destroy()
    torch.testing.assert_close(
        torch.stack(losses[True]), torch.stack(losses[False]), rtol=1e-5, atol=0
    )
    assert sent[False] == 2 * sent[True] > 0


def assert_parts_of(whole: dict[str, torch.Tensor], engine: Any) -> None:
    """Check that every rank's state dict, gathered from all parts, equals the full model bit by
    bit.
    """
    found = engine.module.state_dict()
    assert found.keys() == whole.keys()
    assert not [name for name, value in found.items() if not torch.equal(value, whole[name])]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp_replicate": 2, "tp": 2}, {"tp": 4}], ids=str)
def test_shards_replicas_and_parts_together_train_to_the_bits_of_one_process(
    stage: int, axes: dict[str, int]
) -> None:
    """Four tp ranks share two kv heads in pairs.

    The norm, and therefore clipping, counts each element once.
    """
    config = config_of(stage, "fp32") | {"gradient_clipping": 0.1}
    engine = engine_of(llama(), axes, config)
    model = virtual(llama(), axes["tp"])
    optimizer, data_size = OPTIMIZERS["adamw"](list(model.parameters())), 4 // axes["tp"]
    for step in range(3):
        (loss,) = train_at(engine, step, 1)
        grads: list[list[torch.Tensor]] = []
        for data in range(data_size):
            tokens = tokens_of(step, 0, data)
            expected = model(input_ids=tokens, labels=tokens).loss
            expected.backward()
            if data == engine.mesh.data_index:
                assert torch.equal(loss, expected.detach()), step
            grads.append([param.grad for param in model.parameters()])
            model.zero_grad(set_to_none=True)
        norm = engine.get_global_grad_norm()
        for param, *parts in zip(model.parameters(), *grads, strict=True):
            param.grad = sum(parts[1:], parts[0]) / data_size
        exact = (
            torch.stack([param.grad.double().norm() for param in model.parameters()]).norm().item()
        )
        assert norm == pytest.approx(exact, rel=1e-5)
        for param in model.parameters():
            param.grad.mul_(min(1.0, 0.1 / (norm + 1e-6)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert_parts_of(dict(model.state_dict()), engine)


@pytest.mark.ranks(4)
def test_shared_heads_that_are_unfrozen_still_add_up_the_gradients_of_their_ranks() -> None:
    """Two tp ranks hold each of the two kv heads, so their gradients are partial sums."""

    def losses_of(engine: Any, model: nn.Module) -> list[torch.Tensor]:
        found = train_at(engine, 0, 1)
        for name, param in model.named_parameters():
            if "k_proj" in name or "v_proj" in name:
                param.requires_grad_(True)
        return [*found, *(loss for step in (1, 2, 3) for loss in train_at(engine, step, 1))]

    def frozen() -> nn.Module:
        model = llama()
        for name, param in model.named_parameters():
            param.requires_grad_("k_proj" not in name and "v_proj" not in name)
        return model

    model = frozen()
    engine = engine_of(model, {"tp": 4}, config_of(1, "fp32"))
    losses = losses_of(engine, model)
    whole = virtual(frozen(), 4)
    reference = engine_of(whole, {"dp_replicate": 4}, config_of(1, "fp32"))
    reference.mesh = engine.mesh
    assert all(map(torch.equal, losses, losses_of(reference, whole)))
