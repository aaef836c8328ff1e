"""FSDP2 (`fully_shard`) per block and root; with a bf16 policy the fp32 parameters are main
weights.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ..cells import ADAMW
from ..model import Batch
from .common import Job, MakeModel, System, join


def build(make_model: MakeModel, job: Job, *, reshard_after_forward: bool) -> System:
    """Build the system.

    reshard_after_forward: True gathers weights twice per micro-batch (stage 3), False keeps them
    until backward.
    """
    join()
    model = make_model()
    mesh = init_device_mesh("cpu", (job.size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if job.is_bf16 else None)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(batches: list[Batch]) -> list[Tensor]:
        losses = []
        for number, (tokens, targets) in enumerate(batches):
            # As at stage 2, gathered weights are kept for the whole step; gradients are sharded
            # after every micro-batch.
            model.set_reshard_after_backward(reshard_after_forward or number == len(batches) - 1)
            loss = model(tokens, targets)
            (loss / len(batches)).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return System(
        step, settings={"reshard_after_forward": reshard_after_forward, "units": "blocks and root"}
    )
