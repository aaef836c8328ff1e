"""No dead keys: each effective key, moved off its default, changes the assembled parts (the raw configuration
excluded).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepseek_zero as dz
from deepseek_zero.config import Config, off_default_config


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.first(x))


def model() -> nn.Module:
    return nn.Sequential(Block(), Block(), nn.Linear(8, 1))


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """`base` with `change` laid over it, section by section."""
    result = dict(base)
    for key, value in change.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def without(config: dict[str, Any], path: str) -> dict[str, Any]:
    """The same configuration with one key left out: what its companions alone would assemble."""
    head, _, rest = path.partition(".")
    result = dict(config)
    if rest and isinstance(result.get(head), dict):
        result[head] = without(result[head], rest)
    else:
        result.pop(head, None)
    return result


BASE: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3},
}
# Where leaving the key out lets the hardware decide, what it is compared with is stated.
STATED: dict[str, dict[str, Any]] = {
    "torch_autocast.dtype": {"torch_autocast": {"enabled": True, "dtype": "bf16"}},
}
ROWS = [row for row in Config.field_table() if row.status == "effective" and getattr(row, "effect", "") != "check"]


def assembled(config: dict[str, Any]) -> list[str]:
    engine, *_ = dz.initialize(model=model(), config=config)
    parts: list[str] = engine.parts.describe()
    engine.destroy()
    return parts


@pytest.mark.parametrize("row", ROWS, ids=[row.path for row in ROWS])
def test_an_effective_key_changes_the_parts(row: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    needed = getattr(row, "requires", None)
    if needed and find_spec(needed) is None:
        pytest.skip(f"needs {needed}")
    change = off_default_config(row.path)
    moved = merged(BASE, change)
    if row.path.startswith("optimizer."):
        moved["optimizer"] = change["optimizer"]
    still = without(moved, row.path)
    if row.path == "optimizer.type":
        still = {"zero_optimization": {"stage": 3}}
    still = merged(still, STATED.get(row.path, {}))
    assert assembled(moved) != assembled(still), f"{row.path} is a dead key"
