"""DeepSpeed's `get_accelerator()`: what scripts ask of the device this rank trains on.

Reached through the drop-in (`deepspeed.accelerator`).
"""

from __future__ import annotations

from functools import cache

import torch

from ..base.device import allocated_bytes, default_device, has_fast_bf16
from ..base.mesh import default_backend


class Accelerator:
    """One rank's device, a GPU or the CPU, under DeepSpeed's method names."""

    def device_name(self, device_index: int | None = None) -> str:
        kind = default_device().type
        return kind if device_index is None or kind == "cpu" else f"{kind}:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(device_index))

    def current_device(self) -> int | str:
        return "cpu" if default_device().type == "cpu" else torch.cuda.current_device()

    def current_device_name(self) -> str:
        return self.device_name(None if default_device().type == "cpu" else torch.cuda.current_device())

    def device_count(self) -> int:
        return torch.cuda.device_count() if default_device().type == "cuda" else 1

    def set_device(self, device_index: int) -> None:
        if default_device().type == "cuda":
            torch.cuda.set_device(device_index)

    def is_available(self) -> bool:
        return True

    def communication_backend_name(self) -> str:
        return default_backend(default_device())

    def synchronize(self, device_index: int | None = None) -> None:
        if default_device().type == "cuda":
            torch.cuda.synchronize(device_index)

    def empty_cache(self) -> None:
        if default_device().type == "cuda":
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return allocated_bytes(default_device() if device_index is None else self.device(device_index))

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)  # of the CPU and every GPU

    def is_bf16_supported(self) -> bool:
        return default_device().type == "cpu" or has_fast_bf16(default_device())

    def is_fp16_supported(self) -> bool:
        return True


@cache
def get_accelerator() -> Accelerator:
    """The device this rank trains on; one object per process."""
    return Accelerator()
