"""torch's optimizers run without importing its compiler, and step hooks run once per step."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

import deepseek_zero as dz
from deepseek_zero.optimizers.plain_steps import raw_step, undecorated

TRAINS = """
import sys, torch, deepseek_zero
model = torch.nn.Linear(8, 8)
engine, *_ = deepseek_zero.initialize(model=model, config={
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "NAME", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3},
})
before = model.state_dict()["weight"].clone()
engine.backward(engine(torch.randn(1, 8)).sum())
engine.step()
assert not torch.equal(before, model.state_dict()["weight"])
print("torch._dynamo" in sys.modules)
"""


def test_training_does_not_import_the_compiler() -> None:
    for name in ("AdamW", "SGD", "Lion"):
        done = subprocess.run(
            [sys.executable, "-c", TRAINS.replace("NAME", name)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == "False"


def test_building_does_not_change_torch() -> None:
    before = Optimizer.add_param_group
    with undecorated():
        assert Optimizer.add_param_group is not before
        torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    assert Optimizer.add_param_group is before


def doubled(step: Callable[..., Any]) -> Callable[..., Any]:
    """A user's decorator that changes the behavior of `step`."""

    @functools.wraps(step)
    def twice(self: Optimizer, *args: Any) -> None:
        step(self, *args)
        step(self, *args)

    return twice


class Doubled(torch.optim.SGD):
    step = doubled(torch.optim.SGD.step)


def test_only_torchs_own_step_is_undecorated() -> None:
    def moved(optimizer_class: type[Optimizer], patch: bool = False) -> float:
        param = nn.Parameter(torch.ones(1))
        optimizer = optimizer_class([param], lr=0.25)  # type: ignore[call-arg]
        if patch:
            optimizer.step = lambda: param.data.zero_()  # type: ignore[method-assign, assignment]
        param.grad = torch.ones(1)
        with torch.no_grad():
            raw_step(optimizer)()
        return param.item()

    assert moved(torch.optim.SGD) == 0.75
    assert moved(Doubled) == 0.5
    assert moved(torch.optim.SGD, patch=True) == 0.0


def test_step_hooks_run_once_a_step_whatever_the_tiles() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    calls: list[str] = []
    inner.register_step_pre_hook(lambda *_: calls.append("inner before"))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2, "sub_group_size": 1024},
    }
    engine, *_ = dz.initialize(model=model, optimizer=inner, config=config)
    assert engine.optimizer is not None
    assert len(engine.optimizer.shard_set.tiles.now) > 1
    engine.optimizer.register_step_post_hook(lambda *_: calls.append("ours after"))
    everywhere = register_optimizer_step_post_hook(lambda *_: calls.append("any after"))
    try:
        engine.backward(engine(torch.randn(1, 64)).sum())
        engine.step()
    finally:
        everywhere.remove()
    assert calls == ["inner before", "ours after", "any after"]


def test_two_threads_that_build_optimizers_do_not_change_torch() -> None:
    before = Optimizer.add_param_group, Optimizer.load_state_dict
    inside, go_on = threading.Event(), threading.Event()

    def first() -> None:
        with undecorated():
            inside.set()
            go_on.wait(5)

    def second() -> None:
        inside.wait(5)
        with undecorated():
            go_on.set()
            threading.Event().wait(0.1)  # meanwhile, the first thread leaves the context

    threads = [threading.Thread(target=target) for target in (first, second)]
    for thread in threads:
        thread.start()
    inside.wait(5)
    threading.Event().wait(0.1)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert (Optimizer.add_param_group, Optimizer.load_state_dict) == before
