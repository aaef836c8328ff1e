"""Which modules become units: repeated blocks, stages by their blocks, experts with their block."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from deepseek_zero.base.errors import UsageError
from deepseek_zero.extensions.tiled import TiledLinear
from deepseek_zero.planner.auto_wrap_policy import choose_units
from deepseek_zero.planner.plan_settings import PlanSettings


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)


class Stage(nn.Module):
    """A ResNet's: nothing but a sequence of blocks."""

    def __init__(self, extra: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(Block(), Block())
        if extra:
            self.norm = nn.LayerNorm(4)


class Experts(nn.Module):
    """Attention, and experts in a list, of which a token sees some."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)
        self.experts = nn.ModuleList([Block(), Block(), Block()])


class Model(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([make(), make()])
        self.head = nn.Linear(4, 8)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Block, ["blocks.0", "blocks.1"]),
        (
            Stage,
            ["blocks.0.layers.0", "blocks.0.layers.1", "blocks.1.layers.0", "blocks.1.layers.1"],
        ),
        (lambda: Stage(extra=True), ["blocks.0", "blocks.1"]),
        (Experts, ["blocks.0", "blocks.1"]),
        (lambda: nn.Linear(4, 4), []),
    ],
    ids=["blocks", "stages", "stages with more", "experts", "leaves"],
)
def test_repeated_blocks_are_units_the_rest_is_the_roots(
    make: Callable[[], nn.Module], expected: list[str]
) -> None:
    model = Model(make)
    units = choose_units(model, PlanSettings(stage=3))
    assert [unit.name for unit in units] == ["", *expected]
    owned = [name for unit in units for name in unit.params]
    assert sorted(owned) == sorted(name for name, _ in model.named_parameters())
    assert {"embed.weight", "head.weight", "head.bias"} <= set(units[0].params)


def test_units_by_name_override_the_search_and_unknown_names_are_refused() -> None:
    model = Model(Stage)
    assert [
        unit.name for unit in choose_units(model, PlanSettings(stage=3, unit_names=("Stage",)))
    ] == [
        "",
        "blocks.0",
        "blocks.1",
    ]
    with pytest.raises(UsageError, match="Stag"):
        choose_units(model, PlanSettings(stage=3, unit_names=("Stag",)))


def test_a_parameter_of_two_units_is_the_roots() -> None:
    model = Model(Block)
    model.blocks[1].up.weight = model.blocks[0].up.weight
    units = choose_units(model, PlanSettings(stage=3))
    assert "blocks.0.up.weight" in units[0].params
    assert "blocks.1.up.weight" not in [name for unit in units for name in unit.params]


class Tiled(Block):
    """A block with a tiled layer between what is not."""

    def __init__(self) -> None:
        super().__init__()
        self.up = TiledLinear(4, 8, in_splits=2, out_splits=2)


TILES = ["up.linears.0.0", "up.linears.0.1", "up.linears.1.0", "up.linears.1.1"]


def test_tiles_are_units_inside_their_block_and_own_their_parameters() -> None:
    model = Model(Tiled)
    units = choose_units(model, PlanSettings(stage=3))
    expected = [
        name for n in (0, 1) for name in (f"blocks.{n}", *(f"blocks.{n}.{tile}" for tile in TILES))
    ]
    assert [unit.name for unit in units] == ["", *expected]
    assert [unit.name for unit in units if unit.is_tile] == [
        name for name in expected if "linears" in name
    ]
    assert list(units[1].params) == ["blocks.0.down.weight", "blocks.0.down.bias"]
    assert list(units[3].params) == [
        "blocks.0.up.linears.0.1.weight",
        "blocks.0.up.linears.0.1.bias",
    ]
    owned = [name for unit in units for name in unit.params]
    assert sorted(owned) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.parametrize(
    "model",
    [
        TiledLinear(4, 8, in_splits=2, out_splits=2),
        nn.Sequential(TiledLinear(4, 8, out_splits=4), nn.ReLU(), TiledLinear(8, 4, in_splits=4)),
        nn.Sequential(nn.Linear(4, 2000), nn.Sequential(TiledLinear(2000, 2000, in_splits=4))),
    ],
    ids=["the model itself", "a sequence", "large and alone"],
)
def test_tiles_outside_of_blocks_are_units_and_their_layer_is_none(model: nn.Module) -> None:
    tiles = [name for name, module in model.named_modules() if type(module).__name__ == "Tile"]
    units = choose_units(model, PlanSettings(stage=3))
    assert [unit.name for unit in units[1:]] == tiles and all(unit.is_tile for unit in units[1:])


def test_a_large_lone_block_stays_one_though_tiles_repeat_inside() -> None:
    class Lone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = TiledLinear(10, 1000, out_splits=2), nn.Linear(1000, 1000)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Lone()

    names = [unit.name for unit in choose_units(Model(), PlanSettings(stage=3))]
    assert names == ["", "mlp", "mlp.up.linears.0.0", "mlp.up.linears.1.0"]


def test_units_by_name_leave_tiles_units_and_a_leaf_keeps_its_tiles() -> None:
    model = Model(Tiled)
    named = choose_units(model, PlanSettings(stage=3, unit_names=("blocks.1",)))
    assert [unit.name for unit in named][:6] == [
        "",
        *(f"blocks.0.{tile}" for tile in TILES),
        "blocks.1",
    ]
    leaves = choose_units(model, PlanSettings(stage=3, leaf_classes=("Tiled",)))
    assert [unit.name for unit in leaves] == ["", "blocks.0", "blocks.1"]


def test_small_units_are_fused_where_their_modules_are_small_on_average() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.head = Stack(), nn.Linear(4, 1000)

    def names(threshold: int) -> list[str]:
        return [
            unit.name for unit in choose_units(Model(), PlanSettings(stage=3, fuse_numel=threshold))
        ]

    block = Block()
    mean = sum(param.numel() for param in block.parameters()) // sum(1 for _ in block.modules())
    assert (
        names(0) == names(mean // 2) == ["", "small.blocks.0", "small.blocks.1", "small.blocks.2"]
    )
    assert names(mean) == ["", "small"]
    assert names(5000) == [""]
