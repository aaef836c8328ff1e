"""DistributedDataParallel: every rank holds everything.

Gradients are averaged in their own dtype.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..model import Batch
from .common import Job, MakeModel, MasterAdamW, System, backward_all, join


def build(make_model: MakeModel, job: Job) -> System:
    join()
    model = make_model()
    optimizer = MasterAdamW(model, bf16=job.is_bf16)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def step(batches: list[Batch]) -> list[Tensor]:
        losses = backward_all(parallel, batches, parallel.no_sync)
        optimizer.step()
        return losses

    return System(step, settings={"gradient_as_bucket_view": True})
