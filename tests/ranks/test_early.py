"""Speculative updates in backward give the bits of updates after the norm is known.

This holds for every call between backward and step.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import deepseek_zero
from deepseek_zero.base.errors import UsageError
from deepseek_zero.extensions.speculative_update import SpeculativeUpdate
from deepseek_zero.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
)
from tests.models import Gpt, batch_of, seeded
from tests.pairwise import cases
from tests.training import Run, a_disk_that_refuses, offload, train_step

ALL_UNITS = 1 << 30
SIZES = {"width": 30, "hidden": 80}


def engine_of(
    tier: str, clipping: float, kind: str = "adamw", moments: str = "fp32", **given: Any
) -> Any:
    """Start an engine with small tiles.

    given: `undo_bytes`, or top-level configuration keys.
    """
    model = seeded(Gpt, **SIZES)
    undo, top = given.pop("undo_bytes", ALL_UNITS), given
    client = None
    if kind == "groups":
        plain = [param for param in model.parameters() if param.dim() > 1]
        rest = [param for param in model.parameters() if param.dim() <= 1]
        client = torch.optim.AdamW(
            [{"params": plain, "weight_decay": 0.1}, {"params": rest}], lr=0.01
        )
    else:
        top["optimizer"] = {"type": kind, "params": {"lr": 0.01}, "moments": moments}
    keys = {"super_offload": True, "undo_bytes": undo} if tier != "none" else {}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": clipping,
        "steps_per_print": None,
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 4096,
            "stage3_max_live_parameters": 0,
            "stage3_param_persistence_threshold": 0,
            **offload(tier, **keys),
        },
        **top,
    }
    return deepseek_zero.initialize(model=model, optimizer=client, config=config)[0]


def everything(engine: Any) -> list[Tensor]:
    """Return the full weights, main weights and moments."""
    found = [value.clone() for value in engine.state_dict().values()]
    for param in engine.module.parameters():
        states = [
            safe_get_full_optimizer_state(param, key)
            for key in ("exp_avg", "exp_avg_sq", "momentum_buffer")
        ]
        found += [
            value for value in (safe_get_full_fp32_param(param), *states) if value is not None
        ]
    return found


def assert_equal(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right)
    assert all(map(torch.equal, left, right))


AXES = {
    "dtype": ("fp32", "bf16", "fp16"),
    "accumulation": (1, 3),
    "ranks": (1, 2, 3),
    "tier": ("cpu", "nvme"),
    "clipping": (0.0, 0.3),  # the norm is about 1, so 0.0 never clips and 0.3 always clips
    "optimizer": ("adamw", "groups", "muon"),
    "moments": ("fp32", "8bit"),
    "master": ("split", "fp32", "none"),
    "undo_bytes": (ALL_UNITS, 125_000),
}


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize(*cases(AXES))
def test_an_update_in_backward_changes_no_bit(
    dtype: str,
    accumulation: int,
    ranks: int,
    tier: str,
    clipping: float,
    optimizer: str,
    moments: str,
    master: str,
    undo_bytes: int,
) -> None:
    top: dict[str, Any] = {"gradient_accumulation_steps": accumulation}
    if dtype == "bf16":
        top["bf16"] = {"enabled": True, "master": master}
    if dtype == "fp16":
        top["fp16"] = {"enabled": True, "initial_scale_power": 8}
    run, found = Run(3, accumulation=accumulation), []
    for where in ("none", tier):
        engine = engine_of(where, clipping, optimizer, moments, undo_bytes=undo_bytes, **top)
        losses = [torch.stack(train_step(engine, run, step)) for step in range(4)]
        found.append(losses + everything(engine))
    assert_equal(*found)
    early = engine.optimizer.policy(SpeculativeUpdate)
    tally, chosen = early, early.chosen()
    assert 0 < len(chosen) <= 3
    assert (tally.updated > 0) == bool(engine.optimizer.policy(SpeculativeUpdate).units)
    assert tally.undone == (tally.updated if clipping else 0)


@pytest.mark.ranks(2)
def test_an_overflow_reverts_early_updates_of_other_units() -> None:
    found = []
    for tier in ("none", "cpu"):
        engine = engine_of(tier, 0.0, fp16={"enabled": True, "initial_scale_power": 4})
        for step in range(4):
            batch = batch_of(step, 0, dist.get_rank())
            handle = None
            if step == 2:
                bias = engine.module.blocks[0].up.bias
                handle = bias.register_hook(lambda grad: grad * float("inf"))
            loss = engine(batch.tokens, batch.targets)
            engine.backward(loss)
            if handle is not None:
                handle.remove()
            if tier == "cpu" and step == 2:
                sums = [
                    group.gradient.sum.buffer.memory for group in engine.runtime.units[1].trained
                ]
                is_finite = all(bool(mine.isfinite().all()) for mine in sums)
                done = set(engine.optimizer.policy(SpeculativeUpdate)._done)
                assert done == ({1, 2, 3} if is_finite else {2, 3}), (
                    "the overflow is in one rank's slice of unit 1"
                )
            engine.step()
            assert engine.optimizer.overflow is (step == 2)
        found.append(everything(engine))
    assert_equal(*found)
    assert engine.optimizer.policy(SpeculativeUpdate).undone == len(done)


BETWEEN = [
    "lr",
    "states",
    "masters",
    "write master",
    "read gradient",
    "clip by hand",
    "save",
    "state_dict",
    "eval",
    "second backward",
    "retain_graph",
    "zero_grad",
    "failed backward",
]
ALSO_ON_A_DISK = ["lr", "masters", "second backward", "failed backward"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("between", "tier"),
    [(each, "cpu") for each in BETWEEN] + [(each, "nvme") for each in ALSO_ON_A_DISK],
)
def test_updates_are_not_visible_before_their_step(between: str, tier: str, tmp_path: Path) -> None:
    found = []
    for where in ("none", tier):
        engine = engine_of(where, 0.0, bf16={"enabled": True})
        found.append(
            [
                value
                for step in range(4)
                for value in one_step(engine, step, between, tmp_path / where)
            ]
        )
        found[-1] += everything(engine)
    assert_equal(*found)
    tally = engine.optimizer.policy(SpeculativeUpdate)
    assert tally.updated > 0
    assert tally.undone > 0


def one_step(engine: Any, step: int, between: str, folder: Path) -> list[Tensor]:
    """Train one step with an action after backward, and return the observed tensors."""
    batch = batch_of(step, 0, dist.get_rank())
    params = list(engine.module.parameters())
    if between == "failed backward":
        handle = engine.module.blocks[0].up.bias.register_hook(raises)
        with pytest.raises(ZeroDivisionError):
            engine.backward(engine(batch.tokens, batch.targets))
        handle.remove()
    loss = engine(batch.tokens, batch.targets)
    engine.backward(loss, retain_graph=between == "retain_graph")
    found = [loss.detach()]
    match between:
        case "lr":
            for group in engine.optimizer.param_groups:
                group["lr"] *= 0.5
        case "states":
            found += [entry["exp_avg"].clone() for entry in engine.optimizer.state.values()]
            found = found[:1]  # sharded differently than without tiers
        case "masters":
            found += [safe_get_full_fp32_param(param) for param in params]
        case "write master":
            value = safe_get_full_fp32_param(params[5])
            assert value is not None
            safe_set_full_fp32_param(params[5], value * 0.5)
        case "read gradient":
            found += [safe_get_full_grad(param) for param in params]
        case "clip by hand":
            found.append(torch.nn.utils.clip_grad_norm_(params, 0.3))
        case "save":
            engine.save_checkpoint(folder, tag=f"step{step}")
        case "state_dict":
            found += [value.clone() for value in engine.state_dict().values()]
        case "eval":
            with torch.no_grad():
                found.append(engine(batch.tokens, batch.targets).detach())
        case "second backward":
            engine.backward(engine(batch.targets, batch.tokens))
        case "retain_graph":
            engine.backward(loss)
        case "zero_grad":
            engine.optimizer.zero_grad()
            engine.backward(engine(batch.targets, batch.tokens))
    engine.step()
    return found


def raises(grad: Tensor) -> Tensor:
    raise ZeroDivisionError("in backward")


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 160), nn.Linear(160, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Shared(nn.Module):
    """A block used by two regions with reentrant recomputation, so it gets two gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Part() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for number in (0, 1, 2, 1):
            x = x + checkpoint(self.blocks[number], x, use_reentrant=True)
        return x


@pytest.mark.ranks(2)
def test_a_gradient_that_arrives_after_the_early_update_reverts_it() -> None:
    found = []
    for tier in ("none", "nvme"):
        config = Run(
            3, optimizer="adamw", tier=tier, updates=(("super_offload", tier != "none"),)
        ).config()
        config["optimizer"] |= {"type": "AdamW", "params": {"lr": 0.01}}
        torch.manual_seed(3)
        engine = deepseek_zero.initialize(model=Shared(), config=config)[0]
        for step in range(4):
            x = torch.randn(
                4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())
            )
            engine.backward(engine(x).square().mean())
            engine.step()
        found.append(everything(engine))
    assert_equal(*found)
    assert engine.optimizer.policy(SpeculativeUpdate).undone > 0


@pytest.mark.ranks(2)
def test_the_first_units_are_updated_early_up_to_the_size_of_the_undo_log() -> None:
    counts = {}
    for undo_bytes in (0, 125_000, 1 << 20):
        engine = engine_of("cpu", 0.0, undo_bytes=undo_bytes)
        for step in range(3):
            train_step(engine, Run(3), step)
        early = engine.optimizer.policy(SpeculativeUpdate)
        assert sorted(early.chosen()) == list(range(1, 1 + len(early.chosen())))
        assert engine.optimizer.scratch.kept["undo", torch.device("cpu")].nbytes <= undo_bytes
        counts[undo_bytes] = len(early.chosen())
        text = (
            f"updates in backward: {len(early.chosen())} of 3 units fit undo_bytes, "
            f"{early.updated} updates, 0"
        )
        assert text in engine.explain()
        assert early.updated == 2 * len(early.chosen()), "in every step but the first"
    assert counts == {0: 0, 125_000: 2, 1 << 20: 3}


@pytest.mark.ranks(1)
def test_an_optimizer_without_declared_granularity_is_refused() -> None:
    class Own(torch.optim.AdamW):
        pass

    model = seeded()
    config = Run(3, tier="cpu", updates=(("super_offload", True),)).config()
    with pytest.raises(UsageError, match="super_offload cannot be used with Own"):
        deepseek_zero.initialize(model=model, optimizer=Own(model.parameters()), config=config)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_disk_that_fails_in_backward_ends_the_job_on_all(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of("nvme", 0.0)
    for step in range(2):
        train_step(engine, Run(3), step)
    assert engine.optimizer.policy(SpeculativeUpdate).updated > 0
    with a_disk_that_refuses(call, errno.EIO, monkeypatch, rank=1):
        for step in range(2, 5):
            train_step(engine, Run(3), step)
