"""Genuine DeepSpeed at one stage with its defaults, in a separate environment
(../deepspeed_env).
"""

from __future__ import annotations

import deepspeed

from .common import Job, MakeModel, System, engine_settings, engine_step


def build(make_model: MakeModel, job: Job, *, stage: int) -> System:
    zero = {"stage": stage}
    # the default of 1.0 would give other losses
    settings = {**engine_settings(job, zero), "gradient_clipping": 0.0}
    deepspeed.init_distributed("gloo", verbose=False)
    engine, *_ = deepspeed.initialize(model=make_model(), config=settings)
    return System(engine_step(engine), settings=zero)
