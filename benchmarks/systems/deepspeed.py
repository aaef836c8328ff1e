"""Genuine DeepSpeed at one stage, with its defaults; runs in its own environment (../deepspeed_env)."""

from __future__ import annotations

from typing import Any

import deepspeed
from torch import Tensor

from ..cells import ADAMW, SEQUENCES_PER_RANK
from ..model import Batch
from .common import Job, MakeModel, System


def build(make_model: MakeModel, job: Job, *, stage: int) -> System:
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SEQUENCES_PER_RANK,
        "gradient_accumulation_steps": job.cell.accumulation,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "bf16": {"enabled": job.is_bf16},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,  # 1.0 unless said, and other losses with it
    }
    deepspeed.init_distributed("gloo", verbose=False)
    engine, *_ = deepspeed.initialize(model=make_model(), config=settings)

    def step(batches: list[Batch]) -> list[Tensor]:
        losses = []
        for tokens, targets in batches:
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return losses

    return System(step, settings=settings["zero_optimization"])
