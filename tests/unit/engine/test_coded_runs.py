"""Runs whose matrices travel as codes, through engines whose ranks are threads: at another number of ranks, beside other
axes, on several hosts, and with the bits of one process that rounds the same tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepseek_zero.checkpoint import load
from deepseek_zero.compat.deepspeed.engine import DeepSpeedEngine
from tests.compositions import Here, engines_of_threads
from tests.in_process import Rank, run_ranks
from tests.models import batch_of, seeded
from tests.ranks.test_parity import assert_same_bits, masters_of
from tests.reference import OPTIMIZERS

INT4 = {"zero_quantized_gradients": True, "compression": {"min_numel": 0}}


def configured(stage: int, dtype: str = "bf16", accumulation: int = 1, **zero: Any) -> dict[str, Any]:
    """The configuration of a run.  zero: keys of zero_optimization."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "steps_per_print": None,
        **({dtype: {"enabled": True}} if dtype != "fp32" else {}),
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            **zero,
        },
    }


def start(here: Here, rank: Rank, config: dict[str, Any], model: nn.Module | None = None, **request: Any) -> Any:
    """The engine of one rank; AdamW where the configuration names no optimizer."""
    model = seeded() if model is None else model
    if "optimizer" not in config:
        trained = [each for each in model.parameters() if each.requires_grad]
        request = {"optimizer": OPTIMIZERS["adamw"](trained), **request}
    return here.start(rank, model, config, DeepSpeedEngine, **request)


def train_step(engine: Any, rank: Rank, step: int) -> list[Tensor]:
    """One step on this rank's micro-batches; their losses."""
    losses = []
    for micro in range(engine.runtime.settings.accumulation):
        batch = batch_of(step, micro, rank.index)
        loss = engine(batch.tokens, batch.targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return losses


def weights_of(engine: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


ONE_BIT = {"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 2}}}
STATES = {  # what a run keeps beside weights, masters and moments
    "errors": configured(2, **{**INT4, "compression": {"min_numel": 0, "gradients": {"error_feedback": "bf16"}}}),
    "differences": configured(2, compression={"min_numel": 0, "weights": {"bits": 4}, "gradients": {"bits": 4}}),
    "signs": configured(1) | ONE_BIT,
}


@pytest.mark.parametrize("state", STATES)
def test_a_run_of_4_ranks_goes_on_at_2(state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    monkeypatch.setattr(load, "log_first", said.append)

    def save(rank: Rank) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        engine = start(here, rank, STATES[state])
        for step in range(4):
            train_step(engine, rank, step)
        engine.save_checkpoint(tmp_path, tag="four")
        found = weights_of(engine), masters_of(engine)
        engine.destroy()
        return found

    def go_on(rank: Rank) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        engine = start(here, rank, STATES[state], seeded(seed=8))
        train_step(engine, rank, 7)
        engine.load_checkpoint(tmp_path, tag="four")
        assert_same_bits(weights_of(engine), weights, "weights")
        assert_same_bits(masters_of(engine), masters, "masters")
        groups = engine.runtime.groups
        errors = [group.gradient.errors.memory for group in groups if group.gradient.errors is not None]
        errors += [group.momentum.worker for group in groups if group.momentum is not None]
        assert bool(errors) is (state != "differences") and not any(each.any() for each in errors)
        losses = torch.stack([train_step(engine, rank, step)[0] for step in (4, 5, 6)])
        assert losses.isfinite().all()
        found = weights_of(engine), masters_of(engine)
        engine.destroy()
        return found

    with engines_of_threads() as here:
        (weights, masters), *_ = run_ranks(4, save)
        one, other = run_ranks(2, go_on)
    casts = {name: master.to(weights[name].dtype) for name, master in masters.items()}
    assert torch.equal(weights["head.weight"], casts["head.weight"]) is (state != "differences")
    for mine, others in zip(one, other, strict=True):
        assert_same_bits(mine, others, "what both ranks have")
    lines = [line for line in said if "is dropped" in line]
    assert len(lines) == (0 if state == "differences" else 2), "one on each thread, which is rank 0 of a process"
