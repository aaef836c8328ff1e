"""A checkpoint resumes bit by bit at its world size, and by name and range at any other."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import shutil
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepseek_zero
from deepseek_zero.base.errors import CheckpointError
from deepseek_zero.checkpoint import files, load
from deepseek_zero.checkpoint.safetensors_file import read_header
from deepseek_zero.checkpoint.verify import verify
from tests.crash import flip, names_in
from tests.pairwise import cases
from tests.plain import here, world
from tests.tower import BF16, FP16, Tower, config, train
from tests.training import offload


def build(stage: int, **top: Any) -> Any:
    torch.manual_seed(3)
    return deepseek_zero.initialize(model=Tower(33), config=config(stage, **top))[0]


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different


def moments_of(engine: Any) -> dict[str, Tensor]:
    """Return the full first moments by parameter name."""
    from deepseek_zero.utils import safe_get_full_optimizer_state

    found = {
        name: safe_get_full_optimizer_state(param, "exp_avg")
        for name, param in engine.module.named_parameters()
    }
    return {name: value for name, value in found.items() if value is not None}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("stage", "top"), [(0, BF16), (1, {}), (3, FP16)], ids=["0-bf16", "1-fp32", "3-fp16"]
)
def test_three_steps_and_three_after_a_load_are_six(
    tmp_path: Path, stage: int, top: dict[str, Any]
) -> None:
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
    assert (
        (six.global_steps, six.global_samples)
        == (resumed.global_steps, resumed.global_samples)
        == (6, 6 * 4 * 2)
    )
    if resumed.fp16_enabled():
        assert six.parts.scaler.state_dict() == resumed.parts.scaler.state_dict()


@pytest.mark.ranks(3)
def test_ranks_with_folders_of_their_own_save_parts_of_one_checkpoint(tmp_path: Path) -> None:
    six = build(3)
    train(six, 0, 6)
    three = build(3)
    train(three, 0, 2)
    own = tmp_path / ("first" if dist.get_rank() == 0 else "others")
    three.save_checkpoint(own, tag="kept")
    train(three, 2, 3)
    three.save_checkpoint(own, tag="kept", wait=False)  # overwrites the first save
    three.finish_saving()
    assert (own / "latest").exists() is (dist.get_rank() == 0)
    dist.barrier()
    assert not (own / ".kept.replaced").exists()
    if dist.get_rank() == 0:
        shutil.copytree(tmp_path / "others", tmp_path / "first", dirs_exist_ok=True)
    dist.barrier()
    resumed = build(3)
    resumed.load_checkpoint(tmp_path / "first")
    train(resumed, 3, 6)
    assert_same(six.module_state_dict(), resumed.module_state_dict())


@pytest.mark.ranks(2)
def test_a_save_into_several_folders_that_fails_leaves_the_previous_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(3)
    train(engine, 0, 1)
    saved = engine.module_state_dict()
    own = tmp_path / str(dist.get_rank())
    engine.save_checkpoint(own, tag="kept")
    train(engine, 1, 2)
    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match="No space"):
        patched.setattr(files, "write_text", _no_space)
        engine.save_checkpoint(own, tag="kept")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copytree(tmp_path / "1", tmp_path / "0", dirs_exist_ok=True)
    dist.barrier()
    engine.load_checkpoint(tmp_path / "0")
    assert_same(engine.module_state_dict(), saved)


@pytest.mark.ranks(2)
def test_a_part_that_a_crash_left_hidden_is_not_removed_by_the_next_save(tmp_path: Path) -> None:
    engine = build(3, checkpoint={"keep_last": 1})
    own = tmp_path / str(dist.get_rank())
    engine.save_checkpoint(own, tag="kept")
    engine.finish_saving()
    (own / "kept").rename(own / ".kept.replaced")  # the crash is before the new part is renamed
    engine.save_checkpoint(own, tag="other")
    engine.finish_saving()
    assert (own / ".kept.replaced").exists() is (dist.get_rank() == 1)


def _no_space(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.ranks(2)
def test_folders_of_their_own_are_refused_where_files_are_made_of_several_ranks(
    tmp_path: Path,
) -> None:
    engine = build(3, checkpoint={"layout": "deepspeed"})
    train(engine, 0, 1)
    with pytest.raises(CheckpointError, match="ranks save into different folders"):
        engine.save_checkpoint(tmp_path / str(dist.get_rank()))
    (tmp_path / f"file {dist.get_rank()}" / "tag").mkdir(parents=True)
    (tmp_path / f"file {dist.get_rank()}" / "tag" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="exists already and is not a checkpoint"):
        build(3).save_checkpoint(tmp_path / f"file {dist.get_rank()}", tag="tag")


@pytest.mark.ranks(2)
def test_a_running_engine_can_load_an_earlier_checkpoint(tmp_path: Path) -> None:
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
    os.environ["DEEPSEEK_ZERO_ALONE"] = "1"
    alone = build(stage, **BF16)
    assert world() == alone.world_size == 1
    alone.load_checkpoint(tmp_path)
    if rank == 0:  # at another world size, running statistics are loaded from rank 0
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
                ranges = sorted(
                    (c[3], c[4]) for c in manifest["chunks"] if c[:3] == [kind, name, key]
                )
                assert ranges[0][0] == 0 and ranges[-1][1] == torch.Size(facts["shape"]).numel(), (
                    stage,
                    name,
                )
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
def test_a_value_that_only_pickle_could_hold_is_named_on_every_rank_and_leaves_no_file(
    tmp_path: Path,
) -> None:
    engine = build(3)
    state = {"history": [1, {"model": nn.Linear(1, 1)}]} if here() == 1 else {"history": []}
    with pytest.raises(CheckpointError, match=r"client_state.history\[1\].model is a torch.nn"):
        engine.save_checkpoint(tmp_path, client_state=state)
    assert names_in(tmp_path) == []
    train(engine, 0, 1)


@pytest.mark.ranks(2)
def test_a_write_that_fails_on_one_rank_fails_on_all_and_keeps_the_last_checkpoint(
    tmp_path: Path,
) -> None:
    engine = build(3)
    engine.save_checkpoint(tmp_path, tag="good")
    with pytest.MonkeyPatch.context() as patch:
        if here() == 1:
            patch.setattr("deepseek_zero.checkpoint.files.write", _full_disk)
        with pytest.raises(CheckpointError, match="No space left"):
            engine.save_checkpoint(tmp_path, tag="bad")
    assert not (tmp_path / "bad").exists()
    assert (tmp_path / "latest").read_text() == "good"
    dist.barrier()  # wait until rank 0 has cleaned up
    assert names_in(tmp_path) == ["good", "latest"]
    engine.load_checkpoint(tmp_path)
    engine.save_checkpoint(tmp_path, tag="bad")
    assert (tmp_path / "latest").read_text() == "bad"


def _full_disk(*args: Any, **kwargs: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.ranks(2)
def test_different_tags_on_ranks_are_reported_or_refused(tmp_path: Path) -> None:
    engine = build(3)
    with redirect_stderr(StringIO()) as err:
        engine.save_checkpoint(tmp_path, tag=f"rank{here()}")
    assert ("WARNING: rank 0 saves under tag" in err.getvalue()) == (here() == 0)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["rank0"]
    strict = build(3, checkpoint={"tag_validation": "Fail"})
    with pytest.raises(
        CheckpointError, match="rank 0 saves under tag 'rank0', rank 1 under 'rank1'"
    ):
        strict.save_checkpoint(tmp_path, tag=f"rank{here()}")


@pytest.mark.ranks(2)
def test_checkpoints_that_do_not_fit_are_refused_before_anything_changes(tmp_path: Path) -> None:
    engine = build(3)
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path)
    smaller = deepseek_zero.initialize(
        model=nn.Sequential(nn.Linear(7, 33)),
        config={"zero_optimization": {"stage": 3}, "train_batch_size": 2},
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


class Remembering(nn.Sequential):
    """A model with an expanded buffer and an extra state."""

    def __init__(self, width: int = 4) -> None:
        super().__init__(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.register_buffer("rows", torch.full((4,), float(width)).expand(3, 4))
        self.register_buffer("bank", torch.zeros(width))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.bank += 1.0
        return super().forward(x)

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


def remembering(stage: int, model: nn.Module) -> Any:
    return deepseek_zero.initialize(model=model, config=config(stage))[0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_expanded_buffers_and_extra_states_are_restored(tmp_path: Path, stage: int) -> None:
    engine = remembering(stage, Remembering())
    engine.backward(engine(torch.ones(4, 4)).square().mean())
    engine.step()
    engine.save_checkpoint(tmp_path)
    model = Remembering()
    model.rows = torch.zeros(4).expand(3, 4)
    fresh = remembering(4 - stage, model)
    fresh.load_checkpoint(tmp_path)
    assert model.calls == 1
    assert torch.equal(model.rows, torch.full((3, 4), 4.0))
    assert torch.equal(model.bank, torch.ones(4))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("has_moments", [True, False])
def test_a_checkpoint_that_is_loaded_in_inference_mode_can_be_trained_from(
    tmp_path: Path, stage: int, has_moments: bool
) -> None:
    engine = build(stage)
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path)
    train(engine, 2, 4)
    again = build(stage)
    train(again, 0, int(has_moments))
    with torch.inference_mode():
        again.load_checkpoint(tmp_path)
    train(again, 2, 4)
    assert_same(engine.module_state_dict(), again.module_state_dict())
    with torch.inference_mode():
        reader = build(stage)
    reader.load_checkpoint(tmp_path, tag="global_step2")
    with torch.inference_mode():
        assert reader(torch.ones(4, 7)).shape == (4, 5)


@pytest.mark.ranks(2)
def test_buffers_that_do_not_fit_are_refused_before_anything_changes(tmp_path: Path) -> None:
    remembering(3, Remembering()).save_checkpoint(tmp_path)
    wider = remembering(3, Remembering(5))
    more = Remembering()
    more.register_buffer("extra", torch.zeros(2))
    other = remembering(3, more)
    for engine, reason in ((wider, r"'bank' is \[4\] in .* \[5\] in"), (other, "buffers extra")):
        before = engine.module_state_dict()
        with pytest.raises(CheckpointError, match=reason):
            engine.load_checkpoint(tmp_path)
        after = engine.module_state_dict()
        assert all(
            torch.equal(value, after[name])
            for name, value in before.items()
            if isinstance(value, Tensor)
        )
    other.load_checkpoint(tmp_path, load_module_strict=False)
    assert torch.equal(more.bank, torch.zeros(4))


@pytest.mark.ranks(2)
def test_a_sparse_buffer_is_named_on_every_rank_and_leaves_no_file(tmp_path: Path) -> None:
    model = Remembering()
    model.register_buffer("links", torch.eye(4).to_sparse())
    engine = remembering(3, model)
    with pytest.raises(
        CheckpointError, match=r"'links' is a sparse tensor (.|\n)*persistent=False"
    ):
        engine.save_checkpoint(tmp_path)
    dist.barrier()  # rank 0 has removed the draft
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


@pytest.mark.ranks(2)
def test_no_checkpoint_is_none_and_a_missing_tag_an_error_that_lists_the_others(
    tmp_path: Path,
) -> None:
    engine = build(3)
    assert engine.load_checkpoint(tmp_path) == (None, None)
    engine.save_checkpoint(tmp_path, tag="here", save_latest=False)
    assert engine.load_checkpoint(tmp_path) == (str(tmp_path / "here"), {})
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
    change = {"stage3_gather_16bit_weights_on_model_save": True}
    section = saver.config.zero_optimization.model_copy(update=change)
    saver.config = saver.config.model_copy(update={"zero_optimization": section})
    assert saver.save_16bit_model(tmp_path) is True
    assert_same(whole, torch.load(tmp_path / "pytorch_model.bin", weights_only=True))
    assert saver.save_fp16_model(tmp_path, "model.safetensors") is True
    from safetensors.torch import load_file

    # Tied to write.weight
    once = {name: value for name, value in whole.items() if name != "again.weight"}
    assert_same(once, load_file(tmp_path / "model.safetensors"))


# -- asynchronous saves


@contextmanager
def slowly(seconds: float) -> Iterator[None]:
    """Delay every write so that training steps overtake the save."""
    write = files.write

    def late(descriptor: int, data: memoryview, offset: int) -> None:
        time.sleep(seconds)
        write(descriptor, data, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "write", late)
        yield


BEHIND = {
    "stage": (0, 1, 2, 3),
    "kind": ("fp32", "bf16", "8bit"),
    "snapshot": (0, 5000, 1 << 30),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(*cases(BEHIND))
def test_a_checkpoint_written_in_the_background_has_the_state_at_its_start(
    tmp_path: Path, stage: int, kind: str, snapshot: int
) -> None:
    few_bits = {"optimizer": {"type": "AdamW", "moments": "8bit"}}
    top = {"fp32": {}, "bf16": BF16, "8bit": BF16 | few_bits}[kind]
    engine = build(stage, **top, checkpoint={"snapshot_bytes": snapshot})
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path, tag="at once", save_latest=False)
    with slowly(0.05):
        engine.save_checkpoint(tmp_path, tag="behind", wait=False)
        assert not (tmp_path / "behind").exists()
        train(engine, 2, 4)
        engine.finish_saving()
    assert (tmp_path / "latest").read_text() == "behind"
    found = []
    for tag in ("at once", "behind"):
        other = build(stage, **top)
        other.load_checkpoint(tmp_path, tag=tag)
        found.append((other.module_state_dict(), moments_of(other), other.global_steps))
    assert_same(found[0][0], found[1][0])
    assert_same(found[0][1], found[1][1])
    assert found[0][2] == found[1][2] == 2


def steps_until_it_is_over(engine: Any) -> None:
    while engine.parts.saver.current is not None:
        train(engine, engine.global_steps, engine.global_steps + 1)
        time.sleep(0.01)


@pytest.mark.ranks(2)
def test_a_step_publishes_it_and_raises_its_errors(tmp_path: Path) -> None:
    engine = build(3)
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path, tag="first", wait=False)
    steps_until_it_is_over(engine)
    assert (tmp_path / "latest").read_text() == "first"
    with pytest.MonkeyPatch.context() as patch:
        if here() == 1:
            patch.setattr(files, "write", _full_disk)
        engine.save_checkpoint(tmp_path, tag="second", wait=False)
        with pytest.raises(CheckpointError, match="No space left"):
            steps_until_it_is_over(engine)
    dist.barrier()  # wait until rank 0 has cleaned up
    assert names_in(tmp_path) == ["first", "latest"]
    train(engine, 3, 4)


@pytest.mark.ranks(2)
def test_training_does_not_wait_for_the_removal_of_what_was_replaced(tmp_path: Path) -> None:
    engine, may_go, remove = (
        build(3, checkpoint={"keep_last": 1}),
        threading.Event(),
        files.remove_folder,
    )

    def late(path: Path) -> None:
        assert may_go.wait(60)
        remove(path)

    engine.save_checkpoint(tmp_path, tag="older")
    engine.save_checkpoint(tmp_path, tag="one")
    train(engine, 0, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "remove_folder", late)
        engine.save_checkpoint(tmp_path, tag="one", wait=False)
        steps_until_it_is_over(engine)
        dist.barrier()  # wait until rank 0 has begun
        names = names_in(tmp_path)
        assert names == [".one.replaced", "latest", "one"]
        dist.barrier()
        may_go.set()
        engine.finish_saving()
    dist.barrier()
    assert names_in(tmp_path) == ["latest", "one"]


@pytest.mark.ranks(2)
def test_states_set_during_a_save_are_not_in_the_file(tmp_path: Path) -> None:
    from deepseek_zero.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    engine = build(3, **BF16)
    train(engine, 0, 2)
    expected, moments = engine.module_state_dict(), moments_of(engine)
    with slowly(0.05):
        engine.save_checkpoint(tmp_path, wait=False)
        params = dict(engine.module.named_parameters())
        safe_set_full_fp32_param(params["blocks.2.0.weight"], torch.zeros(33, 33))
        safe_set_full_optimizer_state(params["read.weight"], torch.ones(33, 7), "exp_avg")
        with deepseek_zero.zero.GatheredParameters(params["read.bias"], modifier_rank=0):
            params["read.bias"].data.fill_(5.0)
        engine.finish_saving()
    engine.load_checkpoint(tmp_path)
    assert_same(expected, engine.module_state_dict())
    assert_same(moments, moments_of(engine))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_states_elsewhere_are_written_from_there(tmp_path: Path, tier: str) -> None:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **offload(tier)}
    engine = build(3, zero_optimization=zero)
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path, wait=False)
    train(engine, 2, 4)
    expected = engine.module_state_dict(), moments_of(engine)
    other = build(3, zero_optimization=zero)
    engine.finish_saving()
    other.load_checkpoint(tmp_path)
    train(other, 2, 4)
    assert_same(expected[0], other.module_state_dict())
    assert_same(expected[1], moments_of(other))


# -- random generators and data loaders


class Noisy(nn.Module):
    """A model with dropout and random numbers from Python and NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.write = nn.Linear(6, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.read(x), 0.3)
        return self.write(x * (1.0 + random.random() + float(np.random.rand()))).square().mean()


@pytest.mark.ranks(2)
def test_random_numbers_and_data_resume_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    def noisy() -> tuple[Any, Any]:
        torch.manual_seed(3)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW"},
            "steps_per_print": None,
        }
        engine, _, loader, _ = deepseek_zero.initialize(
            model=Noisy(),
            config=config,
            training_data=torch.randn(28, 6, generator=torch.Generator().manual_seed(1)),
        )
        return engine, loader

    def losses(engine: Any, batches: Any, count: int) -> list[float]:
        found = []
        for _ in range(count):
            loss = engine(next(batches))
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        return found

    engine, loader = noisy()
    torch.manual_seed(100 + here())
    batches = iter(deepseek_zero.utils.RepeatingLoader(loader))
    losses(engine, batches, 3)
    engine.save_checkpoint(tmp_path)
    expected = losses(engine, batches, 9)
    resumed, loader = noisy()
    resumed.load_checkpoint(tmp_path)
    assert losses(resumed, iter(deepseek_zero.utils.RepeatingLoader(loader)), 9) == expected
    assert len(set(expected)) == 9


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("saved_after", "by_name"), [(1, False), (5, False), (5, True)])
def test_a_step_interrupted_by_a_save_is_repeated_from_its_first_micro_batch(
    tmp_path: Path, saved_after: int, by_name: bool
) -> None:
    """With `by_name`, an epoch has four micro-batches and a step three.

    The repeated step may therefore begin in the previous epoch.
    """

    def start() -> tuple[Any, Iterator[Any]]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 1))
        words = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 3,
            "steps_per_print": None,
        }
        data = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
        words["optimizer"] = {"type": "AdamW"}
        engine, _, loader, _ = deepseek_zero.initialize(
            model=model, config=words, training_data=data
        )
        if by_name:
            engine.training_dataloader = loader = engine.deepspeed_io(data)
            assert len(loader) == 4
        return engine, iter(deepseek_zero.utils.RepeatingLoader(loader))

    def take(engine: Any, batches: Iterator[Any], count: int) -> None:
        for _ in range(count):
            engine.backward(engine(next(batches)).square().mean())
            engine.step()

    engine, batches = start()
    take(engine, batches, saved_after)
    engine.save_checkpoint(tmp_path)
    take(engine, batches, 9 - saved_after)
    resumed, _ = start()
    resumed.load_checkpoint(tmp_path)
    assert resumed.global_samples == resumed.global_steps * 12
    take(
        resumed,
        iter(deepseek_zero.utils.RepeatingLoader(resumed.training_dataloader)),
        9 - saved_after // 3 * 3,
    )
    assert (
        (resumed.global_steps, resumed.global_samples)
        == (engine.global_steps, engine.global_samples)
        == (3, 36)
    )
    assert_same(engine.module_state_dict(), resumed.module_state_dict())


@pytest.mark.ranks(3, fresh=True)
def test_another_number_of_ranks_continues_with_the_next_sample(tmp_path: Path) -> None:
    """Each step takes six of 20 samples.

    Two ranks take one step, three ranks the next two, and one rank the steps of the next epoch.
    """
    rank, seen = dist.get_rank(), []
    for number, (ranks, micro, last) in enumerate([(2, 3, 1), (3, 1, 3), (1, 2, 6)]):
        dist.barrier()
        dist.destroy_process_group()
        if rank < ranks:
            store = dist.FileStore(str(tmp_path / f"store{number}"), ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
            config = {
                "train_batch_size": 6,
                "train_micro_batch_size_per_gpu": micro,
                "optimizer": {"type": "SGD"},
            }
            data = torch.arange(20.0).view(20, 1)
            engine, _, loader, _ = deepseek_zero.initialize(
                model=nn.Linear(1, 1), config=config, training_data=data
            )
            if number:
                engine.load_checkpoint(tmp_path / str(number - 1))
            batches = iter(deepseek_zero.utils.RepeatingLoader(loader))
            while engine.global_steps < last:
                batch = next(batches)
                engine.backward(engine(batch).square().mean())
                engine.step()
                rows = engine.runtime.comm.all_gather_rows(batch.flatten(), "samples")
                seen += rows.flatten().int().tolist()
            engine.save_checkpoint(tmp_path / str(number))
            dist.barrier()
        store = dist.FileStore(str(tmp_path / f"all{number}"), 3)
        if rank < ranks:
            dist.destroy_process_group()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    orders = [
        torch.randperm(20, generator=torch.Generator().manual_seed(epoch)).tolist()
        for epoch in range(2)
    ]
    if rank == 0:
        assert seen == [*orders[0], *orders[0][:4], *orders[1][:12]]


@pytest.mark.ranks(4, fresh=True, timeout=120)
def test_four_ranks_three_one_and_two_have_the_same_bits(tmp_path: Path) -> None:
    rank, walk = (
        dist.get_rank(),
        [
            (4, 3, "none"),
            (3, 3, "nvme"),
            (1, 3, "cpu"),
            (2, 1, "none"),
            (3, 0, "none"),
            (2, 2, "cpu"),
        ],
    )
    for number, (ranks, stage, tier) in enumerate(walk):
        dist.barrier()
        dist.destroy_process_group()
        if rank < ranks:
            store = dist.FileStore(str(tmp_path / f"store{number}"), ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
            places = {
                "none": {},
                "nvme": offload("nvme"),
                "cpu": offload("cpu", weights=stage == 3),
            }[tier]
            engine = build(
                stage,
                **BF16,
                zero_optimization={
                    "stage": stage,
                    "stage3_param_persistence_threshold": 0,
                    **places,
                },
            )
            if number:
                engine.load_checkpoint(tmp_path / str(number - 1))
            else:
                train(engine, 0, 2)
            found = {"weights": engine.module_state_dict(), "moments": moments_of(engine)}
            if not number and rank == 0:
                torch.save(found, tmp_path / "expected.pt")
            if rank == 0:
                expected = torch.load(tmp_path / "expected.pt", weights_only=True)
                assert_same(expected["weights"], found["weights"])
                assert_same(expected["moments"], found["moments"])
            engine.save_checkpoint(tmp_path / str(number))
            dist.barrier()
            dist.destroy_process_group()
        _everyone(tmp_path, rank, number)


def _everyone(folder: Path, rank: int, number: int) -> None:
    """Initialize a process group of all four ranks."""
    store = dist.FileStore(str(folder / f"all{number}"), 4)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)


@pytest.mark.ranks(1)
def test_moments_on_a_disk_that_a_program_has_read_are_saved(tmp_path: Path) -> None:
    """Weights and biases are in separate groups, so their shards alternate on the disk."""

    def build_groups(places: dict[str, Any]) -> Any:
        torch.manual_seed(3)
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        groups = [
            {"params": [layer.weight for layer in model]},
            {"params": [layer.bias for layer in model]},
        ]
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **places}
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        top = {
            "train_micro_batch_size_per_gpu": 2,
            "steps_per_print": None,
            "zero_optimization": zero,
        }
        return deepseek_zero.initialize(model=model, optimizer=optimizer, config=top)[0]

    engine = build_groups(offload("nvme"))
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 32)).square().mean())
        engine.step()
    expected = moments_of(engine)
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    other = build_groups({})
    other.load_checkpoint(tmp_path)
    assert_same(expected, moments_of(other))


# -- damage


@pytest.mark.ranks(2)
@pytest.mark.parametrize("damage", ["flipped", "cut", "missing", "another's", "manifest", "disk"])
def test_a_damaged_checkpoint_is_refused_and_the_run_is_unchanged(
    tmp_path: Path, damage: str
) -> None:
    engine = build(3, **BF16)
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path, tag="older")
    train(engine, 1, 2)
    engine.save_checkpoint(tmp_path, tag="newer")
    expected, moments, random_state = (
        engine.module_state_dict(),
        moments_of(engine),
        torch.get_rng_state(),
    )
    path = tmp_path / "newer" / "rank_00001.safetensors"
    if here() == 0:
        whole = path.read_bytes()
        if damage == "flipped":
            path.write_bytes(whole[:-40] + bytes([whole[-40] ^ 4]) + whole[-39:])
        elif damage == "cut":
            path.write_bytes(whole[:-40])
        elif damage == "missing":
            path.unlink()
        elif damage == "another's":
            path.write_bytes((tmp_path / "older" / path.name).read_bytes())
        elif damage == "disk":  # the file cannot be read
            (tmp_path / "newer" / "manifest.json").unlink()
            (tmp_path / "newer" / "manifest.json").mkdir()
        else:
            manifest = tmp_path / "newer" / "manifest.json"
            manifest.write_text(manifest.read_text().replace('"stage": 3', '"stage": 2'))
    dist.barrier()
    said = {
        "flipped": "rank_00001.safetensors.* differs from what was saved",
        "cut": "rank_00001.safetensors .*cut short",
        "missing": "rank_00001.safetensors is missing",
        "another's": "rank_00001.safetensors is of another save",
        "manifest": "manifest.json is not what was written",
        "disk": "manifest.json cannot be read: Is a directory",
    }[damage]
    with pytest.raises(CheckpointError, match=said):
        engine.load_checkpoint(tmp_path)
    assert_same(expected, engine.module_state_dict())
    assert_same(moments, moments_of(engine))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert engine.load_checkpoint(tmp_path, tag="newest")[0] == str(tmp_path / "older")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", ["weight", "moment"])
def test_a_damaged_checkpoint_is_refused_by_a_run_that_begins(
    tmp_path: Path, stage: int, kind: str
) -> None:
    """Moments are verified while they are loaded, weights before they replace the current ones."""
    saved = build(stage, **BF16)
    train(saved, 0, 1)
    saved.save_checkpoint(tmp_path, tag="whole")
    saved.save_checkpoint(tmp_path, tag="flipped")
    path = tmp_path / "flipped" / "rank_00001.safetensors"
    if here() == 0:
        place = next(
            place
            for name, place in read_header(path).locations.items()
            if name.startswith(f"{kind}|")
        )
        flip(path, place.start)
    dist.barrier()
    begun = build(stage, **BF16)
    expected = begun.module_state_dict()
    with pytest.raises(
        CheckpointError,
        match=rf"rank_00001.safetensors, '.*': {kind}.* differs from what was saved",
    ):
        begun.load_checkpoint(tmp_path, tag="flipped")
    assert_same(expected, begun.module_state_dict())
    assert not moments_of(begun)
    begun.load_checkpoint(tmp_path, tag="whole")
    assert_same(saved.module_state_dict(), begun.module_state_dict())
    assert_same(moments_of(saved), moments_of(begun))


@pytest.mark.ranks(2)
def test_moments_are_read_once_where_they_replace_none_and_over_the_old_ones_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out: list[str] = []

    def spy(folder: Path, subset: Any, *, read_again: bool, except_kind: str) -> Any:
        left_out.append(except_kind)
        return verify(folder, subset, read_again=read_again, except_kind=except_kind)

    monkeypatch.setattr(load, "verify", spy)
    saved = build(3)
    train(saved, 0, 1)
    saved.save_checkpoint(tmp_path)
    begun = build(3)
    begun.load_checkpoint(tmp_path)
    places = {
        id(param): state["exp_avg"].data_ptr()
        for param, state in begun.optimizer.inner.state.items()
    }
    begun.load_checkpoint(tmp_path)
    assert left_out == ["moment", ""]
    assert places == {
        id(param): state["exp_avg"].data_ptr()
        for param, state in begun.optimizer.inner.state.items()
    }
    assert_same(moments_of(saved), moments_of(begun))


@pytest.mark.ranks(2)
def test_two_jobs_do_not_write_into_one_checkpoint_and_leftovers_are_no_obstacle(
    tmp_path: Path,
) -> None:
    engine = build(3)
    hidden = tmp_path / ".one.saving"
    if here() == 0:
        hidden.mkdir()
        (hidden / "rank_00000.safetensors").write_bytes(b"half")
        with open(hidden / ".writing", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with pytest.raises(CheckpointError, match="being written by another job"):
                engine.save_checkpoint(tmp_path, tag="one")
    else:
        with pytest.raises(CheckpointError, match="being written by another job"):
            engine.save_checkpoint(tmp_path, tag="one")
    engine.save_checkpoint(tmp_path, tag="one")
    assert not hidden.exists()


@pytest.mark.ranks(2)
def test_files_are_private_and_tags_stay_inside(tmp_path: Path) -> None:
    engine = build(3)
    engine.save_checkpoint(tmp_path / "new", tag="one")
    folder = tmp_path / "new" / "one"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    for tag in ("../one", ".", "a/b", ".hidden"):
        with pytest.raises(CheckpointError, match="cannot be a tag"):
            engine.save_checkpoint(tmp_path, tag=tag)
        with pytest.raises(CheckpointError, match="cannot be a tag"):
            engine.load_checkpoint(tmp_path, tag=tag)


@pytest.mark.ranks(2)
def test_samples_of_a_begun_step_are_not_saved_with_the_own_rows_of_stages(tmp_path: Path) -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.square().mean()

    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1), Square())
    model.dummy_inputs = {"input": torch.ones(1, 4)}
    engine, *_ = deepseek_zero.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 3,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW"},
            "pipeline": {"stages": 2, "rows": "own"},
        },
    )
    engine.backward(engine(torch.ones(3, 4)))
    engine.step()
    assert engine.global_samples == 6  # two ranks with three rows each
    engine.save_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path)
    assert engine.global_samples == 0
