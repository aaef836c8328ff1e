"""Four steps, a checkpoint and four steps in a new engine equal eight steps, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import deepseek_zero
from tests.pairwise import cases
from tests.plain import here
from tests.ranks.test_checkpoint import assert_same, moments_of
from tests.tower import BF16, FP16, Tower
from tests.training import offload

AXES = {
    "ranks": (1, 2, 3),
    "stage": (0, 1, 2, 3),
    "tier": ("none", "cpu", "nvme"),
    "precision": ("fp32", "bf16", "bf16 whole master", "bf16 no master", "fp16"),
    "optimizer": ("AdamW", "AdamW 8bit", "SGD", "Lion", "Adagrad", "Muon", "Lamb"),
    "schedule": ("WarmupLR", "WarmupCosineLR", "OneCycle", "none"),
    "accumulation": (1, 3),
    "behind": (False, True),
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": BF16,
    "bf16 whole master": {"bf16": {"enabled": True, "master": "fp32"}},
    "bf16 no master": {"bf16": {"enabled": True, "master": "none"}},
    "fp16": FP16,
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    name: {
        "type": name.split()[0],
        "params": {"lr": 1e-2},
        **({"moments": "8bit"} if "8bit" in name else {}),
    }
    for name in AXES["optimizer"]  # type: ignore[union-attr]
}
OPTIMIZERS["SGD"]["params"] |= {"momentum": 0.9}
SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 1e-2}},
    "WarmupCosineLR": {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 9, "warmup_num_steps": 3},
    },
    "OneCycle": {
        "type": "OneCycle",
        "params": {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3},
    },
    "none": {},
}


def config_of(
    stage: int, tier: str, precision: str, optimizer: str, schedule: str, accumulation: int
) -> dict[str, Any]:
    places = offload(tier, states=stage >= 1, weights=stage == 3) if stage else {}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "steps_per_print": None,
        "gradient_clipping": 1.0,
        "optimizer": OPTIMIZERS[optimizer],
        "scheduler": SCHEDULES[schedule],
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **places},
        **PRECISIONS[precision],
    }


def engine_of(config: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    return deepseek_zero.initialize(model=Tower(33), config=config)[0]


def train(engine: Any, first: int, last: int, accumulation: int) -> None:
    for number in range(first * accumulation, last * accumulation):
        generator = torch.Generator().manual_seed(100 * number + here())
        engine.backward(engine(torch.randn(4, 7, generator=generator)).float().square().mean())
        engine.step()


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize(*cases(AXES))
def test_four_steps_and_four_after_a_checkpoint_are_eight(
    tmp_path: Path,
    ranks: int,
    stage: int,
    tier: str,
    precision: str,
    optimizer: str,
    schedule: str,
    accumulation: int,
    behind: bool,
) -> None:
    config = config_of(stage, tier, precision, optimizer, schedule, accumulation)
    eight = engine_of(config)
    train(eight, 0, 4, accumulation)
    eight.save_checkpoint(tmp_path, wait=not behind)
    train(eight, 4, 8, accumulation)
    eight.finish_saving()
    resumed = engine_of(config)
    resumed.load_checkpoint(tmp_path, tag="global_step4")
    train(resumed, 4, 8, accumulation)
    assert_same(eight.module_state_dict(), resumed.module_state_dict())
    assert_same(moments_of(eight), moments_of(resumed))
    assert eight.get_lr() == resumed.get_lr()
    assert (eight.global_steps, eight.micro_steps, eight.skipped_steps) == (
        resumed.global_steps,
        resumed.micro_steps,
        resumed.skipped_steps,
    )
