"""`TiledLinear` has the values and gradients of `nn.Linear` for every grid."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepseek_zero.base.errors import UsageError
from deepseek_zero.zero import TiledLinear

GRIDS = [(1, 1), (1, 3), (4, 1), (3, 5), (13, 11)]  # in_splits, out_splits; uneven tiles
IN, OUT = 13, 11


def tiled_of(plain: nn.Linear, grid: tuple[int, int], **options: Any) -> TiledLinear:
    options = {
        "in_splits": grid[0],
        "out_splits": grid[1],
        "init_linear": plain,
        "dtype": plain.weight.dtype,
    } | options
    return TiledLinear(IN, OUT, plain.bias is not None, **options)


def whole(tiled: TiledLinear, of: str) -> Tensor:
    """Concatenate the tiles of the weight or of its gradient."""
    tiles = [[tile.weight for tile in row] for row in tiled.linears]
    return torch.cat(
        [torch.cat([w.grad if of == "grad" else w.detach() for w in row], dim=1) for row in tiles]
    )


def biases(tiled: TiledLinear, of: str) -> Tensor:
    found = [tile.bias for row in tiled.linears for tile in row if tile.bias is not None]
    return torch.cat([bias.grad if of == "grad" else bias.detach() for bias in found])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(IN,), (6, IN), (2, 3, IN)], ids=str)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_values_and_gradients_are_the_linears(
    grid: tuple[int, int], shape: tuple[int, ...], bias: bool
) -> None:
    plain = nn.Linear(IN, OUT, bias, dtype=torch.float64)
    tiled = tiled_of(plain, grid)
    x = torch.randn(*shape, dtype=torch.float64)
    left, right = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, found = plain(left), tiled(right)
    slope = torch.randn_like(expected)
    expected.backward(slope)
    found.backward(slope)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(right.grad, left.grad)
    torch.testing.assert_close(whole(tiled, "grad"), plain.weight.grad)
    if bias:
        torch.testing.assert_close(biases(tiled, "grad"), plain.bias.grad)
    assert torch.equal(whole(tiled, "value"), plain.weight.detach())


def test_tiles_are_as_even_as_they_go_and_one_of_each_row_has_a_bias() -> None:
    tiled = TiledLinear(IN, OUT, in_splits=3, out_splits=4)
    assert (tiled.in_parts, tiled.out_parts) == ([0, 5, 9, 13], [0, 3, 6, 9, 11])
    assert [[tuple(tile.weight.shape) for tile in row] for row in tiled.linears] == [
        [(rows, columns) for columns in (5, 4, 4)] for rows in (3, 3, 3, 2)
    ]
    assert [[tile.bias is not None for tile in row] for row in tiled.linears] == [
        [False, False, True]
    ] * 4


def test_partial_sums_are_added_in_the_order_of_the_input_tiles() -> None:
    tiled = TiledLinear(IN, OUT, in_splits=3)
    x = torch.randn(5, IN)
    first, *rest = (
        tile(part) for tile, part in zip(tiled.linears[0], x.split([5, 4, 4], dim=-1), strict=True)
    )
    for part in rest:
        first = first + part
    assert torch.equal(tiled(x), first)


def test_one_tile_is_the_linear_itself_and_output_tiles_are_linears_of_their_rows() -> None:
    plain = nn.Linear(IN, OUT)
    x = torch.randn(5, IN)
    assert torch.equal(tiled_of(plain, (1, 1))(x), plain(x))
    rows = tiled_of(plain, (1, 4))
    expected = [nn.functional.linear(x, tile.weight, tile.bias) for (tile,) in rows.linears]
    assert torch.equal(rows(x), torch.cat(expected, dim=-1))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_inputs_and_outputs_may_stay_apart(grid: tuple[int, int]) -> None:
    plain = nn.Linear(IN, OUT)
    joined = tiled_of(plain, grid)
    apart = tiled_of(plain, grid, input_is_already_split=True, combine_out_splits=False)
    x = torch.randn(2, 3, IN)
    widths = [high - low for low, high in zip(apart.in_parts, apart.in_parts[1:], strict=False)]
    found = apart(x.split(widths, dim=-1))
    assert isinstance(found, list) and len(found) == grid[1]
    assert torch.equal(torch.cat(found, dim=-1), joined(x))


def test_second_derivatives_are_supported() -> None:
    tiled = TiledLinear(4, 6, in_splits=2, out_splits=3, dtype=torch.float64)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: tiled(x).sin(), (x,))
    assert torch.autograd.gradgradcheck(lambda x: tiled(x).sin(), (x,))


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_it_gives_the_same_gradients(reentrant: bool) -> None:
    tiled = TiledLinear(IN, OUT, in_splits=2, out_splits=3)
    x = torch.randn(5, IN, requires_grad=True)
    tiled(x).sin().sum().backward()
    expected = whole(tiled, "grad")
    tiled.zero_grad()
    checkpoint(lambda x: tiled(x).sin(), x, use_reentrant=reentrant).sum().backward()
    assert torch.equal(whole(tiled, "grad"), expected)


def test_the_output_may_be_changed_in_place() -> None:
    tiled = TiledLinear(IN, OUT, in_splits=2, out_splits=3)
    x = torch.randn(5, IN, requires_grad=True)
    torch.relu_(tiled(x)).sum().backward()
    found, x.grad = x.grad, None
    torch.relu(tiled(x)).sum().backward()
    assert torch.equal(x.grad, found)


def test_values_are_drawn_as_a_linears() -> None:
    tiled = TiledLinear(1000, 400, in_splits=10, out_splits=2)
    bound = 1 / math.sqrt(1000)
    for drawn in (whole(tiled, "value"), biases(tiled, "value")):
        assert 0.95 * bound < float(drawn.abs().max()) <= bound
    assert float(whole(tiled, "value").std()) == pytest.approx(bound / math.sqrt(3), rel=0.01)


def test_without_gradients_and_copied_it_works_as_well() -> None:
    tiled = TiledLinear(IN, OUT, in_splits=2, out_splits=3)
    x = torch.randn(5, IN)
    with torch.inference_mode():
        assert torch.equal(tiled(x), copy.deepcopy(tiled)(x))


class Scaled(nn.Linear):
    """A client's subclass of `nn.Linear`."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, factor: float = 1.0
    ) -> None:
        super().__init__(in_features, out_features, bias)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        # tanh saves its output, so the output must not be changed in place
        return torch.tanh(super().forward(x) * self.factor)


def test_tiles_may_have_another_class_with_arguments() -> None:
    tiled = TiledLinear(IN, OUT, in_splits=2, out_splits=2, linear_cls=Scaled, factor=3.0)
    assert all(type(tile) is Scaled and tile.factor == 3.0 for row in tiled.linears for tile in row)
    tiled(torch.randn(5, IN)).sum().backward()
    assert whole(tiled, "grad").shape == (OUT, IN)


def test_copy_params_from_copies_the_values() -> None:
    plain, tiled = nn.Linear(IN, OUT), TiledLinear(IN, OUT, in_splits=2, out_splits=3)
    tiled.copy_params_from(plain)
    assert torch.equal(whole(tiled, "value"), plain.weight.detach())
    assert torch.equal(biases(tiled, "value"), plain.bias.detach())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"in_splits": 0}, "in_features=13 cannot have in_splits=0"),
        ({"out_splits": 12}, "out_features=11 cannot have out_splits=12"),
        ({"in_splits": 2.0}, "in_splits=2.0"),
        ({"init_linear": nn.Linear(IN, OUT + 1)}, r"\(11, 13\).*\(12, 13\)"),
        ({"init_linear": nn.Linear(IN, OUT, bias=False)}, "bias=True.*bias=False"),
        ({"init_linear": nn.Linear(IN, OUT), "bias": False}, "bias=False.*bias=True"),
        ({"init_linear": nn.ReLU()}, "weight none"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        TiledLinear(IN, OUT, **options)


@pytest.mark.parametrize(
    ("already", "given"), [(False, IN + 1), (True, IN), (True, [5, 8]), (False, [7, 6])]
)
def test_an_input_that_does_not_fit_is_refused(already: bool, given: int | list[int]) -> None:
    tiled = TiledLinear(IN, OUT, in_splits=2, input_is_already_split=already)
    x = (
        torch.randn(3, given)
        if isinstance(given, int)
        else [torch.randn(3, width) for width in given]
    )
    with pytest.raises(UsageError, match="What to do: pass one tensor"):
        tiled(x)


def test_an_input_without_dimensions_is_refused() -> None:
    with pytest.raises(UsageError, match=r"input of \[0\] features"):
        TiledLinear(1, OUT)(torch.tensor(1.0))


@pytest.mark.parametrize("features", [None, 0, "4"])
def test_features_that_are_no_number_are_refused(features: Any) -> None:
    with pytest.raises(UsageError, match="TiledLinear\\(in_features="):
        TiledLinear(features, OUT)
    with pytest.raises(UsageError, match="TiledLinear\\(out_features="):
        TiledLinear(IN, features)
