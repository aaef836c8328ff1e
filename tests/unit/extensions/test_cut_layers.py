"""Large layers are split into tiles of rows: number of tiles, results, and refused inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import deepseek_zero
from deepseek_zero.base.errors import NotBuiltError, UsageError
from deepseek_zero.extensions.cut_layers import CutLayer, choose_cuts
from deepseek_zero.planner.rows import rows_of


def same(dtype: torch.dtype) -> torch.dtype:
    return dtype


def cut(model: nn.Module, limit: int) -> dict[str, str]:
    return choose_cuts(model, limit, same).cut()


class Model(nn.Module):
    """An embedding of `rows` rows with its weight tied to the output layer."""

    def __init__(self, rows: int = 11, width: int = 5, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head = nn.Embedding(rows, width, **options), nn.Linear(width, rows)
        self.head.weight = self.embed.weight
        self.wide = nn.Linear(width, 7, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens)) + self.wide(self.embed(tokens)).sum()


@pytest.mark.parametrize(("limit", "tiles"), [(220, 1), (219, 2), (100, 3), (79, 4), (20, 11)])
def test_as_few_tiles_as_fit_the_limit(limit: int, tiles: int) -> None:
    """The weight has 11 rows of 20 bytes."""
    model = Model()
    names = cut(model, limit)
    found = model.embed.tiles if isinstance(model.embed, CutLayer) else []
    sizes = [tile.weight.shape[0] for tile in found]
    assert len(sizes) == (tiles if tiles > 1 else 0) and sum(sizes) in (0, 11)
    assert all(size * 20 <= limit for size in sizes) and (not sizes or max(sizes) - min(sizes) <= 1)
    assert {name for name, whole in names.items() if whole == "embed.weight"} == {
        f"{layer}.tiles.{number}.weight"
        for layer in ("embed", "head")
        for number in range(len(sizes))
    }
    starts = [rows.start for tile in found if (rows := rows_of(tile.weight)) is not None]
    assert starts == [5 * sum(sizes[:number]) for number in range(len(sizes))]


def test_a_tiles_bytes_are_those_of_the_dtype_that_computes() -> None:
    (found,) = choose_cuts(Model(), 100, lambda own: torch.bfloat16).cuts
    assert found.places == (0, 6, 11)


@pytest.mark.parametrize(
    "options", [{}, {"padding_idx": 4}, {"padding_idx": 10}, {"scale_grad_by_freq": True}]
)
def test_an_embedding_has_the_bits_of_the_whole_one(options: dict[str, Any]) -> None:
    tokens = torch.randint(11, (6, 9), generator=torch.Generator().manual_seed(1))
    tokens[tokens == 7] = 6  # no token selects row 7
    whole, model = Model(**options).embed, Model(**options)
    with torch.no_grad():
        whole.weight[2].mul_(-0.0), model.embed.weight[2].mul_(-0.0)
    cut(model, 60)
    expected, found = whole(tokens), model.embed(tokens)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    arriving = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    expected.backward(arriving)
    found.backward(arriving)
    grads = torch.cat([tile.weight.grad for tile in model.embed.tiles])
    assert torch.equal(grads.view(torch.int32), whole.weight.grad.view(torch.int32))


@pytest.mark.parametrize("wrong", [-1, 11])
def test_an_index_beyond_the_rows_is_an_error(wrong: int) -> None:
    model = Model()
    cut(model, 60)
    with pytest.raises(IndexError):
        model.embed(torch.tensor([3, wrong, 5]))


def test_a_linear_computes_what_the_whole_one_does() -> None:
    """Results are only close, since the shape of a product decides the order of its sums."""
    torch.manual_seed(5)
    whole, model = nn.Linear(33, 47), nn.Sequential(nn.Linear(33, 47))
    model.load_state_dict({f"0.{name}": value for name, value in whole.state_dict().items()})
    cut(model, 33 * 10 * 4)
    given = torch.randn(4, 6, 33)
    inputs = [given.clone().requires_grad_() for _ in range(2)]
    expected, found = whole(inputs[0]), model(inputs[1])
    torch.testing.assert_close(found, expected)
    functional.gelu(expected).sum().backward()
    functional.gelu(found).sum().backward()
    layer = model[0]
    assert len(layer.tiles) == 5
    torch.testing.assert_close(
        torch.cat([tile.weight.grad for tile in layer.tiles]), whole.weight.grad
    )
    torch.testing.assert_close(layer.bias.grad, whole.bias.grad)
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)


def test_state_dicts_are_those_of_the_whole_model_both_ways() -> None:
    whole, model = Model(), Model()
    cut(model, 60)
    found = model.state_dict()
    assert list(found) == list(whole.state_dict())
    assert all(torch.equal(found[name], value) for name, value in whole.state_dict().items())
    changed = {name: value + 1 for name, value in found.items()}
    model.load_state_dict(changed)
    assert all(torch.equal(value, changed[name]) for name, value in model.state_dict().items())
    with pytest.raises(RuntimeError, match=r"head\.weight"):
        model.load_state_dict({**changed, "head.weight": torch.zeros(12, 5)})


def test_layers_of_other_classes_stay_whole_and_are_named() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "own": nn.Linear(8, 9)})
    model["own"].forward = lambda given: given
    assert choose_cuts(model, 100, same).left == (
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "own.weight",
    )


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"sparse": True}])
def test_an_embedding_that_tiles_cannot_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(NotBuiltError, match="tile_above would split 'embed'"):
        choose_cuts(Model(**options), 60, same)


def test_a_row_above_the_limit_is_refused() -> None:
    with pytest.raises(UsageError, match=r"one row of 'embed\.weight' has 20 bytes"):
        choose_cuts(Model(), 19, same)


def test_reading_the_weight_of_a_cut_layer_raises_an_error_with_its_location() -> None:
    model = Model()
    cut(model, 60)
    with pytest.raises(AttributeError, match="tile_above has cut it into tiles"):
        _ = model.head.weight
    assert model.head.bias is not None and not hasattr(model.head, "weight")


def configured(optimizer: str = "AdamW", **more: Any) -> dict[str, Any]:
    zero = {"stage": 3, "tile_above": 60, "stage3_param_persistence_threshold": 0}
    return {
        "optimizer": {"type": optimizer, "params": {"lr": 1e-3}},
        "zero_optimization": zero,
        **more,
    }


def test_plan_lists_tiles_and_does_not_change_the_model() -> None:
    model = Model()
    found = deepseek_zero.plan(model, configured(), ranks=4)
    assert [unit.name for unit in found.units if unit.is_layer_tile] == [
        *(f"embed.tiles.{number}" for number in range(4)),
        *(f"wide.tiles.{number}" for number in range(3)),
    ]
    assert found.numel == sum(param.numel() for param in model.parameters())
    assert isinstance(model.head.weight, nn.Parameter)


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_axes_that_cut_the_model_are_refused_by_name(axis: str) -> None:
    with pytest.raises(NotBuiltError, match=f"tile_above on a mesh with {axis} = 2"):
        deepseek_zero.plan(
            Model(),
            configured(),
            ranks=2,
            mesh={axis: 2},
            example={"tokens": torch.zeros(1, 1).long()},
        )


@pytest.mark.parametrize("key", ["tiled_loss", "tiled_mlp"])
def test_tiles_of_tokens_with_it_are_refused_by_name(key: str) -> None:
    config = configured(activation_checkpointing={key: 16})
    with pytest.raises(NotBuiltError, match="tile_above with activation_checkpointing"):
        deepseek_zero.plan(Model(), config, ranks=2)


def test_an_optimizer_that_needs_whole_matrices_is_refused_by_name() -> None:
    with pytest.raises(
        NotBuiltError, match=r"splits 'embed\.weight', but Lamb needs whole parameters"
    ):
        deepseek_zero.plan(Model(), configured("Lamb"), ranks=2)


def test_a_model_without_values_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = Model()
    with pytest.raises(NotBuiltError, match=r"split 'embed\.weight', which has no values yet"):
        deepseek_zero.initialize(model=model, config=configured())


def test_a_frozen_layer_in_tiles_can_be_left_out_of_a_state_dict() -> None:
    model = Model()
    model.wide.weight.requires_grad_(False)
    engine = deepseek_zero.initialize(model=model, config=configured())[0]
    names = list(engine.module_state_dict())
    assert "wide.weight" in names
    kept = engine.module_state_dict(exclude_frozen_parameters=True)
    assert list(kept) == [name for name in names if name != "wide.weight"]
    engine.destroy()
