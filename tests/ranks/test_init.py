"""zero.Init and construction on the meta device give the values of a plain model.

No rank ever holds the whole model.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import deepseek_zero as dz
from deepseek_zero.base.memory import segment_views
from deepseek_zero.sharding.sharded_parameter import ShardedParameter


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, width: int = 33, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 19)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def reinitialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        module.bias.data.zero_()


def config(**zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
    }


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.ranks("world")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("later", [False, True])
def test_a_model_built_under_init_is_the_plain_one_bit_for_bit(world: int, later: bool) -> None:
    torch.manual_seed(5)
    plain = Net()
    if later:
        plain.apply(reinitialise)
    torch.manual_seed(5)
    with dz.zero.Init():
        model = Net()
        if later:
            model.apply(reinitialise)
    assert all(type(param) is ShardedParameter for param in model.parameters())
    assert [tuple(a.shape) for a in model.parameters()] == [
        tuple(b.shape) for b in plain.parameters()
    ]
    engine, *_ = dz.initialize(model=model, config=config())
    assert_same(full(engine.module), full(plain))
    loss = engine(torch.arange(12).view(2, 6)).square().mean()
    engine.backward(loss)
    engine.step()
    assert engine.get_global_grad_norm() > 0


class Copies(nn.Module):
    """Blocks that are copies of one block, as in `nn.TransformerEncoder`."""

    def __init__(self) -> None:
        super().__init__()
        block = Block(33)
        self.embed = nn.Embedding(19, 33)
        self.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(3))
        nn.init.zeros_(self.blocks[1].down.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.ranks("world")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_copies_under_init_are_sharded_and_have_values_of_their_own(
    world: int, dtype: torch.dtype | None
) -> None:
    torch.manual_seed(5)
    plain = Copies().to(dtype or torch.float32)
    torch.manual_seed(5)
    with dz.zero.Init(dtype=dtype):
        model = Copies()
    teacher = copy.deepcopy(model).requires_grad_(False)
    for built in (model, teacher):
        assert all(type(param) is ShardedParameter for param in built.parameters())
        engine = dz.initialize(model=built, config=config() | {"optimizer": {}})[0]
        assert_same(full(engine.module), full(plain))
        assert engine(torch.arange(12).view(2, 6)).shape == (2, 6, 33)


@pytest.mark.ranks("world")
@pytest.mark.parametrize("world", [1, 2])
def test_a_meta_model_gets_the_values_of_a_plain_construction(world: int) -> None:
    torch.manual_seed(7)
    plain = Net()
    with torch.device("meta"):
        model = Net()
    objects = [id(param) for param in model.parameters()]
    torch.manual_seed(7)
    engine, *_ = dz.initialize(model=model, config=config())
    assert [id(param) for param in model.parameters()] == objects
    assert_same(full(engine.module), full(plain))


@pytest.mark.ranks(1)
def test_a_meta_module_without_reset_parameters_is_named() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), Odd())
    with pytest.raises(dz.DeepSeekZeroError, match=r"'1' \(Odd\).*reset_parameters"):
        dz.initialize(model=model, config=config())


@pytest.mark.ranks(2)
def test_rank_zero_wins_under_init_when_seeds_differ() -> None:
    torch.manual_seed(torch.distributed.get_rank())
    with dz.zero.Init():
        model = Net()
    engine, *_ = dz.initialize(model=model, config=config())
    torch.manual_seed(0)
    assert_same(full(engine.module), full(Net()))


@pytest.mark.ranks("world")
@pytest.mark.parametrize("world", [1, 2])
def test_writes_of_one_rank_before_initialize_reach_all_ranks(world: int) -> None:
    torch.manual_seed(3)
    expected = Net()
    with dz.zero.Init():
        model = Net()
    listed = list(model.parameters())
    buffer, plain = torch.ones(2), nn.Parameter(torch.ones(2))
    with dz.zero.GatheredParameters(
        [*reversed(listed), buffer, plain, None, *listed], modifier_rank=0
    ):
        with dz.zero.GatheredParameters(model.head):  # nested: gathered already
            assert model.head.weight.shape == (19, 33)
        if torch.distributed.get_rank() == 0:
            for param, value in zip(listed, expected.parameters(), strict=True):
                param.data.copy_(value.data)
    assert all(type(param) is ShardedParameter for param in listed)
    with dz.zero.GatheredParameters(model.embed.weight):
        assert torch.equal(model.embed.weight, expected.embed.weight)
    engine, *_ = dz.initialize(model=model, config=config())
    assert_same(full(engine.module), full(expected))


@pytest.mark.ranks(2)
def test_a_change_that_would_be_lost_is_an_error_under_init_too() -> None:
    with dz.zero.Init():
        model = Net()
    lost = pytest.raises(
        dz.DeepSeekZeroError, match=r"in-place modification .*\n.*keep a different change"
    )
    with lost, dz.zero.GatheredParameters(model.head.weight), torch.no_grad():
        if torch.distributed.get_rank() == 1:
            model.head.weight.mul_(2)
    assert type(model.head.weight) is ShardedParameter


@pytest.mark.ranks(2)
def test_the_state_dict_of_a_model_under_construction_has_names_and_shapes() -> None:
    with dz.zero.Init():
        model = Net()
    state = model.state_dict()
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        name: tuple(value.shape) for name, value in Net().state_dict().items()
    }
    with pytest.raises(dz.DeepSeekZeroError, match="is sharded"):
        state["head.weight"].sum()


class Tall(nn.Module):
    """Twelve equal blocks, so that the model is much larger than a block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(256) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Peak(TorchDispatchMode):
    """Peak bytes of storages that were created under this mode and are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        for value in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(value, torch.Tensor) and not value.is_meta:
                storage = value.untyped_storage()
                # Views of another rank's shared segment are counted on that rank
                if storage._cdata not in self.alive:
                    is_held = not any(
                        storage.data_ptr() in addresses for addresses in segment_views()
                    )
                    self.alive[storage._cdata] = (
                        StorageWeakRef(storage),
                        storage.nbytes() * is_held,
                    )
        self.peak = max(self.peak, sum(count for _, count in self.alive.values()))
        return result


@pytest.mark.ranks(2, timeout=120, fresh=True)
def test_construction_and_initialize_stay_under_share_plus_a_unit() -> None:
    torch.manual_seed(0)
    with Peak() as peak:
        with dz.zero.Init():
            model = Tall()
        dz.initialize(
            model=model, config={**config(), "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        )
    whole = sum(param.numel() for param in model.parameters()) * 4
    unit = whole // 12
    bound = whole // 2 + unit
    assert unit < peak.peak <= bound * 1.1, peak.peak / bound
