"""Ranks that never talk: each trains on its own part of the batch and updates its own part of the
elements.

The computation that any ZeRO has, and nothing else: what a step takes beyond this is what sharding
costs.  Each rank's weights go their own way, so its losses mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from ..model import GPT, Batch
from .common import Job, MakeModel, MasterAdamW, Step, System, backward_all, join


def build(make_model: MakeModel, job: Job) -> System:
    join()
    step = floor_step(make_model(), job)
    # Silent from here on, but started together: ranks of one machine share its memory bus
    dist.barrier()
    return System(step)


def floor_step(model: GPT, job: Job, halfway: Callable[[], object] = lambda: None) -> Step:
    """One step of one rank.  halfway: called between its backward and its update."""

    def own_part(tensor: Tensor) -> Tensor:
        flat = tensor.view(-1)
        return flat[job.rank * len(flat) // job.size : (job.rank + 1) * len(flat) // job.size]

    optimizer = MasterAdamW(model, bf16=job.is_bf16, part=own_part)

    def step(batches: list[Batch]) -> list[Tensor]:
        losses = backward_all(model, batches)
        halfway()
        optimizer.step()
        return losses

    return step
