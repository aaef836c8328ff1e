"""Delayed parameter updates give the bits of a plain loop with a delay of one step.

This also holds after a resume from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import deepseek_zero
from deepseek_zero.base.errors import CheckpointError, DeepSeekZeroError, UsageError
from deepseek_zero.extensions.delayed_update import DelayedUpdate
from deepseek_zero.extensions.speculative_update import SpeculativeUpdate
from deepseek_zero.optim.verdict import clip_factor
from tests.models import Batch, batch_of, seeded
from tests.pairwise import cases
from tests.reference import OPTIMIZERS, Reference
from tests.training import DTYPES, Run, offload, start_engine, train_step

LR = [0.01, 0.02, 0.005, 0.03, 0.01, 0.02, 0.01, 0.04]


class Late(Reference):
    """w(t + 1) = update(w(t), g(t - 1)) from step `after` on.

    The clipping factor and the learning rate are those of step t - 1.
    """

    after = 0
    steps = 0
    owed: tuple[list[Tensor], float] | None = None

    def late_step(
        self, batches: Sequence[Sequence[Batch]], norm: float, lr: float, *, skips: bool = False
    ) -> Any:
        """Train one step and return the losses.

        skips: This step's gradient is not finite.
        """
        losses, reduced = self.gradients(batches)
        factor = clip_factor(norm, self.max_norm)
        made = None if skips else ([grad.float().mul_(factor) for grad in reduced], lr)
        due = made
        if self.steps >= self.after:
            due, self.owed = self.owed, made
        self.steps += not skips
        self.carry_out(due)
        return losses

    def carry_out(self, due: tuple[list[Tensor], float] | None) -> None:
        if due is None:
            return
        for master, grad in zip(self.masters, due[0], strict=True):
            master.grad = grad
        for group in self.optimizer.param_groups:
            group["lr"] = due[1]
        self.optimizer.step()
        if self.masters is not self.weights:
            self._cast()


def everyone(step: int, run: Run, ranks: int) -> list[list[Batch]]:
    return [
        [batch_of(step, micro, rank) for micro in range(run.accumulation)] for rank in range(ranks)
    ]


def set_lr(engine: Any, lr: float) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = lr


def assert_follows(engine: Any, reference: Reference) -> None:
    found, expected = dict(engine.module.state_dict()), reference.values()
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


AXES = {
    "stage": (1, 2, 3),
    "dtype": ("fp32", "bf16"),
    "accumulation": (1, 3),
    "ranks": (1, 2, 3),
    "tier": ("cpu", "nvme"),
    "weights": (True, False),
    "after": (0, 2),
    "undo": (0, 1 << 30),  # 0: no update happens in backward
    "looks": (True, False),
}


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize(*cases(AXES))
def test_a_late_update_has_the_bits_of_a_loop_that_is_late(
    stage: int,
    dtype: str,
    accumulation: int,
    ranks: int,
    tier: str,
    weights: bool,
    after: int,
    undo: int,
    looks: bool,
) -> None:
    keys = (("delayed_update_after", after), ("undo_bytes", undo))
    run = Run(stage, dtype, accumulation, clipping=0.3, optimizer="adamw", tier="none")
    config = run.config()
    config["zero_optimization"] |= offload(tier, weights=weights and stage == 3, **dict(keys))
    model = seeded()
    client = OPTIMIZERS["adamw"](list(model.parameters()))
    engine = deepseek_zero.initialize(model=model, optimizer=client, config=config)[0]
    reference = Late(
        seeded(), ranks, accumulation, stage < 2, DTYPES[dtype], OPTIMIZERS["adamw"], max_norm=0.3
    )
    reference.after = after
    for step in range(5):
        set_lr(engine, LR[step])
        losses = train_step(engine, run, step)
        norm = engine.get_global_grad_norm()
        assert norm > 0.3
        expected = reference.late_step(everyone(step, run, ranks), norm, LR[step])
        assert all(map(torch.equal, losses, expected[dist.get_rank()])), (
            f"losses differ in step {step}"
        )
        if looks:
            assert_follows(engine, reference)
    assert_follows(engine, reference)
    engine.optimizer.flush()
    reference.carry_out(reference.owed)
    assert_follows(engine, reference)
    tally = engine.optimizer.policy(SpeculativeUpdate)
    ahead = stage == 3 and weights and undo > 0
    assert (tally.updated > 0) == ahead
    assert tally.undone == 0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_between_backward_and_step_weights_are_those_that_backward_used(tier: str) -> None:
    run = Run(
        3,
        "bf16",
        clipping=0.3,
        optimizer="adamw",
        tier=tier,
        updates=(("delayed_update_after", 0),),
    )
    engine = start_engine(run, seeded())
    reference = Late(seeded(), 2, 1, False, DTYPES["bf16"], OPTIMIZERS["adamw"], max_norm=0.3)
    for step in range(5):
        batch = batch_of(step, 0, dist.get_rank())
        engine.backward(engine(batch.tokens, batch.targets))
        if step != 2:
            assert_follows(engine, reference)
        engine.step()
        reference.late_step(everyone(step, run, 2), engine.get_global_grad_norm(), 0.01)
        assert_follows(engine, reference)
    tally = engine.optimizer.policy(SpeculativeUpdate)
    assert tally.undone == tally.updated - 3 > 0, "all but those of step 2, which nobody looked for"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_an_overflowing_step_runs_pending_updates_and_adds_none(tier: str) -> None:
    run = Run(
        3,
        "bf16",
        clipping=0.3,
        optimizer="adamw",
        tier=tier,
        updates=(("delayed_update_after", 1),),
    )
    config = run.config()
    config["bf16"] |= {"check_grad_overflow": True}
    model = seeded()
    client = OPTIMIZERS["adamw"](list(model.parameters()))
    engine = deepseek_zero.initialize(model=model, optimizer=client, config=config)[0]
    reference = Late(seeded(), 2, 1, False, DTYPES["bf16"], OPTIMIZERS["adamw"], max_norm=0.3)
    reference.after = 1
    for step in range(6):
        batch = batch_of(step, 0, dist.get_rank())
        loss = engine(batch.tokens, batch.targets)
        engine.backward(loss * (float("inf") if step == 3 else 1.0))
        engine.step()
        norm = engine.get_global_grad_norm()
        expected = reference.late_step(everyone(step, run, 2), norm, 0.01, skips=step == 3)
        assert torch.equal(loss.detach(), expected[dist.get_rank()][0])
        assert engine.was_step_applied() is (step != 3)
        assert (engine.optimizer.policy(DelayedUpdate).deferred is None) == (step in (0, 3))
        assert_follows(engine, reference)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("before", "then", "dtype"),
    [
        ((3, "nvme"), (3, "nvme"), "bf16"),
        ((3, "nvme"), (1, "cpu"), "fp32"),
        ((1, "cpu"), (2, "nvme"), "bf16"),
    ],
)
def test_a_checkpoint_contains_pending_updates(
    before: tuple[int, str], then: tuple[int, str], dtype: str, tmp_path: Path
) -> None:
    def engine_of(stage: int, tier: str, seed: int) -> tuple[Any, Run]:
        updates = (("delayed_update_after", 2),)
        run = Run(stage, dtype, clipping=0.3, optimizer="adamw", tier=tier, updates=updates)
        return start_engine(run, seeded(seed=seed)), run

    first, run = engine_of(*before, 7)
    for step in range(8):
        set_lr(first, LR[step])
        train_step(first, run, step)
        if step == 3:
            first.save_checkpoint(tmp_path)
    second, run = engine_of(*then, 8)
    train_step(second, run, 0)  # the load discards this run's delayed gradient
    train_step(second, run, 1)
    train_step(second, run, 2)
    second.load_checkpoint(tmp_path)
    for step in range(4, 8):
        set_lr(second, LR[step])
        train_step(second, run, step)
    for engine in (first, second):
        engine.optimizer.flush()
    found, expected = second.state_dict(), first.state_dict()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.ranks(2)
def test_pending_updates_are_flushed_or_an_error_is_raised(tmp_path: Path) -> None:
    run = Run(3, optimizer="adamw", tier="cpu", updates=(("delayed_update_after", 0),))
    engine = start_engine(run, seeded())
    for step in range(3):
        train_step(engine, run, step)
    engine.save_checkpoint(tmp_path, tag="owes")
    engine.optimizer.flush()
    assert engine.optimizer.policy(DelayedUpdate).deferred is None
    engine.optimizer.flush()
    engine.save_checkpoint(tmp_path, tag="owes nothing")
    plain = start_engine(Run(3, optimizer="adamw", tier="cpu"), seeded(seed=8))
    with pytest.raises(
        CheckpointError, match=r"(?s)owes an update .* engine\.optimizer\.flush\(\)"
    ):
        plain.load_checkpoint(tmp_path, tag="owes")
    plain.load_checkpoint(tmp_path, tag="owes", load_optimizer_states=False)
    plain.load_checkpoint(tmp_path, tag="owes nothing")
    assert all(map(torch.equal, plain.state_dict().values(), engine.state_dict().values()))
    batch = batch_of(9, 0, dist.get_rank())
    engine.backward(engine(batch.tokens, batch.targets))
    engine.step()
    engine.backward(engine(batch.tokens, batch.targets))
    with pytest.raises(UsageError, match="between a backward and its step"):
        engine.optimizer.flush()


@pytest.mark.ranks(2)
def test_a_batch_that_changes_between_two_steps_loses_no_update() -> None:
    """Another accumulation changes the dtype of gradients and therefore the buffer."""
    found = []
    for tier, updates in (("none", ()), ("cpu", ()), ("cpu", (("delayed_update_after", 0),))):
        run = Run(3, "bf16", optimizer="adamw", tier=tier, updates=updates)
        engine = start_engine(run, seeded())
        train_step(engine, run, 0)
        engine.set_train_batch_size(2 * 2 * dist.get_world_size())
        found.append(engine.state_dict())
    for away in found[1:]:
        assert all(map(torch.equal, found[0].values(), away.values()))


@pytest.mark.parametrize(
    ("section", "says"),
    [
        (
            {"offload_optimizer": {"delayed_update_after": 0}},
            "(?s)delayed_update_after = 0.*applies only to offloaded states",
        ),
        (
            {"offload_optimizer": {"delayed_update_after": 3}},
            "(?s)delayed_update_after = 3.*applies only to offloaded states",
        ),
        (
            {"offload_optimizer": {"super_offload": True}},
            "(?s)super_offload = .*applies only to offloaded states",
        ),
        (
            {"stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": True}},
            "(?s)super_offload = .*needs stage 3",
        ),
    ],
)
def test_a_schedule_without_overlap_is_reported(section: dict[str, Any], says: str) -> None:
    with pytest.raises(DeepSeekZeroError, match=says):
        deepseek_zero.initialize(
            model=torch.nn.Linear(2, 2),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": 3, **section},
            },
        )
