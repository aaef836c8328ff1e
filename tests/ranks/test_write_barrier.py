"""If a state changes during an asynchronous save, the checkpoint has the state from before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepseek_zero
from deepseek_zero import utils, zero
from deepseek_zero.checkpoint import files
from deepseek_zero.checkpoint.format import MANIFEST, RNG, VALUE, Manifest
from tests.tower import BF16, Tower, config, train
from tests.training import offload


@contextmanager
def not_yet(seconds: float = 0.4) -> Iterator[None]:
    """Delay writes until the block ends, at most for `seconds`.

    After that time, the block is waiting for the writer.
    """
    write, may_go = files.write, threading.Event()

    def late(descriptor: int, data: memoryview, offset: int) -> None:
        may_go.wait(seconds)
        write(descriptor, data, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "write", late)
        try:
            yield
        finally:
            may_go.set()


def sums(folder: Path) -> dict[tuple[str, str, str, int], int | None]:
    """Return the CRC-32 of every chunk of every state."""
    chunks = Manifest.read(folder / MANIFEST).chunks
    return {(e.kind, e.name, e.key, e.start): e.crc for e in chunks if e.kind not in (RNG, VALUE)}


def named(engine: Any, name: str = "blocks.1.0.weight") -> nn.Parameter:
    return dict(engine.module.named_parameters())[name]


def noise(param: Any) -> torch.Tensor:
    return torch.randn(
        param.shape, generator=torch.Generator().manual_seed(torch.initial_seed() % 1000 + 1)
    )


def by_gathering(engine: Any) -> None:
    with zero.GatheredParameters(named(engine), modifier_rank=0):
        named(engine).data.add_(1.0)


def by_its_state(engine: Any) -> None:
    for state in engine.optimizer.state.values():
        state["exp_avg"].add_(1.0)


def whole_state(engine: Any, change: float) -> dict[str, Any]:
    return {
        name: value + change if value.is_floating_point() else value
        for name, value in engine.module.state_dict().items()
    }


def locally(engine: Any) -> None:
    part = utils.safe_get_local_fp32_param(named(engine))
    utils.safe_set_local_fp32_param(named(engine), part + 1)


def local_state(engine: Any) -> None:
    part = utils.safe_get_local_optimizer_state(named(engine), "exp_avg")
    if part is not None:
        utils.safe_set_local_optimizer_state(named(engine), part + 1, "exp_avg")


WAYS: dict[str, Callable[[Any, Path], object]] = {
    "step": lambda engine, _: train(engine, 7, 8),
    "two steps": lambda engine, _: train(engine, 8, 10),
    "flush": lambda engine, _: engine.optimizer.flush(),
    "set master": lambda engine, _: utils.safe_set_full_fp32_param(
        named(engine), noise(named(engine))
    ),
    "set moment": lambda engine, _: utils.safe_set_full_optimizer_state(
        named(engine), noise(named(engine)), "exp_avg"
    ),
    "set local master": lambda engine, _: locally(engine),
    "set local moment": lambda engine, _: local_state(engine),
    "gather": lambda engine, _: by_gathering(engine),
    "module state": lambda engine, _: engine.module.load_state_dict(whole_state(engine, 1.0)),
    "engine module state": lambda engine, _: engine.load_module_state_dict(
        whole_state(engine, -1.0)
    ),
    "optimizer state": lambda engine, _: by_its_state(engine),
    "weights": lambda engine, path: engine.load_weights(path / "weights"),
    "optimizer load": lambda engine, _: engine.optimizer.load_state_dict(engine.early_state),
    "checkpoint": lambda engine, path: engine.load_checkpoint(path, tag="first"),
    "rate": lambda engine, _: engine.optimizer.param_groups[0].update(lr=0.5),
    "buffer": lambda engine, _: engine.module.norm.running_mean.add_(1.0),
    "step after load": lambda engine, _: train(engine, 5, 6),
}
HOST = {"stage": 3, "stage3_param_persistence_threshold": 0, **offload("cpu")}
DELAYED = {"offload_optimizer": {**HOST["offload_optimizer"], "delayed_update_after": 1}}
EIGHT_BITS = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}, "moments": "8bit"}}
ENGINES: dict[str, tuple[int, dict[str, Any]]] = {
    "0 fp32": (0, {}),
    "1 bf16": (1, BF16),
    "3 bf16 8bit": (3, BF16 | EIGHT_BITS),
    "3 bf16 delayed": (3, BF16 | {"zero_optimization": HOST | DELAYED}),
}


@pytest.mark.ranks(2, timeout=240)
@pytest.mark.parametrize("kind", list(ENGINES))
def test_no_change_of_a_state_reaches_a_checkpoint_that_was_begun_before_it(
    tmp_path: Path, kind: str
) -> None:
    stage, top = ENGINES[kind]
    torch.manual_seed(3)
    engine = deepseek_zero.initialize(model=Tower(33), config=config(stage, **top))[0]
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path, tag="first")
    engine.export(tmp_path / "weights", dtype="fp32")
    # Loads round 8-bit moments, but a state that was loaded stays the same at the next load
    engine.early_state = engine.optimizer.state_dict()
    engine.early_state = {**engine.early_state, "inner": copied(engine.early_state["inner"])}
    train(engine, 1, 3)
    torn = []
    for number, (name, change) in enumerate(WAYS.items()):
        if name == "set local master" and stage == 0:
            continue
        engine.save_checkpoint(tmp_path, tag="now")
        with not_yet():
            engine.save_checkpoint(tmp_path, tag="behind", wait=False)
            change(engine, tmp_path)
        engine.finish_saving()
        dist.barrier()
        now, behind = sums(tmp_path / "now"), sums(tmp_path / "behind")
        if now != behind:
            torn.append((name, [key[:3] for key in now if now[key] != behind.get(key)][:3]))
        engine.save_checkpoint(tmp_path, tag="after")
        changes = name not in ("flush", "rate") or (name == "flush" and "delayed" in kind)
        assert (sums(tmp_path / "after") != now) == changes, (
            f"{name} has changed nothing: it shows nothing ({number})"
        )
        dist.barrier()
    assert not torn


def copied(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    return [copied(each) for each in state] if isinstance(state, list) else state


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["deferred", "early", "delayed"])
def test_loaded_weights_are_not_overwritten_by_pending_updates(tmp_path: Path, kind: str) -> None:
    more: dict[str, Any] = {
        "deferred": {},
        "early": {"super_offload": True},
        "delayed": {"delayed_update_after": 1},
    }[kind]
    zero_part = HOST | {"offload_optimizer": {**HOST["offload_optimizer"], **more}}
    torch.manual_seed(3)
    engine = deepseek_zero.initialize(
        model=Tower(33), config=config(3, **BF16, zero_optimization=zero_part)
    )[0]
    engine.export(tmp_path / "weights", dtype="fp32")
    told = {name: value.clone() for name, value in engine.module.state_dict().items()}
    for load in (engine.load_weights, lambda path: zero.load_weights(engine.module, path)):
        train(engine, 0, 3)  # the last update is pending
        if kind == "early":
            # And the next update has already started
            engine.backward(engine(torch.ones(4, 7)).float().square().mean())
        load(tmp_path / "weights")
        if kind == "delayed":
            train(engine, 3, 4)  # its update is delayed too; no older one is pending
        found = engine.module.state_dict()
        assert not [
            name
            for name in told
            if "norm." not in name and not torch.equal(told[name], found[name])
        ]
