"""Enable PyTorch's fused kernels for optimizers that leave the choice open."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from ..base.device import CPU
from ..sharding.runtime import Runtime

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def are_updated_on_cpu(runtime: Runtime) -> bool:
    """Return whether all main weights are updated on a CPU."""
    masters = [group.master for group in runtime.trained_groups]
    return all(each is None or each.update_device == CPU for each in masters)


def prefer_fused(optimizer: Optimizer, *, on_cpu: bool) -> None:
    """Enable PyTorch's fused kernels if the user left the choice open.

    A fused kernel reads and writes memory once instead of many times.

    Args:
        optimizer: The inner optimizer.
        on_cpu: All shards of all ranks are updated on a CPU. PyTorch has no fused Adagrad on CUDA.
    """
    if type(optimizer) not in FUSED or (type(optimizer) is torch.optim.Adagrad and not on_cpu):
        return
    for group in optimizer.param_groups:
        if group.get("fused", False) is None and not group.get("foreach"):
            group["fused"] = True
