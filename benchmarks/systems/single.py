"""One process that does the work of all ranks and gives the reference losses."""

from __future__ import annotations

from torch import Tensor

from ..model import Batch
from .common import Job, MakeModel, MasterAdamW, System, backward_all


def build(make_model: MakeModel, job: Job) -> System:
    model = make_model()
    optimizer = MasterAdamW(model, bf16=job.is_bf16)

    def step(batches: list[Batch]) -> list[Tensor]:
        losses = backward_all(model, batches)
        optimizer.step()
        return losses

    return System(step)
