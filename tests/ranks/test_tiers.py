"""States offloaded to host or disk give the same bits; on a disk they use no memory.

Every failure raises an error that names its cause.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import deepseek_zero
from deepseek_zero.base import memory as memory_file
from deepseek_zero.base.device import storage_users
from deepseek_zero.base.errors import (
    DeepSeekZeroError,
    OutOfMemoryError,
    PeerError,
    StorageError,
    UsageError,
)
from deepseek_zero.engine.parts import plan_of
from deepseek_zero.extensions.deferred_update import DeferredUpdate
from deepseek_zero.planner.spec import Tier
from deepseek_zero.report.explain import overlap_share
from deepseek_zero.report.picture import places_of
from deepseek_zero.sharding.grad_sum import GradState
from deepseek_zero.sharding.pool import Pool
from deepseek_zero.tiers.disk import ChunkState, Disk, DiskStorage
from deepseek_zero.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
)
from tests.models import Gpt, batch_of, seeded
from tests.pairwise import cases
from tests.training import ALL, Run, a_disk_that_refuses, offload, start_engine, train_step

STEPS = 3
AXES = {
    "stage": (1, 2, 3),
    "dtype": ("fp32", "bf16", "fp16"),
    "accumulation": (1, 3),
    "ranks": (1, 2, 3),
    "tier": ("cpu", "nvme"),
    "states": (True, False),
    "weights": (True, False),
    "optimizer": ("adamw", "groups", "muon"),
    "persistence": (0, 300),
    "window": (0, 10**9),
}


def engine_of(stage: int, zero: dict[str, Any], optimizer: str = "adamw", **top: Any) -> Any:
    """Start an engine with clipping and the smallest tiles."""
    model = top.pop("model", None) or seeded(Gpt)
    if optimizer == "groups":  # slices of two groups alternate inside every unit
        plain = [param for param in model.parameters() if param.dim() > 1]
        rest = [param for param in model.parameters() if param.dim() <= 1]
        client = torch.optim.AdamW(
            [{"params": plain, "weight_decay": 0.1}, {"params": rest}], lr=0.01
        )
        top["client"] = client
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.3,
        "steps_per_print": None,
        "zero_optimization": {
            "stage": stage,
            "sub_group_size": 4096,
            "stage3_max_live_parameters": 0,
            **zero,
        },
        **top,
    }
    client = config.pop("client", None)
    if client is None:
        config["optimizer"] = {"type": optimizer, "params": {"lr": 0.01}}
    return deepseek_zero.initialize(model=model, optimizer=client, config=config)[0]


def everything(engine: Any, run: Run) -> list[Tensor]:
    """Return losses of a few steps, then the full weights, main weights and moments."""
    found = [torch.stack(train_step(engine, run, step)) for step in range(STEPS)]
    found += [value.clone() for value in engine.state_dict().values()]
    for param in engine.module.parameters():
        found += [value for value in (safe_get_full_fp32_param(param),) if value is not None]
        for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
            found += [
                value for value in (safe_get_full_optimizer_state(param, key),) if value is not None
            ]
    return found


def assert_equal(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right)
    assert all(map(torch.equal, left, right))


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize(*cases(AXES))
def test_a_tier_changes_no_bit(
    stage: int,
    dtype: str,
    accumulation: int,
    ranks: int,
    tier: str,
    states: bool,
    weights: bool,
    optimizer: str,
    persistence: int,
    window: int,
) -> None:
    run = Run(stage, accumulation=accumulation)
    top: dict[str, Any] = {"gradient_accumulation_steps": accumulation}
    if dtype != "fp32":
        top[dtype] = {"enabled": True, **({"initial_scale_power": 8} if dtype == "fp16" else {})}
    zero = {"stage3_param_persistence_threshold": persistence, "stage3_max_live_parameters": window}
    plain = everything(engine_of(stage, zero, optimizer, **top), run)
    away = offload(tier, states=states, weights=weights and stage == 3)
    engine = engine_of(stage, zero | away, optimizer, **top)
    assert_equal(everything(engine, run), plain)
    tiers = {spec.tier for group in engine.runtime.trained_groups for spec in specs_of(group)}
    assert (Tier[{"cpu": "HOST", "nvme": "NVME"}[tier]] in tiers) == bool(away)


def specs_of(group: Any) -> list[Any]:
    plan = group.plan
    return [
        spec for spec in (plan.weight, plan.grad, plan.master, plan.moments) if spec is not None
    ]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_states_on_a_disk_use_no_memory_between_steps(dtype: str) -> None:
    engine = engine_of(
        3,
        offload("nvme") | {"stage3_param_persistence_threshold": 0},
        bf16={"enabled": dtype == "bf16"},
    )
    for step in range(2):
        train_step(engine, Run(3), step)
    engine.optimizer.finish()
    storages = offloaded_of(engine)
    assert len(storages) >= 4 * len(engine.runtime.groups)
    for storage in storages:
        numel = storage.memory.numel()
        storage.store(0, 0)
        for chunk in storage.chunks:
            chunk.wait()
        gradients = all(chunk.sum is None for chunk in storage.chunks)
        is_away = all(chunk.state is ChunkState.AWAY for chunk in storage.chunks)
        assert gradients or is_away, (storage.chunks[0].what, numel)


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_no_gathered_weight_is_kept_from_forward_to_backward(ranks: int, tier: str) -> None:
    engine = engine_of(3, offload(tier) | {"stage3_param_persistence_threshold": 0})
    viewed, give = [], Pool.give

    def look(pool: Pool, tensor: Tensor) -> None:
        if storage_users(tensor) > 1:
            viewed.append(tensor.numel())
        give(pool, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pool, "give", look)
        train_step(engine, Run(3), 0)
    assert viewed == []


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("tier", "leaves"), [("cpu", False), ("nvme", True)])
def test_holes_of_the_heap_are_returned_with_offloaded_weights(
    tier: str, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, calls = (
        engine_of(3, offload(tier) | {"stage3_param_persistence_threshold": 0}),
        list[int](),
    )
    monkeypatch.setattr(memory_file, "trim_heap", lambda: calls.append(1))
    monkeypatch.setattr(memory_file, "HOLES_BYTES", 0)
    train_step(engine, Run(3), 0)
    assert bool(calls) is leaves


def offloaded_of(engine: Any) -> list[DiskStorage]:
    found = list(engine.optimizer.moments.offloaded())
    for group in engine.runtime.groups:
        found += group.offloaded()
    return list({id(storage): storage for storage in found}.values())


@pytest.mark.ranks(2)
def test_states_read_and_changed_between_steps_are_used_by_the_next_step() -> None:
    def meddle(engine: Any) -> list[Tensor]:
        run, found = Run(3), []
        for step in range(3):
            train_step(engine, run, step)
            param = next(iter(engine.module.parameters()))
            value = safe_get_full_fp32_param(param)
            assert value is not None
            found.append(value)
            safe_set_full_fp32_param(param, value * 0.5)
            with deepseek_zero.zero.GatheredParameters(
                list(engine.module.parameters())[2], modifier_rank=0
            ):
                if dist.get_rank() == 0:
                    list(engine.module.parameters())[2].data.mul_(1.5)
        return found + [value.clone() for value in engine.state_dict().values()]

    zero = {"stage3_param_persistence_threshold": 0}
    assert_equal(meddle(engine_of(3, zero | offload("nvme"))), meddle(engine_of(3, zero)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("before", "after"), [("nvme", "none"), ("none", "nvme"), ("nvme", "nvme"), ("cpu", "nvme")]
)
def test_a_checkpoint_is_loaded_with_other_tiers(before: str, after: str, tmp_path: Path) -> None:
    run, zero = Run(3), {"stage3_param_persistence_threshold": 0}
    first = engine_of(3, zero | offload(before))
    train_step(first, run, 0)
    first.save_checkpoint(tmp_path)
    expected = [torch.stack(train_step(first, run, step)) for step in (1, 2)]
    second = engine_of(3, zero | offload(after))
    second.load_checkpoint(tmp_path)
    assert_equal([torch.stack(train_step(second, run, step)) for step in (1, 2)], expected)
    assert_equal(list(second.state_dict().values()), list(first.state_dict().values()))


@pytest.mark.ranks(1)
def test_moments_on_a_disk_read_as_nan_without_a_fetch() -> None:
    model = seeded(Gpt)
    client = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = start_engine(Run(3, tier="nvme"), model, lambda params: client)
    train_step(engine, Run(3), 0)
    assert all(bool(entry["exp_avg"].isnan().all()) for entry in client.state.values())
    assert not any(
        bool(entry["exp_avg"].isnan().any()) for entry in engine.optimizer.state.values()
    )


# -- updates delayed until the next forward


def look(engine: Any, step: int) -> Tensor:
    """Run only a forward."""
    batch = batch_of(step, 0, dist.get_rank())
    loss: Tensor = engine(batch.tokens, batch.targets)
    return loss.detach()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("tier", "between"),
    [
        *[
            ("nvme", each)
            for each in ("nothing", "lr", "zero_grad", "eval", "states", "save", "failed forward")
        ],
        *[("cpu", each) for each in ("eval", "states", "save")],
    ],
)
def test_a_deferred_update_uses_the_decision_of_its_step(
    tier: str, between: str, tmp_path: Path
) -> None:
    def run(zero: dict[str, Any], folder: Path) -> list[Tensor]:
        engine = engine_of(3, zero | {"stage3_param_persistence_threshold": 0})
        found = []
        for step in range(3):
            found.append(torch.stack(train_step(engine, Run(3), step)))
            match between:
                case "lr":
                    for group in engine.optimizer.param_groups:
                        group["lr"] *= 0.5
                        group["weight_decay"] = 0.1 * step
                case "zero_grad":
                    engine.optimizer.zero_grad()
                case "eval":
                    with torch.no_grad():
                        found.append(look(engine, 9).clone())
                case "states":
                    entries = engine.optimizer.state.values()
                    found += [entry["exp_avg"].clone() for entry in entries]
                case "save":
                    engine.save_checkpoint(folder, tag=f"step{step}")
                case "failed forward":
                    with pytest.raises(IndexError):
                        engine(torch.full((1, 4), 10**6), torch.zeros(1, 4, dtype=torch.long))
        return found + [value.clone() for value in engine.state_dict().values()]

    assert_equal(run(offload(tier), tmp_path / "away"), run({}, tmp_path / "plain"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("pipeline", [True, False])
def test_the_update_is_deferred_only_if_the_weights_are_not_visible(pipeline: bool) -> None:
    keys = offload("nvme")
    keys["offload_optimizer"] = keys["offload_optimizer"] | {"pipeline": pipeline}
    engine = engine_of(3, keys | {"stage3_param_persistence_threshold": 300})
    train_step(engine, Run(3), 0)
    deferred = engine.optimizer.policy(DeferredUpdate)
    waiting = deferred.waiting if pipeline else set()
    assert waiting == {
        group for group in engine.runtime.trained_groups if pipeline and group.is_sharded
    }
    for group in engine.runtime.trained_groups:
        assert (group.gradient.sum.state is GradState.HELD) == (group in waiting)
    look(engine, 1)
    assert not pipeline or not deferred.waiting
    states = [group.gradient.sum.state for group in engine.runtime.trained_groups]
    assert GradState.HELD not in states


class Recomputing(Gpt):
    """Each block is recomputed by torch's checkpoint, with `use_reentrant=reentrant`."""

    reentrant = False

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        assert targets is not None
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_unit_is_updated_when_used_for_any_prefetch_distance(ranks: int) -> None:
    """Otherwise all updates would run before the first unit, without overlap with forward."""
    far = {
        "stage3_max_live_parameters": ALL,
        "stage3_prefetch_bucket_size": ALL,
        "stage3_param_persistence_threshold": 0,
    }
    engine = engine_of(3, offload("nvme") | far, model=seeded(Gpt, width=96))
    for step in range(2):  # the first step records the order
        train_step(engine, Run(3), step)
    deferred, blocks = engine.optimizer.policy(DeferredUpdate), engine.runtime.units[1:]
    waiting: list[list[bool]] = []
    for unit in blocks:
        unit.module.register_forward_pre_hook(
            lambda *_: waiting.append(
                [not deferred.waiting.isdisjoint(unit.trained) for unit in blocks]
            )
        )
    look(engine, 2)
    assert waiting == [[later > now for later in range(len(blocks))] for now in range(len(blocks))]


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_and_backward_of_a_block_share_one_load(ranks: int, reentrant: bool) -> None:
    """With the smallest window a unit is loaded once for forward and once for backward.

    The last unit of forward is loaded once, unless a reentrant checkpoint runs its forward without
    gradients.
    """
    engine = engine_of(
        3,
        offload("nvme", states=False) | {"stage3_param_persistence_threshold": 0},
        model=seeded(Recomputing),
    )
    engine.module.reentrant = reentrant
    train_step(engine, Run(3), 0)
    for storage in (group.weight.storage for group in engine.runtime.groups):
        storage.store(0, 0)
        for chunk in storage.chunks:
            chunk.wait()  # wait for the writes of the update
    with engine.timeline() as seen:
        batch = batch_of(1, 0, dist.get_rank())
        engine.backward(engine(batch.tokens, batch.targets))
    loads = Counter(
        event.what.removeprefix("the weights of ").rpartition(".norm_1")[0]
        for event in seen.transfers
    )
    assert loads == {"blocks.0": 2, "blocks.1": 2, "blocks.2": 2 if reentrant else 1, "": 1}


# -- logs


@pytest.mark.ranks(2)
def test_the_log_of_a_disk_has_every_transfer_with_its_times() -> None:
    engine = engine_of(3, offload("nvme") | {"stage3_param_persistence_threshold": 0})
    train_step(engine, Run(3), 0)
    disk = engine.runtime.comm_ctx.tiers.memories[Tier.NVME]
    before = disk.traffic.read_bytes
    with engine.timeline() as seen:
        train_step(engine, Run(3), 1)  # includes the update deferred from step 0
    assert disk.traffic.events is None
    assert (
        sum(event.nbytes for event in seen.transfers if event.is_read)
        == disk.traffic.read_bytes - before
        > 0
    )
    assert [event.issued for event in seen.transfers] == sorted(
        event.issued for event in seen.transfers
    )
    ended = [event for event in seen.transfers if event.ended]  # the last writes may be in flight
    assert {event.is_read for event in ended} == {True, False}
    for event in ended:
        assert event.issued <= event.began <= event.ended
        since, until = event.waited
        assert since == until == 0.0 or event.issued <= since <= until >= event.ended
    assert 0.0 <= overlap_share(seen.transfers, seen.collectives) <= 1.0
    gradients = Counter(
        event.what for event in ended if event.what.startswith("gradients of") and not event.is_read
    )
    assert set(gradients.values()) == {1}, (
        "written by backward, and not again when the update has read them"
    )
    train_step(engine, Run(3), 2)
    assert "of it reached: the disk at its highest rate" in engine.explain()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("ahead", [1, 0])
def test_a_unit_is_read_while_the_one_before_it_is_used_unless_nothing_is_gathered_ahead(
    ahead: int,
) -> None:
    zero = {
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": ALL,
        "stage3_max_reuse_distance": 0,
    }
    engine = engine_of(3, zero | {"stage3_prefetch_bucket_size": ahead} | offload("nvme"))
    with engine.timeline() as before:
        train_step(engine, Run(3), 0)
        engine.optimizer.finish()
    # Data with pending writes would not be read from the disk
    while not all(event.ended for event in before.transfers):
        time.sleep(0.01)
    used = dict[str, float]()
    for number, block in enumerate(engine.module.blocks):
        block.register_forward_pre_hook(
            lambda *_, name=f"blocks.{number}": used.update({name: time.perf_counter()})
        )
    with engine.timeline() as seen:
        look(engine, 1)
    for earlier, name in pairwise(used):
        read = next(
            event for event in seen.transfers if event.what.startswith(f"the weights of {name}.")
        )
        assert read.is_read
        assert read.ended <= used[name]
        assert (read.issued < used[earlier]) is bool(ahead)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "tier"), [(3, "nvme"), (3, "none"), (2, "cpu"), (1, "none")])
def test_the_picture_of_a_plan_shows_the_bytes_that_the_plan_predicts(
    stage: int, tier: str, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    zero = {"stage3_param_persistence_threshold": 300} | offload(tier, weights=stage == 3)
    engine = engine_of(stage, zero, bf16={"enabled": True})
    train_step(engine, Run(stage), 0)
    shown = sum(
        (Counter(place.nbytes) for place in places_of(plan_of(engine.runtime, engine.optimizer))),
        Counter(),
    )
    predicted = engine.memory_report().predicted
    for away in (Tier.HOST, Tier.NVME):
        assert sum(count for (_, where), count in shown.items() if where is away) == predicted.get(
            away.value, 0
        )
    assert shown["grad", Tier.DEVICE] == predicted["grad"]
    picture = tmp_path / "plan.png"
    assert engine.explain(picture) == engine.explain()
    engine.runtime.comm.barrier("the picture")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.png"]


# -- failures


@pytest.mark.ranks(2)
def test_a_directory_that_one_rank_cannot_create_is_an_error_on_every_rank(tmp_path: Path) -> None:
    mine = tmp_path / f"rank{dist.get_rank()}"
    if dist.get_rank() == 1:
        mine.write_text("a file, so nothing can be made below it")
    place = {"device": "nvme", "nvme_path": str(mine / "states")}
    with pytest.raises(
        PeerError if dist.get_rank() == 0 else StorageError, match="Not a directory"
    ):
        engine_of(3, {"offload_param": place, "offload_optimizer": place})


@pytest.mark.ranks(2)
def test_a_missing_directory_is_created_with_access_for_its_owner_only(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    states = tmp_path / "new" / "states"
    place = {"device": "nvme", "nvme_path": str(states)}
    engine_of(3, {"offload_param": place, "offload_optimizer": place}).destroy()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path, states.parent, states)] == [
        0o755,
        0o700,
        0o700,
    ]


def test_a_missing_directory_has_the_free_space_of_its_disk(tmp_path: Path) -> None:
    assert Disk.free_bytes(tmp_path / "new" / "states") > 0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_disk_that_fails_on_one_rank_ends_the_step_on_all(
    number: int, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(3, offload("nvme") | {"stage3_param_persistence_threshold": 0})
    train_step(engine, Run(3), 0)

    with a_disk_that_refuses(call, number, monkeypatch, rank=1):
        for step in range(1, 4):
            train_step(engine, Run(3), step)


@pytest.mark.ranks(2)
def test_a_disk_that_fails_as_memory_is_about_to_be_compared_ends_the_step_on_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    zero = offload("nvme") | {"stage3_param_persistence_threshold": 0}
    engine = engine_of(3, zero, integrity={"mode": "end", "every": 1})
    train_step(engine, Run(3), 0)
    with a_disk_that_refuses("pwritev", errno.EIO, monkeypatch, rank=1):
        for step in range(1, 4):
            train_step(engine, Run(3), step)


@pytest.mark.ranks(1)
def test_no_step_is_accepted_after_a_partial_one(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(2, offload("nvme", weights=False))
    train_step(engine, Run(2), 0)

    def refuse(*given: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(os, "pwritev", refuse)
        with pytest.raises(StorageError):
            for step in range(1, 4):
                train_step(engine, Run(2), step)
    with pytest.raises((UsageError, StorageError), match=r"load the last checkpoint|start again"):
        for step in range(4, 8):
            train_step(engine, Run(2), step)


@pytest.mark.ranks(2)
def test_plans_that_do_not_fit_are_refused_before_anything_is_allocated() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1 << 17, 1 << 17) for _ in range(4)))
    for tier, error in (("cpu", OutOfMemoryError), ("nvme", StorageError)):
        with pytest.raises(
            error, match=r"offloaded states need 1\.00 TiB .*for each of 2 ranks\), .* are free"
        ):
            deepseek_zero.initialize(
                model=model,
                config={
                    "train_micro_batch_size_per_gpu": 1,
                    "optimizer": {"type": "AdamW"},
                    "zero_optimization": {"stage": 3, **offload(tier)},
                },
            )


@pytest.mark.parametrize(
    ("zero", "says"),
    [
        ({"stage": 0, "offload_optimizer": {"device": "cpu"}}, "needs stage 1 or more"),
        ({"stage": 2, "offload_param": {"device": "cpu"}}, "needs stage 3 or more"),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, "nvme_path = None.*is missing"),
        (
            {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/a"},
                "offload_optimizer": {"device": "nvme", "nvme_path": "/b"},
            },
            "use one directory for both",
        ),
    ],
)
def test_an_invalid_tier_is_named(zero: dict[str, Any], says: str) -> None:
    with pytest.raises(DeepSeekZeroError, match=says):
        deepseek_zero.initialize(
            model=nn.Linear(2, 2),
            config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero},
        )


def test_the_directory_is_left_empty() -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = {"device": "nvme", "nvme_path": folder}
        engine = engine_of(3, {"offload_param": place, "offload_optimizer": place})
        train_step(engine, Run(3, window=ALL), 0) if dist.is_initialized() else None
        assert os.listdir(folder) == []
