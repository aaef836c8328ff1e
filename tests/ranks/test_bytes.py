"""A step sends the number of bytes given by ZeRO's formulas and predicted by the plan.

The bytes are counted by the engine's meter and, independently, by a dispatch mode that sees every
c10d.send. Psi is the padded number of elements. Control rows (norms, late gradients, once the order
of units) carry no state and are counted separately.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models import seeded
from tests.pairwise import cases
from tests.training import ALL, Run, assert_is_sharded, start_engine, train_step

# Shared memory sends nothing; test_same_host.py checks that its meter counts the same bytes
over_gloo = partial(Run, transport="gloo")


class SendCounter(TorchDispatchMode):
    """Counts the bytes of every tensor passed to c10d.send, from any caller."""

    def __init__(self) -> None:
        super().__init__()
        self.sent_bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.name().startswith("c10d::"):
            assert function.name() in ("c10d::send", "c10d::recv_"), (
                f"{function.name()} is not counted"
            )
            if function.name() == "c10d::send":
                self.sent_bytes += sum(tensor.nbytes for tensor in args[0])
        return function(*args, **(kwargs or {}))


def count_step(engine: Any, run: Run, step: int) -> tuple[int, int]:
    """Return the bytes of states and of rows that this rank sends in one step.

    Checks that meter and dispatch mode agree.
    """
    meter = engine.runtime.comm.meter
    meter.reset()
    with SendCounter() as counter:
        train_step(engine, run, step)
    rows = meter.sent_bytes["rows"]
    assert counter.sent_bytes == meter.total_bytes()
    return meter.total_bytes() - rows, rows


# Model volumes sent per step for G micro-batches, before the factor (N-1)/N.
TIMES = {
    0: lambda micro_batches: 2,  # gradients: reduce-scatter and all-gather
    1: lambda micro_batches: 2,  # gradients: reduce-scatter; weights: all-gather
    2: lambda micro_batches: micro_batches + 1,  # as stage 1, with gradients once per micro-batch
    3: lambda micro_batches: 3 * micro_batches,  # weights: forward and backward; gradients
}


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_without_window_and_persistence_the_stages_send_2_2_g_plus_1_and_3g_times_the_model(
    ranks: int, stage: int, accumulation: int
) -> None:
    run = over_gloo(stage, accumulation=accumulation, window=0, persistence=0)
    engine = start_engine(run, seeded())
    groups = engine.runtime.groups
    padded = sum(group.layout.padded_numel for group in groups)
    parameters = sum(parameter.numel() for parameter in engine.module.parameters())
    assert parameters < padded < parameters + 1024 * ranks * len(groups), (
        "padding: under 1,024 elements per slice"
    )
    # A table of norms: one float64 per group and slice
    rows = 8 * ranks * len(groups) * (ranks - 1)
    rows += 8 * 5 * (ranks - 1)  # four flags and a checksum
    # After the first step, rank 0 sends the order of units: an int64 each
    order = 8 * len(engine.runtime.units) * (ranks - 1)
    expected = TIMES[stage](accumulation) * 4 * padded // ranks * (ranks - 1)
    assert count_step(engine, run, 0) == (expected, rows + order)
    assert count_step(engine, run, 1) == (expected, rows)
    if stage == 3:
        assert_is_sharded(engine)


AXES = {
    "stage": (0, 1, 2, 3),
    "dtype": ("fp32", "bf16"),
    "accumulation": (1, 2),
    "ranks": (2, 3),
    "window": (
        0,
        9000,
        ALL,
    ),  # elements: no, some and all units stay gathered from forward to backward
    "persistence": (0, 300),  # elements: 300 keeps norms, biases and one matrix unsharded
    "bucket": (2048, ALL),  # elements: several messages per reduction, or one
    "overlap": (True, False),
}


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize(*cases(AXES))
def test_otherwise_a_step_sends_what_plan_and_schedule_predict(
    stage: int,
    dtype: str,
    accumulation: int,
    ranks: int,
    window: int,
    persistence: int,
    bucket: int,
    overlap: bool,
) -> None:
    run = over_gloo(
        stage,
        dtype,
        accumulation,
        window,
        optimizer="adamw",
        persistence=persistence,
        bucket=bucket,
        overlap=overlap,
    )
    engine = start_engine(run, seeded())
    volume = engine.runtime.plan.volume()
    assert count_step(engine, run, 0) == (volume.state_bytes, volume.rows + volume.first_step_rows)
    assert engine.runtime.plan.volume() == volume, "units are used in the order they are declared"
    assert count_step(engine, run, 1) == (volume.state_bytes, volume.rows)


@pytest.mark.ranks(2)
def test_a_wider_window_saves_gathers_and_persistence_trades_them_for_refreshes() -> None:
    def gathered(window: int, persistence: int) -> int:
        engine = start_engine(over_gloo(3, window=window, persistence=persistence), seeded())
        return engine.runtime.plan.volume().gathers

    none, some, every = gathered(0, 0), gathered(9000, 0), gathered(ALL, 0)
    assert none == 2 * every and every < some < none
    assert gathered(0, 300) < none


@pytest.mark.ranks(2)
def test_frozen_parameters_are_gathered_and_never_reduced() -> None:
    model = seeded()
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    engine = start_engine(over_gloo(3), model)
    frozen = sum(
        group.layout.padded_numel for group in engine.runtime.groups if not group.trainable
    )
    padded = sum(group.layout.padded_numel for group in engine.runtime.groups)
    volume = engine.runtime.plan.volume()
    assert (volume.gathers, volume.reduces) == (2 * 4 * padded // 2, 4 * (padded - frozen) // 2)
    assert count_step(engine, over_gloo(3), 0)[0] == volume.state_bytes


@pytest.mark.ranks(1)
def test_a_world_of_one_sends_nothing() -> None:
    for stage in range(4):
        engine = start_engine(over_gloo(stage), seeded())
        assert count_step(engine, over_gloo(stage), 0) == (0, 0)
        assert engine.runtime.plan.volume().state_bytes == 0


def test_the_dispatch_mode_refuses_collectives_it_cannot_count() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(AssertionError, match="is not counted"), SendCounter():
            dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()
