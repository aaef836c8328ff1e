"""Engines with pp, tp or sp ranks: samples per rank, short batches, and different meshes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from deepseek_zero.api.engine import ZeroEngine
from deepseek_zero.base.errors import ModelMismatchError
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.config.load import load
from deepseek_zero.engine import start as start_file
from deepseek_zero.engine.dialect import EngineDialect
from deepseek_zero.parallel.apply import virtual
from tests.compositions import MANY, Tokens, batch, config_of, engines_of_threads, llama
from tests.in_process import Rank, World, run_ranks
from tests.reference import OPTIMIZERS
from tests.unit.parallel import tiny

pytest.importorskip("transformers")


def engine_of(mesh: Mesh, stage: int = 1, data: Any = None, layers: int = 2) -> Any:
    """Return an engine of the current thread's rank."""
    model = llama(layers)
    optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
    request = start_file.Request(model, optimizer, mesh=mesh, training_data=data)
    return start_file.start(load(config_of(stage, "fp32")), request, EngineDialect(ZeroEngine))


@pytest.mark.parametrize(
    "mesh", [Mesh(pp=2), Mesh(tp=2), Mesh(sp=2), Mesh(pp=2, tp=2), Mesh(dp_replicate=2)], ids=str
)
def test_ranks_of_one_data_coordinate_read_the_same_samples_and_others_read_others(
    mesh: Mesh,
) -> None:
    """A loader must shard by the data index of a rank, not by its index in the world."""
    many = 32  # divisible by the step size of every mesh
    samples: list[Tokens] = [
        {"input_ids": torch.full((8,), number), "labels": torch.full((8,), number)}
        for number in range(many)
    ]

    with engines_of_threads() as here:

        def body(rank: Rank) -> tuple[int, int, list[int]]:
            here.rank = rank
            engine = engine_of(mesh, data=samples)
            seen = [int(row[0]) for each in engine.training_dataloader for row in each["input_ids"]]
            return engine.mesh.data_index, engine.mesh.data_size, seen

        found = run_ranks(8, body, reads_in_place=True)
    by_share: dict[int, set[tuple[int, ...]]] = {}
    for share, _, seen in found:
        by_share.setdefault(share, set()).add(tuple(seen))
    size = found[0][1]
    assert sorted(by_share) == list(range(size)) and all(
        len(each) == 1 for each in by_share.values()
    )
    together = [number for each in by_share.values() for seen in each for number in seen]
    assert sorted(together) == list(range(many))


@pytest.mark.parametrize("sizes", [{"pp": 2}, {"pp": 3}, {"pp": 2, "tp": 2}])
def test_a_short_last_batch_and_fewer_micro_batches_than_stages_do_not_hang(
    sizes: dict[str, int],
) -> None:
    """There are two micro-batches, the last one is shorter, and shapes differ between steps."""
    mesh, rows = Mesh(dp_shard=1, **sizes), [(2, 1), (2, 2), (1, 2)]

    def given(step: int, micro: int) -> Tokens:
        return {name: value[: rows[step][micro]] for name, value in batch(step, micro, 0).items()}

    with engines_of_threads() as here:

        def body(rank: Rank) -> list[float]:
            here.rank = rank
            engine = engine_of(mesh, stage=3, layers=3)
            return [
                engine.train_batch(given(step, micro) for micro in range(MANY)).item()
                for step in range(len(rows))
            ]

        found = run_ranks(mesh.world_size, body, reads_in_place=True)
    model: Any = llama(3)
    optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
    for step in range(len(rows)):
        losses = [model(**given(step, micro)).loss for micro in range(MANY)]
        mean = sum(losses) / MANY
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
        assert [each[step] for each in found] == pytest.approx(
            [mean.item()] * mesh.world_size, rel=1e-5
        )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Mesh(pp=2), Mesh(tp=2)),
        (Mesh(tp=2), Mesh(dp_shard=2)),
        (Mesh(sp=2), Mesh(dp_replicate=2, dp_shard=1)),
    ],
    ids=str,
)
def test_ranks_with_different_meshes_are_refused_at_the_start(first: Mesh, second: Mesh) -> None:
    with engines_of_threads() as here:

        def body(rank: Rank) -> None:
            here.rank = rank
            engine_of(second if rank.index else first)

        found = World[None](2).outcomes(body)
    for error in found:
        assert isinstance(error, ModelMismatchError), error
        assert "ranks differ in the mesh: rank 0 has" in str(error)
        assert "pass the same mesh on every rank" in str(error)


@pytest.mark.parametrize("name", tiny.EIGHT)
def test_unmodified_models_in_two_stages_of_two_parts_train_as_one_process(name: str) -> None:
    """Bitwise equal, except for tied weights: the stages sum their gradients in another order."""
    steps = [[tiny.batch(10 * step + micro) for micro in range(MANY)] for step in range(2)]

    with engines_of_threads() as here:

        def body(rank: Rank) -> tuple[list[float], dict[str, Tensor]]:
            here.rank = rank
            model = tiny.tiny(name)
            request = start_file.Request(
                model, OPTIMIZERS["sgd"](list(model.parameters())), mesh=Mesh(pp=2, tp=2)
            )
            engine = start_file.start(
                load(config_of(3, "fp32")), request, EngineDialect(ZeroEngine)
            )
            losses = [engine.train_batch(iter(batches)).item() for batches in steps]
            whole = {name: value.clone() for name, value in engine.module.state_dict().items()}
            engine.destroy()
            return losses, whole

        ranks = run_ranks(4, body, reads_in_place=True)
    model = virtual(tiny.tiny(name), 2)
    optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
    losses = []
    for batches in steps:
        optimizer.zero_grad()
        losses.append(0.0)
        for each in batches:
            loss = model(**each).loss
            (loss / MANY).backward()
            losses[-1] += loss.item() / MANY
        optimizer.step()
    expected, is_tied = (
        model.state_dict(),
        bool(getattr(model.config, "tie_word_embeddings", False)),
    )
    for found, weights in ranks:
        assert found == pytest.approx(losses, rel=1e-6)
        assert weights.keys() == expected.keys()
        for key, value in weights.items():
            torch.testing.assert_close(value, expected[key], rtol=0, atol=1e-6 if is_tied else 0)
