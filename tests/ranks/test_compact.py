"""Moments in 16 or 8 bits and weights without main weights.

They give the same bits on every stage and tier, and losses near those of the exact run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepseek_zero.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state
from tests.models import seeded
from tests.pairwise import cases
from tests.training import Run, start_engine, train_step

STEPS = 4
WAYS = {
    "bf16 moments": {"dtype": "bf16", "moments": "bf16"},
    "8-bit moments": {"dtype": "bf16", "moments": "8bit"},
    "8-bit moments in fp32": {"dtype": "fp32", "moments": "8bit"},
    "no master": {"dtype": "bf16", "master": "none", "moments": "fp32"},
    "6 bytes": {"dtype": "bf16", "master": "none", "moments": "bf16"},
}
AXES: dict[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2, 3),
    "ranks": (1, 2, 3),
    "tier": ("none", "cpu", "nvme"),
    "accumulation": (1, 3),
    "clipping": (0.0, 0.3),
    "way": tuple(WAYS),
}


def everything(run: Run, steps: int = STEPS) -> list[Tensor]:
    """Return the losses, then the full weights and moments."""
    engine = start_engine(run, seeded())
    found = [torch.stack(train_step(engine, run, step)) for step in range(steps)]
    found += [value.clone() for value in engine.state_dict().values()]
    for param in engine.module.parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            state = safe_get_full_optimizer_state(param, key)
            assert state is not None
            found.append(state)
    engine.destroy()
    return found


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize(*cases(AXES))
def test_tiers_and_stages_have_the_same_bits(
    stage: int, ranks: int, tier: str, accumulation: int, clipping: float, way: str
) -> None:
    run = Run(
        stage,
        accumulation=accumulation,
        clipping=clipping,
        optimizer="adamw",
        tier=tier,
        **WAYS[way],
    )
    # Stages 2 and 3 reduce each micro-batch, so they sum in another order
    first = 0 if accumulation == 1 or stage < 2 else 2
    plain = Run(first, accumulation=accumulation, clipping=clipping, optimizer="adamw", **WAYS[way])
    for left, right in zip(everything(run), everything(plain), strict=True):
        assert torch.equal(left, right)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_the_losses_stay_near_those_of_the_exact_run(way: str) -> None:
    steps = 20
    run = Run(3, optimizer="adamw", **WAYS[way])
    exact = Run(3, WAYS[way]["dtype"], optimizer="adamw")
    found, expected = (
        torch.stack(everything(each, steps)[:steps]).mean(dim=1) for each in (run, exact)
    )
    fall = float(expected[0] - expected[-1])
    assert not torch.equal(found, expected)
    assert float((found - expected).abs().max()) < 0.1 * fall


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tier", ["none", "nvme"])
@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_a_moment_that_is_set_is_what_the_next_step_uses(tier: str, moments: str) -> None:
    def meddle(factor: float) -> list[Tensor]:
        run = Run(3, "bf16", optimizer="adamw", tier=tier, moments=moments)
        engine = start_engine(run, seeded())
        train_step(engine, run, 0)
        for param in engine.module.parameters():
            state = safe_get_full_optimizer_state(param, "exp_avg")
            assert state is not None
            safe_set_full_optimizer_state(param, state * factor, "exp_avg")
        train_step(engine, run, 1)
        return [value.clone() for value in engine.state_dict().values()]

    untouched, same, other = meddle(1.0), meddle(1.0), meddle(-8.0)
    assert all(map(torch.equal, untouched, same))
    assert not all(map(torch.equal, untouched, other))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tier", ["none", "nvme"])
def test_a_checkpoint_resumes_bit_by_bit(way: str, tier: str, tmp_path: Path) -> None:
    run = Run(3, optimizer="adamw", tier=tier, **WAYS[way])

    def weights(engine: Any) -> list[Tensor]:
        return [value.clone() for value in engine.state_dict().values()]

    first = start_engine(run, seeded())
    for step in range(2):
        train_step(first, run, step)
    first.save_checkpoint(tmp_path)
    for step in range(2, 4):
        train_step(first, run, step)
    second = start_engine(run, seeded())
    second.load_checkpoint(tmp_path)
    for step in range(2, 4):
        train_step(second, run, step)
    report = second.memory_report()  # loaded states were moved to their tier
    assert {state: report.measured[state] for state in report.predicted} == dict(report.predicted)
    assert all(map(torch.equal, weights(second), weights(first)))
