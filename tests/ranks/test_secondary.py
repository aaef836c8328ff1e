"""`zero_hpz_partition_size` in the engine on real ranks: bits, bytes sent, memory, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepseek_zero
from deepseek_zero.base.errors import UsageError
from deepseek_zero.comm.transports.shared_memory import SharedMemory
from deepseek_zero.extensions.shared_weight import SharedWeight
from tests.models import Gpt, seeded
from tests.ranks.test_bytes import SendCounter
from tests.ranks.test_same_host import hosts
from tests.reference import OPTIMIZERS
from tests.training import Run, train_step

WORLD = 4


def start(run: Run, near: int, **keys: Any) -> Any:
    config, model = run.config(), seeded(Gpt)
    config["zero_optimization"] |= {"zero_hpz_partition_size": near, **keys}
    optimizer = OPTIMIZERS[run.optimizer](list(model.parameters()))
    return deepseek_zero.initialize(model=model, optimizer=optimizer, config=config)[0]


def assert_alike(first: Any, second: Any) -> None:
    weights = second.module.state_dict()
    for name, weight in first.module.state_dict().items():
        assert torch.equal(weight, weights[name]), name


@pytest.mark.ranks(WORLD)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_run_has_the_bits_of_stage_3_and_its_bytes_and_memory_are_the_plans(
    accumulation: int,
) -> None:
    run = Run(3, "bf16", accumulation, optimizer="adamw", transport="gloo")
    engine, plain = start(run, 2), start(run, 1)
    for step in range(3):
        losses, expected = train_step(engine, run, step), train_step(plain, run, step)
        assert all(map(torch.equal, losses, expected))
    volume, meter = engine.runtime.plan.volume(), engine.runtime.comm.meter
    meter.reset()
    with SendCounter() as counter:
        train_step(engine, run, 3)
    train_step(plain, run, 3)
    assert counter.sent_bytes == meter.total_bytes() == volume.state_bytes + volume.rows
    assert meter.sent_bytes["inner_gather"] == volume.inner_gathers > 0
    assert meter.sent_bytes["all_gather"] == volume.gathers - volume.inner_gathers
    assert volume.gathers < plain.runtime.plan.volume().gathers
    report = engine.memory_report()
    assert {state: nbytes for state, nbytes in report.predicted.items() if nbytes} == {
        state: nbytes for state, nbytes in report.measured.items() if nbytes and state != "other"
    }
    psi = sum(group.layout.padded_numel for group in engine.runtime.groups)
    assert report.measured["secondary"] == psi // 2 * 2  # half of the bf16 weights per rank
    assert "secondary" not in plain.memory_report().measured
    assert "sharded over 2 of 4 ranks (hpZ)" in str(engine.runtime.plan)
    config = run.config() | {
        "optimizer": {"type": "AdamW", "params": {"fused": False, "foreach": False}}
    }
    config["zero_optimization"] |= {"zero_hpz_partition_size": 2}
    plan = deepseek_zero.plan(seeded(Gpt), config, ranks=WORLD, rank=dist.get_rank())
    assert plan.volume() == volume
    assert plan.bytes_by_state() == report.predicted
    assert_alike(engine, plain)


@pytest.mark.ranks(WORLD)
def test_a_unit_is_gathered_between_hosts_once_a_step_and_later_through_shared_memory() -> None:
    run = Run(3, "bf16", 2, optimizer="adamw")
    with hosts(lambda rank: f"host {rank // 2}"):
        engine, plain = start(run, 2), start(run, 1)
        copies = [group.weight_gather for group in engine.runtime.groups]
        assert all(isinstance(copy.comm_ctx.comm.lanes.transport, SharedMemory) for copy in copies)
        for step in range(3):
            engine.runtime.comm.meter.reset()
            assert all(
                map(torch.equal, train_step(engine, run, step), train_step(plain, run, step))
            )
        volume, meter = engine.runtime.plan.volume(), engine.runtime.comm.meter
        assert meter.total_bytes() == volume.state_bytes + volume.rows
        assert meter.sent_bytes["inner_gather"] == volume.inner_gathers > 0
        report = engine.memory_report()
        assert report.measured_total == report.predicted_total
        assert_alike(engine, plain)
    alone = start(run, 2)
    assert all(isinstance(group.weight_gather, SharedWeight) for group in alone.runtime.groups)


@pytest.mark.ranks(WORLD)
def test_a_checkpoint_and_an_evaluation_in_the_middle_change_no_bit(tmp_path: Path) -> None:
    run = Run(3, "bf16", 2, optimizer="adamw", transport="gloo")
    engine, plain = start(run, 2), start(run, 1)
    for step in range(2):
        train_step(engine, run, step)
        train_step(plain, run, step)
    engine.save_checkpoint(tmp_path, tag="two")
    assert "secondary" not in (tmp_path / "two" / "manifest.json").read_text()
    train_step(engine, run, 2)
    with torch.no_grad():
        # With other weights than those loaded next
        engine(torch.zeros(1, 3, dtype=torch.long))
    engine.load_checkpoint(tmp_path, tag="two")
    for step in range(2, 4):
        with torch.no_grad():
            tokens = torch.ones(1, 3, dtype=torch.long)
            assert torch.equal(engine(tokens), plain(tokens))
        assert all(map(torch.equal, train_step(engine, run, step), train_step(plain, run, step)))
    assert_alike(engine, plain)


@pytest.mark.ranks(WORLD)
def test_an_overflow_skips_the_step_and_the_next_one_is_plain_stage_3s() -> None:
    def train(near: int) -> tuple[list[float], Any]:
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "transport": "gloo",
            "zero_optimization": {
                "stage": 3,
                "stage3_param_persistence_threshold": 0,
                "zero_hpz_partition_size": near,
            },
        }
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
        engine, losses = deepseek_zero.initialize(model=model, config=config)[0], []
        for step in range(4):
            x = torch.full((2, 8), 0.1 * (step + dist.get_rank()))
            loss = engine(x).float().square().mean()
            losses.append(loss.item())
            engine.backward(loss * (float("inf") if step == 1 and dist.get_rank() == 3 else 1.0))
            engine.step()
        return losses, engine

    (losses, engine), (expected, plain) = train(2), train(1)
    assert losses == expected
    assert engine.skipped_steps == 1
    assert_alike(engine, plain)


@pytest.mark.ranks(WORLD)
def test_a_size_that_does_not_divide_the_ranks_is_refused() -> None:
    with pytest.raises(UsageError, match=r"zero_hpz_partition_size\): 4 is not divisible by 3"):
        start(Run(3, transport="gloo"), 3)
