"""OneBitAdam in the engine gives Adam's bits until freeze_step.

Afterwards it gives the bits of one process that simulates all ranks. The error-feedback buffers are
part of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import deepseek_zero
from deepseek_zero.base.errors import UsageError
from deepseek_zero.checkpoint import load
from deepseek_zero.optimizers.one_bit_adam import OneBitAdam
from deepseek_zero.planner import update
from tests.models import Batch, batch_of, seeded
from tests.ranks.test_parity import assert_same_bits, masters_of
from tests.reference import Reference
from tests.training import DTYPES, Run, train_step

FREEZE, STEPS = 3, 6
PARAMS = {"lr": 0.01, "weight_decay": 0.1, "freeze_step": FREEZE}
BETA1, BETA2 = 0.9, 0.999
# The loss scale doubles every other step
FP16 = {"enabled": True, "initial_scale_power": 7, "loss_scale_window": 2, "hysteresis": 1}


def start(run: Run, seed: int = 7, name: str = "OneBitAdam", **zero: Any) -> Any:
    """Start an engine with the optimizer `name`.

    zero: Keys of zero_optimization.
    """
    config = run.config()
    config["zero_optimization"] |= zero
    config["fp16"] = FP16 if run.dtype == "fp16" else {"enabled": False}
    params = (
        dict(PARAMS)
        if name == "OneBitAdam"
        else {key: PARAMS[key] for key in ("lr", "weight_decay")}
    )
    config["optimizer"] = {"type": name, "params": params}
    return deepseek_zero.initialize(model=seeded(seed=seed), config=config)[0]


def signs_of(values: Tensor, count: int) -> Tensor:
    """Compress values to signs and decompress them by definition."""
    scale = (values.double().square().sum() / max(count, 1)).sqrt().float()
    return torch.where(values >= 0, scale, -scale)


@dataclass
class OneBit(Reference):
    """A reference that exchanges signs of momenta after `freeze` steps.

    layouts: Layouts of the flat buffers. scale: Loss scale, a power of two.
    """

    layouts: Sequence[Any] = ()
    scale: float = 1.0
    steps: int = 0
    momenta: list[Tensor] = field(default_factory=list)
    # Error feedback by buffer and rank; owners have the key -1 - rank
    left: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def micro_batch(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        for weight in self.weights:
            weight.grad = None
        loss = self.model(batch.tokens, batch.targets)
        factor = self.scale / self.accumulation
        (loss if factor == 1.0 else loss.float() * factor).backward()
        return loss.detach(), [grad for weight in self.weights if (grad := weight.grad) is not None]

    def gradients(
        self, batches: Sequence[Sequence[Batch]]
    ) -> tuple[list[list[Tensor]], list[Tensor]]:
        losses, reduced = super().gradients(batches)
        return losses, [grad.float() / self.scale for grad in reduced]

    def step(
        self, batches: Sequence[Sequence[Batch]], norm: float | None = None
    ) -> tuple[list[list[Tensor]], float]:
        self.steps += 1
        if self.steps <= FREEZE:
            return super().step(batches, norm)
        names = [name for name, _ in self.model.named_parameters()]
        states = dict(
            zip(names, (self.optimizer.state[master] for master in self.masters), strict=True)
        )
        if not self.momenta:
            for number, layout in enumerate(self.layouts):
                own = self.flat(layout, {name: state["exp_avg"] for name, state in states.items()})
                self.momenta.append(self.by_owner(layout, own, partial(self.keep, number)))
                for owner in range(self.ranks):
                    self.left[number, -1 - owner] *= BETA1
        losses, grads = [], []
        for of_rank in batches:
            runs = [self.micro_batch(batch) for batch in of_rank]
            losses.append([loss for loss, _ in runs])
            totals = [grad.to(self.grad_dtype, copy=True).float() for grad in runs[0][1]]
            for _, more in runs[1:]:
                for total, grad in zip(totals, more, strict=True):
                    total.add_(grad)
            grads.append(dict(zip(names, totals, strict=True)))
        found: dict[str, Tensor] = {}
        for number, layout in enumerate(self.layouts):
            sent = []
            for rank in range(self.ranks):
                new = self.flat(layout, grads[rank]) * ((1 - BETA1) / self.scale)
                before = self.left.get((number, rank), torch.zeros_like(new))
                own = before + self.momenta[number] * BETA1 + new
                rests: dict[int, Tensor] = {}
                sent.append(self.by_owner(layout, own, rests.__setitem__))
                self.left[number, rank] = torch.cat([rests[owner] for owner in range(self.ranks)])
            total = self._sum(sent)
            mean = total * (1 / self.ranks) if self.ranks in (2, 4) else total / self.ranks
            mean = torch.cat([self.left[number, -1 - owner] for owner in range(self.ranks)]) + mean
            self.momenta[number] = self.by_owner(layout, mean, partial(self.keep, number))
            for slot in layout.slots:
                found[slot.name] = self.momenta[number][slot.start : slot.stop].view(slot.shape)
        for name, master in zip(names, self.masters, strict=True):
            state = states[name]
            scale = state["exp_avg_sq"].sqrt() / (1 - BETA2**FREEZE) ** 0.5 + 1e-8
            update = torch.where(state["exp_avg_sq"] > 0, found[name] / scale, 0.0)
            master.data.mul_(1 - PARAMS["lr"] * PARAMS["weight_decay"])
            master.data.sub_(update * (PARAMS["lr"] / (1 - BETA1**self.steps)))
        if self.masters is not self.weights:
            self._cast()
        return losses, 0.0

    def keep(self, number: int, owner: int, rest: Tensor) -> None:
        self.left[number, -1 - owner] = rest

    def flat(self, layout: Any, tensors: dict[str, Tensor]) -> Tensor:
        found = torch.zeros(layout.padded_numel)
        for slot in layout.slots:
            found[slot.start : slot.stop] = tensors[slot.name].reshape(-1)
        return found

    def by_owner(self, layout: Any, values: Tensor, left: Any) -> Tensor:
        """Compress each owner's part to signs and pass the error to `left`. Padding is zero."""
        for low, high in layout.gaps:
            values[low:high] = 0
        parts = []
        for owner, part in enumerate(values.split(layout.slice_numel)):
            padding = sum(
                max(0, min(high, layout.bounds(owner)[1]) - max(low, layout.bounds(owner)[0]))
                for low, high in layout.gaps
            )
            parts.append(signs_of(part, part.numel() - padding))
            left(owner, part - parts[-1])
        return torch.cat(parts)


CASES = [
    (0, "fp32", 1, 2, "fastest"),
    (0, "bf16", 2, 3, "gloo"),
    (1, "bf16", 1, 2, "gloo"),
    (1, "fp32", 2, 4, "fastest"),
    (1, "bf16", 1, 3, "fastest"),
    (0, "fp16", 2, 2, "fastest"),
    (1, "fp16", 1, 3, "gloo"),
]


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize(("stage", "dtype", "accumulation", "ranks", "transport"), CASES)
def test_training_has_adams_bits_and_then_those_of_one_process_that_exchanges_signs(
    stage: int, dtype: str, accumulation: int, ranks: int, transport: str
) -> None:
    run = Run(stage, dtype, accumulation, transport=transport)
    engine = start(run)
    for group in engine.optimizer.param_groups:
        group["fused"] = (
            # As in the reference, whose kernel has no special case for the last elements
            False
        )
    groups = engine.runtime.groups
    reference = OneBit(
        seeded(),
        ranks,
        accumulation,
        True,
        DTYPES.get(dtype, torch.float16),
        lambda params: torch.optim.AdamW(
            params, lr=0.01, weight_decay=0.1, foreach=False, fused=False
        ),
        layouts=[group.layout for group in groups],
    )
    meter = engine.runtime.comm.meter
    for step in range(STEPS):
        meter.reset()
        reference.scale = engine.optimizer.loss_scale
        losses = train_step(engine, run, step)
        everyone = [
            [batch_of(step, micro, rank) for micro in range(accumulation)] for rank in range(ranks)
        ]
        expected, _ = reference.step(everyone, engine.get_global_grad_norm())
        assert all(map(torch.equal, losses, expected[dist.get_rank()])), (
            f"losses differ in step {step}"
        )
        assert_same_bits(
            dict(engine.module.state_dict()), reference.values(), f"weights after step {step}"
        )
    volume = engine.runtime.plan.volume()
    assert meter.total_bytes() == volume.state_bytes + volume.rows
    signs = sum(2 * (ranks - 1) * (group.layout.slice_numel / 8 + 4) for group in groups)
    whole = sum(
        (ranks - 1) * group.layout.slice_numel * group.plan.weight.dtype.itemsize
        for group in groups
    )
    assert volume.reduces == signs and volume.refresh == (whole if stage else 0)
    masters = dict(zip(reference.values(), reference.masters, strict=True))
    assert_same_bits(masters_of(engine), masters, "masters")
    report = engine.memory_report()
    assert report.measured_total == report.predicted_total
    assert "momenta sent as signs" in engine.explain()


@pytest.mark.ranks(2)
def test_the_warm_up_is_that_of_adamw_with_its_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    # Gives both the same layout, so that kernels have the same last elements
    monkeypatch.setattr(update, "GRAIN", 1)
    run = Run(1, "bf16")
    engine, plain = start(run), start(run, name="AdamW")
    for step in range(FREEZE):
        assert all(map(torch.equal, train_step(engine, run, step), train_step(plain, run, step)))
    assert_same_bits(masters_of(engine), masters_of(plain), "AdamW's masters")
    assert engine.optimizer.inner.takes_momenta


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1])
def test_a_run_resumes_bit_for_bit_before_and_after_freeze_step(stage: int, tmp_path: Path) -> None:
    run = Run(stage, "fp16" if stage else "bf16")
    engine = start(run)
    losses = []
    for step in range(STEPS):
        losses.append(train_step(engine, run, step))
        if step + 1 in (2, 4):
            engine.save_checkpoint(tmp_path, tag=f"{step + 1}")
    masters = masters_of(engine)
    other, said = start(run, seed=8), list[str]()
    for tag in (4, 2, 4):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(load, "log_first", said.append)
            other.load_checkpoint(tmp_path, tag=f"{tag}")
        for step in range(tag, STEPS):
            assert all(map(torch.equal, train_step(other, run, step), losses[step]))
        assert_same_bits(masters_of(other), masters, f"masters from {tag}")
    assert not said
    with pytest.MonkeyPatch.context() as patch:  # simulates another layout in another world
        patch.setattr(
            load, "place_of", lambda group, piece: (piece.name(group.members[0]), "elsewhere")
        )
        patch.setattr(load, "log_first", said.append)
        other.load_checkpoint(tmp_path, tag="4")
    assert len(said) == 1 and "is dropped" in said[0]
    kept = [group.gradient.reduction.own_states() for group in other.runtime.groups]
    assert not any(each["worker"].any() for each in kept)
    again = torch.stack([train_step(other, run, step)[0] for step in range(4, STEPS)])
    torch.testing.assert_close(
        again, torch.stack([loss for (loss,) in losses[4:]]), rtol=0.05, atol=0.0
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_nonfinite_step_is_skipped_without_a_trace(dtype: str) -> None:
    run = Run(1, dtype)
    engine = start(run)
    for step in range(FREEZE + 2):
        train_step(engine, run, step)
    before, scale = masters_of(engine), engine.optimizer.loss_scale
    batch = batch_of(9, 0, dist.get_rank())
    loss = engine(batch.tokens, batch.targets)
    engine.backward(loss * (float("inf") if dist.get_rank() == 1 else 1.0))
    engine.step()
    assert engine.skipped_steps == 1 and engine.optimizer.loss_scale == scale / (
        2 if dtype == "fp16" else 1
    )
    assert_same_bits(masters_of(engine), before, "masters of a skipped step")
    for group in engine.runtime.groups:
        kept = group.gradient.reduction.own_states()
        assert not kept["worker"].any() and not kept["server"].any()
    losses = [train_step(engine, run, step)[0] for step in range(10, 13)]
    assert torch.stack(losses).isfinite().all()


def test_a_single_rank_keeps_its_momentum_and_a_frozen_second_moment() -> None:
    param = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    other = torch.nn.Parameter(param.detach().clone())
    one_bit, adam = (
        OneBitAdam([param], lr=0.1, freeze_step=2),
        torch.optim.AdamW([other], lr=0.1, weight_decay=0.0),
    )
    grads = [
        torch.tensor([0.5, -1.0, 0.0]),
        torch.tensor([1.0, 2.0, 0.0]),
        torch.tensor([3.0, -3.0, 1.0]),
    ]
    for grad in grads[:2]:
        param.grad, other.grad = grad.clone(), grad.clone()
        one_bit.step()
        adam.step()
        torch.testing.assert_close(param, other)
    before, second = param.detach().clone(), one_bit.state[param]["exp_avg_sq"].clone()
    param.grad = grads[2]
    one_bit.step()
    assert torch.equal(one_bit.state[param]["exp_avg_sq"], second)
    mean = one_bit.state[param]["exp_avg"] / (1 - 0.9**3)
    expected = before - 0.1 * mean / ((second / (1 - 0.999**2)).sqrt() + 1e-8)
    torch.testing.assert_close(param[:2], expected[:2])
    assert param[2] == before[2], "its second moment is zero"


@pytest.mark.ranks(2)
def test_unsupported_combinations_with_an_exchange_of_momenta_are_refused_by_name() -> None:
    with pytest.raises(
        UsageError, match=r"OneBitAdam cannot be used with stage 2, gradient_clipping"
    ):
        start(Run(2, clipping=1.0))
    run = Run(1)
    engine = start(run)
    for step in range(FREEZE):
        train_step(engine, run, step)
    batch = batch_of(5, 0, dist.get_rank())
    engine.backward(engine(batch.tokens, batch.targets))
    with pytest.raises(UsageError, match="comes in two parts"):
        engine.backward(engine(batch.tokens, batch.targets))
