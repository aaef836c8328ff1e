"""Pipelines in an engine: partitioning, training and evaluation of models and lists of layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepseek_zero.base.errors import PeerError, UsageError
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.pipeline.chain import Chain, find_chain
from deepseek_zero.pipeline.layers import Labelled, LayerSpec, LayerStages
from deepseek_zero.pipeline.pipeline import Pipeline, StagedModel, cut_model
from deepseek_zero.pipeline.stage import MicroBatch
from deepseek_zero.pipeline.ties import Ties
from tests.in_process import Rank, World, optimizer_over, run_ranks, sharded
from tests.models import Block, Gpt, batch_of, seeded
from tests.reference import OPTIMIZERS

MANY, STEPS = 4, 3
WHOLE = Mesh(pp=2)


def gpt() -> nn.Module:
    return seeded(Gpt, blocks=4)


def chain_of(model: nn.Module) -> Chain:
    sample = given(0, 0)[0]
    return find_chain(model, sample.args, sample.kwargs)


def ties_of(staged: StagedModel, rank: Rank, mesh: Mesh) -> Ties:
    return Ties(rank.comm, mesh, staged.placement, staged.ties)


def given(step: int, place: int, many: int = MANY) -> list[MicroBatch]:
    found = [batch_of(step, micro, place) for micro in range(many)]
    return [MicroBatch((), {"tokens": batch.tokens, "targets": batch.targets}) for batch in found]


@pytest.mark.parametrize(("name", "virtual"), [("1f1b", 1), ("interleaved", 2)])
@pytest.mark.parametrize("stage", [1, 3])
def test_losses_fall_and_are_returned_on_every_rank(name: str, virtual: int, stage: int) -> None:
    def body(rank: Rank) -> tuple[list[float], list[Any] | None, float]:
        mesh = WHOLE.on_world(rank.size, rank.index)
        model = gpt()
        staged = cut_model(
            model, chain_of(model), mesh, schedule=name, virtual=virtual, micro_batches=MANY
        )
        runtime = sharded(rank, model, WHOLE, stage=stage, accumulation=MANY, reduces_once=True)
        optimizer = optimizer_over(runtime, OPTIMIZERS["adamw"])
        pipeline = Pipeline(staged, ties_of(staged, rank, mesh), rank.comm, mesh, runtime, name)
        losses = []
        for _ in range(STEPS):
            losses.append(float(pipeline.train(given(0, mesh.data_index))))
            optimizer.step()
        loss, outputs = pipeline.evaluate(given(0, mesh.data_index, 3), keeps_outputs=True)
        assert loss is not None
        assert (outputs is not None) == (mesh.coordinates["pp"] == mesh.pp - 1)
        return losses, outputs, float(loss)

    found = run_ranks(4, body, reads_in_place=True)
    losses, _, evaluated = found[0]
    assert all(each[0] == losses and each[2] == evaluated for each in found)
    assert losses[0] > losses[1] > losses[2] > evaluated - 0.1
    model, means = gpt(), []
    for place in range(2):
        means += [float(model(**micro.kwargs).detach()) for micro in given(0, place)]
    assert losses[0] == pytest.approx(sum(means) / len(means), rel=1e-6)


def loss_fn(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten())


def test_a_list_of_layers_trains_and_may_change_its_shapes() -> None:
    def layers() -> list[Any]:
        specs = [
            LayerSpec(nn.Embedding, 37, 15),
            *[LayerSpec(Block) for _ in range(3)],
            LayerSpec(nn.Linear, 15, 37),
        ]
        return [*specs]

    def body(rank: Rank) -> list[float]:
        mesh = WHOLE.on_world(rank.size, rank.index)
        model = LayerStages(layers(), 2, mesh.coordinates["pp"], loss_fn=loss_fn, seed_layers=True)
        staged = cut_model(model, None, mesh)
        runtime = sharded(rank, model, WHOLE, stage=2, accumulation=MANY, reduces_once=True)
        optimizer = optimizer_over(runtime, OPTIMIZERS["adamw"])
        pipeline = Pipeline(staged, ties_of(staged, rank, mesh), rank.comm, mesh, runtime)
        losses = []
        for size in (2, 2, 3):
            found = [batch_of(0, micro, mesh.data_index, size) for micro in range(MANY)]
            # Middle stages have no data, the first stage has no labels, and the last one has no
            # inputs.
            micro_batches = [
                Labelled(
                    batch.tokens if mesh.coordinates["pp"] == 0 else None,
                    batch.targets if mesh.coordinates["pp"] == mesh.pp - 1 else None,
                )
                for batch in found
            ]
            if size == 3:
                pipeline.reset_shapes()
            losses.append(float(pipeline.train(micro_batches)))
            optimizer.step()
        return losses

    found = run_ranks(4, body, seed=2)
    assert all(each == found[0] for each in found)
    assert found[0][1] < found[0][0]


def test_layers_that_cannot_be_cut_are_reported_before_any_is_cut() -> None:
    mesh = WHOLE.on_world(2, 0)
    with pytest.raises(UsageError, match="a list of 1 stages on a mesh with pp=2"):
        cut_model(LayerStages([nn.Linear(2, 2)], 1, 0), None, mesh)
    with pytest.raises(UsageError, match="4 layers are cut into 6 stages"):
        model = gpt()
        cut_model(model, chain_of(model), mesh, schedule="interleaved", virtual=3)
    assert torch.is_grad_enabled()


def on_two_ranks(body: Callable[[Pipeline], Any]) -> list[Any]:
    """Run `body` with a pipeline of `gpt()` on two ranks; return each rank's result or error."""

    def on_rank(rank: Rank) -> Any:
        mesh = WHOLE.on_world(rank.size, rank.index)
        model = gpt()
        staged = cut_model(model, chain_of(model), mesh)
        runtime = sharded(rank, model, WHOLE, reduces_once=True)
        return body(Pipeline(staged, ties_of(staged, rank, mesh), rank.comm, mesh, runtime))

    return World[Any](2, timeouts=20).outcomes(on_rank)


def test_an_evaluation_without_a_loss_raises_on_every_rank() -> None:
    unlabelled = [MicroBatch((), {"tokens": micro.kwargs["tokens"]}) for micro in given(0, 0)]
    first, last = on_two_ranks(lambda pipeline: pipeline.evaluate(unlabelled))
    assert isinstance(last, UsageError) and "the model returned no loss" in str(last)
    assert isinstance(first, PeerError) and "the model returned no loss" in str(first)


@pytest.mark.parametrize("name", ["train", "evaluate"])
def test_a_step_without_micro_batches_is_refused_on_every_rank(name: str) -> None:
    for found in on_two_ranks(lambda pipeline: getattr(pipeline, name)([])):
        assert isinstance(found, UsageError)
        assert "a pipeline was given no micro-batches" in str(found)
