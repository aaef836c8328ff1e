"""Offload of checkpointed activations to host or disk gives the bits of a run without it.

The test names contain "offload" so that `-k offload` selects them with the other offload tests.
"""

from __future__ import annotations

import errno
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import deepseek_zero
from deepseek_zero import checkpointing
from deepseek_zero.activations import recompute
from deepseek_zero.activations.offload import ActivationOffload
from deepseek_zero.base.errors import PeerError, StorageError
from tests.models import Gpt, batch_of, seeded
from tests.pairwise import cases
from tests.training import a_disk_that_refuses, offload

SAMPLES = 40  # an activation has 16 KiB in fp32 and 8 KiB in bf16
BLOCKS = 3
AXES = {
    "stage": (0, 1, 2, 3),
    "dtype": ("fp32", "bf16"),
    "accumulation": (1, 3),
    "ranks": (1, 2),
    "place": ("cpu", "nvme", "contiguous"),
    "states": ("none", "nvme"),
    "transport": ("fastest", "gloo"),
    "forwards": (1, 2),
}


def straight(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


class Net(Gpt):
    """Blocks with dropout, each called through `run`; keeps weak references to their inputs."""

    run: Callable[..., Any] = staticmethod(straight)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        assert targets is not None
        self.storages: list[weakref.ref[Any]] = []
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            self.storages.append(weakref.ref(x.untyped_storage()))
            (x,) = self.run(
                lambda pair, rate, block=block: [F.dropout(block(pair[0]), rate)], (x, None), 0.1
            )
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


def section(place: str, folder: str | None = None) -> dict[str, Any]:
    """Return the activation-checkpointing section that offloads to `place`."""
    words: dict[str, dict[str, Any]] = {
        "none": {},
        "cpu": {"cpu_checkpointing": True},
        "contiguous": {"contiguous_memory_optimization": True, "number_checkpoints": BLOCKS},
        "nvme": {"device": "nvme", "nvme_path": folder or tempfile.gettempdir()},
    }
    return words[place]


def engine_of(place: str, stage: int = 3, zero: dict[str, Any] | None = None, **top: Any) -> Any:
    model = seeded(Net)
    model.run = straight if place == "none" else checkpointing.checkpoint
    sharding = {
        "stage": stage,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
    }
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": sharding | (zero or {}),
        "activation_checkpointing": section(place),
        **top,
    }
    return deepseek_zero.initialize(model=model, config=config)[0]


def train(engine: Any, step: int, accumulation: int = 1, forwards: int = 1) -> list[Tensor]:
    """Run one optimizer step, with `forwards` forwards before each backward."""
    torch.manual_seed(100 * step + dist.get_rank())
    losses = []
    for micro in range(accumulation):
        found = []
        for number in range(forwards):
            batch = batch_of(step, 10 * micro + number, dist.get_rank(), SAMPLES)
            found.append(engine(batch.tokens, batch.targets))
        total = torch.stack(found).mean()
        engine.backward(total)
        engine.step()
        losses.append(total.detach())
    return losses


def parking_of(engine: Any) -> ActivationOffload:
    found = engine.parts.recompute.parking
    assert isinstance(found, ActivationOffload)
    return found


def everything(engine: Any, *how: int) -> list[Tensor]:
    """Return the losses of three steps and the final weights."""
    found = [loss for step in range(3) for loss in train(engine, step, *how)]
    return found + [value.clone() for value in engine.state_dict().values()]


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize(*cases(AXES))
def test_offloaded_inputs_of_checkpoints_change_no_bit(
    stage: int,
    dtype: str,
    accumulation: int,
    ranks: int,
    place: str,
    states: str,
    transport: str,
    forwards: int,
) -> None:
    top: dict[str, Any] = {
        "gradient_accumulation_steps": accumulation,
        "bf16": {"enabled": dtype == "bf16"},
    }
    zero = offload(states, states=stage >= 1, weights=stage == 3)
    plain = engine_of("none", stage, zero, transport=transport, **top)
    assert not checkpointing.is_configured()
    expected = everything(plain, accumulation, forwards)
    engine = engine_of(place, stage, zero, transport=transport, **top)
    found = everything(engine, accumulation, forwards)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    parking = parking_of(engine)
    assert parking._arrived == 3 * accumulation * forwards * BLOCKS
    assert parking.used_bytes == 0 and len(parking.slabs) == 1
    engine.destroy()
    assert not checkpointing.is_configured()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transport", ["fastest", "gloo"])
@pytest.mark.parametrize("stage", [0, 3])
def test_offload_leaves_no_input_of_a_checkpoint_alive(stage: int, transport: str) -> None:
    engine = engine_of("nvme", stage, transport=transport)
    for step in range(2):
        batch = batch_of(step, 0, dist.get_rank(), SAMPLES)
        loss = engine(batch.tokens, batch.targets)
        assert [storage() is None for storage in engine.module.storages] == [True] * BLOCKS
        engine.backward(loss)
        engine.step()
        assert parking_of(engine).used_bytes == 0
    engine.destroy()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("place", ["cpu", "nvme", "contiguous"])
def test_the_slab_of_offloaded_inputs_is_as_large_as_predicted(place: str) -> None:
    engine = engine_of(place)
    for step in range(3):
        train(engine, step)
    parking = parking_of(engine)
    # An input of less than 16 sectors is padded to whole sectors
    needed, sector = (SAMPLES * 7 * 15 * 4, 4096)
    predicted = BLOCKS * -(-needed // sector) * sector
    assert parking.reserved_bytes == parking.memory.reserved_bytes == predicted
    assert (
        parking.peak_bytes == BLOCKS * needed
        and parking.unused_bytes == predicted - BLOCKS * needed
    )
    assert (
        "activations: 60.0 KiB in one arena, 49.2 KiB used at most, gap 10.8 KiB"
        in engine.explain()
    )
    engine.destroy()


@pytest.mark.ranks(2)
def test_offloaded_inputs_survive_an_evaluation_and_a_forward_that_fails() -> None:
    def run(place: str) -> list[Tensor]:
        engine = engine_of(place)
        found = []
        for step in range(3):
            found += train(engine, step)
            with torch.no_grad():
                batch = batch_of(9, 0, dist.get_rank(), SAMPLES)
                found.append(engine(batch.tokens, batch.targets))
            with pytest.raises(IndexError):
                engine(batch.tokens, torch.full_like(batch.targets, 10**6))
        found += [value.clone() for value in engine.state_dict().values()]
        engine.destroy()
        return found

    assert all(map(torch.equal, run("nvme"), run("none")))


@pytest.mark.ranks(2)
def test_offload_set_by_configure_applies_to_the_engines_of_the_process() -> None:
    expected = everything(engine_of("none"))
    checkpointing.configure(
        None, {"activation_checkpointing": section("nvme")}, checkpoint_in_cpu=False
    )
    engine = engine_of("none")
    engine.module.run = checkpointing.checkpoint
    assert all(map(torch.equal, everything(engine), expected))
    current = recompute.current()
    assert engine.parts.recompute is None and current is not None and current.parking is not None
    assert current.parking._arrived == 3 * BLOCKS
    engine.destroy()
    assert checkpointing.is_configured()
    recompute.release(current)


# -- failures


@pytest.mark.ranks(2)
def test_an_offload_directory_that_one_rank_cannot_create_is_an_error_on_every_rank(
    tmp_path: Path,
) -> None:
    mine = tmp_path / f"rank{dist.get_rank()}" / "inside"
    if dist.get_rank() == 1:
        mine.parent.touch()
    with pytest.raises(
        PeerError if dist.get_rank() == 0 else StorageError, match="Not a directory"
    ):
        engine_of("none", activation_checkpointing=section("nvme", str(mine)))
    recompute.release(recompute.current())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_an_offload_disk_that_fails_on_one_rank_ends_the_step_on_all(
    number: int, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of("nvme")
    train(engine, 0)

    with a_disk_that_refuses(call, number, monkeypatch, rank=1):
        for step in range(1, 4):
            train(engine, step)
    engine.destroy()
