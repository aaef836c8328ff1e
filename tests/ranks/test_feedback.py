"""Error feedback: each rank adds the quantization error of earlier gradients to the next ones.

The engine has the bits of one process that does this for all ranks. The error-feedback buffers are
part of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepseek_zero
from deepseek_zero.base.errors import OutOfMemoryError
from deepseek_zero.checkpoint import load
from deepseek_zero.precision.codecs import Blocks
from deepseek_zero.tiers.budget import NO_LIMIT
from tests.models import Batch, batch_of, seeded
from tests.pairwise import cases
from tests.ranks.test_codecs import CODES, Rounding, flats_of, rounded
from tests.ranks.test_parity import assert_same_bits, masters_of
from tests.reference import OPTIMIZERS
from tests.training import ALL, DTYPES, Run, train_step

STEPS = 4
KEPT: dict[
    str, tuple[str, float, int | None]
] = {  # format of the error buffer, beta, and steps until a reset
    "bf16": ("bf16", 0.0, None),
    "int8": ("int8", 0.0, None),
    "loco": ("bf16", 0.8, 2),
    "loco in int8": ("int8", 0.5, 1024),
}


def start(
    run: Run,
    codes: str,
    kept: str,
    model: nn.Module | None = None,
    inside_bits: int = 16,
    **keys: Any,
) -> Any:
    """Start an engine with quantized gradients and error feedback.

    keys: Additional configuration keys.
    """
    weights, gradients = CODES[codes]
    assert gradients is not None
    how, beta, reset = KEPT[kept]
    config = run.config() | keys
    zero = config["zero_optimization"]
    zero["compression"] = {
        "weights": {"bits": weights.bits, "block": weights.block} if weights is not None else {},
        "gradients": {
            "bits": gradients.bits,
            "block": gradients.block,
            "error_feedback": how,
            "inside_bits": inside_bits,
        },
        "min_numel": 0,
    }
    if reset is not None:
        zero["zeropp_loco_param"] = {"err_beta": beta, "reset_T": reset}
    model = seeded() if model is None else model
    optimizer = OPTIMIZERS[run.optimizer](
        [each for each in model.parameters() if each.requires_grad]
    )
    return deepseek_zero.initialize(model=model, optimizer=optimizer, config=config)[0]


@dataclass
class FeedingBack(Rounding):
    """A reference whose ranks, or hosts with several ranks, use error feedback."""

    kept: str = "bf16"
    errors: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # by sender and flat buffer
    calls: int = 0

    def micro_batch(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        self.calls += 1  # ranks run one after another
        return super().micro_batch(batch)

    def sent(self, grads: list[Tensor]) -> list[Tensor]:
        return self.sent_by((self.calls - 1) // self.accumulation % self.ranks, grads)

    def sent_by(self, sender: int, grads: list[Tensor]) -> list[Tensor]:
        held, codec = dict(zip(self.names, grads, strict=True)), self.codes[1]
        assert codec is not None
        how, beta, _ = KEPT[self.kept]
        for number, flat in enumerate(self.flats):
            error, exact = (
                self.errors.get((sender, number), torch.zeros(flat.numel)),
                torch.zeros(flat.numel),
            )
            for name, low in flat.places.items():
                exact[low : low + held[name].numel()] = held[name].reshape(-1).float()
            exact += error
            sent = rounded(codec, exact)
            left = error * beta + (exact - sent) * (1.0 - beta)
            self.errors[sender, number] = (
                left.bfloat16().float() if how == "bf16" else rounded(Blocks(8, 256), left)
            )
            for name, low in flat.places.items():
                held[name] = sent[low : low + held[name].numel()].view(held[name].shape)
        return [held[name] for name in self.names]

    def step(
        self, batches: Sequence[Sequence[Batch]], norm: float | None = None
    ) -> tuple[list[list[Tensor]], float]:
        found = super().step(batches, norm)
        reset = KEPT[self.kept][2]
        if reset is not None and self.calls // (self.ranks * self.accumulation) % reset == 0:
            self.errors.clear()
        return found


@dataclass
class HostsFeedingBack(FeedingBack):
    """A reference whose hosts reduce exactly, or through `inside`, and exchange quantized sums."""

    inside: Blocks | None = None

    def gradients(
        self, batches: Sequence[Sequence[Batch]]
    ) -> tuple[list[list[Tensor]], list[Tensor]]:
        runs = [self.plain_batch(of_rank[0]) for of_rank in batches]  # one micro-batch each
        hosts = [
            runs[start : start + self.ranks_per_host]
            for start in range(0, self.ranks, self.ranks_per_host)
        ]
        sums = []
        for number, host in enumerate(hosts):
            summed = [
                self._sum(list(grads)) for grads in zip(*(grads for _, grads in host), strict=True)
            ]
            sums.append(self.sent_by(number, summed))
        totals = [
            self._sum(list(grads)).div_(float(self.ranks)) for grads in zip(*sums, strict=True)
        ]
        return [[loss] for loss, _ in runs], [total.to(self.grad_dtype) for total in totals]

    def plain_batch(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        self.calls += 1
        self.adds_first, before = True, self.adds_first  # quantize nothing here
        found = Rounding.micro_batch(self, batch)
        self.adds_first = before
        return found if self.inside is None else (found[0], self.rounded(self.inside, found[1]))


def reference_of(engine: Any, run: Run, codes: str, kept: str, ranks: int) -> FeedingBack:
    weights, gradients = CODES[codes]
    weights = weights if run.stage > 0 else None
    return (HostsFeedingBack if run.ranks_per_host else FeedingBack)(
        seeded(),
        ranks,
        run.accumulation,
        run.stage < 2,
        DTYPES[run.dtype],
        OPTIMIZERS["adamw"],
        run.clipping,
        ranks_per_host=run.ranks_per_host or 1,
        flats=flats_of(engine),
        codes=(weights if run.stage == 3 else None, gradients),
        differences=weights if run.stage in (1, 2) else None,
        kept=kept,
    )


def assert_follows(engine: Any, run: Run, reference: FeedingBack, steps: Sequence[int]) -> None:
    """Check losses and weights of every step, and that bytes sent and held match the plan."""
    meter = engine.runtime.comm.meter
    for step in steps:
        meter.reset()
        losses = train_step(engine, run, step)
        sent = meter.total_bytes()
        batches = range(run.accumulation), range(reference.ranks)
        everyone = [[batch_of(step, micro, rank) for micro in batches[0]] for rank in batches[1]]
        expected, _ = reference.step(everyone, engine.get_global_grad_norm())
        assert all(map(torch.equal, losses, expected[dist.get_rank()])), (
            f"losses differ in step {step}"
        )
        assert_same_bits(
            dict(engine.module.state_dict()), reference.values(), f"weights after step {step}"
        )
    volume = engine.runtime.plan.volume()
    assert sent == volume.state_bytes + volume.rows
    masters = dict(zip(reference.values(), reference.masters, strict=True))
    assert_same_bits(masters_of(engine), masters, "masters")
    report = engine.memory_report()
    assert report.measured["errors"] == report.predicted["errors"] > 0
    if run.stage < 3:
        assert report.measured_total == report.predicted_total


AXES = {
    "stage": (0, 1, 2, 3),
    "kept": ("bf16", "int8", "loco"),
    "codes": ("int4 gradients", "int8 both, small blocks"),
    "dtype": ("fp32", "bf16"),
    "accumulation": (1, 2),
    "ranks": (2, 3),
    "bucket": (4096, ALL),
    "transport": ("fastest", "gloo"),
}


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize(*cases(AXES))
def test_training_has_the_bits_of_one_process_that_keeps_every_ranks_errors(
    stage: int,
    kept: str,
    codes: str,
    dtype: str,
    accumulation: int,
    ranks: int,
    bucket: int,
    transport: str,
) -> None:
    run = Run(stage, dtype, accumulation, 0, 0.3, "adamw", transport=transport, bucket=bucket)
    engine = start(run, codes, kept)
    assert_follows(engine, run, reference_of(engine, run, codes, kept, ranks), range(STEPS))


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("stage", "dtype", "kept", "bucket", "inside"),
    [
        (1, "bf16", "int8", 4096, None),
        (2, "fp32", "loco", 4096, None),
        (3, "bf16", "bf16", ALL, None),
        (2, "bf16", "bf16", 4096, Blocks(8, 256)),
        (1, "fp32", "loco", ALL, Blocks(8, 256)),
    ],
)
def test_with_sums_by_host_errors_belong_to_the_sums_of_hosts(
    stage: int, dtype: str, kept: str, bucket: int, inside: Blocks | None
) -> None:
    """inside: Codec of the summands within a host, which has no error feedback."""
    run = Run(stage, dtype, 1, 0, 0.3, "adamw", transport="gloo", bucket=bucket, ranks_per_host=2)
    engine = start(run, "int4 gradients", kept, inside_bits=16 if inside is None else inside.bits)
    reference = reference_of(engine, run, "int4 gradients", kept, 4)
    assert isinstance(reference, HostsFeedingBack)
    reference.inside = inside
    assert_follows(engine, run, reference, range(STEPS))
    coded = [
        group.layout.padded_numel for group in engine.runtime.groups if group.planned.key.is_coded
    ]
    bytes_each = 2 if kept != "int8" else 1 + 4 / 256
    assert engine.memory_report().measured["errors"] == sum(coded) / 2 * bytes_each


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kept", ["loco", "int8"])
def test_errors_are_saved_and_restored_on_the_same_mesh_and_dropped_on_another(
    kept: str, tmp_path: Path
) -> None:
    run, said = Run(2, "bf16", optimizer="adamw"), list[str]()

    def started(seed: int, mesh: dict[str, int]) -> Any:
        return start(run, "int4 gradients", kept, seeded(seed=seed), mesh=mesh)

    mesh = {"dp_replicate": 2, "dp_shard": 2}
    engine = started(0, mesh)
    for step in range(3):
        train_step(engine, run, step)
    engine.save_checkpoint(tmp_path, tag="three")
    expected = [train_step(engine, run, step) for step in (3, 4)]
    masters = masters_of(engine)

    other = started(8, mesh)
    train_step(other, run, 7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "log_first", said.append)
        other.load_checkpoint(tmp_path, tag="three")
    assert not said
    for step, losses in zip((3, 4), expected, strict=True):
        assert all(map(torch.equal, train_step(other, run, step), losses))
    assert_same_bits(masters_of(other), masters, "masters")

    train_step(other, run, 5)
    other.load_checkpoint(tmp_path, tag="three", load_optimizer_states=False)
    assert not any(
        each.gradient.reduction.own_states()["gradients"].any()
        for each in other.runtime.groups
        if each.planned.key.is_coded
    )

    reshaped = started(8, {"dp_shard": 4})
    train_step(reshaped, run, 7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "log_first", said.append)
        reshaped.load_checkpoint(tmp_path, tag="three")
    held = [
        group.gradient.reduction.own_states()["gradients"]
        for group in reshaped.runtime.groups
        if group.planned.key.is_coded
    ]
    assert held and not any(errors.any() for errors in held)
    assert len(said) == 1 and "error feedback of its gradients is dropped" in said[0]


@pytest.mark.ranks(2)
def test_errors_that_exceed_the_budget_are_never_kept() -> None:
    engine = start(Run(2, optimizer="adamw"), "int4 gradients", "bf16")
    group = next(each for each in engine.runtime.groups if each.planned.key.is_coded)
    reduction = group.gradient.reduction
    budget = group.comm_ctx.tiers.budget
    taken = budget.taken_bytes
    budget.limit_bytes = taken
    for _ in range(2):
        with pytest.raises(OutOfMemoryError, match="what codes leave out"):
            reduction.ensure_errors()
    budget.limit_bytes = NO_LIMIT
    assert budget.taken_bytes == taken
    errors = reduction.ensure_errors()
    assert budget.taken_bytes == taken + errors.memory.nbytes


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kept", ["bf16", "int8"])
def test_errors_follow_the_loss_scale_and_a_skipped_step_forgets_them(kept: str) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(40, 50), nn.Tanh(), nn.Linear(50, 30))
    model[0].weight.requires_grad_(False)
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 2}
    engine = start(Run(2, optimizer="adamw"), "int4 gradients", kept, model, fp16=fp16, bf16={})
    groups = [
        group for group in engine.runtime.groups if group.trainable and group.planned.key.is_coded
    ]

    def backward(factor: float = 1.0) -> None:
        x = torch.linspace(-1, 1, 80).view(2, 40) * (1 + dist.get_rank())
        engine.backward(engine(x).float().square().mean() * factor)

    def kept_now() -> Tensor:
        found = torch.empty(sum(group.planned.errors_numel for group in groups))
        for group, out in zip(
            groups, found.split([group.planned.errors_numel for group in groups]), strict=True
        ):
            errors = group.gradient.reduction.ensure_errors()
            errors.feedback.codec.decode(errors.memory, 0, out.numel(), out, torch.empty(1 << 14))
        return found

    scales = []
    for _ in range(4):
        backward()
        before = kept_now()
        scale = engine.optimizer.loss_scale
        engine.step()
        scales.append(engine.optimizer.loss_scale / scale)
        assert before.any() and torch.equal(kept_now(), before * scales[-1])
    assert sorted(scales) != [1.0] * 4, "the scale never moved"
    backward(float("inf") if dist.get_rank() == 1 else 1.0)
    engine.step()
    assert engine.skipped_steps == 1 and not kept_now().any()
    backward()
    assert kept_now().any() and kept_now().isfinite().all()
    engine.step()
    model[2].weight.requires_grad_(False)
    engine(torch.ones(2, 40))
    assert not kept_now().any(), "of what is frozen nothing more may come"
