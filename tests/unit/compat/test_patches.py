"""What is changed of torch, or of a user's module, lasts while an engine needs it, and then is as
it was.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import deepseek_zero
from deepseek_zero.compat.deepspeed.parameters import VIEWS
from deepseek_zero.engine.compiling import compile_units, restore
from deepseek_zero.optimizers.plain_steps import undecorated


def shown() -> list[str]:
    gc.collect()
    return [name for name in VIEWS if name in vars(nn.Parameter)]


def test_importing_leaves_torch_as_it_is() -> None:
    program = """
import torch
from torch import nn
classes = [nn.Parameter, nn.Module, torch.optim.Optimizer, torch.Tensor]
before = [dict(vars(each)) for each in classes]
import deepseek_zero.zero, deepseek_zero.utils, deepseek_zero.comm, deepseek_zero.checkpointing
import deepseek_zero.api.wrap, deepseek_zero.compat.deepspeed.dialect
import deepseek_zero.compat.deepspeed.constants
for each, was in zip(classes, before):
    changed = {name for name, value in vars(each).items() if was.get(name) is not value}
    assert not changed, (each, changed)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_parameters_answer_to_deepspeeds_names_while_somebody_has_sharded_some() -> None:
    assert not shown()
    with deepseek_zero.zero.Init():
        model = nn.Linear(2, 2)
        nn.Sequential(model)
    assert model.weight.ds_shape == (2, 2)
    assert shown() == list(VIEWS)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    engine = deepseek_zero.initialize(
        model=model, config={"train_batch_size": 1, "zero_optimization": zero}
    )[0]
    assert model.weight.ds_numel == 4
    engine.destroy()
    del engine, model
    assert not shown()


def test_two_threads_that_build_optimizers_leave_torch_as_it_was() -> None:
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
            threading.Event().wait(0.1)  # the first one leaves meanwhile

    threads = [threading.Thread(target=target) for target in (first, second)]
    for thread in threads:
        thread.start()
    inside.wait(5)
    threading.Event().wait(0.1)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert (Optimizer.add_param_group, Optimizer.load_state_dict) == before


def forward_of(module: nn.Module) -> Any:
    return module.__dict__.get("forward")


def test_compile_gives_back_the_forward_that_a_module_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda forward, **options: lambda *args: forward(*args))
    plain, patched, later = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
    patched.forward = own = lambda x: x + 1  # type: ignore[method-assign]
    units = [SimpleNamespace(module=module) for module in (nn.Identity(), plain, patched, later)]
    compiled = compile_units(SimpleNamespace(units=units), {})  # type: ignore[arg-type]
    assert all(forward_of(module) not in (None, own) for module in (plain, patched, later))
    later.forward = after = lambda x: x + 2  # type: ignore[method-assign]
    restore(compiled)
    assert (forward_of(plain), forward_of(patched), forward_of(later)) == (None, own, after)
