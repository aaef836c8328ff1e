"""Test which modules become units and which parameters and buffers stay fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepseek_zero
from deepseek_zero.base.errors import UsageError
from deepseek_zero.compat.deepspeed import zero as drop_in
from deepseek_zero.extensions.tiled import TiledLinear
from deepseek_zero.planner.auto_wrap_policy import choose_units, full_precision_names
from deepseek_zero.planner.plan_settings import PlanSettings


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)


class Stage(nn.Module):
    """A sequence of blocks, as in a ResNet."""

    def __init__(self, extra: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(Block(), Block())
        if extra:
            self.norm = nn.LayerNorm(4)


class Experts(nn.Module):
    """A module with attention and a list of experts."""

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
def test_repeated_blocks_are_units_and_other_parameters_belong_to_the_root(
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


def test_a_parameter_of_two_units_belongs_to_the_root() -> None:
    model = Model(Block)
    model.blocks[1].up.weight = model.blocks[0].up.weight
    units = choose_units(model, PlanSettings(stage=3))
    assert "blocks.0.up.weight" in units[0].params
    assert "blocks.1.up.weight" not in [name for unit in units for name in unit.params]


class Tiled(Block):
    """A block with a `TiledLinear` and plain layers."""

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
    assert [unit.name for unit in units if unit.is_layer_tile] == [
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
    assert [unit.name for unit in units[1:]] == tiles and all(
        unit.is_layer_tile for unit in units[1:]
    )


def test_a_single_large_block_is_one_unit_although_it_contains_tiles() -> None:
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


def test_small_units_are_fused_if_their_modules_are_small_on_average() -> None:
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


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 64) / 8)
        self.e_score_correction_bias = nn.Parameter(torch.randn(4))
        self.register_buffer("counts", torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = nn.functional.linear(x.float(), self.weight.float()).sigmoid()
        return (
            (scores + self.e_score_correction_bias + self.counts).sum(-1, keepdim=True).to(x.dtype)
        )


class RoutedBlock(nn.Module):
    _keep_in_fp32_modules_strict = ("router.e_score_correction_bias",)

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.wo = nn.Linear(64, 64)
        self.two = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.wo((x * self.router(x)).to(self.wo.weight.dtype)).to(x.dtype))


class Net(nn.Module):
    _keep_in_fp32_modules = ("wo",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RoutedBlock() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


DECLARED = {
    f"blocks.{number}.{name}"
    for number in range(2)
    for name in ("router.e_score_correction_bias", "wo.weight", "wo.bias")
}


def test_names_are_matched_by_whole_parts_inside_the_module_that_declares_them() -> None:
    assert full_precision_names(Net()) == DECLARED


@pytest.mark.parametrize("under_init", [False, True])
@pytest.mark.parametrize("stage", range(4))
def test_parameters_declared_as_fp32_stay_fp32(stage: int, under_init: bool) -> None:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": None,
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    torch.manual_seed(1)
    plain = Net()
    torch.manual_seed(1)
    if under_init:
        with deepseek_zero.zero.Init(config_dict_or_path=config):
            model = Net()
    else:
        model = Net()
    engine = deepseek_zero.initialize(model=model, config=config)[0]
    weights = engine.module_state_dict()
    for name, value in plain.named_parameters():
        expected = value.detach() if name in DECLARED else value.detach().to(torch.bfloat16)
        assert weights[name].dtype == expected.dtype, name
        torch.testing.assert_close(
            weights[name], expected, rtol=0 if name in DECLARED else 1e-2, atol=0
        )
    assert engine.module.blocks[0].router.counts.dtype == torch.float32
    engine.backward(engine(torch.ones(2, 64)).float().square().mean())
    engine.step()
    moved = engine.module_state_dict()
    assert all(
        not torch.equal(moved[name], weights[name]) for name in DECLARED
    )  # such a step would be lost in 16 bits


@pytest.mark.parametrize("name", ["deepseek_zero", "deepspeed"])
def test_parameters_declared_as_fp32_keep_their_initial_values(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drop_in, "init_distributed", lambda: None)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": None,
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3},
    }
    torch.manual_seed(1)
    plain = Net()
    constructor = nn.Module.__init__
    torch.manual_seed(1)
    if name == "deepspeed":
        context = drop_in.DropInInit(config_dict_or_path=config)
    else:
        context = deepseek_zero.zero.Init(dtype=torch.bfloat16)
    with context:
        model = Net()
    assert nn.Module.__init__ is constructor
    for key, param in model.named_parameters():
        assert param.dtype == (torch.float32 if key in DECLARED else torch.bfloat16), key
    weights = deepseek_zero.initialize(model=model, config=config)[0].module_state_dict()
    for key, value in plain.named_parameters():
        expected = value if key in DECLARED else value.to(torch.bfloat16)
        assert torch.equal(weights[key], expected), key


def test_a_failing_constructor_restores_the_modules_of_torch() -> None:
    constructor = nn.Module.__init__
    with pytest.raises(ZeroDivisionError), deepseek_zero.zero.Init(dtype=torch.bfloat16):
        Net()
        raise ZeroDivisionError
    assert nn.Module.__init__ is constructor


@pytest.mark.parametrize("context", [deepseek_zero.zero.Init, drop_in.DropInInit])
def test_a_context_that_is_not_enabled_changes_nothing(context: Any) -> None:
    with context(enabled=False, dtype=torch.bfloat16):
        model = Net()
    assert {param.dtype for param in model.parameters()} == {torch.float32}
