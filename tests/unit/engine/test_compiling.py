"""`engine.compile` restores the forward method of a module."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from deepseek_zero.engine.compiling import compile_units


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
    for restore in compiled:
        restore()
    assert (forward_of(plain), forward_of(patched), forward_of(later)) == (None, own, after)
