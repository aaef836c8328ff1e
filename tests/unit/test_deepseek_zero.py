"""Importing the package: torch is not changed, and systems other than Linux are refused."""

from __future__ import annotations

import os
import subprocess
import sys


def test_importing_on_another_operating_system_raises_an_error_with_advice() -> None:
    program = "import sys; sys.platform = 'darwin'; import deepseek_zero"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: deepseek_zero runs on Linux only, and this is darwin")
    assert "WSL 2" in last
    assert done.stderr.count("Error: ") == 1, done.stderr


def test_importing_does_not_change_torch() -> None:
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
