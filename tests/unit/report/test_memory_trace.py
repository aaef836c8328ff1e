"""The memory of a step by category: engine states, and activations by phase."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepseek_zero
from deepseek_zero.base.errors import NotBuiltError, UsageError
from deepseek_zero.report import plots
from deepseek_zero.report.memory_trace import ACTIVATIONS, MemoryTrace

WIDTH, ROWS = 64, 256


def engine_of(**section: Any) -> Any:
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH))
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 1},
        **section,
    }
    return deepseek_zero.initialize(model=model, config=config)[0]


def test_a_step_is_followed_by_kind(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    engine, x = engine_of(), torch.randn(ROWS, WIDTH)
    with engine.memory_trace(tmp_path / "memory.png") as trace:
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
    params = sum(param.numel() for param in engine.module.parameters()) * 4
    peak = trace.peak
    assert params <= peak["weight"] <= params + 4096 and sum(peak.values()) == trace.peak_bytes
    kept = [sample.get(ACTIVATIONS, 0) for sample in trace.samples]
    assert max(kept) >= ROWS * 4 * WIDTH * 4  # the output of tanh is saved for the backward pass
    assert kept[-1] < ROWS * WIDTH * 4 and kept[0] < max(kept)
    assert trace.samples[-1]["moments"] >= 2 * params
    assert [phase for _, phase in trace.marks if phase in ("forward", "backward", "optimizer")]
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    engine.destroy()


def test_freed_memory_is_not_counted() -> None:
    trace = MemoryTrace(dict, lambda: "forward")
    with trace.recording():
        x = torch.zeros(1000)
        y = x + 1
        del x
        z = y.view(10, 100)
        del y
        del z
    assert trace.peak_bytes == 8000
    assert sum(trace.samples[-1].values()) == 0


def test_a_trace_without_memory_is_not_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace = MemoryTrace(dict, lambda: "forward")
    for _ in range(2):
        with pytest.raises(UsageError, match="has no memory to draw"):
            trace.draw(tmp_path / "memory.png")
        trace.sample()
    assert not (tmp_path / "memory.png").exists()


def test_a_picture_without_matplotlib_is_refused_before_the_block(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    tracing = engine_of().memory_trace(tmp_path / "memory.png")
    with pytest.raises(NotBuiltError, match="pip install matplotlib"), tracing:
        pytest.fail("the block was run")
