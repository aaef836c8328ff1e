"""A model as a list of layers, with DeepSpeed's names, trains to the bits of one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import deepseek_zero
from deepseek_zero.base.errors import UsageError
from deepseek_zero.compat.deepspeed.pipe import (
    LayerSpec,
    PipelineError,
    PipelineModule,
    TiedLayerSpec,
)
from tests.plain import here

MANY = 4


def layers() -> list[Any]:
    def head(module: nn.Module, x: Tensor) -> Tensor:
        return nn.functional.linear(x, module.weight)  # type: ignore[arg-type]

    return [
        TiedLayerSpec("embed", nn.Embedding, 40, 16),
        *[LayerSpec(nn.Linear, 16, 16) for _ in range(3)],
        torch.tanh,
        LayerSpec(nn.LayerNorm, 16),
        TiedLayerSpec("embed", nn.Embedding, 40, 16, forward_fn=head),
    ]


def loss(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.view(-1, 40), labels.view(-1))


def module_of(stages: int, **more: Any) -> PipelineModule:
    words = {"loss_fn": loss, "seed_layers": True, "partition_method": "uniform", **more}
    return PipelineModule(layers(), num_stages=stages, **words)


def batches_of(step: int) -> Iterator[tuple[Tensor, Tensor]]:
    for micro in range(MANY):
        tokens = torch.randint(
            0, 40, (2, 6), generator=torch.Generator().manual_seed(10 * step + micro)
        )
        yield tokens, tokens.roll(1)


def engine_of(model: PipelineModule, stage: int, mesh: Any = None, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MANY,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_clipping": 1.0,
        "steps_per_print": None,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }
    return deepseek_zero.initialize(model=model, config=config, mesh=mesh)[0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_list_of_layers_trains_as_one_process_does(stage: int) -> None:
    engine = engine_of(module_of(2), stage)
    # Both ranks of the reference have the same batches.
    reference = engine_of(module_of(1), 0, {"dp_replicate": 2})
    assert engine.is_pipe_parallel() and engine.stage_id == engine.grid.get_stage_id()
    assert engine.is_first_stage() is not engine.is_last_stage()
    for step in range(3):
        found, expected = (
            engine.train_batch(batches_of(step)),
            reference.train_batch(batches_of(step)),
        )
        assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert engine.get_global_grad_norm() == pytest.approx(
        reference.get_global_grad_norm(), rel=1e-5
    )
    engine.set_dataiterator(batches_of(7))
    assert engine.train_batch().item() == pytest.approx(
        reference.train_batch(batches_of(7)).item(), rel=1e-6
    )
    mean, logits = engine.eval_batch(batches_of(9), return_logits=True)
    assert mean.item() == pytest.approx(reference.eval_batch(batches_of(9)).item(), rel=1e-6)
    assert (logits is not None) is engine.is_last_stage()
    raw = {"compute_loss": False, "reduce_output": None}
    expected = reference.eval_batch(batches_of(9), **raw)
    outputs = engine.eval_batch(batches_of(9), **raw)
    assert (outputs is not None) is engine.is_last_stage()
    if outputs is not None:
        torch.testing.assert_close(outputs, expected)
        assert torch.equal(logits, outputs[-1]), "the output of the last micro-batch"
    for call in (engine.forward, engine.backward, engine.step):
        with pytest.raises(PipelineError, match="Only train_batch"):
            call(None)


@pytest.mark.ranks(3)
def test_a_stage_between_the_first_and_the_last_needs_no_data() -> None:
    parts = [LayerSpec(nn.Linear, 4, 4) for _ in range(3)]
    engine = engine_of(PipelineModule(parts, num_stages=3, loss_fn=nn.functional.mse_loss), 1)
    batch = torch.ones(2, 4), torch.zeros(2, 4)
    data = None if here() == 1 else iter([batch] * (3 * MANY - 1))
    first = engine.train_batch(data)
    assert engine.eval_batch(data) < first
    with pytest.raises(StopIteration):
        engine.train_batch(data)
    with pytest.raises(StopIteration):
        engine.eval_batch(data)


@pytest.mark.ranks(2)
def test_batches_may_differ_in_shape_if_the_list_allows_it() -> None:
    # No clipping: two stages add the norm in another order, so its last bit may differ.
    unclipped = {"gradient_clipping": 0.0}
    engine, alone = (
        engine_of(module_of(stages, dynamic_shape=True), 0, **unclipped) for stages in (2, 1)
    )
    for length in (6, 3, 9):
        tokens = torch.arange(2 * length).view(2, length) % 40
        losses = [
            each.train_batch(iter([(tokens, tokens.roll(1))] * MANY)) for each in (engine, alone)
        ]
        assert torch.equal(*losses)


@pytest.mark.ranks(2)
def test_a_mesh_that_the_list_does_not_have_is_refused() -> None:
    with pytest.raises(UsageError, match="PipelineModule"):
        engine_of(module_of(2), 1, {"pp": 1, "dp_shard": 2})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_files_hold_the_layers_of_all_stages(stage: int, tmp_path: Path) -> None:
    """Each rank has built only its layers."""
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    where = Path(folder[0])
    engine = engine_of(module_of(2), stage)
    engine.train_batch(batches_of(0))
    written = load_file(next(engine.export(where / "stages").glob("*.safetensors")))
    assert list(written) == ["tied_modules.embed.weight"] + [
        f"{n}.{p}" for n in (1, 2, 3, 5) for p in ("weight", "bias")
    ]
    engine.save_checkpoint(where)
    whole = engine_of(module_of(1), 0, {"dp_replicate": 2})
    whole.load_checkpoint(where)
    for name, param in whole.module.named_parameters():
        assert torch.equal(param, written[name]), name
    engine.load_weights(where / "stages")
    expected = whole.eval_batch(batches_of(3)).item()
    assert engine.eval_batch(batches_of(3)).item() == pytest.approx(expected, rel=1e-6)
