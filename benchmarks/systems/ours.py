"""This library at one stage, through `deepseek_zero.initialize`.

Stage 3 keeps no units: each is resharded after forward and gathered again for backward. Weights are
sent twice and gradients once (3 Psi), as in FSDP2 with reshard_after_forward.
"""

from __future__ import annotations

from contextlib import nullcontext

from deepseek_zero import initialize
from deepseek_zero.zero import Init

from .common import Job, MakeModel, System, engine_settings, engine_step

STAGE_3 = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}


def build(make_model: MakeModel, job: Job, *, stage: int, init: bool = False) -> System:
    """Build the system. init: build the model under `zero.Init`, sharded from the start."""
    zero = {"stage": stage, **(STAGE_3 if stage == 3 else {})}
    with Init() if init else nullcontext():
        model = make_model()
    engine, *_ = initialize(
        model=model, config={**engine_settings(job, zero), "steps_per_print": None}
    )
    return System(engine_step(engine), engine.runtime.comm.meter.total_bytes, zero)
