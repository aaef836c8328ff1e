"""Access to a wrapped model: state dicts, GatheredParameters, sharded parameters and copies."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deepseek_zero
from tests.plain import (
    STAGE_3,
    STAGE_3_BARE,
    Plain,
    Setting,
    assert_same_state,
    assert_trains_like_plain,
    draw,
    engine_for,
    here,
    on_stage_3,
    on_stages_1_and_3,
    on_stages_1_to_3,
    seeded,
    world,
)

pytestmark = pytest.mark.ranks(2)
WIDTH = 8
Gathered = deepseek_zero.zero.GatheredParameters
ZeroError = deepseek_zero.DeepSeekZeroError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """A model with tied, frozen, 0-dim, empty and odd-sized parameters, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.blocks[1].up.requires_grad_(False)
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) + self.nothing.sum()


def batch(rank: int, step: int) -> Tensor:
    return torch.randint(0, 11, (6,), generator=torch.Generator().manual_seed(100 * step + rank))


def train(model: nn.Module, rank: int, step: int, backward: Callable[..., Any]) -> Tensor:
    tokens = batch(rank, step)
    loss = F.cross_entropy(model(tokens), tokens)
    backward(loss)
    return loss


# -- state_dict
# --------------------------------------------------------------------------------------------------


@on_stages_1_to_3
@pytest.mark.parametrize(
    "when", ["before training", "between forward and backward", "after a step"]
)
def test_state_dict_is_the_plain_one_on_every_rank(when: str, setting: Setting) -> None:
    plain, model = Plain(Model), seeded(Model)
    engine = engine_for(model, setting)
    if when == "after a step":
        plain.run(train, 0)
        plain.update()
        train(engine, here(), 0, engine.backward)
        engine.step()
    if when == "between forward and backward":
        loss = F.cross_entropy(engine(batch(here(), 0)), batch(here(), 0))
        plain.mine(batch(here(), 0))
    assert_same_state(model, plain.mine)
    if when == "between forward and backward":
        engine.backward(loss)
        engine.step()


@on_stages_1_to_3
def test_a_state_dict_is_plain_tensors_that_belong_to_the_caller(setting: Setting) -> None:
    model = seeded(Model)
    _engine = engine_for(model, setting)
    state = model.state_dict()
    assert type(state) is OrderedDict and hasattr(state, "_metadata")
    assert {type(value) for value in state.values()} == {Tensor}
    assert (
        state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    )  # tied weights are saved once
    for name in seeded(Model).state_dict():
        if "norm" not in name and "seen" not in name:  # torch hands out live buffers too
            state[name].fill_(5.0)
    assert_same_state(model, seeded(Model))


@on_stages_1_and_3
def test_a_saved_state_dict_is_no_larger_than_the_plain_one_and_loads_into_a_plain_model(
    setting: Setting,
) -> None:
    model, plain = seeded(Model), seeded(Model, seed=8)
    _engine = engine_for(model, setting)
    mine, plains = io.BytesIO(), io.BytesIO()
    torch.save(model.state_dict(), mine)
    torch.save(plain.state_dict(), plains)
    assert mine.tell() == pytest.approx(plains.tell(), rel=0.02)
    mine.seek(0)
    assert not any(plain.load_state_dict(torch.load(mine)))
    assert_same_state(model, plain)


@on_stages_1_and_3
def test_state_dict_of_a_part_a_prefix_and_keep_vars(setting: Setting) -> None:
    model, plain = seeded(Model), seeded(Model)
    engine = engine_for(model, setting)
    for part in ("blocks.0", "blocks", "blocks.1.up", "head"):
        found = model.get_submodule(part).state_dict(prefix="here.")
        expected = plain.get_submodule(part).state_dict(prefix="here.")
        assert list(found) == list(expected)
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
    assert list(engine.state_dict()) == [f"module.{name}" for name in plain.state_dict()]
    kept = model.state_dict(keep_vars=True)
    assert kept["blocks.0.up.weight"] is model.blocks[0].up.weight


# -- load_state_dict
# --------------------------------------------------------------------------------------------------


def other_values() -> OrderedDict[str, Tensor]:
    return OrderedDict(
        (name, value.clone()) for name, value in seeded(Model, seed=99).state_dict().items()
    )


@on_stages_1_to_3
def test_load_state_dict_reaches_weights_masters_and_buffers(setting: Setting) -> None:
    plain, model = Plain(Model), seeded(Model)
    engine = engine_for(model, setting)
    train(engine, here(), 0, engine.backward)
    engine.step()
    for target in (model, *plain.copies):
        assert not any(target.load_state_dict(other_values()))
    assert_same_state(model, plain.mine)
    for step in range(2):
        plain.run(train, step)
        plain.update()
        train(engine, here(), step, engine.backward)
        engine.step()
    assert_same_state(model, plain.mine)


@on_stages_1_and_3
def test_load_state_dict_of_a_part_and_with_assign(setting: Setting) -> None:
    model, plain = seeded(Model), seeded(Model)
    _engine = engine_for(model, setting)
    part = OrderedDict(
        (name[9:], value) for name, value in other_values().items() if name.startswith("blocks.2.")
    )
    for target in (model, plain):
        target.blocks[2].load_state_dict(part)
    assert_same_state(model, plain)
    before = model.embed.weight
    with pytest.raises(ZeroError, match="assign"):
        model.load_state_dict(other_values(), assign=True)
    assert model.embed.weight is before


@on_stages_1_and_3
def test_load_state_dict_reports_missing_unexpected_and_misshapen_entries(setting: Setting) -> None:
    model = seeded(Model)
    _engine = engine_for(model, setting)
    state = other_values()
    del state["blocks.0.up.weight"]
    state["surprise"] = torch.ones(1)
    with pytest.raises(
        RuntimeError, match=r"(?s)blocks.0.up.weight.*surprise|surprise.*blocks.0.up.weight"
    ):
        model.load_state_dict(state)
    found = model.load_state_dict(state, strict=False)
    assert found.missing_keys == ["blocks.0.up.weight"] and found.unexpected_keys == ["surprise"]
    with pytest.raises(RuntimeError, match=r"size mismatch for blocks\.1\.down\.bias"):
        model.load_state_dict(other_values() | {"blocks.1.down.bias": torch.ones(3)})


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_under_bf16_loaded_values_reach_the_masters(stage: int) -> None:
    """Otherwise the next step would restore the old values from the main weights."""
    model = seeded(Model)
    engine = engine_for(
        model,
        Setting(stage),
        bf16={"enabled": True},
        optimizer={"type": "SGD", "params": {"lr": 0.0}},
    )
    model.load_state_dict(other_values())
    train(engine, here(), 0, engine.backward)
    engine.step()
    for name, value in seeded(Model, seed=99).named_parameters():
        assert torch.equal(
            model.state_dict()[name].float(), value.to(model.state_dict()[name].dtype).float()
        ), name


# -- which rank's values count
# ------------------------------------------------------------------------------------------------


@on_stages_1_to_3
def test_rank_0s_parameters_and_buffers_win(setting: Setting) -> None:
    model = seeded(Model, seed=40 + here())
    for buffer in model.buffers():
        buffer.fill_(3 + here())
    _engine = engine_for(model, setting)
    expected = seeded(Model, seed=40)
    for buffer in expected.buffers():
        buffer.fill_(3)
    assert_same_state(model, expected)


def renamed(model: Model) -> None:
    model.blocks[1].other = model.blocks[1].scale
    del model.blocks[1].scale


def reshaped(model: Model) -> None:
    model.blocks[1].down = nn.Linear(2 * WIDTH, WIDTH + 1)


def retyped(model: Model) -> None:
    model.blocks[1].down.double()


def reordered(model: Model) -> None:
    block = model.blocks[1]
    block.up, block.down = block.up, block.down
    up = block._modules.pop("up")
    block._modules["up"] = up


def thawed(model: Model) -> None:
    model.blocks[1].up.requires_grad_(True)


def lengthened(model: Model) -> None:
    model.blocks.append(Block())


def untied(model: Model) -> None:
    model.head = nn.Linear(WIDTH, 11, bias=False)


def other_buffer(model: Model) -> None:
    model.blocks[1].seen = torch.zeros(3)


DIFFERENCES = [renamed, reshaped, retyped, reordered, thawed, lengthened, untied, other_buffer]


@on_stages_1_and_3
@pytest.mark.parametrize("change", DIFFERENCES, ids=lambda change: change.__name__)
def test_models_that_differ_between_ranks_are_an_error_on_every_rank(
    change: Callable[[Model], None], setting: Setting
) -> None:
    model = seeded(Model)
    if here() == 1:
        change(model)
    with pytest.raises(ZeroError, match=r"(?s)rank 0 has.*rank 1.*(blocks|head)"):
        engine_for(model, setting)
    assert all(torch.isfinite(param).all() for param in model.parameters())  # nothing changed


# -- sharded parameters
# ------------------------------------------------------------------------------------------------


@on_stages_1_to_3
def test_parameters_report_their_full_shapes_and_stay_the_same_objects(setting: Setting) -> None:
    model, plain = seeded(Model), seeded(Model)
    before = dict(model.named_parameters(remove_duplicate=False))
    engine = engine_for(model, setting)

    def check() -> None:
        found = dict(model.named_parameters(remove_duplicate=False))
        assert list(found) == list(before)
        for name, param in plain.named_parameters(remove_duplicate=False):
            mine = found[name]
            assert mine is before[name] and isinstance(mine, nn.Parameter)
            assert (mine.shape, mine.size(), mine.dtype, mine.ndim) == (
                param.shape,
                param.size(),
                param.dtype,
                param.ndim,
            )
            assert (mine.numel(), mine.requires_grad, mine.is_leaf) == (
                param.numel(),
                param.requires_grad,
                True,
            )
            assert mine.device == param.device and isinstance(repr(mine), str)
        assert sum(p.numel() for p in model.parameters()) == sum(
            p.numel() for p in plain.parameters()
        )

    check()
    train(engine, here(), 0, engine.backward)
    check()
    engine.step()
    check()


@on_stage_3
def test_a_rank_stores_only_its_padded_slice_of_sharded_weights(setting: Setting) -> None:
    model = seeded(Model)
    engine = engine_for(model, setting)
    train(engine, here(), 0, engine.backward)
    engine.step()
    for name, param in model.named_parameters():
        with torch._C.DisableTorchFunctionSubclass():
            assert param.untyped_storage().nbytes() == 4, name
    for group in engine.runtime.groups:
        assert group.weight.memory.numel() == group.layout.padded_numel // world()


@on_stage_3
def test_reading_a_sharded_parameter_raises_an_error_with_its_name_and_advice(
    setting: Setting,
) -> None:
    model = seeded(Model)
    _engine = engine_for(model, setting)
    weight = model.blocks[0].up.weight
    readings: list[Callable[[], Any]] = [
        lambda: weight + 1,
        lambda: weight.sum().item(),
        lambda: weight[0],
        lambda: weight.detach(),
        lambda: weight.clone(),
        lambda: weight.data,
        lambda: weight.tolist(),
        lambda: weight.numpy(),
        lambda: F.linear(torch.ones(1, WIDTH), weight),
        lambda: torch.nn.init.normal_(weight),
        lambda: weight.data.fill_(1.0),
        lambda: weight.double(),
        lambda: torch.equal(weight, weight),
        lambda: copy.deepcopy(weight),
        lambda: pickle.dumps(weight),
        lambda: float(model.blocks[0].scale),
        lambda: bool(model.blocks[0].scale > 0),
    ]
    for number, read in enumerate(readings):
        with pytest.raises(
            ZeroError, match=r"(?s)blocks\.0\.(up\.weight|scale).*GatheredParameters"
        ) as caught:
            read()
        assert caught.value.fix, number


@on_stages_1_to_3
@pytest.mark.parametrize("make", [copy.deepcopy, pickle.dumps], ids=["deepcopy", "pickle"])
def test_copying_a_wrapped_model_raises_an_error_that_names_state_dict(
    make: Callable[[nn.Module], Any], setting: Setting
) -> None:
    model = seeded(Model)
    engine = engine_for(model, setting)
    for target in (model, engine, model.blocks[0]):
        with pytest.raises(ZeroError, match="state_dict"):
            make(target)
    assert_same_state(model, seeded(Model))


@on_stages_1_to_3
def test_copy_from_a_loader_writes_weights_and_masters(setting: Setting) -> None:
    plain, model = Plain(Model), seeded(Model)
    engine = engine_for(model, setting)
    values = other_values()
    for target in (model, *plain.copies):
        with torch.no_grad():
            for name, param in target.named_parameters():
                param.copy_(values[name])
    assert_same_state(model, plain.mine)
    plain.run(train, 0)
    plain.update()
    train(engine, here(), 0, engine.backward)
    engine.step()
    assert_same_state(model, plain.mine)


@on_stages_1_and_3
def test_casting_or_moving_a_wrapped_model_raises_an_error_or_changes_nothing(
    setting: Setting,
) -> None:
    model = seeded(Model)
    _engine = engine_for(model, setting)
    assert model.to("cpu") is model and model.float() is model and model.cpu() is model
    assert_same_state(model, seeded(Model))
    # Raises at once if weights are sharded, otherwise at the next step
    with pytest.raises(ZeroError, match=r"float64|'double'"):
        model.double()
        train(_engine, here(), 0, _engine.backward)
        _engine.step()


@on_stages_1_and_3
def test_a_parameter_added_after_wrapping_is_named_before_it_trains_unsynchronised(
    setting: Setting,
) -> None:
    """Adding PEFT adapters or resizing embeddings after wrapping raises an error."""
    model = seeded(Model)
    engine = engine_for(model, setting)
    model.blocks[0].adapter = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(ZeroError, match=r"(?s)blocks\.0\.adapter.*(initialize|wrap)"):
        train(engine, here(), 0, engine.backward)
        engine.step()


@on_stages_1_and_3
def test_resizing_the_embedding_works_or_raises_an_error_with_advice(setting: Setting) -> None:
    model = seeded(Model)
    engine = engine_for(model, setting)
    with pytest.raises(ZeroError, match=r"embed\.weight"):
        resized = nn.Embedding(13, WIDTH)
        resized.weight.data[:11] = model.embed.weight.data
        model.embed = resized
        train(engine, here(), 0, engine.backward)
        engine.step()


# -- GatheredParameters
# ------------------------------------------------------------------------------------------------


@on_stages_1_to_3
@pytest.mark.parametrize("given", ["one", "list", "generator", "module", "dict values"])
def test_gathered_parameters_are_whole_inside_the_block_and_sharded_after(
    given: str, setting: Setting
) -> None:
    model, plain = seeded(Model), seeded(Model)
    _engine = engine_for(model, setting)
    weight = model.blocks[0].up.weight
    params: Any = {
        "one": weight,
        "list": [weight, model.blocks[2].scale, model.nothing],
        "generator": model.parameters(),
        "module": model,
        "dict values": dict(model.named_parameters()).values(),
    }[given]
    with Gathered(params):
        assert torch.equal(weight, plain.blocks[0].up.weight)
        if given != "one":
            assert float(model.blocks[2].scale.detach()) == 1.0 and model.nothing.shape == (0, 3)
        assert type(weight) is nn.Parameter and weight.requires_grad
    assert_same_state(model, plain)
    if setting.stage == 3:
        with pytest.raises(ZeroError, match="sharded"):
            weight.sum()


@on_stages_1_to_3
@pytest.mark.parametrize("rank", [0, 1])
def test_the_modifier_ranks_changes_apply_on_all_ranks(rank: int, setting: Setting) -> None:
    plain, model = Plain(Model), seeded(Model)
    engine = engine_for(model, setting)
    changed = [model.blocks[0].up.weight, model.blocks[1].up.weight, model.blocks[2].scale]
    with Gathered(changed, modifier_rank=rank), torch.no_grad():
        if here() == rank:
            nn.init.constant_(model.blocks[0].up.weight, 0.25)
            model.blocks[1].up.weight.data.mul_(2.0)  # frozen
            model.blocks[2].scale.fill_(0.5)
    for each in plain.copies:
        with torch.no_grad():
            nn.init.constant_(each.blocks[0].up.weight, 0.25)
            each.blocks[1].up.weight.mul_(2.0)
            each.blocks[2].scale.fill_(0.5)
    assert_same_state(model, plain.mine)
    for step in range(2):
        plain.run(train, step)
        plain.update()
        train(engine, here(), step, engine.backward)
        engine.step()
    assert_same_state(model, plain.mine)


@on_stages_1_to_3
def test_changes_of_ranks_other_than_the_modifier_are_dropped(setting: Setting) -> None:
    model = seeded(Model)
    _engine = engine_for(model, setting)
    with Gathered(model.parameters(), modifier_rank=0), torch.no_grad():
        if here() == 1:
            for param in model.parameters():
                param.fill_(9.0)
    assert_same_state(model, seeded(Model))


@on_stages_1_to_3
@pytest.mark.parametrize("changer", [0, 1])
def test_a_change_without_a_modifier_rank_is_an_error_on_every_rank(
    changer: int, setting: Setting
) -> None:
    model = seeded(Model)
    engine = engine_for(model, setting)
    with (
        pytest.raises(ZeroError, match="modifier_rank"),
        torch.no_grad(),
        Gathered(model.blocks[0].parameters()),
    ):
        if here() == changer:
            model.blocks[0].up.weight.zero_()
    assert_same_state(model, seeded(Model))
    train(engine, here(), 0, engine.backward)
    engine.step()


@on_stages_1_to_3
def test_a_forward_of_gathered_modules_runs_inside_the_block(setting: Setting) -> None:
    model, plain = seeded(Model), seeded(Model)
    _engine = engine_for(model, setting)
    x = draw(0, 0, 3, WIDTH)
    with Gathered(model), torch.no_grad():
        assert torch.equal(model.blocks[0].up(x), plain.blocks[0].up(x))
        assert torch.equal(F.linear(x, model.embed.weight), F.linear(x, plain.embed.weight))
    assert_same_state(model, plain)


@on_stages_1_to_3
def test_the_whole_model_runs_inside_the_block(setting: Setting) -> None:
    model, plain = seeded(Model), seeded(Model)
    engine = engine_for(model, setting)
    with Gathered(model), torch.no_grad():
        assert torch.equal(engine(batch(here(), 0)), plain(batch(here(), 0)))
        assert torch.equal(model.blocks[0].up.weight, plain.blocks[0].up.weight)
    assert_same_state(model, plain)
    train(engine, here(), 0, engine.backward)
    engine.step()


@on_stages_1_to_3
@pytest.mark.parametrize("grad", [False, True])
def test_one_rank_runs_the_whole_model_alone_inside_the_block(grad: bool, setting: Setting) -> None:
    plain, model = Plain(Model), seeded(Model)
    engine = engine_for(model, setting)
    for step in range(2):
        with Gathered(model):
            if here() == 0:
                with torch.set_grad_enabled(grad):
                    found = engine.eval()(batch(0, step))
                assert torch.equal(found, plain.mine.eval()(batch(0, step)))
                engine.train()
                plain.mine.train()
        plain.run(train, step)
        plain.update()
        train(engine, here(), step, engine.backward)
        engine.step()
    assert_same_state(model, plain.mine)


@on_stages_1_to_3
def test_a_backward_after_the_block_follows_a_forward_inside_it(setting: Setting) -> None:
    plain, model = Plain(Model), seeded(Model)
    engine = engine_for(model, setting)
    for step in range(2):
        plain.run(train, step)
        plain.update()
        with Gathered(model):
            loss = F.cross_entropy(engine(batch(here(), step)), batch(here(), step))
        engine.backward(loss)
        engine.step()
    assert_same_state(model, plain.mine)


@on_stages_1_to_3
def test_nested_blocks_disabled_blocks_and_foreign_parameters(setting: Setting) -> None:
    model, plain = seeded(Model), seeded(Model)
    _engine = engine_for(model, setting)
    foreign = nn.Parameter(torch.ones(2))
    weight = model.blocks[0].up.weight
    with Gathered([weight, foreign], modifier_rank=0):
        with Gathered([weight, model.blocks[2].scale], modifier_rank=0), torch.no_grad():
            assert torch.equal(weight, plain.blocks[0].up.weight)
            model.blocks[2].scale.fill_(4.0)
        assert torch.equal(weight, plain.blocks[0].up.weight)
        with torch.no_grad():
            weight.fill_(2.0)
    with (
        Gathered(weight, enabled=False),
        Gathered([]),
        Gathered([foreign]),
        Gathered([foreign], modifier_rank=1),
    ):
        pass
    with torch.no_grad():
        plain.blocks[0].up.weight.fill_(2.0)
        plain.blocks[2].scale.fill_(4.0)
    assert_same_state(model, plain)


@on_stages_1_to_3
def test_an_exception_inside_the_block_on_all_ranks_leaves_the_old_values(setting: Setting) -> None:
    model = seeded(Model)
    engine = engine_for(model, setting)
    with pytest.raises(KeyError), Gathered(model.parameters(), modifier_rank=0), torch.no_grad():
        model.blocks[0].up.weight.zero_()
        raise KeyError
    assert_same_state(model, seeded(Model))
    train(engine, here(), 0, engine.backward)
    engine.step()


@on_stages_1_and_3
def test_gathering_between_forward_and_backward_disturbs_neither(setting: Setting) -> None:
    plain, model = Plain(Model), seeded(Model)
    engine = engine_for(model, setting)
    plain.run(train, 0)
    tokens = batch(here(), 0)
    loss = F.cross_entropy(engine(tokens), tokens)
    with Gathered(model):
        assert all(
            torch.equal(a, b)
            for a, b in zip(model.parameters(), plain.mine.parameters(), strict=True)
        )
    engine.backward(loss)
    engine.step()
    plain.update()
    assert_same_state(model, plain.mine)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_under_bf16_gathered_changes_reach_the_masters(stage: int) -> None:
    model = seeded(Model)
    engine = engine_for(
        model,
        Setting(stage),
        bf16={"enabled": True},
        optimizer={"type": "SGD", "params": {"lr": 0.0}},
    )
    with Gathered([model.blocks[0].up.weight], modifier_rank=0), torch.no_grad():
        model.blocks[0].up.weight.fill_(0.5)
    train(engine, here(), 0, engine.backward)
    engine.step()
    assert torch.equal(
        model.state_dict()["blocks.0.up.weight"].float(), torch.full((2 * WIDTH, WIDTH), 0.5)
    )


# -- external parameters
# -----------------------------------------------------------------------------------------------


class External(nn.Module):
    """One unit reads the weight of a later unit; another reads the root's weight."""

    class Reader(Block):
        def __init__(self, others: list[nn.Module]) -> None:
            super().__init__()
            self.others = others if isinstance(others, tuple) else tuple(others)

        def forward(self, x: Tensor) -> Tensor:
            for other in self.others:
                x = x + F.linear(x, other.weight)[:, :WIDTH]
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        last, head = Block(), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            [self.Reader([last.up, head]), self.Reader([head]), self.Reader([]), last]
        )
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@on_stages_1_to_3
def test_announced_external_parameters_train(setting: Setting) -> None:
    announced = []

    def body(model: Any, rank: int, step: int, backward: Callable[..., Any]) -> Any:
        if isinstance(model, deepseek_zero.DeepSpeedEngine) and not announced:
            deepseek_zero.zero.register_external_parameter(
                model.blocks[0], model.blocks[3].up.weight
            )
            deepseek_zero.zero.register_external_parameter(model.blocks[0], model.head.weight)
            deepseek_zero.zero.register_external_parameter(model.blocks[1].up, model.head.weight)
            deepseek_zero.zero.register_external_parameter(model.blocks[2], model.head.weight)
            deepseek_zero.zero.unregister_external_parameter(model.blocks[2], model.head.weight)
            announced.append(True)
        output = model(draw(rank, step, 4, WIDTH))
        backward(output.square().mean())
        return output

    assert_trains_like_plain(External, body, setting)


def test_announcing_an_unwrapped_parameter_raises_an_error_with_advice() -> None:
    model = seeded(Model)
    with pytest.raises(ZeroError, match="initialize"):
        deepseek_zero.zero.register_external_parameter(model, model.embed.weight)
    with pytest.raises(ZeroError, match="initialize"):
        deepseek_zero.zero.unregister_external_parameter(model, model.embed.weight)


# -- clipping and zeroing with torch's functions
# ---------------------------------------------------------------------


@on_stages_1_to_3
def test_torchs_gradient_clipping_and_norm_use_the_whole_gradient(setting: Setting) -> None:
    plain, model = Plain(Model), seeded(Model)
    zero = {
        key: value for key, value in setting.config()["zero_optimization"].items() if key != "stage"
    }
    deepseek_zero.DeepSeekZeRO3(model, stage=setting.stage, zero_optimization=zero)
    optimizer = deepseek_zero.ZeroOptimizer(model.parameters(), lr=0.1, optimizer_type="sgd")
    for step in range(2):
        plain.run(train, step)
        for params in zip(*(each.parameters() for each in plain.copies), strict=True):
            if params[0].requires_grad:
                mean = torch.stack([param.grad for param in params]).mean(dim=0)
                for param in params:
                    param.grad = mean.clone()
        expected = [nn.utils.clip_grad_norm_(each.parameters(), 0.05) for each in plain.copies][
            here()
        ]
        for each in plain.optimizers:
            each.step()
            each.zero_grad()
        optimizer.zero_grad()
        train(model, here(), step, lambda loss: loss.backward())
        found = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        torch.testing.assert_close(torch.as_tensor(found), expected)
        optimizer.step()
    assert_same_state(model, plain.mine)


@pytest.mark.parametrize("setting", [STAGE_3, STAGE_3_BARE], ids=str)
def test_reading_a_sharded_gradient_raises_an_error_with_advice(setting: Setting) -> None:
    model = seeded(Model)
    engine = engine_for(model, setting)
    train(engine, here(), 0, engine.backward)
    grad = model.blocks[0].up.weight.grad
    assert grad is not None and grad.shape == (2 * WIDTH, WIDTH)
    with pytest.raises(ZeroError, match="safe_get_full_grad"):
        grad.sum()
    engine.step()
    assert model.blocks[0].up.weight.grad is None
