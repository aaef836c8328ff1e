"""Prefetch and message sizes tuned during training are equal on every rank and change no bit."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepseek_zero
from deepseek_zero.extensions.tuning import PERIOD
from deepseek_zero.sharding.regroup import resize
from tests.models import Gpt, seeded
from tests.training import ALL, Run, start_engine, train_step


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transport", ["fastest", "gloo"])
@pytest.mark.parametrize("stage", [1, 3])
def test_sizes_change_between_steps_and_every_bit_stays(stage: int, transport: str) -> None:
    def train(change: bool) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        run = Run(
            stage, window=ALL, keep=0, ahead=0, bucket=2048, transport=transport, optimizer="adamw"
        )
        engine = start_engine(run, seeded(Gpt))
        before = str(engine.runtime.schedule)
        losses = train_step(engine, run, 0)
        for step in (1, 2):
            if change:
                settings = engine.runtime.settings
                resize(
                    engine.runtime,
                    replace(settings, ahead_numel=20_000 * step, bucket_numel=10_000 * step),
                )
            losses += train_step(engine, run, step)
        assert (str(engine.runtime.schedule) != before) is (change and stage == 3)
        report = engine.memory_report()
        assert {state: report.measured[state] for state in report.predicted} == report.predicted
        return losses, engine.module.state_dict()

    (plain_losses, plain), (losses, changed) = train(False), train(True)
    assert all(map(torch.equal, plain_losses, losses))
    assert all(torch.equal(plain[name], changed[name]) for name in plain)


@pytest.mark.ranks(2)
def test_ranks_that_wait_unequally_choose_alike() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "transport": "gloo",
        "steps_per_print": None,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": "auto",
        },
    }
    engine: Any = deepseek_zero.initialize(model=seeded(Gpt), config=config)[0]
    runtime, seen = engine.runtime, []
    knob = runtime.after_steps[0].__self__.knobs[0]
    knob.value = knob.floor // 4
    for unit in runtime.units:
        if dist.get_rank() == 1:
            unit.module.register_forward_pre_hook(lambda *_: time.sleep(0.003))
    for step in range(3 * PERIOD + 1):
        train_step(engine, Run(3), step)
        seen.append(
            f"{runtime.settings.ahead_numel} {runtime.settings.bucket_numel} {runtime.schedule}"
        )
    assert len(set(seen)) > 1, "rank 0 waits for rank 1 in every unit, so that something was tried"
    mine, theirs = runtime.comm.all_gather_text("\n".join(seen), "what was chosen")
    assert mine == theirs
