"""A device that is not the CPU and needs no hardware, to test code for GPUs without a GPU.

Its tensors are in host memory and every operation runs on the CPU, so results have the same bits as
on the CPU. As on a GPU, an operation that mixes its tensors with CPU tensors raises (device.cpp).
Copies in a side stream happen as late as possible: when the host waits for them, or when the
compute stream waits for them and then computes.
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
NAME = "hpu"  # a device type that torch knows by name and that no test machine has
# Checkouts and versions of torch share torch's cache of extensions, so the name includes a hash.
LIBRARY = f"deepseek_zero_toy_device_{crc32(SOURCE.read_bytes() + torch.__version__.encode()):08x}"
LIBRARY_VARIABLE = "DEEPSEEK_ZERO_TOY_DEVICE"  # the variable with the library's path, for programs


def can_build() -> bool:
    """Return whether this machine has a C++ compiler and ninja to build the device."""
    return shutil.which("g++") is not None and shutil.which("ninja") is not None


@lru_cache(maxsize=1)
def build() -> str:
    """Return the library's path in torch's cache of extensions; build it if it is missing.

    A build takes half a minute. It runs in a new process, because a process that loads the device
    cannot unload it.
    """
    made = subprocess.run(
        [sys.executable, "-m", "tests.toy"], capture_output=True, text=True, cwd=SOURCE.parents[2]
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout.splitlines()[-1]


def make() -> str:
    """Build the library in this process; `build` starts it."""
    cpp_extension.load(LIBRARY, [str(SOURCE)], extra_cflags=["-O0", "-w"], is_python_module=False)
    return str(Path(cpp_extension._get_build_directory(LIBRARY, verbose=False)) / f"{LIBRARY}.so")


@lru_cache(maxsize=1)
def register(library: str) -> Any:
    """Register the device with this process's torch, which cannot be undone."""
    spec = importlib.util.spec_from_file_location(LIBRARY, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch._register_device_module(NAME, _module())
    return module


def _module() -> ModuleType:
    """Return the module `torch.hpu` with the functions that torch calls."""
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


# Before any other code, because torch looks up its devices only once.
if LIBRARY_VARIABLE in os.environ:
    register(os.environ[LIBRARY_VARIABLE])
