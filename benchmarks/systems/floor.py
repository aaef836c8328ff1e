"""Ranks that never communicate: each trains on its part of the batch and updates its part of the
elements.

This is the computation that any ZeRO implementation has. The remaining time of a step is the cost
of sharding. The weights of the ranks diverge, so losses have no meaning.
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
    # Ranks start together, because they share the machine's memory bandwidth.
    dist.barrier()
    return System(step)


def floor_step(model: GPT, job: Job, halfway: Callable[[], object] = lambda: None) -> Step:
    """Return a step of one rank. halfway: called between its backward and its update."""

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
