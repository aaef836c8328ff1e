"""Names of DeepSpeed's that programs use beyond the engine: its CPU Adam, Muon's functions, folders
of checkpoints.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import deepseek_zero as dz
from deepseek_zero.base.errors import CheckpointError, UsageError
from deepseek_zero.checkpoint.staging import in_turn
from deepseek_zero.compat.deepspeed import activation_checkpointing, defaults
from deepseek_zero.compat.deepspeed.checkpoint import folder, universal
from deepseek_zero.compat.deepspeed.muon import mark_parameters, muon_update
from deepseek_zero.compat.deepspeed.ops import DeepSpeedCPUAdam, FusedAdam
from deepseek_zero.compat.deepspeed.optimizer import FP16_UnfusedOptimizer, scale_at_stage_0
from deepseek_zero.compat.deepspeed.pipe import PipelineModule
from deepseek_zero.compat.deepspeed.profiling import FlopsProfiler
from deepseek_zero.config import RawConfig
from deepseek_zero.config.load import load
from deepseek_zero.optimizers.muon import Muon
from deepseek_zero.precision.loss_scale import LossScaler, LossScaleSettings

# -- DeepSpeedCPUAdam


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_adam_steps_as_torch_and_pieces_step_back(decoupled: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    start = torch.randn(100).to(dtype)
    whole, piece = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    reference = nn.Parameter(start.float())
    by_torch = (torch.optim.AdamW if decoupled else torch.optim.Adam)(
        [reference], lr=0.01, weight_decay=0.1
    )
    ours: Any = DeepSpeedCPUAdam([whole], 0.01, weight_decay=0.1, adamw_mode=decoupled)
    pieces: Any = DeepSpeedCPUAdam([piece], lr=0.01, weight_decay=0.1, adamw_mode=decoupled)
    before = []
    for _ in range(3):
        grad = torch.randn(100).to(dtype)
        before.append((piece.detach().clone(), grad))
        whole.grad, piece.grad, reference.grad = grad.clone(), grad.clone(), grad.float()
        for step in (ours.step, by_torch.step, lambda: pieces.step_subgroup(3)):
            step()
    near = {"atol": 1e-6 if dtype is torch.float32 else 0.03, "rtol": 0.0}
    torch.testing.assert_close(whole.detach().float(), reference.detach(), **near)
    torch.testing.assert_close(piece.detach().float(), whole.detach().float(), **near)
    assert ours.state[whole]["exp_avg"].dtype is torch.float32 and pieces.state[3]["step"] == 3
    for weight, grad in reversed(before):
        piece.grad = grad
        pieces.rollback_subgroup(3)
        torch.testing.assert_close(
            piece.detach().float(), weight.float(), atol=1e-5 + near["atol"], rtol=0
        )
    with pytest.raises(RuntimeError, match="step count is 0"):
        pieces.rollback_subgroup(3)
    with pytest.raises(RuntimeError, match="has not been initialized"):
        pieces.rollback_subgroup(4)


def test_cpu_adam_keeps_moments_as_asked_and_can_leave_them_uncorrected() -> None:
    param = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer: Any = DeepSpeedCPUAdam([param], fp32_optimizer_states=False)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.state[param]["exp_avg"].dtype is torch.bfloat16
    plain = nn.Parameter(torch.zeros(2))
    uncorrected: Any = DeepSpeedCPUAdam([plain], 1.0, False, (0.5, 0.75), 0.0)
    plain.grad = torch.ones(2)
    uncorrected.step()
    torch.testing.assert_close(plain.detach(), torch.full((2,), -1.0))  # 0.5 / sqrt(0.25)
    with pytest.raises(RuntimeError, match="AMSGrad"):
        DeepSpeedCPUAdam([plain], amsgrad=True)
    assert FusedAdam([plain], 0.5, True, (0.8, 0.9)).defaults["betas"] == (0.8, 0.9)


# -- the engine's optimizer


def make(config: dict[str, Any], model: nn.Module | None = None, **more: Any) -> Any:
    model = model if model is not None else nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    return dz.initialize(model=model, config={"train_batch_size": 1, **config}, **more)[0]


def test_the_optimizer_of_stage_0_is_of_the_given_class_and_equal_to_it() -> None:
    model = nn.Linear(4, 1)
    given = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine = make({}, model, optimizer=given)
    assert (
        isinstance(engine.optimizer, torch.optim.AdamW)
        and engine.optimizer == given == engine.optimizer
    )
    assert (
        engine.optimizer != torch.optim.AdamW(model.parameters()) and len({engine.optimizer}) == 1
    )
    engine(torch.ones(1, 4)).sum().backward()
    engine.step()
    half = make({"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}})
    assert (
        isinstance(half.optimizer, FP16_UnfusedOptimizer)
        and half.optimizer.low_precision_dtype is torch.bfloat16
    )
    sharded = make({"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW"}})
    assert not isinstance(sharded.optimizer, torch.optim.AdamW)


def test_the_loss_scale_of_stage_0_falls_at_each_overflow_and_stays_at_its_minimum() -> None:
    scaler = LossScaler(scale_at_stage_0(LossScaleSettings(initial_scale_power=2)))
    seen = []
    for _ in range(4):
        scaler.update(overflow=True)
        seen.append(scaler.scale)
    assert seen == [2.0, 1.0, 1.0, 1.0] and scaler.cur_iter == 4


@pytest.mark.parametrize(
    ("asked", "fits"), [("fp32", True), ("bf16", False), (None, True), ("auto", True)]
)
def test_other_sums_at_stage_0_are_refused_behind_the_name(asked: Any, fits: bool) -> None:
    raw: RawConfig = load({"data_types": {"grad_accum_dtype": asked}}, unknown="warn")
    staged = load(
        {"data_types": {"grad_accum_dtype": asked}, "zero_optimization": {"stage": 1}},
        unknown="warn",
    )
    defaults.refuse_other_sums(staged)
    if fits:
        defaults.refuse_other_sums(raw)
    else:
        with pytest.raises(NotImplementedError, match="unsupported mix"):
            defaults.refuse_other_sums(raw)


def test_the_profiled_forward_is_the_engines_flops_profiler() -> None:
    asked = {"flops_profiler": {"enabled": True, "profile_step": 0}, "optimizer": {"type": "Adam"}}
    engine = make(asked, nn.Linear(10, 10))
    assert engine.flops_profiler.flops == 0
    engine(torch.ones(1, 10))
    assert isinstance(engine.flops_profiler, FlopsProfiler)
    assert (engine.flops_profiler.flops, engine.flops_profiler.params) == (200, 110)
    assert make({}).flops_profiler is None


def test_a_profile_says_whose_ranks_it_is_of(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = {"world_size": 8, "dp_world_size": None, "seq_dp_world_size": 4, "mp_world_size": 1}
    engine = SimpleNamespace(**ranks, train_micro_batch_size_per_gpu=lambda: 2)
    model = nn.Linear(4, 4)
    profiler = FlopsProfiler(model, engine)
    profiler.start_profile()
    model(torch.ones(1, 4))
    profiler.print_model_profile(detailed=False)
    profiler.end_profile()
    assert capsys.readouterr().out.splitlines()[1].split() == ["data", "parallel", "size:", "4"]


def test_a_checkpoint_saved_nowhere_is_a_value_error(tmp_path: Path) -> None:
    engine = make({})
    for nowhere in (None, ""):
        with pytest.raises(ValueError, match="names no folder"):
            engine.save_checkpoint(nowhere)
    script = tmp_path / "script.py"
    script.touch(0o600)
    engine._change_recovery_script_permissions(script)
    assert script.stat().st_mode & 0o777 == 0o700
    engine._change_recovery_script_permissions(tmp_path / "missing")  # a line in the log


# -- Muon


@pytest.mark.parametrize("shape", [(4, 8), (8, 4), (6, 2, 3, 3), (3, 4, 4)])
def test_muon_update_is_the_step_of_the_optimizer(shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    weight, grad = nn.Parameter(torch.zeros(shape)), torch.randn(shape)
    weight.grad = grad.clone()
    Muon([weight], lr=1.0).step()
    direction = muon_update(grad.clone(), torch.zeros(shape))
    torch.testing.assert_close(-weight.detach(), direction.reshape(shape))


def test_muon_update_by_heads_and_with_gradients_that_are_not_finite() -> None:
    torch.manual_seed(1)
    grad = torch.randn(8, 4)
    by_head = torch.cat([muon_update(part.clone(), torch.zeros(4, 4)) for part in grad.split(4)])
    torch.testing.assert_close(muon_update(grad.clone(), torch.zeros(8, 4), num_heads=2), by_head)
    kept, broken = torch.ones(8, 4), torch.full((8, 4), float("inf"))
    assert muon_update(broken, kept).isinf().all() and (kept == 1).all()
    with pytest.raises(ValueError, match="3 heads"):
        muon_update(grad, torch.zeros(8, 4), num_heads=3)


def test_marks_say_what_muon_takes() -> None:
    model = nn.ModuleDict(
        {"embed": nn.Embedding(8, 4), "inner": nn.Linear(4, 4), "head": nn.Linear(4, 8)}
    )
    assert [len(group["params"]) for group in Muon.parameter_groups(model)] == [1, 4]
    mark_parameters(model)  # DeepSpeed leaves out embeddings and lm_head alone
    matrices, rest = Muon.parameter_groups(model)
    assert [id(each) for each in matrices["params"]] == [
        id(model["inner"].weight),
        id(model["head"].weight),
    ]
    assert len(rest["params"]) == 3


# -- recomputation


def test_layers_are_recomputed_as_a_configuration_says() -> None:
    model = PipelineModule([nn.ReLU(), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=1)
    assert model.is_checkpointable_results == []
    model.set_checkpoint_interval(2)
    assert model.is_checkpointable_results == [False, True]
    model.take_configured({"activation_checkpoint_interval": 1, "use_reentrant": False})
    assert model.activation_checkpoint_func is activation_checkpointing.non_reentrant_checkpoint
    assert model.is_checkpointable_results == [False, False, True, True]
    x = torch.ones(2, 4, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    with pytest.raises(UsageError, match="interval"):
        model.set_checkpoint_interval(-1)


def test_configure_takes_an_engines_configuration() -> None:
    asked = {"activation_checkpointing": {"number_checkpoints": 3}, "optimizer": {"type": "Adam"}}
    engine = make(asked)
    try:
        activation_checkpointing.configure(None, deepspeed_config=engine.config)
        assert activation_checkpointing.num_layers == 3
    finally:
        engine.destroy()


def test_variables_say_how_checkpoints_are_configured() -> None:
    assert activation_checkpointing.CPU_CHECKPOINT is False
    assert (
        activation_checkpointing.deepspeed_checkpointing_enabled
        is activation_checkpointing.is_configured()
    )


# -- checkpoints


def train(path: Path) -> Any:
    engine = make(
        {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    )
    engine(torch.ones(1, 4)).sum().backward()
    engine.step()
    engine.save_checkpoint(path, tag="one")
    return engine


def test_a_universal_checkpoint_loads_under_its_name(tmp_path: Path) -> None:
    engine = train(tmp_path)
    given = SimpleNamespace(
        input_folder=str(tmp_path / "one"), output_folder=str(tmp_path / "one_universal")
    )
    universal.main(given)
    with pytest.raises(CheckpointError, match="exists already"):
        universal.main(given)
    (tmp_path / "latest").unlink()
    other = make(
        {
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "AdamW"},
            "checkpoint": {"load_universal": True},
        }
    )
    path, _ = other.load_checkpoint(tmp_path)
    assert path is not None and path.endswith("one_universal")
    for mine, theirs in zip(engine.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    with pytest.raises(CheckpointError):
        universal.main(
            SimpleNamespace(input_folder=str(tmp_path), output_folder=str(tmp_path / "none"))
        )


def written(path: Path, shapes: list[dict[str, int] | None]) -> str:
    for number, shape in enumerate(shapes):
        state = {"iteration": 7} | ({folder.DIMENSIONS: shape} if shape is not None else {})
        torch.save(state, path / f"mp_rank_{number:02d}_model_states.pt")
        for rank in range(2):
            torch.save({}, path / f"bf16_zero_pp_rank_{rank}_mp_rank_{number:02d}_optim_states.pt")
    return str(path)


def test_a_folder_says_by_what_shape_it_was_written(tmp_path: Path) -> None:
    stages = {"pp_degree": 2, "tp_degree": 1}
    found = folder.DeepSpeedCheckpoint(written(tmp_path, [stages, stages]), dp_degree=1)
    assert (found.pp_degree, found.tp_degree, found.dp_degree, found.original_world_size) == (
        2,
        1,
        1,
        4,
    )
    assert (
        found.get_iteration() == 7
        and found.is_change_dp_degree()
        and not found.is_change_tp_degree()
    )
    assert [Path(each).name for each in found.get_zero_files(1, 0, 0)] == [
        f"bf16_zero_pp_rank_{rank}_mp_rank_01_optim_states.pt" for rank in (0, 1)
    ]
    assert [Path(each).name for each in found.get_2d_parallel_files(0, 1)] == [
        "mp_rank_01_model_states.pt"
    ]


@pytest.mark.parametrize(
    ("shapes", "error"),
    [
        ([None, None], ""),
        ([{"pp_degree": 2, "tp_degree": 1}, None], "missing from model-state files"),
        ([{"pp_degree": 2, "tp_degree": 1}, {"pp_degree": 1, "tp_degree": 2}], "disagrees across"),
        ([{"pp_degree": 3, "tp_degree": 1}] * 2, "not 3 stages"),
    ],
)
def test_a_folder_that_disagrees_with_itself_is_refused(
    tmp_path: Path, shapes: Any, error: str
) -> None:
    path = written(tmp_path, shapes)
    if error:
        with pytest.raises(RuntimeError, match=error):
            folder.get_model_3d_descriptor(path)
    else:
        assert folder.ZeROCheckpoint(path).get_src_tp_degree() == 2
        assert folder.get_model_3d_descriptor(path).dp_degree == 2


def test_makers_of_one_output_take_turns(tmp_path: Path) -> None:
    inside, most = [], []

    def work() -> None:
        with in_turn(tmp_path / "out"):
            inside.append(1)
            most.append(len(inside))
            threading.Event().wait(0.01)
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1, 1]
