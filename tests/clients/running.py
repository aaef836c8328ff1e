"""Run client programs in separate processes and read the JSON that rank 0 prints."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import deepseek_zero
from tests.needs import need

HERE = Path(__file__).parent
PATHS = f"{Path(deepseek_zero.__path__[0]).parent}:{HERE.parents[1]}"
OURS = [sys.executable, "-m", "deepseek_zero.cli"]
# To save time, CI runs one program of accelerate and one of transformers. `make clients` sets this
# variable and runs the others.
BY_HAND = pytest.mark.skipif(
    not os.environ.get("DEEPSEEK_ZERO_ALL_CLIENTS"), reason="DEEPSEEK_ZERO_ALL_CLIENTS=1 runs it"
)
ONE, TWO = ["exec", sys.executable], ["run", "--as-deepspeed", "--nproc", "2"]


def need_client(*names: str) -> None:
    for name in names:
        need(importlib.util.find_spec(name) is not None, name)


def start(line: list[str], program: str, *words: object) -> subprocess.Popen[str]:
    """Start a program in separate processes, offline, with one thread each."""
    environment = {
        name: value for name, value in os.environ.items() if name != "DEEPSEEK_ZERO_AS_DEEPSPEED"
    }
    environment |= {"PYTHONPATH": PATHS, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [*line, str(HERE / program), *map(str, words)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def told(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for a program and return the JSON that rank 0 printed."""
    out, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors[-4000:]
    line = next(line for line in out.splitlines() if line.startswith("TOLD "))
    found: dict[str, Any] = json.loads(line.removeprefix("TOLD "))
    return found
