"""DeepSpeed's API on two ranks: forms of the configuration, both calls of backward, and the log."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import deepseek_zero
from deepseek_zero import utils
from deepseek_zero.base.errors import NotBuiltError, UsageError
from deepseek_zero.base.quantities import format_count
from deepseek_zero.compat.deepspeed.dialect import end_engine_of
from deepseek_zero.compat.deepspeed.optimizer import FlatStates
from deepseek_zero.compat.deepspeed.parameters import VIEWS, ZeroParamStatus
from deepseek_zero.compat.deepspeed.utils import unwrap_model_for_generation
from deepseek_zero.utils import safe_get_full_fp32_param
from tests.plain import here

FP16 = {"fp16": {"enabled": True, "initial_scale_power": 6}}
SGD = {"type": "SGD", "params": {"lr": 0.1}}


def net() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(
        nn.Linear(6, 20),
        *[nn.Sequential(nn.Linear(20, 20), nn.Tanh()) for _ in range(2)],
        nn.Linear(20, 3),
    )


def config(stage: int, **top: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": None,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **top,
    }


def door(stage: int, **given: Any) -> Any:
    top = given.pop("top", {})
    return deepseek_zero.initialize(
        model=given.pop("model", None) or net(), config=config(stage, **top), **given
    )


def batch(step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + here()))


def train(engine: Any, micro_steps: int, *, plain: bool) -> dict[str, Tensor]:
    for step in range(micro_steps):
        loss = engine(batch(step)).float().square().mean()
        loss.backward() if plain else engine.backward(loss)
        engine.step()
    return engine.module_state_dict()


def assert_close(left: dict[str, Tensor], right: dict[str, Tensor], within: float = 0.0) -> None:
    for name, value in left.items():
        torch.testing.assert_close(
            value, right[name], rtol=0, atol=within, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("top", [{}, FP16], ids=["fp32", "fp16"])
def test_both_backwards_give_the_same_weights(
    stage: int, accumulation: int, top: dict[str, Any]
) -> None:
    top = {**top, "optimizer": SGD, "gradient_accumulation_steps": accumulation}
    ours, plain = door(stage, top=top)[0], door(stage, top=top)[0]
    start = ours.module_state_dict()
    left, right = train(ours, 4, plain=False), train(plain, 4, plain=True)
    # All factors are powers of two, so the order of scaling does not change the bits
    assert_close(left, right)
    assert ours.global_steps == plain.global_steps == 4 // accumulation
    assert ours.skipped_steps == 0
    assert any(not torch.equal(start[name], left[name]) for name in start)


@pytest.mark.ranks(2)
def test_scale_then_backward_is_engine_backward() -> None:
    top = {**FP16, "optimizer": SGD, "gradient_accumulation_steps": 2}
    ours, scaled = door(3, top=top)[0], door(3, top=top)[0]
    left = train(ours, 4, plain=False)
    for step in range(4):
        loss = scaled(batch(step)).float().square().mean()
        scaled.scale(loss).backward()
        scaled.step()
    assert_close(left, scaled.module_state_dict())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_every_way_to_name_an_optimizer_is_the_same_optimizer(stage: int) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        first, *rest = list(model.children())
        others = [param for child in rest for param in child.parameters()]
        return [{"params": list(first.parameters()), "lr": 0.05}, {"params": others}]

    model = net()
    given = door(stage, model=model, optimizer=torch.optim.SGD(groups(model), lr=0.1))[0]
    reference = train(given, 3, plain=False)
    model = net()
    named = door(stage, model=model, model_parameters=groups(model), top={"optimizer": SGD})[0]
    assert_close(reference, train(named, 3, plain=False))
    model = net()
    made = door(
        stage,
        model=model,
        model_parameters=groups(model),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    assert_close(reference, train(made[0], 3, plain=False))
    assert given.get_lr() == named.get_lr() == made[0].get_lr() == [0.05, 0.1]
    assert made[1] is made[0].optimizer and made[1].optimizer is made[1].inner


@pytest.mark.ranks(2)
def test_only_model_parameters_are_trained() -> None:
    model = net()
    engine = door(3, model=model, model_parameters=model[0].parameters(), top={"optimizer": SGD})[0]
    before = engine.module_state_dict()
    after = train(engine, 2, plain=False)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"0.weight", "0.bias"}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("is_held", [True, False])
def test_under_deepspeeds_name_a_second_engine_takes_over_pending_work(
    is_held: bool, stage: int
) -> None:
    model, top = net(), {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    first, optimizer, *_ = door(stage, model=model, top=top)
    for step in range(3):
        first.backward(first(batch(step)).square().mean())
        first.step()  # the delayed update of the last step waits for a forward that never runs
    runtime = first.runtime
    if not is_held:  # Lightning keeps only the optimizer; its hooks are still on the model
        del first
    end_engine_of(model)
    assert runtime.is_destroyed and optimizer.runtime is runtime
    second = door(stage, model=model)[0]
    assert_close(second.module_state_dict(), train(door(stage, top=top)[0], 3, plain=False))
    assert second(batch(0)).shape == (4, 3)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["callable", "instance", "config"])
def test_every_way_to_name_a_schedule_steps_it(kind: str) -> None:
    halve = {"step_size": 1, "gamma": 0.5}
    match kind:
        case "callable":
            made = door(
                3,
                top={"optimizer": SGD},
                lr_scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, **halve),
            )
        case "instance":
            model = net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, **halve)
            made = door(3, model=model, optimizer=optimizer, lr_scheduler=schedule)
        case _:
            made = door(3, top={"optimizer": SGD, "scheduler": {"type": "StepLR", "params": halve}})
    engine, optimizer, _, schedule = made
    assert schedule is engine.lr_scheduler
    train(engine, 3, plain=False)
    assert engine.get_lr() == pytest.approx([0.0125])
    engine.lr_scheduler = None  # Lightning steps the scheduler
    train(engine, 1, plain=False)
    assert engine.get_lr() == pytest.approx([0.0125])


@pytest.mark.ranks(2)
def test_torchs_schedule_counts_the_steps_of_a_rank_without_updates() -> None:
    model = nn.Linear(6, 3)  # less than one block, so all of it is on rank 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    engine = door(3, model=model, optimizer=optimizer)[0]
    train(engine, 1, plain=False)
    schedule.step()  # torch warns, which fails the test, if no optimizer step came before
    assert engine.get_lr() == pytest.approx([0.05])


@pytest.mark.ranks(2)
def test_training_data_becomes_a_loader_of_this_ranks_share() -> None:
    data = TensorDataset(torch.arange(20.0).reshape(20, 1))
    engine, _, loader, _ = door(1, training_data=data, top={"optimizer": SGD})
    mine = torch.cat([items for (items,) in loader]).flatten()
    assert len(mine) == 12 and len(loader) == 3, "three whole steps of eight samples"
    rows = engine.runtime.comm.all_gather_rows(mine, "test")
    assert set(rows.flatten().tolist()) == set(range(20))
    by_name = engine.deepspeed_io(data)
    assert [len(items) for (items,) in by_name] == [4, 4, 2], "as DeepSpeed's own ends"
    in_order = engine.deepspeed_io(data, batch_size=5, route="eval")
    first = next(iter(in_order))[0].flatten().tolist()
    assert first == [float(2 * number + here()) for number in range(5)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("top", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_changing_the_batch_size_is_starting_with_it(stage: int, top: dict[str, Any]) -> None:
    top = {**top, "optimizer": SGD}
    changed, started = (
        door(stage, top=top)[0],
        door(stage, top={**top, "gradient_accumulation_steps": 2})[0],
    )
    changed.set_train_batch_size(16)
    assert changed.get_batch_info() == started.get_batch_info() == (16, 4, 2)
    assert_close(train(changed, 4, plain=True), train(started, 4, plain=True))
    with pytest.raises(
        UsageError, match="divisible by micro-batch data parallelism: 12 is not a multiple of 8"
    ):
        changed.set_train_batch_size(12)
    changed.set_train_micro_batch_size(2)
    assert changed.get_batch_info() == (8, 2, 2)
    changed(batch(9)).sum().backward()
    changed.step()
    with pytest.raises(UsageError, match="between two micro-batches"):
        changed.set_train_batch_size(4)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("top", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_masters_gradients_and_moments_are_read_and_written_whole(
    stage: int, top: dict[str, Any]
) -> None:
    top = {
        **top,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 0.1, "betas": [0.5, 0.9], "weight_decay": 0.0},
        },
    }
    engine = door(stage, top=top)[0]
    param = engine.module[1][0].weight
    assert (
        utils.safe_get_full_grad(param) is None
        and utils.safe_get_full_optimizer_state(param, "exp_avg") is None
    )
    engine.backward(engine(batch(0)).float().square().mean())
    grad = utils.safe_get_full_grad(param)
    assert grad.shape == (20, 20) and grad.abs().sum() > 0
    utils.safe_set_full_grad(param, torch.full((20, 20), 2.0))
    assert torch.equal(utils.safe_get_full_grad(param), torch.full((20, 20), 2.0))
    engine.step()
    assert torch.equal(
        utils.safe_get_full_optimizer_state(param, "exp_avg"), torch.full((20, 20), 1.0)
    )
    new = torch.linspace(-1, 1, 400).reshape(20, 20)
    utils.safe_set_full_fp32_param(param, new)
    assert torch.equal(utils.safe_get_full_fp32_param(param), new)
    held = engine.module_state_dict()["1.0.weight"]
    assert torch.equal(held, new) or (
        top.keys() >= {"bf16"} and (held.float() - new).abs().max() < 2**-8
    )
    utils.safe_set_full_optimizer_state(param, new, "exp_avg")
    assert torch.equal(utils.safe_get_full_optimizer_state(param, "exp_avg"), new)
    with pytest.raises(UsageError, match=r"no element-wise state 'typo' for '1.0.weight'"):
        utils.safe_set_full_optimizer_state(param, new, "typo")


@pytest.mark.ranks(2)
def test_local_parts_add_up_to_the_whole() -> None:
    engine = door(3, top={"optimizer": {"type": "Adam", "params": {"lr": 0.1}}})[0]
    param = engine.module[1][0].weight
    engine.backward(engine(batch(0)).square().mean())
    counts = engine.runtime.comm.all_gather_rows(
        torch.tensor([utils.safe_get_local_grad(param).numel()]), "test"
    )
    assert int(counts.sum()) == 400
    engine.step()
    local = utils.safe_get_local_fp32_param(param)
    utils.safe_set_local_fp32_param(param, torch.full_like(local, 3.0))
    assert torch.equal(engine.module_state_dict()["1.0.weight"], torch.full((20, 20), 3.0))
    moment = utils.safe_get_local_optimizer_state(param, "exp_avg")
    if moment is not None:
        utils.safe_set_local_optimizer_state(param, torch.full_like(moment, 4.0), "exp_avg")
    assert torch.equal(
        utils.safe_get_full_optimizer_state(param, "exp_avg"), torch.full((20, 20), 4.0)
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_unknown_local_states_are_reported_on_ranks_without_elements(stage: int) -> None:
    engine = door(stage, top={"optimizer": {"type": "Adam", "params": {"lr": 0.1}}})[0]
    engine.backward(engine(batch(0)).square().mean())
    engine.step()
    for param in engine.module.parameters():
        held = utils.safe_get_local_optimizer_state(param, "exp_avg")
        for key in ("typo", "step"):  # "step" is not element-wise
            assert utils.safe_get_local_optimizer_state(param, key) is None
            with pytest.raises(UsageError, match=r"It has exp_avg, exp_avg_sq\."):
                utils.safe_set_local_optimizer_state(param, held, key)
        utils.safe_set_local_optimizer_state(param, held, "exp_avg")


@pytest.mark.ranks(2)
def test_the_gradient_norm_is_that_of_the_whole_model() -> None:
    norms = []
    for stage in (0, 1, 2, 3):
        engine = door(stage, top={"optimizer": SGD})[0]
        assert engine.get_global_grad_norm() is None
        engine.backward(engine(batch(0)).square().mean())
        grads = [utils.safe_get_full_grad(param) for param in engine.module.parameters()]
        whole = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
        engine.step()
        norms.append(engine.get_global_grad_norm())
        assert norms[-1] == pytest.approx(float(whole), rel=1e-5)
    assert len(set(norms)) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_whole_state_dict_is_taken_over_on_every_rank(stage: int) -> None:
    engine = door(stage, top={"optimizer": SGD, "bf16": {"enabled": True}})[0]
    wanted = {
        name: torch.full_like(value, 0.5) for name, value in engine.module_state_dict().items()
    }
    engine.load_module_state_dict({"module": wanted})
    assert_close(wanted, engine.module_state_dict())
    masters = [utils.safe_get_full_fp32_param(param) for param in engine.module.parameters()]
    assert all(torch.equal(master, torch.full_like(master, 0.5)) for master in masters)


@pytest.mark.ranks(2)
def test_destroying_twice_releases_the_model_and_empties_the_cache() -> None:
    engine = door(3, top={"optimizer": SGD})[0]
    train(engine, 1, plain=False)
    engine.empty_partition_cache()
    pool = engine.runtime.groups[0].comm_ctx.pool
    assert pool.allocated_bytes == 0
    train(engine, 1, plain=False)
    engine.destroy()
    engine.destroy()


@pytest.mark.ranks(2)
def test_an_engine_without_optimizer_runs_inference_and_raises_an_error_in_step() -> None:
    engine, optimizer, loader, schedule = door(3)
    assert (optimizer, loader, schedule) == (None, None, None)
    with torch.no_grad():
        assert engine(batch(0)).shape == (4, 3)
    assert engine.get_lr() == [] and engine.param_groups == []
    with pytest.raises(UsageError, match="the engine has no optimizer"):
        engine.step()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(20, 20)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.line(x).tanh()


def tower() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(
        nn.Linear(6, 20), nn.Sequential(*[Block() for _ in range(3)]), nn.Linear(20, 3)
    )


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.filterwarnings("ignore")  # torch.compile emits its own warnings
@pytest.mark.parametrize("stage", [2, 3])
def test_compiled_units_share_one_graph_and_train_the_same_bits(stage: int) -> None:
    from torch._dynamo.utils import counters

    top = {"optimizer": SGD}
    plain, compiled = (door(stage, model=tower(), top=top)[0] for _ in range(2))
    counters.clear()
    torch.compiler.reset()
    compiled.compile(backend="aot_eager")
    assert compiled.is_compiled and not plain.is_compiled
    assert_close(train(plain, 3, plain=False), train(compiled, 3, plain=False))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    compiled.destroy()
    assert "forward" not in compiled.module[1][0].__dict__
    with pytest.raises(NotBuiltError, match="DeepCompile"):
        plain.compile(schedule=[])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_the_flops_of_one_forward_are_counted_and_change_nothing(
    stage: int, tmp_path: Path
) -> None:
    file = tmp_path / f"flops_of_{stage}.txt"
    counted = {
        "flops_profiler": {"enabled": True, "output_file": str(file), "module_depth": 1},
        "optimizer": SGD,
    }
    plain, profiled = door(stage, top={"optimizer": SGD})[0], door(stage, top=counted)[0]
    assert_close(train(plain, 3, plain=False), train(profiled, 3, plain=False))
    assert profiled.flops_profiler_enabled() and not plain.flops_profiler_enabled()
    if profiled.global_rank == 0:
        lines = file.read_text().splitlines()
        assert f"forward {format_count(2 * 4 * (6 * 20 + 2 * 20 * 20 + 20 * 3))}FLOPS" in lines[1]
        assert [line.split(":")[0].strip() for line in lines[2:]] == ["(model)", "0", "1", "2", "3"]


@pytest.mark.ranks(2)
def test_parameters_at_stage_3_have_the_attributes_that_clients_read() -> None:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    plain = torch.nn.Linear(64, 40)
    engine, *_ = deepseek_zero.initialize(
        model=plain, config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    )
    weight, bias = engine.module.parameters()
    assert (weight.ds_id, bias.ds_id) == (0, 1)
    assert (weight.ds_shape, weight.ds_numel) == (
        weight.shape,
        2560,
    ) and bias.ds_numel == bias.numel() == 40
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE and not weight.ds_persist
    # Cut at blocks of 1024: rank 0 has two blocks of the weight, rank 1 the rest and the bias
    assert (weight.partition_numel(), bias.partition_numel()) == ((2048, 0), (512, 40))[
        engine.global_rank
    ]
    mine, whole = weight.ds_tensor.clone(), safe_get_full_fp32_param(weight)
    assert torch.equal(
        mine, whole.flatten()[:2048] if engine.global_rank == 0 else whole.flatten()[2048:]
    )
    with deepseek_zero.zero.GatheredParameters(weight):
        assert weight.ds_status is ZeroParamStatus.AVAILABLE
        assert weight.ds_summary()["partition_numel"] == mine.numel()
        weight.ds_active_sub_modules.clear()
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    assert not any(hasattr(torch.nn.Parameter(torch.ones(1)), name) for name in VIEWS)
    with unwrap_model_for_generation(engine) as whole_model:
        assert torch.equal(whole_model(torch.zeros(1, 64))[0], bias)
    # Clients such as the Trainer read the engine's configuration when they save
    assert engine.config.get("zero_optimization", {}).get("stage", None) == 3
    assert engine.config.get("no_such_section", {}) == {}


@pytest.mark.ranks(2)
def test_parameters_under_zero_init_have_the_same_attributes() -> None:
    with deepseek_zero.zero.Init():
        model = torch.nn.Sequential(torch.nn.Linear(3, 5))
    weight, bias = model.parameters()
    assert (
        weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
        and weight.ds_numel == 15
        and bias.ds_shape == (5,)
    )
    assert weight.ds_tensor.numel() == weight.partition_numel() == 8 and weight.ds_id < bias.ds_id


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_of_the_inner_optimizer_are_flat_and_of_one_length_where_a_rank_has_none(
    stage: int,
) -> None:
    def trained(model: nn.Module, steps: int, flat: Any = None) -> Any:
        engine, *_ = door(
            stage, model=model, top={"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
        )
        if flat is not None:
            FlatStates(engine.optimizer).load_state_dict(flat)
        for step in range(steps):
            engine.backward(engine(x + step).square().mean())
            engine.step()
        return engine

    torch.manual_seed(5)
    model, x = nn.Linear(4, 4), torch.randn(4, 4)  # 20 elements: less than one rank's shard
    engine, plain = trained(copy.deepcopy(model), 2), copy.deepcopy(model)
    assert len(engine.optimizer.shards()) == 1 - dist.get_rank(), "or this test shows nothing"
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        plain(x + step).square().mean().backward()
        optimizer.step()
    flat = FlatStates(engine.optimizer).state_dict()
    assert (list(flat["state"]), [group["params"] for group in flat["param_groups"]]) == (
        [0],
        [[0]],
    )
    assert float(flat["state"][0]["step"]) == 2
    for kind in ("exp_avg", "exp_avg_sq"):
        parts = engine.runtime.comm.all_gather_rows(flat["state"][0][kind], kind).reshape(-1)
        expected = torch.cat(
            [optimizer.state[param][kind].reshape(-1) for param in plain.parameters()]
        )
        torch.testing.assert_close(parts[: expected.numel()], expected)
        assert not parts[expected.numel() :].any()
    weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
    again = copy.deepcopy(model)
    again.load_state_dict(weights)
    x = x + 2
    found = [
        each.module.state_dict()["weight"].clone() for each in (trained(again, 1, flat), engine)
    ]
    assert not torch.equal(*found)
    engine.backward(engine(x).square().mean())
    engine.step()
    assert torch.equal(found[0], engine.module.state_dict()["weight"])


@pytest.mark.ranks(2)
def test_states_smaller_than_their_parameters_have_torchs_shapes() -> None:
    model = nn.Linear(8, 8)
    engine, *_ = door(
        1, model=model, optimizer=lambda params: torch.optim.Adafactor(params, lr=0.1)
    )
    engine.backward(engine(torch.randn(4, 8)).square().mean())
    engine.step()
    inner = FlatStates(engine.optimizer)
    state = inner.state_dict()
    assert [len(group["params"]) for group in state["param_groups"]] == [
        len(engine.optimizer.shards())
    ]
    inner.load_state_dict(state)
    engine.backward(engine(torch.randn(4, 8)).square().mean())
    engine.step()
