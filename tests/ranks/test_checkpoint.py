"""A checkpoint goes on bit by bit at its own world size, and by name and range at any other."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepseek_zero
from deepseek_zero.base.errors import CheckpointError
from tests.plain import here, world

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}}


class Tower(nn.Module):
    """Odd sizes, repeated blocks, running statistics, a tied and a frozen parameter, a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(7, 33)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(33, 33), nn.Tanh()) for _ in range(3)])
        self.norm = nn.BatchNorm1d(33)
        self.frozen = nn.Linear(33, 33)
        self.frozen.requires_grad_(False)
        self.write = nn.Linear(33, 5, bias=False)
        self.again = nn.Linear(33, 5)
        self.again.weight = self.write.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.read(x)
        for block in self.blocks:
            x = x + block(x)
        x = self.frozen(self.norm(x))
        return self.write(x) + self.again(x)


def build(stage: int, **top: Any) -> Any:
    torch.manual_seed(3)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": None,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **top,
    }
    return deepseek_zero.initialize(model=Tower(), config=config)[0]


def train(engine: Any, first: int, last: int, rank: int | None = None) -> None:
    """Steps [first, last) on this rank's data."""
    for step in range(first, last):
        generator = torch.Generator().manual_seed(100 * step + (here() if rank is None else rank))
        loss = engine(torch.randn(4, 7, generator=generator)).float().square().mean()
        engine.backward(loss)
        engine.step()


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different


def moments_of(engine: Any) -> dict[str, Tensor]:
    """First moments by parameter name, whole."""
    from deepseek_zero.utils import safe_get_full_optimizer_state

    found = {name: safe_get_full_optimizer_state(param, "exp_avg") for name, param in engine.module.named_parameters()}
    return {name: value for name, value in found.items() if value is not None}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("top", [{}, BF16, FP16], ids=["fp32", "bf16", "fp16"])
def test_three_steps_and_three_after_a_load_are_six(tmp_path: Path, stage: int, top: dict[str, Any]) -> None:
    six = build(stage, **top)
    train(six, 0, 6)
    three = build(stage, **top)
    train(three, 0, 3)
    three.save_checkpoint(tmp_path, client_state={"epoch": 7})
    resumed = build(stage, **top)
    path, client = resumed.load_checkpoint(tmp_path)
    assert path == str(tmp_path / "global_step3") and client == {"epoch": 7}
    train(resumed, 3, 6)
    assert_same(six.module_state_dict(), resumed.module_state_dict())
    assert_same(moments_of(six), moments_of(resumed))
    assert six.get_lr() == resumed.get_lr()
    assert (six.global_steps, six.global_samples) == (resumed.global_steps, resumed.global_samples) == (6, 6 * 4 * 2)
    if resumed.fp16_enabled():
        assert six.parts.scaler.state_dict() == resumed.parts.scaler.state_dict()


@pytest.mark.ranks(2)
def test_a_live_engine_that_has_trained_on_goes_back(tmp_path: Path) -> None:
    engine = build(3)
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path, tag="two")
    before, moments = engine.module_state_dict(), moments_of(engine)
    train(engine, 2, 4)
    engine.load_checkpoint(tmp_path, tag="two")
    assert_same(before, engine.module_state_dict())
    assert_same(moments, moments_of(engine))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("saved", "loaded"), [(0, 3), (3, 0), (3, 1), (2, 3)])
def test_another_stage_reads_the_same_values(tmp_path: Path, saved: int, loaded: int) -> None:
    source = build(saved, **BF16)
    train(source, 0, 2)
    source.save_checkpoint(tmp_path)
    target = build(loaded, **BF16)
    target.load_checkpoint(tmp_path)
    assert_same(source.module_state_dict(), target.module_state_dict())
    assert_same(moments_of(source), moments_of(target))


@pytest.mark.ranks(2, fresh=True)
@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_reads_what_two_wrote(tmp_path: Path, stage: int) -> None:
    engine = build(stage, **BF16)
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path)
    whole, moments = engine.module_state_dict(), moments_of(engine)
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    os.environ["WORLD_SIZE"] = "1"
    alone = build(stage, **BF16)
    assert world() == alone.world_size == 1
    alone.load_checkpoint(tmp_path)
    if rank == 0:  # at another world size the running statistics are rank 0's
        assert_same(whole, alone.module_state_dict())
    assert_same(moments, moments_of(alone))
    train(alone, 2, 3)
    assert alone.global_steps == 3


@pytest.mark.ranks(2)
def test_every_element_is_written_once(tmp_path: Path) -> None:
    for stage in (0, 3):
        engine = build(stage)
        train(engine, 0, 1)
        engine.save_checkpoint(tmp_path, tag=f"stage{stage}")
        manifest = json.loads((tmp_path / f"stage{stage}" / "manifest.json").read_text())
        for kind, key in (("weight", ""), ("moment", "exp_avg"), ("moment", "exp_avg_sq")):
            for name, facts in manifest["parameters"].items():
                if kind == "moment" and not facts["trained"]:
                    continue
                ranges = sorted((c[3], c[4]) for c in manifest["chunks"] if c[:3] == [kind, name, key])
                assert ranges[0][0] == 0 and ranges[-1][1] == torch.Size(facts["shape"]).numel(), (stage, name)
                assert all(a[1] == b[0] for a, b in pairwise(ranges)), (stage, name)
        assert not any("scratch" in chunk[1] for chunk in manifest["chunks"])


@pytest.mark.ranks(2)
def test_frozen_parameters_can_be_left_out(tmp_path: Path) -> None:
    engine = build(3)
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    other = build(3)
    other.load_checkpoint(tmp_path)
    assert_same(engine.module_state_dict(), other.module_state_dict())
    manifest = json.loads((tmp_path / "global_step0" / "manifest.json").read_text())
    assert not any(chunk[0] == "weight" and "frozen" in chunk[1] for chunk in manifest["chunks"])


@pytest.mark.ranks(2)
def test_a_value_that_only_pickle_could_hold_is_named_on_every_rank_and_leaves_no_file(tmp_path: Path) -> None:
    engine = build(3)
    state = {"history": [1, {"model": nn.Linear(1, 1)}]} if here() == 1 else {"history": []}
    with pytest.raises(CheckpointError, match=r"client_state.history\[1\].model is a torch.nn"):
        engine.save_checkpoint(tmp_path, client_state=state)
    assert list(tmp_path.iterdir()) == []
    train(engine, 0, 1)


@pytest.mark.ranks(2)
def test_a_write_that_fails_on_one_rank_fails_on_all_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    engine = build(3)
    engine.save_checkpoint(tmp_path, tag="good")
    with pytest.MonkeyPatch.context() as patch:
        if here() == 1:
            patch.setattr("deepseek_zero.checkpoint.save.save_file", _full_disk)
        with pytest.raises(CheckpointError, match=r"rank 1 failed .*No space left"):
            engine.save_checkpoint(tmp_path, tag="bad")
    assert not (tmp_path / "bad").exists()
    assert (tmp_path / "latest").read_text() == "good"
    engine.load_checkpoint(tmp_path)
    engine.save_checkpoint(tmp_path, tag="bad")  # what the failed save left is no obstacle
    assert (tmp_path / "latest").read_text() == "bad"


def _full_disk(*args: Any, **kwargs: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.ranks(2)
def test_ranks_that_name_different_tags_are_told_or_refused(tmp_path: Path) -> None:
    engine = build(3)
    engine.save_checkpoint(tmp_path, tag=f"rank{here()}")
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["rank0"]
    strict = build(3, checkpoint={"tag_validation": "Fail"})
    with pytest.raises(CheckpointError, match="rank 0 saves under tag 'rank0', rank 1 under 'rank1'"):
        strict.save_checkpoint(tmp_path, tag=f"rank{here()}")


@pytest.mark.ranks(2)
def test_what_does_not_fit_is_refused_before_anything_changes(tmp_path: Path) -> None:
    engine = build(3)
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path)
    smaller = deepseek_zero.initialize(
        model=nn.Sequential(nn.Linear(7, 33)), config={"zero_optimization": {"stage": 3}, "train_batch_size": 2}
    )[0]
    before = smaller.module_state_dict()
    with pytest.raises(CheckpointError, match=r"lacks 0.weight, 0.bias and has read.weight"):
        smaller.load_checkpoint(tmp_path)
    sgd = build(3, optimizer={"type": "SGD", "params": {"lr": 0.1}}, scheduler={})
    with pytest.raises(CheckpointError, match="has the state of AdamW, the engine runs SGD"):
        sgd.load_checkpoint(tmp_path)
    assert_same(before, smaller.module_state_dict())
    sgd.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert_same(engine.module_state_dict(), sgd.module_state_dict())
    fresh = build(3)
    fresh.load_checkpoint(tmp_path, load_module_only=True)
    assert_same(engine.module_state_dict(), fresh.module_state_dict())
    assert (fresh.global_steps, moments_of(fresh)) == (0, {})


@pytest.mark.ranks(2)
def test_no_latest_is_none_and_a_missing_tag_an_error_that_lists_the_others(tmp_path: Path) -> None:
    engine = build(3)
    assert engine.load_checkpoint(tmp_path) == (None, None)
    engine.save_checkpoint(tmp_path, tag="here", save_latest=False)
    assert engine.load_checkpoint(tmp_path) == (None, None)
    with pytest.raises(CheckpointError, match=r"no checkpoint 'there'(.|\n)*choose one of: here"):
        engine.load_checkpoint(tmp_path, tag="there")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["Muon", "Lamb", "Adafactor"])
def test_optimizers_that_need_whole_tensors_resume_bit_by_bit(tmp_path: Path, kind: str) -> None:
    top = {"optimizer": {"type": kind, "params": {"lr": 1e-3}}, "scheduler": {}}
    six = build(3, **top)
    train(six, 0, 4)
    half = build(3, **top)
    train(half, 0, 2)
    half.save_checkpoint(tmp_path)
    resumed = build(3, **top)
    resumed.load_checkpoint(tmp_path)
    train(resumed, 2, 4)
    assert_same(six.module_state_dict(), resumed.module_state_dict())


@pytest.mark.ranks(2)
def test_the_consolidated_weights_are_on_rank_zero_and_in_the_file(tmp_path: Path) -> None:
    engine = build(3, **BF16)
    whole = engine.module_state_dict()
    consolidated = engine._zero3_consolidated_16bit_state_dict()
    assert (consolidated is None) == (here() != 0)
    assert engine.save_16bit_model(tmp_path, "refused.bin") is False
    saver = build(3, **BF16)
    saver.config = saver.config.model_copy(
        update={
            "zero_optimization": saver.config.zero_optimization.model_copy(
                update={"stage3_gather_16bit_weights_on_model_save": True}
            )
        }
    )
    assert saver.save_16bit_model(tmp_path) is True
    assert_same(whole, torch.load(tmp_path / "pytorch_model.bin", weights_only=True))
    assert saver.save_fp16_model(tmp_path, "model.safetensors") is True
    from safetensors.torch import load_file

    assert_same(whole, load_file(tmp_path / "model.safetensors"))
