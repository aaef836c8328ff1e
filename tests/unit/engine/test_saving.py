"""Checkpoints of programs with unusual schedules and settings."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepseek_zero
from deepseek_zero.base.errors import CheckpointError, UsageError
from deepseek_zero.checkpoint.background_write import BackgroundWrite
from deepseek_zero.checkpoint.convert import state_dict_of
from deepseek_zero.compat.deepspeed.checkpoint import layout as deepspeed_layout
from deepseek_zero.engine import saving
from deepseek_zero.engine.data import ShardedLoader
from deepseek_zero.extensions import AdaptivePrecision
from deepseek_zero.utils import safe_get_full_optimizer_state


class OnlySteps:
    """A learning-rate schedule without states."""

    def step(self) -> None:
        pass


def build(make_schedule: Any = None, **top: Any) -> Any:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = None if make_schedule is None else make_schedule(optimizer)
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 1}, **top}
    return deepseek_zero.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=config
    )[0]


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(saving, "log_once", lambda text, *_: said.append(text))
    return said


def test_a_schedule_without_states_starts_from_its_beginning(
    tmp_path: Path, warnings: list[str]
) -> None:
    saved = build(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1))
    saved.save_checkpoint(tmp_path)
    engine = build(lambda _: OnlySteps())
    assert engine.load_checkpoint(tmp_path)[0] is not None
    assert "OnlySteps has no load_state_dict" in warnings[0]


def test_settings_without_effect_on_deepspeeds_layout_are_named(
    tmp_path: Path, warnings: list[str]
) -> None:
    engine = build(checkpoint={"layout": "deepspeed", "keep_last": 1})
    engine.save_checkpoint(tmp_path, wait=False)
    assert warnings == [
        "wait=False and checkpoint.keep_last: no effect, because checkpoint.layout is "
        "DeepSpeed's layout."
    ]


def test_frozen_parameters_may_be_left_out_of_deepspeeds_files_of_stage_0(tmp_path: Path) -> None:
    def frozen() -> Any:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[0].requires_grad_(False)
        config = {
            "train_batch_size": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
            "checkpoint": {"layout": "deepspeed"},
        }
        return deepseek_zero.initialize(model=model, config=config)[0]

    engine = frozen()
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    other = frozen()
    other.load_checkpoint(tmp_path, load_module_strict=False)
    for mine, saved in zip(
        other.module[1].parameters(), engine.module[1].parameters(), strict=True
    ):
        assert torch.equal(mine, saved)
        assert torch.equal(
            safe_get_full_optimizer_state(mine, "exp_avg"),
            safe_get_full_optimizer_state(saved, "exp_avg"),
        )


def test_deepspeeds_layout_refuses_units_that_precision_auto_computes_in_fp32(
    tmp_path: Path,
) -> None:
    engine = build(precision="auto", bf16={"enabled": True}, checkpoint={"layout": "deepspeed"})
    adaptive = engine.optimizer.policy(AdaptivePrecision)
    adaptive.restore([engine.runtime.units[0].name])
    with pytest.raises(CheckpointError, match=r"computes in fp32 \(auto\)"):
        engine.save_checkpoint(tmp_path)


@pytest.mark.parametrize("call", ["save_checkpoint", "offload_states", "compile", "step"])
def test_a_destroyed_engine_refuses_what_needs_its_hooks(tmp_path: Path, call: str) -> None:
    engine = build()
    engine.destroy()
    arguments = [tmp_path / "new"] if call == "save_checkpoint" else []
    with pytest.raises(UsageError, match=rf"engine\.{call}\(\) was called after destroy"):
        getattr(engine, call)(*arguments)
    assert not engine.is_compiled and not (tmp_path / "new").exists()


def test_a_destroyed_engine_refuses_whole_steps() -> None:
    engine = build()
    step = engine.optimizer.step
    engine.destroy()
    with pytest.raises(UsageError, match=r"engine\.train_batch\(\) was called after destroy"):
        engine.train_batch(iter([torch.ones(1, 2)]))
    with pytest.raises(UsageError, match=r"engine\.optimizer\.step\(\) was called after destroy"):
        step()


def test_a_custom_load_fn_that_is_no_function_is_refused(tmp_path: Path) -> None:
    engine = build()
    engine.save_checkpoint(tmp_path)
    with pytest.raises(UsageError, match="load_checkpoint\\(custom_load_fn=5\\)"):
        engine.load_checkpoint(tmp_path, custom_load_fn=5)
    with pytest.raises(UsageError, match="load_module_state_dict\\(custom_load_fn=5\\)"):
        engine.load_module_state_dict(engine.module_state_dict(), custom_load_fn=5)


@pytest.mark.parametrize(
    ("layout", "interrupted"),
    [
        ("slices", (BackgroundWrite, "write")),
        ("slices", (secrets, "token_hex")),  # after the hidden folder is locked
        ("deepspeed", (BackgroundWrite, "write")),
        ("deepspeed", (deepspeed_layout, "_rewrite")),
    ],
)
def test_a_save_can_be_repeated_after_ctrl_c(
    layout: str, interrupted: tuple[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    engine = build(checkpoint={"layout": layout})
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(*interrupted, interrupt)
        engine.save_checkpoint(tmp_path, tag="last")
    engine.save_checkpoint(tmp_path, tag="last")
    assert not list(tmp_path.glob(".*saving"))
    assert engine.load_checkpoint(tmp_path, tag="last")[0] is not None


def test_weights_are_exported_into_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    build().export(".")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_sparse_tensor_in_a_client_state_is_named(tmp_path: Path) -> None:
    sparse = torch.ones(2).to_sparse()
    with pytest.raises(CheckpointError, match=r"client_state\.mask is a sparse tensor"):
        build().save_checkpoint(tmp_path, client_state={"mask": sparse})


def test_a_kind_of_states_that_is_no_name_is_refused() -> None:
    with pytest.raises(UsageError, match=r"offload_states\(include=5\)"):
        build().offload_states(include=5)


def test_the_state_dict_of_a_checkpoint_is_read_from_a_path_in_a_string(tmp_path: Path) -> None:
    engine = build()
    engine.save_checkpoint(tmp_path)
    assert set(state_dict_of(str(tmp_path))) == {"weight", "bias"}
    with pytest.raises(UsageError, match="state_dict_of"):
        state_dict_of(None)  # type: ignore[arg-type]


def test_the_state_of_the_loader_is_checked_before_a_load_changes_weights(tmp_path: Path) -> None:
    class Other:
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.place = state["place"]

    engine = build()
    engine.training_dataloader = ShardedLoader([torch.ones(4)], 1, engine.mesh)
    engine.save_checkpoint(tmp_path)
    engine.training_dataloader = Other()
    with torch.no_grad():
        param = next(iter(engine.module.parameters())).zero_()
    with pytest.raises(CheckpointError, match="is of the class Other"):
        engine.load_checkpoint(tmp_path)
    assert not param.any()
    engine.load_checkpoint(tmp_path, load_module_only=True)
    assert param.any()
