"""TiledLinear in the engine trains to the bits of the unsharded layer.

At most two tiles are gathered at a time.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import deepseek_zero
from deepseek_zero.base.device import storage_users
from deepseek_zero.sharding.pool import Pool
from deepseek_zero.sharding.unit import Unit, UnitState
from deepseek_zero.zero import TiledLinear
from tests.models import HIDDEN, VOCABULARY, WIDTH, Gpt, batch_of, seeded
from tests.pairwise import cases
from tests.plain import (
    BACKWARD,
    STAGE_0,
    STAGE_1,
    STAGE_2,
    STAGE_3,
    STAGE_3_BARE,
    Setting,
    assert_trains_like_plain,
    draw,
    on_stages_1_and_3,
)
from tests.reference import OPTIMIZERS, Reference
from tests.training import ALL, DTYPES, Run, offload, start_engine, train_step

STEPS = 3


class TiledGpt(Gpt):
    """Tiles inside and outside of repeated blocks, split along both dimensions."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up = TiledLinear(WIDTH, HIDDEN, out_splits=3, init_linear=block.up)
            block.down = TiledLinear(
                HIDDEN, WIDTH, in_splits=3, out_splits=2, init_linear=block.down
            )
        self.head = TiledLinear(WIDTH, VOCABULARY, bias=False, out_splits=2, init_linear=self.head)


AXES = {
    "stage": (0, 1, 2, 3),
    "dtype": ("fp32", "bf16"),
    "accumulation": (1, 2),
    "ranks": (1, 2, 3),
    "window": (0, 1000, ALL),
    "ahead": (0, ALL),
    "transport": ("fastest", "gloo"),
    "tier": ("none", "cpu", "nvme"),
}


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize(*cases(AXES))
def test_it_trains_to_the_bits_of_the_unsharded_one(
    stage: int,
    dtype: str,
    accumulation: int,
    ranks: int,
    window: int,
    ahead: int,
    transport: str,
    tier: str,
) -> None:
    run = Run(
        stage, dtype, accumulation, window, 0.0, "adamw", 0, ahead, transport=transport, tier=tier
    )
    engine = start_engine(run, seeded(TiledGpt))
    tiles = [unit for unit in engine.runtime.units if unit.is_layer_tile]
    assert len(tiles) == 3 * (3 + 6) + 2
    reference = Reference(
        seeded(TiledGpt), ranks, accumulation, stage < 2, DTYPES[dtype], OPTIMIZERS["adamw"]
    )
    for step in range(STEPS):
        losses = train_step(engine, run, step)
        everyone = [
            [batch_of(step, micro, rank) for micro in range(accumulation)] for rank in range(ranks)
        ]
        expected, _ = reference.step(everyone)
        assert all(map(torch.equal, losses, expected[dist.get_rank()])), (
            f"losses differ in step {step}"
        )
        found = engine.module.state_dict()
        different = [
            name
            for name, value in reference.values().items()
            if not torch.equal(found[name], value)
        ]
        assert not different, f"step {step}"


# -- order and skipped blocks
# -------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Modules before, between and after tiled layers.

    recompute: `use_reentrant` of the checkpoint, or None for no checkpoint.
    """

    def __init__(self, width: int = 8, hidden: int = 20, recompute: bool | None = None) -> None:
        super().__init__()
        self.norm, self.gate, self.recompute = (
            nn.LayerNorm(width),
            nn.Linear(hidden, hidden),
            recompute,
        )
        self.up = TiledLinear(width, hidden, in_splits=2, out_splits=4)
        self.down = TiledLinear(hidden, width, in_splits=4, out_splits=2)

    def inside(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.gate(self.up(self.norm(x)))))

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute is None:
            return self.inside(x)
        return checkpoint(self.inside, x, use_reentrant=self.recompute)


class Stack(nn.Module):
    """A stack of blocks.

    recompute: "" or the place (inside or around the block) and kind (reentrant or not).
    """

    def __init__(self, recompute: str = "", **sizes: int) -> None:
        super().__init__()
        self.around = {"around, reentrant": True, "around": False}.get(recompute)
        self.inside = {"inside, reentrant": True, "inside": False}.get(recompute)
        self.blocks = nn.ModuleList(Block(recompute=self.inside, **sizes) for _ in range(3))
        self.head = nn.Linear(sizes.get("width", 8), 3)

    def forward(self, x: Tensor, skipped: int = -1) -> Tensor:
        if True in (self.around, self.inside) and torch.is_grad_enabled():
            x = x.requires_grad_()  # reentrant recomputation needs an input that requires grad
        for number, block in enumerate(self.blocks):
            if number != skipped:
                x = (
                    block(x)
                    if self.around is None
                    else checkpoint(block, x, use_reentrant=self.around)
                )
        return self.head(x)


HOW = ["", "inside", "inside, reentrant", "around", "around, reentrant"]


def some_slow(*values: Any, runs: bool) -> Any:
    """Return a case of a test, which is marked slow unless it `runs` in CI."""
    return pytest.param(*values, marks=() if runs else pytest.mark.slow)


@pytest.mark.parametrize(
    ("setting", "recompute"),
    [
        some_slow(setting, how, runs=how == HOW[-1] or setting is STAGE_3_BARE)
        for setting in (STAGE_0, STAGE_1, STAGE_2, STAGE_3, STAGE_3_BARE)
        for how in HOW
    ],
    ids=str,
)
@pytest.mark.ranks(2)
def test_in_recomputed_blocks_it_trains_too(recompute: str, setting: Setting) -> None:
    def body(model: nn.Module, rank: int, step: int, backward: BACKWARD) -> Any:
        loss = model(draw(rank, step, 4, 8)).square().mean()
        backward(loss)
        return loss

    assert_trains_like_plain(lambda: Stack(recompute), body, setting, transport="gloo")


@on_stages_1_and_3
@pytest.mark.ranks(2)
def test_a_rank_may_skip_a_block_of_tiles(setting: Setting) -> None:
    def body(model: nn.Module, rank: int, step: int, backward: BACKWARD) -> Any:
        loss = model(draw(rank, step, 4, 8), step if rank == step % 2 else -1).square().mean()
        backward(loss)
        return loss

    assert_trains_like_plain(Stack, body, setting, transport="gloo")


@on_stages_1_and_3
@pytest.mark.ranks(2)
def test_every_gradient_of_a_block_of_tiles_arrives_before_its_reduction(setting: Setting) -> None:
    engine = deepseek_zero.initialize(model=seeded(Stack), config=setting.config())[0]
    for step in range(3):
        engine.backward(engine(draw(dist.get_rank(), step, 4, 8)).square().mean())
        assert not engine.runtime.reductions.late
        engine.step()


# -- memory
# --------------------------------------------------------------------------------------------------


class Watched:
    """Peak of gathered elements by phase, gathers by unit, and returned buffers still in use."""

    def __init__(self) -> None:
        self.most: dict[str, int] = defaultdict(int)
        self.gathers: Counter[str] = Counter()
        self.kept: list[int] = []


@contextmanager
def watching(engine: Any) -> Iterator[Watched]:
    seen, start, give = Watched(), Unit.unshard, Pool.give

    def start_gather(unit: Unit) -> None:
        seen.gathers[unit.name] += unit.state is UnitState.SHARDED
        start(unit)
        here = [
            each.planned.gathered_numel
            for each in engine.runtime.units
            if each.state is not UnitState.SHARDED
        ]
        phase = engine.runtime.step.phase.value
        seen.most[phase] = max(seen.most[phase], sum(here))

    def give_back(pool: Pool, tensor: Tensor) -> None:
        if storage_users(tensor) > 1:
            seen.kept.append(tensor.numel())
        give(pool, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Unit, "unshard", start_gather)
        patch.setattr(Pool, "give", give_back)
        yield seen


def engine_of(
    model: nn.Module, tier: str, window: int = 0, ahead: int = 0, optimizer: str = "AdamW"
) -> Any:
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": window,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": ahead,
        **offload(tier),
    }
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": None,
        "transport": "gloo",  # gathered weights need separate memory with gloo
        "optimizer": {"type": optimizer, "params": {"lr": 1e-3}},
        "zero_optimization": zero,
    }
    return deepseek_zero.initialize(model=model, config=config)[0]


class Mlp(nn.Module):
    """Two tiled layers: 8 tiles of 32 x 64 and 8 of 64 x 32."""

    def __init__(self) -> None:
        super().__init__()
        self.up = TiledLinear(64, 256, in_splits=2, out_splits=4)
        self.down = TiledLinear(256, 64, in_splits=4, out_splits=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def steps_of(engine: Any) -> None:
    for step in range(2):
        x = draw(
            dist.get_rank(), step, 4, 64
        ).requires_grad_()  # frozen tiles then take part in backward
        engine.backward(engine(x).square().mean())
        engine.step()


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("ranks", "at_once"), [(1, 1), (2, 1), (2, 2), (3, 1)])
def test_so_many_tiles_are_gathered_at_once_in_forward_and_in_backward(
    ranks: int, at_once: int, frozen: bool, tier: str
) -> None:
    model = seeded(Mlp)
    for name, param in model.named_parameters():
        param.requires_grad_(not frozen or "up.linears.0.0" in name)
    tile = 64 * 32 + 64
    padded = -(-tile // (1024 * ranks)) * 1024 * ranks
    engine = engine_of(model, tier, window=(at_once - 1) * 2 * padded, ahead=at_once - 1)
    with watching(engine) as seen:
        steps_of(engine)
    assert len(engine.runtime.units) == 17
    assert seen.most["forward"] <= at_once * padded
    assert seen.most["backward"] <= at_once * padded
    assert seen.kept == []
    # Forward and backward of two steps; with offload, the last tile stays gathered between them
    if not frozen and at_once == 1:
        stays = set() if tier == "none" else {16}
        found = {unit.number: seen.gathers[unit.name] for unit in engine.runtime.units[1:]}
        assert found == {number: 2 if number in stays else 4 for number in range(1, 17)}


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize(
    ("ranks", "tier", "recompute"),
    [
        some_slow(ranks, tier, how, runs=how == HOW[-1] or (ranks, tier) == (2, "none"))
        for ranks, tier in ((1, "nvme"), (2, "none"), (2, "nvme"))
        for how in HOW
    ],
)
def test_a_block_adds_them_to_its_other_collectives_and_recomputation_adds_one(
    ranks: int, tier: str, recompute: str
) -> None:
    torch.manual_seed(7)
    engine = engine_of(Stack(recompute, width=64, hidden=256), tier)
    sizes = {True: 0, False: 0}
    for unit in engine.runtime.units[1:]:
        sizes[unit.is_layer_tile] = max(sizes[unit.is_layer_tile], unit.planned.gathered_numel)
    tile, frame = sizes[True], sizes[False] + engine.runtime.root.planned.gathered_numel
    with watching(engine) as seen:
        steps_of(engine)
    assert seen.most["forward"] <= frame + tile
    assert seen.most["backward"] <= frame + tile * (2 if recompute else 1)
    tiles = {unit.planned.gathered_numel for unit in engine.runtime.units if unit.is_layer_tile}
    assert not tiles & set(seen.kept), "nobody keeps a tile, recomputed or not"


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_pool_holds_a_few_tiles_as_predicted(ranks: int) -> None:
    engine = engine_of(seeded(Mlp), "none")
    steps_of(engine)
    report = engine.memory_report()
    tile = max(unit.planned.gathered_numel for unit in engine.runtime.units)
    scratch = 4 * (1 << 20)  # for partial sums, of a constant size
    assert report.measured["buffers"] == report.predicted["buffers"]
    # A gathered tile, its gradient, one tile in flight, and the pieces received from other ranks,
    # with and without a bias.
    assert report.measured["buffers"] - scratch <= 2 * 4 * tile * 4


def peak_bytes() -> int:
    """Return the peak memory of this process since the last reset of its high-water mark."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.ranks(1, fresh=True, timeout=240)
def test_an_operator_larger_than_the_memory_it_is_trained_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DEEPSEEK_ZERO_KERNELS", "torch")  # llvmlite itself takes 60 MB
    with torch.device("meta"):
        model = nn.Sequential(TiledLinear(8192, 8192, bias=False, out_splits=64))
    Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
    before = peak_bytes()
    engine = engine_of(model, "nvme", optimizer="SGD")
    engine.backward(engine(draw(0, 0, 4, 8192)).square().mean())
    engine.step()
    engine(draw(0, 1, 4, 8192))  # runs the delayed updates
    weight = 4 * 8192 * 8192
    assert weight == 256 << 20 and peak_bytes() - before < 0.6 * weight


# -- building
# --------------------------------------------------------------------------------------------------


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("how", ["init", "meta"])
def test_built_sharded_it_has_the_values_of_a_plain_construction(ranks: int, how: str) -> None:
    plain = seeded(Mlp)
    torch.manual_seed(7)
    if how == "init":
        with deepseek_zero.zero.Init():
            model = Mlp()
    else:
        with torch.device("meta"):
            model = Mlp()
    engine = engine_of(model, "none")
    found = engine.module.state_dict()
    assert all(torch.equal(found[name], value) for name, value in plain.state_dict().items())


def of_first(linear: nn.Linear) -> list[Tensor]:
    """Return rank 0's weight and bias."""
    values = [linear.weight.detach().clone(), linear.bias.detach().clone()]
    for value in values:
        dist.broadcast(value, 0)
    return values


def assert_holds(engine: Any, weight: Tensor, bias: Tensor) -> None:
    state = engine.module.state_dict()
    rows = [
        torch.cat([state[f"up.linears.{row}.{column}.weight"] for column in range(2)], dim=1)
        for row in range(4)
    ]
    assert torch.equal(torch.cat(rows), weight)
    assert torch.equal(torch.cat([state[f"up.linears.{row}.1.bias"] for row in range(4)]), bias)


@pytest.mark.ranks(2)
def test_a_linears_values_are_taken_while_building_sharded_and_by_a_running_engine() -> None:
    torch.manual_seed(dist.get_rank())  # ranks have different values; rank 0's are used
    first, second = nn.Linear(64, 256), nn.Linear(64, 256)
    with deepseek_zero.zero.Init():
        model = Mlp()
        model.up = TiledLinear(64, 256, in_splits=2, out_splits=4, init_linear=first)
    engine = engine_of(model, "none")
    assert_holds(engine, *of_first(first))
    with deepseek_zero.zero.GatheredParameters(list(model.up.parameters()), modifier_rank=0):
        if dist.get_rank() == 0:
            model.up.copy_params_from(second)
    assert_holds(engine, *of_first(second))
