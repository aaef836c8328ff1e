"""Pipelines in the engine with ZeRO stages 0 to 3, tied weights, shards and tensor parallelism.

The results have the bits of a run without pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import deepseek_zero
from deepseek_zero.base.errors import BatchMismatchError, UsageError
from deepseek_zero.compat.deepspeed.pipe import PipelineModule
from deepseek_zero.parallel.apply import virtual
from deepseek_zero.planner.split import split_of
from tests.reference import OPTIMIZERS

MANY = 4


def llama(tied: bool = False) -> nn.Module:
    torch.manual_seed(3)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    config = LlamaConfig(
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied, **sizes
    )
    return LlamaForCausalLM(config)


def config_of(stage: int, dtype: str, **top: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MANY,
        "steps_per_print": None,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **top,
    }
    return found | ({dtype: {"enabled": True}} if dtype != "fp32" else {})


def batches_of(step: int, data: int) -> Iterator[dict[str, torch.Tensor]]:
    for micro in range(MANY):
        seed = torch.Generator().manual_seed(100 * step + 10 * micro + data)
        tokens = torch.randint(0, 96, (2, 8), generator=seed)
        yield {"input_ids": tokens, "labels": tokens}


def engine_of(model: nn.Module, mesh: dict[str, int] | None, config: dict[str, Any]) -> Any:
    optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
    return deepseek_zero.initialize(model=model, optimizer=optimizer, config=config, mesh=mesh)[0]


def assert_parts_of(whole: dict[str, torch.Tensor], engine: Any) -> None:
    """Check that this rank's parameters equal their parts of the full ones bit by bit."""
    own = dict(engine.module.named_parameters())
    assert own
    found = engine.module.state_dict()
    for name, param in own.items():
        assert torch.equal(found[name], whole[name]), name
        assert split_of(param) is None or engine.mesh.tp > 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("stage", "dtype", "schedule", "virtual_stages"),
    [
        (0, "fp32", "1f1b", 1),
        (1, "bf16", "interleaved", 2),
        (2, "fp32", "breadth_first", 2),
        (2, "bf16", "1f1b", 1),
        (3, "fp32", "interleaved", 2),
        (3, "bf16", "1f1b", 1),
        (3, "bf16", "breadth_first", 2),
    ],
)
def test_two_stages_train_to_the_bits_of_one_process(
    stage: int, dtype: str, schedule: str, virtual_stages: int
) -> None:
    top = {"pipeline": {"schedule": schedule, "virtual": virtual_stages}}
    engine = engine_of(llama(), {"pp": 2}, config_of(stage, dtype, **top))
    # Both ranks of the reference have the same batches: the mean of two equal gradients is exact.
    reference = engine_of(llama(), {"dp_replicate": 2}, config_of(0, dtype))
    for step in range(3):
        loss, expected = (
            engine.train_batch(batches_of(step, 0)),
            reference.train_batch(batches_of(step, 0)),
        )
        assert torch.equal(loss, expected), step
        assert engine.get_global_grad_norm() == pytest.approx(
            reference.get_global_grad_norm(), rel=1e-6
        )
    assert_parts_of(reference.module.state_dict(), engine)
    assert torch.equal(engine.eval_batch(batches_of(9, 0)), reference.eval_batch(batches_of(9, 0)))


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("stage", "axes"),
    [
        (1, {"pp": 2}),
        (3, {"pp": 2}),
        (3, {"pp": 4}),
        (0, {"pp": 2, "tp": 2}),
        (3, {"pp": 2, "tp": 2}),
    ],
)
def test_stages_shards_and_parts_together(stage: int, axes: dict[str, int]) -> None:
    engine = engine_of(llama(), axes, config_of(stage, "fp32"))
    tensor = axes.get("tp", 1)
    model = virtual(llama(), tensor) if tensor > 1 else llama()
    optimizer, data_size = OPTIMIZERS["adamw"](list(model.parameters())), engine.mesh.data_size
    for step in range(2):
        loss = engine.train_batch(batches_of(step, engine.mesh.data_index))
        losses, grads = [], []
        for data in range(data_size):
            optimizer.zero_grad(set_to_none=True)
            for batch in batches_of(step, data):
                expected = model(**batch).loss
                (expected / MANY).backward()
                losses.append(expected.item())
            grads.append([param.grad for param in model.parameters()])
        for param, *parts in zip(model.parameters(), *grads, strict=True):
            param.grad = sum(parts[1:], parts[0]) / data_size
        optimizer.step()
        assert loss.item() == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    whole, found = model.state_dict(), engine.module.state_dict()
    assert found.keys() == whole.keys()
    assert all(torch.equal(value, whole[name]) for name, value in found.items())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_tied_weight_is_one_though_two_stages_have_it(stage: int) -> None:
    engine = engine_of(llama(tied=True), {"pp": 2}, config_of(stage, "fp32"))
    reference = engine_of(llama(tied=True), {"dp_replicate": 2}, config_of(0, "fp32"))
    for step in range(3):
        loss, expected = (
            engine.train_batch(batches_of(step, 0)),
            reference.train_batch(batches_of(step, 0)),
        )
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        assert engine.get_global_grad_norm() == pytest.approx(
            reference.get_global_grad_norm(), rel=1e-5
        )
    whole = engine.runtime.comm.whole
    name = "model.embed_tokens.weight"
    mine = dict(engine.module.state_dict())
    table = whole.all_gather_rows(
        (mine.get(name, mine.get("lm_head.weight"))).reshape(-1), "the tied weight"
    )
    assert torch.equal(table[0], table[1])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_frozen_on_any_stage_can_be_excluded_from_the_state_dict(stage: int) -> None:
    model = llama(tied=True)
    frozen = {
        "model.embed_tokens.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.3.mlp.up_proj.weight",
    }
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    names = set(model.state_dict())
    engine = engine_of(model, {"pp": 2}, config_of(stage, "fp32"))
    assert engine.module_state_dict().keys() == names
    kept = engine.module_state_dict(exclude_frozen_parameters=True)
    assert names - kept.keys() == frozen | {"lm_head.weight"}  # tied to the embedding


@pytest.mark.ranks(2)
def test_unsupported_operations_of_a_stage_are_refused_by_name() -> None:
    engine = engine_of(llama(), {"pp": 2}, config_of(1, "fp32"))
    with pytest.raises(UsageError, match="called directly"):
        engine.module(**next(batches_of(0, 0)))
    with pytest.raises(BatchMismatchError, match="ranks of a pipeline received different batches"):
        engine(**next(batches_of(0, dist.get_rank())))
    with pytest.raises(UsageError, match="whose backward is due"):
        engine.backward(torch.ones((), requires_grad=True))
    with pytest.raises(UsageError, match="vertical_micro_batches"):
        engine_of(
            llama(),
            {"pp": 2},
            config_of(3, "fp32") | {"zero_optimization": {"stage": 3, "vertical_micro_batches": 2}},
        )
    table = str(deepseek_zero.plan(llama(), config_of(1, "fp32"), ranks=2, mesh={"pp": 2}))
    assert "2 stages on 2 ranks" in table  # traced with the model's dummy_inputs


class Counting(nn.Linear):
    """A layer that counts its forwards in a tensor, which is its extra state."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.calls = torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return super().forward(x)

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


@pytest.mark.ranks(2)
def test_extra_states_of_all_stages_are_restored(tmp_path: Path) -> None:
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)

    def build() -> Any:
        layers = PipelineModule([Counting() for _ in range(4)], num_stages=2, loss_fn=F.mse_loss)
        return engine_of(layers, None, config_of(1, "fp32"))

    engine = build()
    engine.train_batch(iter([(torch.ones(2, 4), torch.ones(2, 4))] * MANY))
    engine.save_checkpoint(folder[0])
    other = build()
    other.load_checkpoint(folder[0])
    calls = [each.calls for each in other.module.modules() if isinstance(each, Counting)]
    assert calls == [torch.full((1,), MANY)] * 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_of_pipeline_stages_resumes_without_stages_and_back(
    tied: bool, tmp_path: Path
) -> None:
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    config = config_of(3, "fp32", gradient_clipping=1.0)
    staged = engine_of(llama(tied), {"pp": 2}, config)
    for step in range(2):
        staged.train_batch(batches_of(step, 0))
    staged.save_checkpoint(folder[0], "staged")
    expected = staged.train_batch(batches_of(2, 0))
    whole = engine_of(llama(tied), {"dp_replicate": 2}, config)
    whole.load_checkpoint(folder[0], "staged")
    assert whole.train_batch(batches_of(2, 0)).item() == pytest.approx(expected.item(), rel=1e-6)
    whole.save_checkpoint(folder[0], "whole")
    again = engine_of(llama(tied), {"pp": 2}, config)
    again.load_checkpoint(folder[0], "whole")
    assert again.train_batch(batches_of(3, 0)).item() == pytest.approx(
        staged.train_batch(batches_of(3, 0)).item(), rel=1e-5
    )
    again.explain()
    again.memory_report()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axis", ["pp", "tp"])
def test_an_overflow_on_one_piece_of_the_model_skips_the_step_on_all(axis: str) -> None:
    config = config_of(2, "fp16") | {"fp16": {"enabled": True, "initial_scale_power": 4}}
    engine = engine_of(llama(), {axis: 2}, config)
    engine.train_batch(batches_of(0, 0))
    assert engine.skipped_steps == 0
    before = {name: value.clone() for name, value in engine.module.state_dict().items()}
    handle = None
    if dist.get_rank() == 1:
        param = next(each for name, each in engine.module.named_parameters() if "up_proj" in name)
        handle = param.register_hook(lambda grad: grad * float("inf"))
    engine.train_batch(batches_of(1, 0))
    assert engine.skipped_steps == 1
    assert all(
        torch.equal(value, before[name]) for name, value in engine.module.state_dict().items()
    )
    if handle is not None:
        handle.remove()
    engine.train_batch(batches_of(2, 0))
    assert engine.skipped_steps == 1
