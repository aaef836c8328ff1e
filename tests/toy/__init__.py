"""A device that is not the CPU and needs no hardware, so that what runs beside a GPU is tested
where there is none.

Its tensors lie in plain memory and every operation on them runs on the CPU, so results have the
CPU's bits; but an operation that mixes them with the CPU's is an error, as it is on a GPU
(device.cpp).  Copies in a stream of their own
happen as late as they may: when the host waits for them, or when the stream that computes was told
to and computes.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

import torch
from torch.utils import cpp_extension

SOURCE = Path(__file__).with_name("device.cpp")
NAME = "hpu"  # a device that torch knows by name and that no machine here has
# Checkouts and versions of torch share torch's cache of extensions, so each content has a name of
# its own.
LIBRARY = f"deepseek_zero_toy_device_{crc32(SOURCE.read_bytes() + torch.__version__.encode()):08x}"
LIBRARY_VARIABLE = "DEEPSEEK_ZERO_TOY_DEVICE"  # where a program finds it


def can_build() -> bool:
    """Whether this machine has what makes the device: a C++ compiler and ninja."""
    return shutil.which("g++") is not None and shutil.which("ninja") is not None


@lru_cache(maxsize=1)
def build() -> str:
    """The device as a library in torch's cache of extensions, made where it is not there: half a
    minute.

    In a process of its own: whoever loads it has the device for good.
    """
    made = subprocess.run(
        [sys.executable, "-m", "tests.toy"], capture_output=True, text=True, cwd=SOURCE.parents[2]
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout.splitlines()[-1]


def make() -> str:
    """What `build` runs."""
    cpp_extension.load(LIBRARY, [str(SOURCE)], extra_cflags=["-O0", "-w"], is_python_module=False)
    return str(Path(cpp_extension._get_build_directory(LIBRARY, verbose=False)) / f"{LIBRARY}.so")


@lru_cache(maxsize=1)
def register(library: str) -> Any:
    """Let this process's torch have the device; there is no way back."""
    spec = importlib.util.spec_from_file_location(LIBRARY, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch._register_device_module(NAME, _module())
    return module


def _module() -> ModuleType:
    """What torch asks a device's module."""
    name = f"torch.{NAME}"
    module = sys.modules[name] = ModuleType(name)
    answers = {
        "is_available": True,
        "is_initialized": True,
        "_is_in_bad_fork": False,
        "_lazy_init": None,
        "device_count": 1,
        "current_device": 0,
        "get_amp_supported_dtype": [torch.bfloat16, torch.float16],
        "manual_seed_all": None,
    }
    module.get_rng_state = lambda device=0: torch.get_rng_state()  # type: ignore[attr-defined]
    module.set_rng_state = lambda state, device=0: torch.set_rng_state(state)  # type: ignore[attr-defined]
    for attribute, answer in answers.items():
        setattr(module, attribute, lambda *_, answer=answer: answer)
    return module


# Before anything asks torch which devices there are: it asks once
if LIBRARY_VARIABLE in os.environ:
    register(os.environ[LIBRARY_VARIABLE])
