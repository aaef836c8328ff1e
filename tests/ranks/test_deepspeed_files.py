"""Checkpoints written by DeepSpeed (tests/data/deepspeed), read bit for bit.

They load at any world size and stage.
"""

from __future__ import annotations

import os
import pickle
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import deepseek_zero
from deepseek_zero.base.errors import CheckpointError
from deepseek_zero.compat.deepspeed import dialect
from deepseek_zero.compat.deepspeed.checkpoint.reader import open_file
from tests.crash import names_in
from tests.data.deepspeed.make import CASES, config, small, train
from tests.plain import here
from tests.tower import differences, moments, whole

DATA = Path(__file__).parents[1] / "data" / "deepspeed"


def start(stage: int, dtype: str, seed: int = 6, **top: Any) -> Any:
    words = config(stage, dtype) | {"steps_per_print": None} | top
    words["optimizer"]["params"].pop("torch_adam", None)
    return deepseek_zero.initialize(model=small(seed), config=words)[0]


def expected(case: str) -> dict[str, Tensor]:
    return torch.load(DATA / case / "expected.pt", weights_only=True)


def assert_loaded(engine: Any, case: str) -> None:
    """Compare main weights, moments and frozen weights with DeepSpeed's. Collective."""
    told = expected(case)
    del told["losses"]
    found = whole(engine) | moments(engine)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[
        CASES[case]["dtype"]
    ]
    if CASES[case]["stage"] == 0:  # expected: the main weights, cast to the weights' dtype
        found = {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in found.items()
        }
    assert not differences({name: found[name] for name in told}, told)
    assert torch.equal(found["frozen.weight"].to(dtype), small().frozen.weight.detach().to(dtype))
    assert found["norm.running"].abs().sum() > 0


@pytest.mark.parametrize(
    ("world", "case"), [(1, "stage0"), (1, "stage3_bf16"), *((3, case) for case in CASES)]
)
@pytest.mark.ranks("world")
def test_a_genuine_checkpoint_is_read_bit_for_bit_at_any_world_size(world: int, case: str) -> None:
    engine = start(CASES[case]["stage"], CASES[case]["dtype"])
    path, client = engine.load_checkpoint(DATA / case)
    assert path == str(DATA / case / "global_step2") and client == {
        "epoch": 7,
        "note": ["plain", 1.5],
    }
    assert_loaded(engine, case)
    assert (engine.global_steps, engine.global_samples, engine.skipped_steps) == (2, 16, 0)
    assert engine.loaded_checkpoint_dp_world_size == 2
    assert engine.loaded_checkpoint_mp_world_size == 1
    if CASES[case]["dtype"] == "fp16":
        told = {
            "dynamic": True,
            "scale": 16.0,
            "cur_iter": 2,
            "last_overflow_iter": -1,
            "cur_hysteresis": 2,
        }
        assert engine.parts.scaler.state_dict() == told


@pytest.mark.parametrize(
    ("case", "stage", "dtype"), [("stage3_bf16", 0, "bf16"), ("stage1", 3, "fp32")]
)
@pytest.mark.ranks(2)
def test_another_stage_loads_the_same_values(case: str, stage: int, dtype: str) -> None:
    engine = start(stage, dtype)
    engine.load_checkpoint(DATA / case)
    assert_loaded(engine, case)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.ranks(2)
def test_training_continues_like_deepspeed(case: str) -> None:
    engine = start(CASES[case]["stage"], CASES[case]["dtype"])
    engine.load_checkpoint(DATA / case)
    assert_loaded(engine, case)
    losses = torch.tensor(train(engine, 2, 4, here()))
    close = 1e-6 if CASES[case]["dtype"] == "fp32" else 2e-2
    if here() == 0:
        torch.testing.assert_close(losses, expected(case)["losses"], rtol=close, atol=close)


@pytest.mark.ranks(2)
def test_only_weights_may_be_taken() -> None:
    engine = start(3, "fp32", optimizer={"type": "SGD", "params": {"lr": 0.1}}, scheduler={})
    with pytest.raises(
        CheckpointError, match=r"has the states exp_avg, exp_avg_sq; SGD has momentum_buffer"
    ):
        engine.load_checkpoint(DATA / "stage3")
    engine.load_checkpoint(DATA / "stage3", load_module_only=True)
    told = expected("stage3")
    found = whole(engine)
    assert not differences(
        {n: found[n] for n in told if n in found}, {n: v for n, v in told.items() if n in found}
    )
    assert engine.global_steps == 0


@pytest.mark.ranks(2)
def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    engine = start(2, "fp32")
    before = whole(engine)
    if here() == 0:
        shutil.copytree(DATA / "stage2" / "global_step2", tmp_path / "global_step2")
        (tmp_path / "global_step2" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"lacks the optimizer files of ranks \[1\] of 2"):
        engine.load_checkpoint(tmp_path, tag="global_step2")
    assert not differences(whole(engine), before)


SAVED = [(0, "fp32"), (0, "fp16"), (1, "bf16"), (2, "fp16"), (3, "fp32"), (3, "bf16"), (3, "fp16")]


@pytest.mark.parametrize(
    ("world", "stage", "dtype"),
    [*((2, *each) for each in SAVED), (1, 3, "fp32"), (3, 1, "bf16"), (3, 3, "bf16")],
)
@pytest.mark.ranks("world")
def test_checkpoints_in_deepspeeds_layout_are_loaded(
    tmp_path: Path, world: int, dtype: str, stage: int
) -> None:
    layout = {"checkpoint": {"layout": "deepspeed"}}
    engine = start(stage, dtype, **layout)
    train(engine, 0, 2, here())
    engine.save_checkpoint(tmp_path, tag="first", client_state={"epoch": 3})
    # Replaces the first checkpoint
    engine.save_checkpoint(tmp_path, tag="first", client_state={"epoch": 4})
    folder, prefix = tmp_path / "first", "bf16_" if dtype == "bf16" else ""
    names = {
        f"{prefix}zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in range(world if stage else 0)
    }
    models = {f"zero_pp_rank_{r}_mp_rank_00_model_states.pt" for r in range(world)}
    assert {path.name for path in folder.iterdir()} == names | (
        models if stage == 3 else {"mp_rank_00_model_states.pt"}
    )
    assert names_in(tmp_path) == ["first", "latest", "zero_to_fp32.py"]
    other = start(stage, dtype, seed=2, **layout)
    assert other.load_checkpoint(tmp_path) == (str(folder), {"epoch": 4})
    different = differences(whole(other), whole(engine))
    assert not differences(moments(other), moments(engine))
    # Below stage 3, rank 0 writes for all ranks, and all ranks load its running statistics.
    assert different == ([] if stage == 3 or here() == 0 else ["norm.running"])
    assert other.get_lr() == engine.get_lr() and other.global_steps == 2
    if dtype == "fp16":
        assert other.parts.scaler.state_dict() == engine.parts.scaler.state_dict()
    if dtype == "fp16" and stage:
        told = open_file(folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")[
            "optimizer_state_dict"
        ]["loss_scaler"]
        assert (told.scale_window, told.delayed_shift) == (
            1000,
            2,
        ) and told.cur_scale == engine.parts.scaler.scale
    if world == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["zero_to_fp32.py", str(tmp_path), str(tmp_path / "out")])
            runpy.run_path(str(tmp_path / "zero_to_fp32.py"), run_name="__main__")
        assert not differences(
            torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True), whole(engine)
        )
    assert train(other, 2, 3, here()) == train(engine, 2, 3, here())


@pytest.mark.ranks(2)
def test_groups_and_frozen_parameters_left_out_keep_their_places(tmp_path: Path) -> None:
    def build() -> Any:
        model = small(4)
        names = dict(model.named_parameters())
        biases = [
            param for name, param in names.items() if name.endswith("bias") and param.requires_grad
        ]
        rest = [
            param
            for name, param in names.items()
            if not name.endswith("bias") and param.requires_grad
        ]
        groups = [{"params": biases, "weight_decay": 0.0}, {"params": rest, "lr": 3e-3}]
        words = config(3, "bf16") | {
            "steps_per_print": None,
            "checkpoint": {"layout": "deepspeed"},
            "scheduler": {},
        }
        words.pop("optimizer")
        return deepseek_zero.initialize(
            model=model, optimizer=torch.optim.AdamW(groups), config=words
        )[0]

    engine = build()
    train(engine, 0, 2, here())
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    other = build()
    with pytest.raises(CheckpointError, match=r"lacks frozen.weight, frozen.bias"):
        other.load_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path, load_module_strict=False)
    assert not differences(whole(other), whole(engine)) and not differences(
        moments(other), moments(engine)
    )
    assert [group["weight_decay"] for group in other.optimizer.param_groups] == [0.0, 1e-2]


@pytest.mark.ranks(1)
def test_states_that_the_layout_does_not_support_are_refused(tmp_path: Path) -> None:
    engine = start(2, "fp32", checkpoint={"layout": "deepspeed"})
    with pytest.raises(CheckpointError, match="client_state has the key 'module'"):
        engine.save_checkpoint(tmp_path, client_state={"module": 1})
    assert not (tmp_path / "global_step0").exists()
    torch.save({"module": None}, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="is not laid out as expected: KeyError"):
        engine.load_checkpoint(tmp_path.parent, tag=tmp_path.name)


@pytest.mark.ranks(1)
def test_buffers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    layout = {"checkpoint": {"layout": "deepspeed"}}
    start(2, "fp32", **layout).save_checkpoint(tmp_path)
    engine = start(2, "fp32", **layout)
    engine.module.norm.running = torch.zeros(1)
    with pytest.raises(CheckpointError, match=r"'norm.running' is .* and \[1\] in the model"):
        engine.load_checkpoint(tmp_path)


@pytest.mark.ranks(2)
def test_a_failed_save_leaves_only_the_previous_checkpoint(tmp_path: Path) -> None:
    engine = start(2, "fp32", checkpoint={"layout": "deepspeed"})
    engine.save_checkpoint(tmp_path, tag="good")
    for what in (
        "compat.deepspeed.checkpoint.layout.write_rank",
        "checkpoint.files.write",
        "compat.deepspeed.checkpoint.layout.publish",
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"deepseek_zero.{what}", _full_disk)
            with pytest.raises(CheckpointError, match="No space left on device"):
                engine.save_checkpoint(tmp_path, tag="bad")
        dist.barrier()  # wait until rank 0 has cleaned up
        assert names_in(tmp_path) == ["good", "latest", "zero_to_fp32.py"]
        dist.barrier()
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "good")


def _full_disk(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.ranks(2)
def test_under_deepspeeds_name_its_checkpoint_layout_is_the_default(tmp_path: Path) -> None:
    """The default falls back to sharded files if a setting or a state requires them."""

    def saved(
        name: str, *, stage: int = 2, client: Any = None, wait: bool = True, **words: Any
    ) -> set[str]:
        engine = start(stage, "fp32", **words)
        train(engine, 0, 1, here())
        engine.save_checkpoint(tmp_path / name, tag="it", client_state=client, wait=wait)
        engine.finish_saving()
        dist.barrier()
        engine.load_checkpoint(tmp_path / name)
        return {path.suffix for path in (tmp_path / name / "it").iterdir()}

    slices = {".json", ".safetensors"}
    assert saved("ours") == slices
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dialect, "is_dropin_imported", lambda: True)
        assert saved("theirs") == {".pt"}
        assert saved("told", checkpoint={"layout": "slices"}) == slices
        assert saved("kept", checkpoint={"keep_last": 2}) == slices
        assert saved("behind", wait=False) == slices
        assert saved("stage 0", stage=0) == {".pt"}
        assert saved("taken", client={"module": 1}) == slices
        factors = {"type": "Adafactor", "params": {"lr": 1e-3}}
        assert saved("factors", optimizer=factors) == slices


class Tied(torch.nn.Module):
    """A model with a tied weight, a frozen layer and a layer that forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last, self.idle = (torch.nn.Linear(4, 4) for _ in range(4))
        self.last.weight = self.first.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.frozen(self.first(x)))


@pytest.mark.parametrize("groups", ["one", "reversed", "two"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.ranks(2)
def test_a_checkpoint_of_stage_0_has_the_module_and_resumes(
    dtype: str, groups: str, tmp_path: Path
) -> None:
    def built(seed: int) -> Any:
        torch.manual_seed(seed)
        model = Tied()
        params: list[Any] = [param for param in model.parameters() if param.requires_grad]
        if groups == "reversed":
            params = params[::-1]
        elif groups == "two":
            params = [{"params": params[2:], "lr": 0.01}, {"params": params[:2]}]
        words = {"train_micro_batch_size_per_gpu": 2, "checkpoint": {"layout": "deepspeed"}}
        if dtype != "fp32":
            words[dtype] = {"enabled": True}
        adam = torch.optim.Adam(params, lr=0.1)
        return deepseek_zero.initialize(model=model, optimizer=adam, config=words)[0]

    def losses(engine: Any) -> list[float]:
        found = []
        for step in range(2):
            inputs = torch.full((2, 4), 1.0 + step + here(), dtype=engine.module.idle.weight.dtype)
            loss = engine(inputs).float().square().mean()
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        return found

    engine = built(0)
    losses(engine)
    engine.save_checkpoint(tmp_path, client_state={"rank": here()})
    file = torch.load(tmp_path / "global_step2" / "mp_rank_00_model_states.pt")
    assert not differences(file["module"], engine.module_state_dict())
    resumed = built(1)
    assert resumed.load_checkpoint(tmp_path)[1] == {"rank": here()}
    assert losses(resumed) == losses(engine)


class Evil:
    """Creates a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.ranks(1)
def test_a_file_cannot_run_code(tmp_path: Path) -> None:
    engine = start(0, "fp32")
    folder = tmp_path / "global_step2"
    shutil.copytree(DATA / "stage0" / "global_step2", folder)
    state = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=True)
    torch.save(state | {"client": Evil(tmp_path / "ran")}, folder / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match=r"mp_rank_00_model_states.pt holds a posix.mkdir"):
        engine.load_checkpoint(tmp_path, tag="global_step2")
    torch.save(state | {"client": pickle.PickleError}, folder / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match=r"holds a _?pickle.PickleError"):
        engine.load_checkpoint(tmp_path, tag="global_step2")
    (folder / "mp_rank_00_model_states.pt").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"cannot be read"):
        engine.load_checkpoint(tmp_path, tag="global_step2")
    assert not (tmp_path / "ran").exists()
