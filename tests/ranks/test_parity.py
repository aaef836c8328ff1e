"""Sharded training gives the bits of one process that adds gradients in the documented order."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import deepseek_zero
from deepseek_zero.extensions.param_states import safe_get_full_fp32_param
from tests.models import Gpt, batch_of, seeded
from tests.pairwise import cases
from tests.reference import OPTIMIZERS, Reference, whole_batch_run
from tests.training import ALL, DTYPES, Run, assert_is_sharded, start_engine, train_step

STEPS = 3
AXES = {
    "stage": (0, 1, 2, 3),
    "dtype": ("fp32", "bf16"),
    "accumulation": (1, 2),
    "ranks": (2, 3),
    "window": (0, ALL),
    "clipping": (0.0, 0.3),  # the norm of these gradients is about 1, so 0.3 always clips
    "optimizer": ("sgd", "adamw"),
    "transport": ("fastest", "gloo"),
    "tier": ("none", "cpu", "nvme"),
}
# Only three fp32 summands reveal the order: two commute, and sums of bf16 are exact in fp32.
SHOWS_ORDER = [(stage, "fp32", 2, 3, 0, 0.0, "adamw", "fastest", "none") for stage in AXES["stage"]]


def masters_of(engine: object) -> dict[str, Tensor]:
    """Return the full fp32 main weights by name. Collective."""
    named = engine.module.named_parameters()  # type: ignore[attr-defined]
    found = {name: safe_get_full_fp32_param(parameter) for name, parameter in named}
    return {name: master for name, master in found.items() if master is not None}


def assert_same_bits(left: dict[str, Tensor], right: dict[str, Tensor], what: str) -> None:
    assert left.keys() == right.keys()
    different = {
        name: int((left[name] != right[name]).sum())
        for name in left
        if not torch.equal(left[name], right[name])
    }
    assert not different, f"{what}: elements that differ, by parameter: {different}"


def furthest(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Return the largest difference between two sets of parameters."""
    return max(float((left[name].double() - right[name].double()).abs().max()) for name in left)


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize(*cases(AXES, SHOWS_ORDER))
def test_training_gives_the_bits_of_one_process_that_runs_every_ranks_micro_batches(
    stage: int,
    dtype: str,
    accumulation: int,
    ranks: int,
    window: int,
    clipping: float,
    optimizer: str,
    transport: str,
    tier: str,
) -> None:
    run = Run(
        stage, dtype, accumulation, window, clipping, optimizer, transport=transport, tier=tier
    )
    engine = start_engine(run, seeded())
    reference = Reference(
        seeded(),
        ranks,
        accumulation,
        stage < 2,
        DTYPES[dtype],
        OPTIMIZERS[optimizer],
        max_norm=clipping,
    )
    for step in range(STEPS):
        losses = train_step(engine, run, step)
        norm = engine.get_global_grad_norm()
        everyone = [
            [batch_of(step, micro, rank) for micro in range(accumulation)] for rank in range(ranks)
        ]
        expected, expected_norm = reference.step(everyone, norm)
        assert norm == pytest.approx(expected_norm, rel=1e-6)
        assert clipping == 0 or norm > clipping, (
            "clipping has to change something, or it is not tried"
        )
        assert all(map(torch.equal, losses, expected[dist.get_rank()])), (
            f"losses differ in step {step}"
        )
        assert_same_bits(
            dict(engine.module.state_dict()), reference.values(), f"weights after step {step}"
        )
    masters = dict(zip(reference.values(), reference.masters, strict=True))
    assert_same_bits(masters_of(engine), masters, "masters")
    if stage == 3:
        assert_is_sharded(engine)


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("ranks", "accumulation"), [(2, 1), (2, 2), (3, 1), (3, 2)])
def test_losses_and_weights_follow_the_plain_whole_batch_loop(
    stage: int, ranks: int, accumulation: int
) -> None:
    run = Run(stage, accumulation=accumulation)
    engine = start_engine(run, seeded())
    losses = [torch.stack(train_step(engine, run, step)).mean() for step in range(STEPS)]
    means = torch.stack(losses)
    dist.all_reduce(means)
    whole = [
        [batch_of(step, m, r) for r in range(ranks) for m in range(accumulation)]
        for step in range(STEPS)
    ]
    expected, weights = whole_batch_run(seeded(), OPTIMIZERS["sgd"], whole)
    assert (means / ranks).tolist() == pytest.approx(expected, rel=1e-6)
    assert furthest(dict(engine.module.state_dict()), weights) < 1e-5


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("ranks", "clipping"), [(2, 0.3), (3, 0.0), (3, 0.3)])
def test_all_stages_agree_bit_by_bit_at_accumulation_1(
    dtype: str, ranks: int, clipping: float
) -> None:
    found = [_fused_adamw_run(Run(stage, dtype, 1, clipping=clipping)) for stage in range(4)]
    for stage, (norms, masters) in enumerate(found[1:], 1):
        assert norms == found[0][0], f"norms of stage {stage}"
        assert_same_bits(found[0][1], masters, f"masters of stages 0 and {stage}")


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("ranks", "clipping"), [(2, 0.0), (3, 0.3)])
def test_above_accumulation_1_stages_0_and_1_agree_bit_by_bit_and_so_do_2_and_3(
    dtype: str, ranks: int, clipping: float
) -> None:
    found = [_fused_adamw_run(Run(stage, dtype, 2, clipping=clipping)) for stage in range(4)]
    for left, right in ((0, 1), (2, 3)):
        assert found[left][0] == found[right][0], f"norms of stages {left} and {right}"
        assert_same_bits(found[left][1], found[right][1], f"masters of stages {left} and {right}")


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("dtype", "steps"), [("fp32", 3), ("bf16", 1)])
def test_above_accumulation_1_the_two_pairs_of_stages_stay_within_a_millionth(
    ranks: int, dtype: str, steps: int
) -> None:
    # One step in bf16: a difference in the last bit of a main weight may round to another weight,
    # which changes the next gradients.
    found = []
    for stage in (1, 2):
        run = Run(stage, dtype, 2)
        engine = start_engine(run, seeded())
        losses = torch.stack([torch.stack(train_step(engine, run, step)) for step in range(steps)])
        found.append((losses, masters_of(engine)))
    assert torch.allclose(found[0][0], found[1][0], rtol=0, atol=1e-6)
    assert furthest(found[0][1], found[1][1]) < 1e-6


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_seed_0s_api_with_a_plain_backward_gives_the_same_bits(ranks: int, stage: int) -> None:
    model = seeded()
    zero = {
        "stage": stage,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
    }
    door = deepseek_zero.DeepSeekZeRO3(model, zero_optimization=zero)
    assert door.runtime.settings.stage == stage
    options = {"momentum": 0.9, "weight_decay": 0.01, "foreach": False, "fused": False}
    optimizer = deepseek_zero.ZeroOptimizer(
        model.parameters(), lr=0.05, optimizer_type="sgd", **options
    )
    reference = Reference(seeded(), ranks, 1, stage < 2)
    for step in range(STEPS):
        batch = batch_of(step, 0, dist.get_rank())
        optimizer.zero_grad()
        loss = model(batch.tokens, batch.targets)
        loss.backward()
        optimizer.step()
        expected, _ = reference.step([[batch_of(step, 0, rank)] for rank in range(ranks)])
        assert torch.equal(loss.detach(), expected[dist.get_rank()][0])
    assert_same_bits(dict(model.state_dict()), reference.values(), "weights")


def test_the_reference_agrees_with_the_plain_loop_and_its_two_orders_of_adding_differ() -> None:
    batches = [[batch_of(0, micro, rank) for micro in range(2)] for rank in range(3)]
    first, second = (Reference(seeded(), 3, 2, adds_first) for adds_first in (True, False))
    for reference in (first, second):
        reference.step(batches)
    _, plain = whole_batch_run(
        seeded(), OPTIMIZERS["sgd"], [[each for of_rank in batches for each in of_rank]]
    )
    assert furthest(first.values(), plain) < 1e-6
    assert 0 < furthest(first.values(), second.values()) < 1e-6


def _fused_adamw_run(run: Run) -> tuple[list[float], dict[str, Tensor]]:
    """Return norms and main weights of a run with torch's fused AdamW.

    Every stage must shard alike.
    """
    engine = start_engine(
        run, copy.deepcopy(seeded(Gpt)), lambda params: torch.optim.AdamW(params, lr=0.01)
    )
    norms = []
    for step in range(STEPS):
        train_step(engine, run, step)
        norms.append(engine.get_global_grad_norm())
    assert all(group["fused"] for group in engine.optimizer.param_groups)
    return norms, masters_of(engine)
