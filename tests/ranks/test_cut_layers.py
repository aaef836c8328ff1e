"""Layers above `tile_above`, split into tiles that are gathered one at a time.

They give the bits of the same tiles without sharding. Checkpoints and exports hold the whole
layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepseek_zero
from deepseek_zero import zero
from deepseek_zero.extensions.cut_layers import CutEmbedding, CutLinear, choose_cuts
from deepseek_zero.parallel.sequence_model import own_part
from tests.models import Gpt, batch_of, seeded
from tests.pairwise import cases
from tests.ranks.test_tiled import watching
from tests.reference import OPTIMIZERS, Reference
from tests.training import ALL, DTYPES, Run, train_step
from tests.unit.parallel.tiny import LENGTH, VOCABULARY, tiny

LIMIT = 900  # all layers of Gpt except `places` and the attention's projection are larger


class Tied(Gpt):
    """A model whose head shares the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.tokens.weight


def start(run: Run, model: nn.Module, limit: int | None = LIMIT) -> Any:
    config = run.config()
    config["zero_optimization"]["tile_above"] = limit
    optimizer = OPTIMIZERS[run.optimizer](list(model.parameters()))
    return deepseek_zero.initialize(model=model, optimizer=optimizer, config=config)[0]


def cut(model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Split a model of one process into the same tiles."""
    choose_cuts(model, LIMIT, lambda own: dtype).cut()
    return model


AXES = {
    "build": (Gpt, Tied),
    "stage": (0, 2, 3),
    "dtype": ("fp32", "bf16"),
    "accumulation": (1, 2),
    "ranks": (1, 2),
    "window": (0, ALL),
}


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize(*cases(AXES))
def test_it_trains_to_the_bits_of_the_same_tiles_without_sharding(
    build: type[Gpt], stage: int, dtype: str, accumulation: int, ranks: int, window: int
) -> None:
    run = Run(stage, dtype, accumulation, window, 0.0, "adamw", 0, window, transport="gloo")
    engine = start(run, seeded(build))
    assert isinstance(engine.module.tokens, CutEmbedding) and isinstance(
        engine.module.head, CutLinear
    )
    model = cut(seeded(build), DTYPES[dtype])
    reference = Reference(model, ranks, accumulation, stage < 2, DTYPES[dtype], OPTIMIZERS["adamw"])
    for step in range(3):
        losses = train_step(engine, run, step)
        everyone = [
            [batch_of(step, micro, rank) for micro in range(accumulation)] for rank in range(ranks)
        ]
        expected, _ = reference.step(everyone)
        assert all(map(torch.equal, losses, expected[dist.get_rank()])), (
            f"losses differ in step {step}"
        )
        found, whole = engine.module.state_dict(), model.state_dict()
        assert list(found) == list(whole) == list(seeded(build).state_dict())
        different = [name for name, value in whole.items() if not torch.equal(found[name], value)]
        assert not different, f"step {step}"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("build", [Gpt, Tied])
def test_one_tile_is_gathered_at_a_time(build: type[Gpt]) -> None:
    class Ends(build):  # type: ignore[misc, valid-type]
        """Embedding and head only, so that every weight is in a tile."""

        def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
            logits = self.head(self.tokens(tokens))
            return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

        def __init__(self) -> None:
            super().__init__()
            del self.blocks, self.norm, self.places

    run = Run(3, keep=0, ahead=0, transport="gloo")
    engine = start(run, seeded(Ends))
    tiles = [unit.planned.gathered_numel for unit in engine.runtime.units if unit.is_layer_tile]
    assert len(tiles) == (3 if build is Tied else 6)
    assert sum(tiles) == sum(each.planned.gathered_numel for each in engine.runtime.units)
    with watching(engine) as seen:
        for step in range(3):
            train_step(engine, run, step)
    assert seen.most == {"forward": max(tiles), "backward": max(tiles)}
    assert seen.kept == []


@pytest.mark.ranks(2)
@pytest.mark.parametrize("build", [Gpt, Tied])
def test_files_are_those_of_the_whole_model_and_load_with_other_tiles(
    build: type[Gpt], tmp_path: Path
) -> None:
    # SGD with momentum: Adam turns gradients that are only rounding errors into full steps
    run = Run(3, transport="gloo")
    engine = start(run, seeded(build))
    for step in range(2):
        train_step(engine, run, step)
    engine.save_checkpoint(tmp_path / "saved", tag="two")
    engine.export(tmp_path / "whole")
    values = engine.module.state_dict()
    engine.destroy()
    found: dict[int | None, Any] = {}
    for limit in (None, 500):
        other = start(run, seeded(build, seed=8), limit)
        other.load_checkpoint(tmp_path / "saved", tag="two")
        assert_same(other.module.state_dict(), values)
        before = train_step(other, run, 2)
        other.save_checkpoint(tmp_path / "again", tag=f"{limit}")
        other.load_weights(tmp_path / "whole")
        assert_same(other.module.state_dict(), values)
        other.module.load_state_dict(seeded(build, seed=9).state_dict())
        assert torch.equal(
            other.module.state_dict()["head.weight"], seeded(build, seed=9).head.weight
        )
        other.load_checkpoint(tmp_path / "again", tag="None")  # written with whole layers
        after = train_step(other, run, 3)
        # A wrong moment would change weights by 1e-3
        found[limit] = (before, after, other.module.state_dict())
        other.destroy()
    torch.testing.assert_close(found[500], found[None], rtol=1e-5, atol=1e-5)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    assert not [name for name, value in expected.items() if not torch.equal(found[name], value)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"sp": 2}], ids=str)
def test_an_unmodified_model_with_a_tied_head_trains_alike_and_is_saved_for_others(
    mesh: dict[str, int], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    found = {}
    for limit in (None, 1000):
        model = tiny("qwen2")
        config = Run(3, transport="gloo").config() | {"checkpoint": {"layout": "deepspeed"}}
        config["zero_optimization"]["tile_above"] = limit
        optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
        engine = deepseek_zero.initialize(
            model=model, optimizer=optimizer, config=config, mesh=mesh
        )[0]
        losses = []
        for step in range(3):
            tokens = torch.randint(
                VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(step)
            )
            batch = {"input_ids": tokens, "labels": tokens}
            loss = engine(**(own_part(model, batch) if "sp" in mesh else batch)).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        found[limit] = losses, model.state_dict()
        if limit is not None:
            assert model.lm_head.tiles[0] is model.model.embed_tokens.tiles[0]
            engine.export(tmp_path / "whole")
            assert_same(
                transformers.Qwen2ForCausalLM.from_pretrained(tmp_path / "whole").state_dict(),
                found[limit][1],
            )
            engine.save_checkpoint(tmp_path / "saved", tag="three")
            engine.load_checkpoint(tmp_path / "saved", tag="three")
            assert_same(model.state_dict(), found[limit][1])
        engine.destroy()
    torch.testing.assert_close(found[1000], found[None], rtol=1e-5, atol=1e-5)


@pytest.mark.ranks(2)
def test_a_model_built_in_slices_is_cut_to_the_same_bits() -> None:
    run, losses = Run(3, optimizer="adamw", transport="gloo"), []
    for sliced in (False, True):
        torch.manual_seed(7)
        with zero.Init(enabled=sliced):
            model = Tied()
        engine = start(run, model)
        losses += [train_step(engine, run, step)[0] for step in range(2)]
        engine.destroy()
    assert torch.equal(losses[0], losses[2]) and torch.equal(losses[1], losses[3])
