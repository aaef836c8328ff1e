"""DeepSpeed's OnDevice: a model built on a device, or on none ("meta"), in a dtype.  Reached through the drop-in."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

import torch


class OnDevice:
    """What is made inside is made on `device`, and floating values in `dtype`.

    "meta": shapes without values.  To train a model larger than memory, build it under zero.Init, which gives each rank
    its slices.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, device, enabled
        self._inside = ExitStack()

    def __enter__(self) -> OnDevice:
        if self.enabled:
            before = torch.get_default_dtype()
            self._inside.callback(torch.set_default_dtype, before)
            torch.set_default_dtype(self.dtype)
            self._inside.enter_context(torch.device(self.device))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._inside.close()
