"""The package `deepspeed` that is only another name for this one: where it lies, and how it is put
first.

Clients look for a package and its metadata (`importlib.metadata`), so it is a directory with both
that nothing finds until it is put on the path; it then stands before a genuine DeepSpeed and
changes nothing of it.  Imports no torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path

from ...base.errors import UsageError

DIRECTORY = Path(__file__).parent / "_dropin"
PROGRAMS = DIRECTORY / "bin"  # `deepspeed` and `ds_report`, for what is run by `deepseek-zero exec`
PYTHON = "DEEPSEEK_ZERO_PYTHON"  # the Python that those two programs start
# 1: every Python of this environment starts so (deepseek_zero_dropin.pth)
SWITCH = "DEEPSEEK_ZERO_AS_DEEPSPEED"

# They ask whether DeepSpeed is there when they are imported, and remember the answer.
CLIENTS = (
    "accelerate",
    "transformers",
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
    "trl",
)


def install_as_deepspeed() -> Path:
    """Make `import deepspeed` mean this library, in this process and those it starts; returns the
    drop-in's directory.

    Call it before accelerate, transformers, lightning or trl are imported.  A genuine DeepSpeed
    stays as it is on the disk.  Calling it twice is harmless.
    """
    if not is_dropin_active():
        _refuse_what_was_imported()
        sys.path.insert(0, str(DIRECTORY))
        importlib.invalidate_caches()
    os.environ["PYTHONPATH"] = _with_first(os.environ.get("PYTHONPATH", ""))
    return DIRECTORY


def uninstall_as_deepspeed() -> None:
    """Undo `install_as_deepspeed`.  Clients that were imported meanwhile keep what they saw."""
    sys.path[:] = [entry for entry in sys.path if entry != str(DIRECTORY)]
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(DIRECTORY) in entries:
        os.environ["PYTHONPATH"] = os.pathsep.join(
            entry for entry in entries if entry != str(DIRECTORY)
        )
    if is_dropin_imported():
        for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
            del sys.modules[name]
    importlib.invalidate_caches()


def is_dropin_active() -> bool:
    """Whether `import deepspeed` means this library, imported already or not."""
    if "deepspeed" in sys.modules:
        return is_dropin_imported()
    spec = PathFinder.find_spec("deepspeed")
    return spec is not None and _is_ours(spec.origin)


def is_dropin_imported() -> bool:
    """Whether somebody in this process has imported `deepspeed` and got this library."""
    return _is_ours(getattr(sys.modules.get("deepspeed"), "__file__", None))


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What a program must be started with to find the drop-in, and the programs `deepspeed` and
    `ds_report`.
    """
    return {
        "PYTHONPATH": _with_first(environment.get("PYTHONPATH", "")),
        "PATH": os.pathsep.join([str(PROGRAMS), environment.get("PATH", os.defpath)]),
        PYTHON: sys.executable,
    }


def _with_first(path: str) -> str:
    rest = [entry for entry in path.split(os.pathsep) if entry and entry != str(DIRECTORY)]
    return os.pathsep.join([str(DIRECTORY), *rest])


def _is_ours(file: str | None) -> bool:
    return file is not None and DIRECTORY in Path(file).parents


def _refuse_what_was_imported() -> None:
    if "deepspeed" in sys.modules:
        raise UsageError(
            "deepspeed is imported already, from "
            f"{getattr(sys.modules['deepspeed'], '__file__', 'somewhere')}.",
            "Objects of two libraries under one name would meet in this process.",
            "call deepseek_zero.install_as_deepspeed() before anything imports deepspeed.",
        )
    early = [name for name in CLIENTS if name in sys.modules]
    if early:
        raise UsageError(
            f"{', '.join(early)} is imported already.",
            "It asked at its import whether DeepSpeed is there, and remembers the answer.",
            "call deepseek_zero.install_as_deepspeed() first of all, or start the script by "
            "`deepseek-zero exec`.",
        )
