"""The plain loop over stages: `loss = engine(batch)`, `engine.backward(loss)`, `engine.step()`.

The results have the bits of a run without pipeline.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import deepseek_zero
from deepseek_zero.base.errors import UsageError
from tests.reference import OPTIMIZERS

Batch = dict[str, Tensor]


def llama(tied: bool = False) -> nn.Module:
    torch.manual_seed(3)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    config = LlamaConfig(
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied, **sizes
    )
    return LlamaForCausalLM(config)


def engine_of(
    model: nn.Module,
    mesh: dict[str, int],
    stage: int,
    dtype: str,
    calls: int,
    rows: int,
    **top: Any,
) -> Any:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": calls,
        "steps_per_print": None,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **top,
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True, **({"initial_scale_power": 4} if dtype == "fp16" else {})}
    optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
    return deepseek_zero.initialize(model=model, optimizer=optimizer, config=config, mesh=mesh)[0]


def batches_of(step: int, many: int, rows: int = 2) -> list[Batch]:
    found = []
    for number in range(many):
        tokens = torch.randint(
            0, 96, (rows, 8), generator=torch.Generator().manual_seed(100 * step + number)
        )
        found.append({"input_ids": tokens, "labels": tokens})
    return found


def joined(batches: list[Batch]) -> Batch:
    return {key: torch.cat([each[key] for each in batches]) for key in batches[0]}


def calls_of(engine: Any, batches: list[Batch]) -> list[Tensor]:
    """Run one step of the plain loop and return the losses."""
    losses = []
    for batch in batches:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return losses


def assert_parts_of(whole: dict[str, Tensor], engine: Any) -> None:
    own, found = dict(engine.module.named_parameters()), engine.module.state_dict()
    assert own
    for name in own:
        assert torch.equal(found[name], whole[name]), name


def assert_trains_alike(engine: Any, reference: Any, calls: int, parts: int, steps: range) -> None:
    """Train both engines with the same micro-batches and compare them.

    Both ranks of the reference have the same micro-batches, so its means are exact.
    """
    many = calls * parts
    for step in steps:
        batches = batches_of(step, many)
        losses = calls_of(
            engine, [joined(batches[first : first + parts]) for first in range(0, many, parts)]
        )
        expected = reference.train_batch(iter(batches))
        mean = sum(map(float, losses)) / calls
        assert mean == pytest.approx(float(expected), rel=1e-6)
        assert engine.observer.record.loss == pytest.approx(mean, rel=1e-6)
        assert engine.global_steps == step + 1
        assert engine.get_global_grad_norm() == pytest.approx(
            reference.get_global_grad_norm(), rel=1e-6
        )
    assert_parts_of(reference.module.state_dict(), engine)


@pytest.mark.ranks(2, timeout=150)
def test_calls_train_to_the_bits_of_one_process_and_mix_with_whole_steps() -> None:
    top = {"pipeline": {"micro_batches": 2, "schedule": "interleaved", "virtual": 2}}
    engine = engine_of(llama(), {"pp": 2}, 3, "bf16", 2, 4, **top)
    reference = engine_of(llama(), {"dp_replicate": 2}, 0, "bf16", 4, 2)
    assert_trains_alike(engine, reference, 2, 2, range(2))
    engine.eval()
    (batch,) = batches_of(9, 1)
    found = engine(**batch)
    loss = reference.eval_batch(iter([batch]), 1)
    assert float(found.loss) == pytest.approx(float(loss), rel=1e-3)
    assert ("logits" in found) is (dist.get_rank() == 1)
    engine.train()
    loss = engine.train_batch(iter(batches_of(3, 2, 4)))
    assert engine.observer.record.loss == pytest.approx(float(loss), rel=1e-6)
    assert engine.global_steps == 3 and engine.micro_steps == 6
    with torch.no_grad():
        assert not engine(**joined(batches_of(5, 2))).loss.requires_grad
    with pytest.raises(UsageError, match="whose backward is due"):
        engine.backward(torch.ones((), requires_grad=True))


@pytest.mark.ranks(2, timeout=150)
def test_an_overflow_on_one_stage_skips_the_step_on_all_stages() -> None:
    engine = engine_of(llama(), {"pp": 2}, 2, "fp16", 2, 4, pipeline={"micro_batches": 2})
    reference = engine_of(llama(), {"dp_replicate": 2}, 0, "fp16", 4, 2)
    assert_trains_alike(engine, reference, 2, 2, range(1))
    before = {name: value.clone() for name, value in engine.module.state_dict().items()}
    handle = None
    if dist.get_rank() == 0:
        param = next(each for name, each in engine.module.named_parameters() if "up_proj" in name)
        handle = param.register_hook(lambda grad: grad * float("inf"))
    calls_of(engine, batches_of(7, 2, 4))
    assert engine.skipped_steps == 1
    assert all(
        torch.equal(value, before[name]) for name, value in engine.module.state_dict().items()
    )
    if handle is not None:
        handle.remove()
    calls_of(engine, batches_of(8, 2, 4))
    assert (engine.skipped_steps, engine.global_steps) == (1, 3)


def grads_of(runtime: Any) -> list[Tensor]:
    """Return this rank's shards of the reduced gradients."""
    found = [group.gradient.sum.reduced() for group in runtime.trained_groups]
    return [grad.clone() for grad in found if grad is not None]


@pytest.mark.ranks(4, timeout=150)
def test_seed_000s_api_with_stages_and_tensor_parallelism() -> None:
    """Each backward is reduced and accumulated until zero_grad, as with torch's optimizers."""
    model = llama(tied=True)
    # The parameters of the whole model
    optimizer = deepseek_zero.ZeroOptimizer(model.parameters(), lr=0.01, optimizer_type="adamw")
    zero = deepseek_zero.DeepSeekZeRO3(
        model, pp_degree=2, mp_degree=2, stage=3, pipeline={"micro_batches": 2}
    )
    engine = engine_of(
        llama(tied=True), {"pp": 2, "tp": 2}, 3, "fp32", 1, 4, pipeline={"micro_batches": 2}
    )
    (batch,) = batches_of(0, 1, 4)
    zero(**batch).loss.backward()
    engine.backward(engine(**batch).loss)
    once = grads_of(engine.runtime)
    assert len(once) > 0 and all(map(torch.equal, grads_of(zero.runtime), once))
    zero(**batch).loss.backward()
    assert all(
        torch.equal(grad, other + other)
        for grad, other in zip(grads_of(zero.runtime), once, strict=True)
    )
    optimizer.zero_grad()
    before = {name: value.clone() for name, value in zero.state_dict().items()}
    zero(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    after = zero.state_dict()
    assert before and all(not torch.equal(after[name], value) for name, value in before.items())
    zero(**batch)
    with pytest.raises(UsageError, match="a step before the backward"):
        optimizer.step()


@pytest.mark.ranks(4, timeout=150)
def test_calls_over_stages_and_tensor_parts() -> None:
    engine = engine_of(
        llama(tied=True), {"pp": 2, "tp": 2}, 3, "fp32", 1, 4, pipeline={"micro_batches": 2}
    )
    other = engine_of(llama(tied=True), {"pp": 2, "tp": 2}, 3, "fp32", 2, 2)
    for step in range(2):
        batches = batches_of(step, 2)
        (loss,) = calls_of(engine, [joined(batches)])
        mean = other.train_batch(iter(batches))
        table = engine.runtime.comm.whole.all_gather_rows(loss.double().reshape(1), "losses")
        assert table.tolist() == [table[0].tolist()] * 4
        assert float(loss) == pytest.approx(float(mean), rel=1e-6)
    assert_parts_of(other.module.state_dict(), engine)
