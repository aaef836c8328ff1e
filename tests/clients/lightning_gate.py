"""Allow Lightning's DeepSpeed strategy on CPUs.

Lightning limits it to CUDA, although nothing else in it requires CUDA.
"""

from __future__ import annotations

from unittest import mock

from lightning.fabric.accelerators import CPUAccelerator as FabricCPU
from lightning.pytorch.accelerators import CPUAccelerator


def lift() -> None:
    for room, accelerator in (("fabric", FabricCPU), ("pytorch", CPUAccelerator)):
        module = f"lightning.{room}.strategies.deepspeed"
        mock.patch(f"{module}.CUDAAccelerator", accelerator).start()
        mock.patch(f"{module}._validate_device_index_selection").start()  # a CPU has no index
