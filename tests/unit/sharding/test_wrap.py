"""Which modules become units: repeated blocks, stages by their blocks, experts with their block."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from deepseek_zero.base.errors import UsageError
from deepseek_zero.sharding.plan import PlanSettings
from deepseek_zero.sharding.wrap import choose_units


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
        (Stage, ["blocks.0.layers.0", "blocks.0.layers.1", "blocks.1.layers.0", "blocks.1.layers.1"]),
        (lambda: Stage(extra=True), ["blocks.0", "blocks.1"]),
        (Experts, ["blocks.0", "blocks.1"]),
        (lambda: nn.Linear(4, 4), []),
    ],
    ids=["blocks", "stages", "stages with more", "experts", "leaves"],
)
def test_repeated_blocks_are_units_the_rest_is_the_roots(make: Callable[[], nn.Module], expected: list[str]) -> None:
    model = Model(make)
    units = choose_units(model, PlanSettings(stage=3))
    assert [unit.name for unit in units] == ["", *expected]
    owned = [name for unit in units for name in unit.params]
    assert sorted(owned) == sorted(name for name, _ in model.named_parameters())
    assert {"embed.weight", "head.weight", "head.bias"} <= set(units[0].params)


def test_units_by_name_override_the_search_and_unknown_names_are_refused() -> None:
    model = Model(Stage)
    assert [unit.name for unit in choose_units(model, PlanSettings(stage=3, unit_names=("Stage",)))] == [
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
