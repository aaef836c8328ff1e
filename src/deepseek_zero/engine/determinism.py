"""Deterministic algorithms in PyTorch while an engine that requires them exists.

The library's own sums have a fixed order in any case (`ordered_sum`), but PyTorch's kernels may add
with atomics or choose an algorithm by timing. The switches are global to the process, so the
engines share them and the last engine restores them.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..base.errors import UsageError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACE_SIZE = ":4096:8"


@dataclass(frozen=True)
class _Switches:
    """PyTorch's switches for deterministic algorithms."""

    deterministic: bool = True
    warns_only: bool = False
    tries_cudnn: bool = False  # cuDNN times its algorithms and may choose another one in each run

    @staticmethod
    def now() -> _Switches:
        """Return the current switches."""
        return _Switches(
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.benchmark,
        )

    def set(self) -> None:
        """Apply these switches."""
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warns_only)
        torch.backends.cudnn.benchmark = self.tries_cudnn


class Determinism:
    """Enables PyTorch's deterministic algorithms for as long as one engine exists.

    `release` restores PyTorch's previous settings. If it is not called, they are restored when
    the object is garbage-collected.
    """

    _holds: ClassVar[int] = 0
    _before: ClassVar[_Switches] = _Switches()

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda" and WORKSPACE not in os.environ:
            raise UsageError(
                f"deterministic is true, but CUDA has started without {WORKSPACE}.",
                "cuBLAS reads it once, when it starts; without it matrix products may differ from "
                "run to run.",
                f"set {WORKSPACE}={WORKSPACE_SIZE} before the program starts, or build the model "
                "on the CPU and the engine before anything touches the GPU.",
            )
        if not Determinism._holds:
            Determinism._before = _Switches.now()
        Determinism._holds += 1
        _Switches().set()
        self._end = weakref.finalize(self, Determinism._let_go)
        self._end.atexit = False

    def release(self) -> None:
        """Restore PyTorch's switches, unless another engine still needs them. Idempotent."""
        self._end()

    @classmethod
    def _let_go(cls) -> None:
        cls._holds -= 1
        if not cls._holds:
            cls._before.set()


def fix_workspace(device: torch.device) -> None:
    """Set a cuBLAS workspace of fixed size, so that cuBLAS always adds in one order.

    cuBLAS reads the variable once, when CUDA starts, so this has no effect afterwards. Call it
    before the engine moves the model to the device.
    """
    if device.type == "cuda" and not torch.cuda.is_initialized():
        os.environ.setdefault(WORKSPACE, WORKSPACE_SIZE)
