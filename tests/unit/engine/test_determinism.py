"""Deterministic algorithms set the cuBLAS workspace before CUDA starts or raise an error."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch

import deepseek_zero
from deepseek_zero.base.errors import UsageError
from deepseek_zero.engine import start
from deepseek_zero.engine.determinism import WORKSPACE, WORKSPACE_SIZE, Determinism

GPU = torch.device("cuda", 0)


class Started(Exception):
    """Raised where CUDA would start."""


def start_cuda(*args: Any, **kwargs: Any) -> None:
    raise Started(os.environ.get(WORKSPACE))


def with_engine(config: dict[str, Any]) -> None:
    deepseek_zero.initialize(model=torch.nn.Linear(2, 2), config=config)


def with_module(config: dict[str, Any]) -> None:
    deepseek_zero.DeepSeekZeRO3(torch.nn.Linear(2, 2), **config)


@pytest.mark.parametrize("door", [with_engine, with_module])
@pytest.mark.parametrize(("asked", "size"), [(True, WORKSPACE_SIZE), (False, None)])
def test_the_workspace_is_fixed_before_the_engine_touches_the_gpu(
    door: Callable[[dict[str, Any]], None],
    asked: bool,
    size: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(WORKSPACE, "")  # so that monkeypatch restores it
    monkeypatch.delenv(WORKSPACE)
    monkeypatch.setattr(start, "default_device", lambda: GPU)
    monkeypatch.setattr(import_module("deepseek_zero.api.dialect"), "join", start_cuda)
    monkeypatch.setattr(import_module("deepseek_zero.api.wrap"), "current_mesh", start_cuda)
    with pytest.raises(Started) as raised:
        door({"deterministic": asked})
    assert raised.value.args == (size,)


def test_a_gpu_that_has_started_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKSPACE, raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    start.fix_workspace(GPU)
    with pytest.raises(UsageError, match="CUDA has started without"):
        Determinism(GPU)
    assert WORKSPACE not in os.environ and not torch.are_deterministic_algorithms_enabled()
