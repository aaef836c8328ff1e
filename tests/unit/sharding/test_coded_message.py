"""Engines that send quantized matrices equal one process that rounds the same tensors.

Ranks are threads. Also covered: sent bytes, resuming on another number of ranks, and replicas.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepseek_zero.checkpoint import load
from deepseek_zero.compat.deepspeed.engine import DeepSpeedEngine
from deepseek_zero.parallel.cuts import cut
from deepseek_zero.precision.codecs import Blocks
from deepseek_zero.sharding.coded_message import CodedMessage
from deepseek_zero.tiers.tier import COMPLETED, CopyEngine, CopyEvent, Storage
from tests import compositions
from tests.compositions import DTYPES, Found, Here, Sizes, engines_of_threads
from tests.in_process import Rank, run_ranks
from tests.models import Batch, batch_of, seeded
from tests.ranks.test_codecs import Flat, Rounding, coded_flats
from tests.ranks.test_feedback import FeedingBack
from tests.ranks.test_parity import assert_same_bits, masters_of
from tests.reference import OPTIMIZERS, Reference, TwoLevels
from tests.training import offload

STEPS = 3
TOLERANCE = 0.3  # times the change in two steps of SGD with 4-bit gradients
INT4 = {"zero_quantized_gradients": True, "compression": {"min_numel": 0}}


def configured(
    stage: int, dtype: str = "bf16", accumulation: int = 1, **zero: Any
) -> dict[str, Any]:
    """Return the configuration of a run.

    zero: keys of zero_optimization.
    """
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "steps_per_print": None,
        **({dtype: {"enabled": True}} if dtype != "fp32" else {}),
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            **zero,
        },
    }


def start(
    here: Here, rank: Rank, config: dict[str, Any], model: nn.Module | None = None, **request: Any
) -> Any:
    """Return the engine of one rank, with AdamW if the configuration has no optimizer."""
    model = seeded() if model is None else model
    if "optimizer" not in config:
        trained = [each for each in model.parameters() if each.requires_grad]
        request = {"optimizer": OPTIMIZERS["adamw"](trained), **request}
    return here.start(rank, model, config, DeepSpeedEngine, **request)


def train_step(engine: Any, rank: Rank, step: int) -> list[Tensor]:
    """Run one step on this rank's micro-batches and return their losses."""
    losses = []
    for micro in range(engine.runtime.settings.accumulation):
        batch = batch_of(step, micro, rank.index)
        loss = engine(batch.tokens, batch.targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return losses


@dataclass
class Trained:
    """The results of one rank.

    scales: loss scales.

    reduced: sent bytes of gradients.

    padded: number of elements of all flat buffers.

    flats: the positions of quantized matrices in the flat buffers.
    """

    losses: list[list[Tensor]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: int = 0
    reduced: int = 0
    padded: int = 0
    flats: list[Flat] = field(default_factory=list)


def train(
    here: Here,
    rank: Rank,
    config: dict[str, Any],
    model: nn.Module,
    poisoned: int = -1,
    **request: Any,
) -> Trained:
    """Train one rank.

    poisoned: the step in which the last rank's loss is infinite.
    """
    engine, found = start(here, rank, config, model, **request), Trained()
    engine.runtime.comm.meter.reset()
    for step in range(STEPS):
        found.scales.append(engine.optimizer.loss_scale)
        losses = []
        for micro in range(engine.runtime.settings.accumulation):
            batch = batch_of(step, micro, rank.index)
            loss = engine(batch.tokens, batch.targets)
            engine.backward(
                loss * (float("inf") if (step, rank.index) == (poisoned, rank.size - 1) else 1.0)
            )
            engine.step()
            losses.append(loss.detach())
        found.losses.append(losses)
        found.weights.append(weights_of(engine))
    found.reduced = engine.runtime.comm.meter.sent_bytes["reduce_scatter"]
    found.padded = sum(group.layout.padded_numel for group in engine.runtime.groups)
    found.skipped, found.flats = engine.skipped_steps, coded_flats(engine)
    engine.destroy()
    return found


class Scaled(Reference):
    """The reference with a loss scale that is a power of two.

    The loss of the micro-batch `poison` is infinite. A step with non-finite gradients is skipped.
    """

    scale, poison = 1.0, None

    def micro_batch(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        for weight in self.weights:
            weight.grad = None
        loss = self.model(batch.tokens, batch.targets)
        factor = self.scale / self.accumulation * (float("inf") if batch is self.poison else 1.0)
        (loss.float() * factor).backward()
        return loss.detach(), [
            torch.zeros_like(each) if each.grad is None else each.grad for each in self.weights
        ]

    def step(self, batches: Any, norm: float | None = None) -> tuple[list[list[Tensor]], float]:
        if self.poison is None:
            return super().step(batches, norm)
        losses, reduced = self.gradients(batches)
        assert not all(bool(each.isfinite().all()) for each in reduced)
        return losses, float("inf")


@dataclass
class ScaledRounding(Rounding, Scaled):
    def gradients(self, batches: Any) -> tuple[list[list[Tensor]], list[Tensor]]:
        losses, reduced = super().gradients(batches)
        return losses, [each.float() / self.scale for each in reduced]


def assert_follows(found: Sequence[Trained], reference: Any, poisoned: int = -1) -> None:
    """Check that every rank has the losses and weights of the reference in each step."""
    for step in range(STEPS):
        micros = range(reference.accumulation)
        everyone = [[batch_of(step, micro, rank) for micro in micros] for rank in range(len(found))]
        reference.scale, reference.poison = (
            found[0].scales[step],
            everyone[-1][0] if step == poisoned else None,
        )
        expected, _ = reference.step(everyone)
        for one, losses in zip(found, expected, strict=True):
            assert all(map(torch.equal, one.losses[step], losses)), f"losses differ in step {step}"
            assert_same_bits(one.weights[step], reference.values(), f"weights after step {step}")


def oracle(
    found: Sequence[Trained],
    config: dict[str, Any],
    dtype: torch.dtype,
    model: nn.Module,
    codes: Any,
    kind: Any = Rounding,
) -> Any:
    """Return the reference with the same quantization; weights are quantized only at stage 3."""
    assert bool(found[0].flats) is (codes != (None, None))
    stage = config["zero_optimization"]["stage"]
    trained = [number for number, each in enumerate(model.parameters()) if each.requires_grad]
    return kind(
        model,
        len(found),
        config["gradient_accumulation_steps"],
        stage < 2,
        dtype,
        lambda params: OPTIMIZERS["adamw"]([params[number] for number in trained]),
        flats=found[0].flats,
        codes=codes,
    )


@pytest.mark.parametrize(
    ("stage", "codes"), [(2, (None, Blocks(4, 128))), (3, (Blocks(8, 256), Blocks(4, 128)))]
)
def test_with_frozen_weights_a_run_equals_one_process(stage: int, codes: Any) -> None:
    def model() -> nn.Module:
        found = seeded()
        found.blocks[1].requires_grad_(False)
        return found

    config = configured(stage, accumulation=2, **INT4, zero_quantized_weights=codes[0] is not None)
    with engines_of_threads() as here:
        found = run_ranks(2, lambda rank: train(here, rank, config, model()))
    assert_follows(found, oracle(found, config, torch.bfloat16, model(), codes))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_single_rank_sends_nothing_and_equals_a_run_without_codes(stage: int) -> None:
    config = configured(stage, **INT4, zero_quantized_weights=True)
    with engines_of_threads() as here:
        found = run_ranks(1, lambda rank: train(here, rank, config, seeded()))
    assert not found[0].flats
    assert_follows(found, oracle(found, config, torch.bfloat16, seeded(), (None, None)))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_overflow_in_fp16_is_one_process_overflow(stage: int) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 1}
    codes = Blocks(8, 256) if stage == 3 else None, Blocks(4, 128)
    config = configured(stage, **INT4, zero_quantized_weights=stage == 3) | {
        "fp16": fp16,
        "bf16": {"enabled": False},
    }
    with engines_of_threads() as here:
        found = run_ranks(3, lambda rank: train(here, rank, config, seeded(), poisoned=1))
    assert [each.skipped for each in found] == [1, 1, 1] and len(set(found[0].scales)) > 1
    assert_follows(
        found, oracle(found, config, torch.float16, seeded(), codes, ScaledRounding), poisoned=1
    )


@pytest.mark.parametrize(("stage", "kept"), [(1, "int8"), (2, "bf16"), (3, "bf16")])
def test_error_feedback_with_offloaded_states_equals_one_process(stage: int, kept: str) -> None:
    given = {"min_numel": 0, "gradients": {"bits": 4, "error_feedback": kept}}
    config = configured(
        stage, accumulation=2, compression=given, **offload("cpu", weights=stage == 3)
    )
    with engines_of_threads() as here:
        found = run_ranks(2, lambda rank: train(here, rank, config, seeded()))
    reference = oracle(found, config, torch.bfloat16, seeded(), (None, Blocks(4, 128)), FeedingBack)
    reference.kept = kept
    assert_follows(found, reference)


def test_a_slice_is_not_encoded_in_the_stream_of_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of a GPU do not wait for each other before they use the same scratch memory."""
    copying = threading.local()
    encoded: list[bool] = []
    encode = CodedMessage.encode

    @contextmanager
    def h2d(engine: CopyEngine, storage: Storage) -> Iterator[CopyEvent]:
        copying.now = True
        yield COMPLETED
        copying.now = False

    def noted(message: CodedMessage, values: Tensor, low: int) -> None:
        encoded.append(getattr(copying, "now", False))
        encode(message, values, low)

    monkeypatch.setattr(CopyEngine, "h2d", h2d)
    monkeypatch.setattr(CodedMessage, "encode", noted)
    codes = {"compression": {"min_numel": 0, "weights": {"bits": 8}}}
    config = configured(3, **codes, **offload("cpu", weights=True))
    with engines_of_threads() as here:
        run_ranks(2, lambda rank: train_step(start(here, rank, config), rank, 0))
    assert encoded and not any(encoded)


def weights_of(engine: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


ONE_BIT = {"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 2}}}
STATES = {  # states other than weights, main weights and moments
    "errors": configured(
        2, **{**INT4, "compression": {"min_numel": 0, "gradients": {"error_feedback": "bf16"}}}
    ),
    "differences": configured(
        2, compression={"min_numel": 0, "weights": {"bits": 4}, "gradients": {"bits": 4}}
    ),
    "signs": configured(1) | ONE_BIT,
}


@pytest.mark.parametrize("state", STATES)
def test_a_run_of_4_ranks_resumes_on_2(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()
    monkeypatch.setattr(load, "log_first", said.append)

    def save(rank: Rank) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        engine = start(here, rank, STATES[state])
        for step in range(4):
            train_step(engine, rank, step)
        engine.save_checkpoint(tmp_path, tag="four")
        found = weights_of(engine), masters_of(engine)
        engine.destroy()
        return found

    def go_on(rank: Rank) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        engine = start(here, rank, STATES[state], seeded(seed=8))
        train_step(engine, rank, 7)
        engine.load_checkpoint(tmp_path, tag="four")
        assert_same_bits(weights_of(engine), weights, "weights")
        assert_same_bits(masters_of(engine), masters, "masters")
        groups = engine.runtime.groups
        kept = [group.gradient.reduction.own_states() for group in groups]
        errors = [each[name] for each in kept for name in ("gradients", "worker") if name in each]
        assert bool(errors) is (state != "differences") and not any(each.any() for each in errors)
        losses = torch.stack([train_step(engine, rank, step)[0] for step in (4, 5, 6)])
        assert losses.isfinite().all()
        found = weights_of(engine), masters_of(engine)
        engine.destroy()
        return found

    with engines_of_threads() as here:
        (weights, masters), *_ = run_ranks(4, save)
        one, other = run_ranks(2, go_on)
    casts = {name: master.to(weights[name].dtype) for name, master in masters.items()}
    assert torch.equal(weights["head.weight"], casts["head.weight"]) is (state != "differences")
    for mine, others in zip(one, other, strict=True):
        assert_same_bits(mine, others, "what both ranks have")
    lines = [line for line in said if "is dropped" in line]
    assert len(lines) == (0 if state == "differences" else 2), (
        "one on each thread, which is rank 0 of a process"
    )


# -- sent bytes: P padded elements, f = (N - 1) / N, F = (M - 1) / M, w and r bytes per encoded
# element


class Square(nn.Sequential):
    """Two matrices without padding, of which all elements are encoded."""

    numel = 2 * 128 * 128

    def __init__(self) -> None:
        super().__init__(nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False))


def bytes_of_a_step(ranks: int, hosts: int, config: dict[str, Any]) -> tuple[int, int]:
    """Return the bytes that the first rank sends in a step and its host sends to other hosts.

    The bytes of `all_gather_rows` are excluded.
    """

    def step(rank: Rank) -> tuple[int, int]:
        engine = start(here, rank, config, Square())
        meter = engine.runtime.comm.meter
        for _ in range(2):
            meter.reset()
            for _ in range(engine.runtime.settings.accumulation):
                engine.backward(engine(torch.ones(2, 128)).float().square().mean())
                engine.step()
        assert sum(group.layout.padded_numel for group in engine.runtime.groups) == Square.numel
        found = (
            meter.total_bytes() - meter.sent_bytes["rows"],
            sum(meter.far_bytes.values()) - meter.far_bytes["rows"],
        )
        engine.destroy()
        return found

    with engines_of_threads() as here:
        found = run_ranks(ranks, step, hosts=hosts)
    return found[0][0], sum(far for _, far in found[: ranks // hosts])


W, R, DIFFERENCE = 1 + 4 / 256, 0.5 + 4 / 128, 0.5 + 4 / 512
BOTH = {"zero_quantized_weights": True, **INT4}
KEPT = {"stage3_max_live_parameters": 10**9}  # gathered once for forward and backward
BLOCKS_OF_512 = {
    "compression": {"min_numel": 0, "weights": {"bits": 4, "block": 512}, "gradients": {"bits": 4}}
}


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_bytes_that_a_rank_sends_equal_the_formulas(accumulation: int) -> None:
    part, many = 3 / 4 * Square.numel, accumulation
    for stage, zero, expected in (
        (3, BOTH, part * many * (2 * W + R)),
        (3, BOTH | KEPT, part * many * (W + R)),
        (2, BLOCKS_OF_512, part * (many * R + DIFFERENCE)),
    ):
        assert bytes_of_a_step(4, 1, configured(stage, accumulation=many, **zero))[0] == expected


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_bytes_that_a_host_sends_equal_the_formulas(accumulation: int) -> None:
    part, many = 1 / 2 * Square.numel, accumulation
    for stage, zero, expected in (
        (3, BOTH, part * many * (2 * W + R)),
        (3, BOTH | {"zero_hpz_partition_size": 2}, part * (W + many * R)),
        (2, BLOCKS_OF_512, part * (many * R + DIFFERENCE)),
    ):
        assert bytes_of_a_step(4, 2, configured(stage, accumulation=many, **zero))[1] == expected


@pytest.mark.parametrize(("dtype", "zero"), [("fp32", {}), ("bf16", BOTH)])
def test_by_host_two_hosts_of_four_send_each_other_a_quarter_of_what_flat_sums_send(
    dtype: str, zero: dict[str, Any]
) -> None:
    config = configured(3, dtype, **zero)
    by_host, flat = (
        bytes_of_a_step(8, 2, config | {"ranks_per_host": each})[1] for each in (None, 1)
    )
    assert by_host == flat / 4 > 0


# -- communication_data_type


@dataclass
class Casting(Reference):
    """The reference in which each rank's gradients are cast to a dtype before the reduction."""

    travels: torch.dtype = torch.float32
    scale, poison = 1.0, None

    def _mean(self, of_ranks: list[Tensor]) -> Tensor:
        return super()._mean([each.to(self.travels) for each in of_ranks])


@pytest.mark.parametrize(
    ("stage", "travels", "dtype", "accumulation", "hosts"),
    [
        (1, "fp16", "fp32", 2, 1),
        (2, "fp16", "bf16", 2, 1),
        (3, "fp16", "bf16", 1, 2),
        (2, "bf16", "fp32", 2, 2),
        (0, "fp32", "bf16", 1, 1),
        (3, "fp32", "bf16", 2, 1),
    ],
)
def test_summands_that_are_sent_in_another_dtype_are_rounded_once(
    stage: int, travels: str, dtype: str, accumulation: int, hosts: int
) -> None:
    config = configured(stage, dtype, accumulation) | {"communication_data_type": travels}
    ranks = 2 * hosts
    with engines_of_threads() as here:
        found = run_ranks(ranks, lambda rank: train(here, rank, config, seeded()), hosts=hosts)
    of, sent, optimizer = DTYPES[dtype], DTYPES[travels], OPTIMIZERS["adamw"]
    per_host, times = ranks // hosts if hosts > 1 else 1, STEPS * (accumulation if stage > 1 else 1)
    reference = Casting(
        seeded(),
        ranks,
        accumulation,
        stage < 2,
        of,
        optimizer,
        ranks_per_host=per_host,
        travels=sent,
    )
    assert_follows(found, reference)
    if hosts == 1:
        assert found[0].reduced == found[0].padded / ranks * (ranks - 1) * sent.itemsize * times


# -- meshes with replicas


@dataclass
class RoundingLevels(Rounding, TwoLevels):
    """The reference that rounds messages within a shard group but not between replicas."""


@pytest.mark.parametrize(
    ("stage", "codes"), [(2, (None, Blocks(4, 128))), (3, (Blocks(8, 256), Blocks(4, 128)))]
)
def test_with_replicas_codes_equal_one_process(stage: int, codes: Any) -> None:
    config = configured(stage, accumulation=2, **INT4, zero_quantized_weights=codes[0] is not None)
    mesh = {"dp_replicate": 2, "dp_shard": 2}
    with engines_of_threads() as here:
        found = run_ranks(4, lambda rank: train(here, rank, config, seeded(), mesh=mesh))
    reference = oracle(found, config, torch.bfloat16, seeded(), codes, RoundingLevels)
    reference.shard = 2
    assert_follows(found, reference)


@pytest.mark.parametrize(
    ("sizes", "stage"),
    [
        ((1, 2, 2, 1), 1),
        ((1, 2, 2, 1), 3),
        ((2, 2, 1, 1), 3),
        ((1, 2, 1, 2), 2),
        ((1, 2, 1, 2), 3),
        ((1, 1, 1, 2), 3),
    ],
)
def test_with_other_axes_codes_keep_ranks_equal_and_close_to_a_run_without_codes(
    sizes: Sizes, stage: int
) -> None:
    pytest.importorskip("transformers")

    def run(zero: dict[str, Any]) -> list[Found]:
        return run_ranks(
            math.prod(sizes),
            lambda rank: compositions.train(here, rank, sizes, stage, "fp32", "sgd", zero=zero),
        )

    with engines_of_threads() as here:
        coded, plain = run(BOTH), run({})
    begins = compositions.llama(2).state_dict()
    first = {each.mesh.coordinates["tp"]: each for each in reversed(coded)}
    for one, without in zip(coded, plain, strict=True):
        assert_same_bits(
            one.weights, first[one.mesh.coordinates["tp"]].weights, "what ranks of one piece hold"
        )
        assert one.norms == coded[0].norms
        for name, value in one.weights.items():
            before, plainly = begins[name], without.weights[name]
            if before.shape != value.shape:
                before = cut(before, one.parts[name], one.mesh.coordinates["tp"])
            assert 0 < (value - plainly).norm() <= TOLERANCE * (plainly - before).norm(), name
