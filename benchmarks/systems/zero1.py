"""ZeroRedundancyOptimizer over DistributedDataParallel, torch's stage 1.

bf16 uses autocast over fp32 weights.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from ..cells import ADAMW
from ..model import Batch
from .common import Job, MakeModel, System, backward_all, join


def build(make_model: MakeModel, job: Job) -> System:
    join()
    model = make_model()
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, fused=True, **ADAMW)

    def step(batches: list[Batch]) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=job.is_bf16):
            losses = backward_all(parallel, batches, parallel.no_sync)
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return System(step, settings={"gradient_as_bucket_view": True, "autocast": job.is_bf16})
