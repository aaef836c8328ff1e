"""The memory predicted by the plan equals the bytes of live storages.

Storages are found without the library's registry. All storages of Python tensors count, except
those from before the engine was built. Besides weights, gradients, main weights and moments, these
are: pooled buffers, one placeholder element per group, the optimizer's step counters of 4 bytes per
piece, and its scratch for casting or clipping gradients.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepseek_zero
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.engine.parts import plan_of
from deepseek_zero.planner.plan import plan_model
from deepseek_zero.planner.plan_settings import Machine
from deepseek_zero.planner.update import ParamGroupPlan, UpdateSettings
from deepseek_zero.report.measure import live_storages
from tests.models import Gpt, seeded
from tests.pairwise import cases
from tests.reference import MakeOptimizer
from tests.training import ALL, Run, assert_is_sharded, start_engine, train_step

STEPS = 3
UNFUSED = {"foreach": False, "fused": False}  # as in the reference's optimizer (tests/reference.py)
ADAMW: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": UNFUSED}}


def added_bytes(before: dict[int, int]) -> int:
    """Return the bytes of live storages that were not alive at `before`."""
    return sum(size for address, size in live_storages().items() if before.get(address) != size)


def assert_prediction_holds(run: Run, make: MakeOptimizer | None = None) -> Any:
    """Train some steps and compare the prediction with the memory in use.

    The prediction is made before the first step. Each state and the total must match.
    """
    before = live_storages()
    engine = start_engine(run, seeded(), make)
    predicted = plan_of(engine.runtime, engine.optimizer).bytes_by_state()
    for step in range(STEPS):
        train_step(engine, run, step)
    found = added_bytes(before)
    report = engine.memory_report()
    assert dict(report.predicted) == predicted
    wrong = {
        state: (size, report.measured[state])
        for state, size in predicted.items()
        if report.measured[state] != size
    }
    assert not wrong, f"(predicted, measured) by state: {wrong}"
    assert report.predicted_total == found
    return engine


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_plans_prediction_is_the_sum_over_all_live_storages(
    ranks: int, stage: int, dtype: str
) -> None:
    engine = assert_prediction_holds(Run(stage, dtype, optimizer="adamw"))
    if stage == 3:
        assert_is_sharded(engine)


@pytest.mark.ranks("ranks", hosts=2)
@pytest.mark.parametrize(
    ("ranks", "stage", "overlap", "tier", "bucket"),
    [
        (2, 0, True, "none", ALL),
        (2, 1, True, "none", 2048),
        (2, 2, True, "cpu", 2048),
        (2, 3, False, "none", ALL),
        (2, 3, True, "none", ALL),
        (4, 2, True, "none", ALL),
        (4, 3, True, "nvme", 2048),
    ],
)
def test_the_prediction_is_correct_between_hosts_with_two_sums_in_flight(
    ranks: int, stage: int, overlap: bool, tier: str, bucket: int
) -> None:
    run = Run(
        stage, "bf16", accumulation=2, optimizer="adamw", overlap=overlap, tier=tier, bucket=bucket
    )
    engine = assert_prediction_holds(run)
    plan = engine.runtime.plan
    assert plan.machine.most_reductions == engine.runtime.reductions.most_reductions == 2
    elsewhere = deepseek_zero.plan(
        Gpt(), run.config() | ADAMW, ranks=ranks, rank=dist.get_rank(), hosts=2
    )
    assert elsewhere.machine == plan.machine
    assert elsewhere.bytes_by_state() == plan.bytes_by_state()


AXES = {
    "stage": (0, 1, 2, 3),
    "dtype": ("fp32", "bf16"),
    "accumulation": (1, 2),
    "window": (0, 9000, ALL),
    "ahead": (0, ALL),
    "clipping": (0.0, 0.3),
    "persistence": (0, 300),
    "bucket": (2048, ALL),
    "overlap": (True, False),
    "transport": ("fastest", "gloo"),
    "tier": ("none", "cpu", "nvme"),
    "master": ("split", "fp32", "none"),
    "moments": ("fp32", "bf16", "8bit"),
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize(*cases(AXES))
def test_the_prediction_is_correct_for_all_settings(
    stage: int,
    dtype: str,
    accumulation: int,
    window: int,
    ahead: int,
    clipping: float,
    persistence: int,
    bucket: int,
    overlap: bool,
    transport: str,
    tier: str,
    master: str,
    moments: str,
) -> None:
    run = Run(
        stage,
        dtype,
        accumulation,
        window,
        clipping,
        "adamw",
        persistence,
        ahead,
        ALL,
        bucket,
        overlap,
        transport,
    )
    run = replace(run, tier=tier, master=master, moments=moments)
    assert_prediction_holds(run)


MAKERS: dict[str, MakeOptimizer] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "adam, amsgrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "rmsprop, centered": lambda params: torch.optim.RMSprop(
        params, lr=0.01, momentum=0.9, centered=True
    ),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "adadelta": lambda params: torch.optim.Adadelta(params, lr=0.01),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.01),
    "two groups": lambda params: torch.optim.AdamW(
        [{"params": params[:5], "lr": 0.1}, {"params": params[5:]}], lr=0.01
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", MAKERS)
def test_the_prediction_includes_each_optimizers_state(name: str) -> None:
    assert_prediction_holds(Run(2), MAKERS[name])


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_model_without_storage_gives_the_same_prediction(ranks: int, stage: int) -> None:
    engine = start_engine(Run(stage, optimizer="adamw"), seeded())
    with torch.device("meta"):
        model = Gpt()
    update = UpdateSettings(
        "AdamW", (ParamGroupPlan({}, frozenset(dict(model.named_parameters()))),)
    )
    machine = Machine(reads_in_place=ranks > 1)
    plan = plan_model(
        model, engine.runtime.settings, Mesh(dp_shard=ranks, rank=dist.get_rank()), machine, update
    )
    expected = plan.bytes_by_state()
    assert plan_of(engine.runtime, engine.optimizer).bytes_by_state() == expected


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_pool_buffers_do_not_grow_with_depth(stage: int) -> None:
    def buffers(blocks: int) -> int:
        run = Run(stage)
        engine = start_engine(run, seeded(Gpt, blocks=blocks))
        for step in range(2):
            train_step(engine, run, step)
        return engine.memory_report().measured["buffers"]

    assert buffers(blocks=3) == buffers(blocks=9) > 0


@pytest.mark.ranks(2)
def test_the_memory_of_stages_falls_as_in_the_table() -> None:
    totals = []
    for stage in range(4):
        engine = start_engine(
            Run(stage, "bf16", optimizer="adamw"), seeded(Gpt, width=60, hidden=240)
        )
        totals.append(plan_of(engine.runtime, engine.optimizer).bytes_by_state())
    states = ("weight", "grad", "master", "moments")
    halved = [
        {state for state in states if totals[stage][state] < 0.6 * totals[0][state]}
        for stage in range(4)
    ]
    assert halved == [set(), {"master", "moments"}, {"grad", "master", "moments"}, set(states)]


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "tier", "moments"), [("fp32", "cpu", "fp32"), ("bf16", "nvme", "8bit")]
)
@pytest.mark.parametrize(
    ("stage", "updates"),
    [
        (1, (("delayed_update_after", 1),)),
        (3, (("delayed_update_after", 1),)),
        (3, (("super_offload", True), ("undo_bytes", 60_000))),
    ],
)
def test_the_prediction_includes_pending_and_revertible_updates(
    ranks: int,
    stage: int,
    dtype: str,
    tier: str,
    moments: str,
    updates: tuple[tuple[str, Any], ...],
) -> None:
    run = Run(
        stage, dtype, clipping=0.3, optimizer="adamw", tier=tier, moments=moments, updates=updates
    )
    assert_prediction_holds(run)
