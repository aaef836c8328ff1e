"""Install and remove the drop-in package `deepspeed`.

Clients look for a package and its metadata (`importlib.metadata`). The drop-in is therefore a
directory with both, which is not on the path by default. It has to precede a genuine DeepSpeed,
which it does not change. This module does not import torch.
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
# `deepspeed`, `ds_report` and their short names for programs started by `deepseek-zero exec`
PROGRAMS = DIRECTORY / "bin"
PYTHON = "DEEPSEEK_ZERO_PYTHON"  # the Python that those programs start
# If 1, every Python of this environment starts with the drop-in (deepseek_zero_dropin.pth).
SWITCH = "DEEPSEEK_ZERO_AS_DEEPSPEED"

# Libraries that check for DeepSpeed when they are imported and cache the result
CLIENTS = (
    "accelerate",
    "transformers",
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
    "trl",
)


def install_as_deepspeed() -> Path:
    """Make `import deepspeed` import this library in this process and its child processes.

    Call this function before accelerate, transformers, lightning or trl is imported. It puts the
    directory of the drop-in first on `sys.path` and on `PYTHONPATH`. It does not change an
    installed DeepSpeed. A second call has no effect.

    Returns:
        The directory of the drop-in.

    Raises:
        UsageError: `deepspeed` or one of these libraries is already imported.
    """
    if not is_dropin_active():
        _refuse_what_was_imported()
        sys.path.insert(0, str(DIRECTORY))
        importlib.invalidate_caches()
    os.environ["PYTHONPATH"] = _with_first(os.environ.get("PYTHONPATH", ""))
    return DIRECTORY


def uninstall_as_deepspeed() -> None:
    """Undo `install_as_deepspeed`.

    The drop-in is removed from `sys.path` and `PYTHONPATH`, and its modules from `sys.modules`.
    Libraries that were imported between the two calls have cached that DeepSpeed is available, and
    do not check it again.
    """
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
    """Return whether `import deepspeed` imports this library."""
    if "deepspeed" in sys.modules:
        return is_dropin_imported()
    spec = PathFinder.find_spec("deepspeed")
    return spec is not None and _is_ours(spec.origin)


def is_dropin_imported() -> bool:
    """Return whether this process has imported `deepspeed` from this library."""
    return _is_ours(getattr(sys.modules.get("deepspeed"), "__file__", None))


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that make a child process import the drop-in.

    Args:
        environment: The variables of the parent process, whose `PYTHONPATH` and `PATH` are
            extended.

    Returns:
        The values of `PYTHONPATH`, `PATH` and `DEEPSEEK_ZERO_PYTHON`, which the caller adds to the
        child's environment. The result does not include the other variables of `environment`.
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
            "Objects of two libraries under one name would mix in this process.",
            "call deepseek_zero.install_as_deepspeed() before anything imports deepspeed.",
        )
    early = [name for name in CLIENTS if name in sys.modules]
    if early:
        raise UsageError(
            f"{', '.join(early)} is imported already.",
            "At its import it checks whether DeepSpeed is installed, and caches the result.",
            "call deepseek_zero.install_as_deepspeed() first of all, or start the script by "
            "`deepseek-zero exec`.",
        )
