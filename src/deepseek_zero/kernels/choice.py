"""What computes updates and sums on a CPU: compiled kernels, or PyTorch.

Kernels are compiled with llvmlite (`jit.py`), which is optional (the extra `fast`). It is imported
at the first update and not with the package.
"""

from __future__ import annotations

import os
import warnings
from importlib.util import find_spec

from ..base.errors import UsageError
from ..base.log import log_once

VARIABLE = "DEEPSEEK_ZERO_KERNELS"


def chosen(wanted: str) -> str:
    """Return the choice of the user: "auto", "compiled" or "torch".

    The environment variable DEEPSEEK_ZERO_KERNELS overrides the configuration.

    Args:
        wanted: Value of the configuration key.

    Raises:
        UsageError: The environment variable has another value.
    """
    wanted = os.environ.get(VARIABLE) or wanted
    if wanted == "numba":  # the name in 0.2.0, in which numba compiled the kernels
        warnings.warn('"numba" is called "compiled" now', DeprecationWarning, stacklevel=2)
        return "compiled"
    if wanted not in ("auto", "compiled", "torch"):
        raise UsageError(
            f"{VARIABLE} is {wanted!r}.",
            "It chooses what computes the optimizer's updates.",
            "set it to auto, compiled or torch, or leave it out.",
        )
    return wanted


def available(wanted: str) -> str:
    """Return what computes updates on a CPU: "auto", "compiled" or "torch".

    Args:
        wanted: Value of the configuration key; see `chosen`.

    Raises:
        UsageError: Compiled kernels were chosen, and llvmlite is not installed.
    """
    wanted = chosen(wanted)
    if wanted == "torch" or find_spec("llvmlite") is not None:
        return wanted
    if wanted == "compiled":
        raise UsageError(
            "updates are to be computed by compiled kernels, and llvmlite is not installed.",
            'The configuration says "optimizer": {"kernels": "compiled"}, or '
            f"{VARIABLE} says compiled.",
            "install the extra `fast`: pip install llvmlite; or leave the setting out.",
        )
    log_once(
        "llvmlite is not installed, so PyTorch computes updates on a CPU, more slowly; the extra "
        "`fast` installs it."
    )
    return "torch"
