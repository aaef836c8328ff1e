"""Quantized communication in the engine gives the bits of one process with the same codecs.

Covers every stage and transport. A step sends the number of bytes given by the formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import deepseek_zero
from deepseek_zero.base.errors import UsageError
from deepseek_zero.config import Facts, resolve
from deepseek_zero.config.load import load
from deepseek_zero.engine.settings import compression_of
from deepseek_zero.precision.codecs import Blocks
from tests.models import Batch, Gpt, batch_of, seeded
from tests.pairwise import cases
from tests.ranks.test_bytes import SendCounter
from tests.ranks.test_parity import assert_same_bits, masters_of
from tests.reference import OPTIMIZERS, Reference
from tests.training import ALL, DTYPES, Run, train_step

STEPS = 3
CODES: dict[str, tuple[Blocks | None, Blocks | None]] = {
    "int8 weights": (Blocks(8, 256), None),
    "int4 gradients": (None, Blocks(4, 128)),
    "both": (Blocks(8, 256), Blocks(4, 128)),
    "int8 both, small blocks": (Blocks(8, 64), Blocks(8, 32)),
    "int4 both": (Blocks(4, 256), Blocks(4, 128)),  # int4 weights are sent as differences
}


def start(
    run: Run,
    codes: str,
    model: nn.Module | None = None,
    hpz: int = 1,
    inside_bits: int = 16,
    **keys: Any,
) -> Any:
    """Start an engine with quantized weights and gradients.

    keys: Additional configuration keys.
    """
    weights, gradients = CODES[codes]
    model = seeded() if model is None else model
    config = run.config() | keys
    config["zero_optimization"]["zero_hpz_partition_size"] = hpz
    config["zero_optimization"]["compression"] = {
        "weights": {"bits": weights.bits, "block": weights.block} if weights is not None else {},
        "gradients": {"bits": gradients.bits, "block": gradients.block, "inside_bits": inside_bits}
        if gradients is not None
        else {},
        "min_numel": 0,
    }
    optimizer = OPTIMIZERS[run.optimizer](
        [each for each in model.parameters() if each.requires_grad]
    )
    return deepseek_zero.initialize(model=model, optimizer=optimizer, config=config)[0]


def rounded(codec: Blocks, flat: Tensor) -> Tensor:
    """Quantize and dequantize by the definition of the codec."""
    rows, largest = flat.float().view(-1, codec.block), {8: 127, 4: 7}[codec.bits]
    scale = rows.abs().amax(1, keepdim=True) * torch.tensor(1 / largest)
    scale = torch.where(scale.isfinite(), scale.where(scale >= 2**-126, 0.0), float("nan"))
    codes = torch.where(scale > 0, (rows * (1 / scale)).round(), 0.0 * scale)
    return (codes * scale).view(-1)


@dataclass(frozen=True)
class Flat:
    """Layout of matrices that are quantized together.

    places: The first element of each matrix in the flat buffer, by name.
    """

    places: dict[str, int]
    numel: int

    def through(self, codec: Blocks, tensors: dict[str, Tensor]) -> None:
        """Replace these tensors by their quantized and dequantized values in fp32."""
        flat = torch.zeros(self.numel)
        for name, start in self.places.items():
            flat[start : start + tensors[name].numel()] = tensors[name].reshape(-1).float()
        found = rounded(codec, flat)
        for name, start in self.places.items():
            tensors[name] = found[start : start + tensors[name].numel()].view(tensors[name].shape)


def flats_of(engine: Any) -> list[Flat]:
    """Return the engine's quantized buffers and check that they hold exactly the matrices."""
    found = coded_flats(engine)
    matrices = {
        name for name, parameter in engine.module.named_parameters() if len(parameter.shape) > 1
    }
    assert {name for flat in found for name in flat.places} == matrices
    return found


def coded_flats(engine: Any) -> list[Flat]:
    """Return the engine's quantized buffers."""
    layouts = [group.layout for group in engine.runtime.groups if group.planned.key.is_coded]
    return [
        Flat({slot.name: slot.start for slot in layout.slots}, layout.padded_numel)
        for layout in layouts
    ]


@dataclass
class Rounding(Reference):
    """A reference that quantizes the weights of each micro-batch and the summands of each rank."""

    flats: Sequence[Flat] = ()
    codes: tuple[Blocks | None, Blocks | None] = (None, None)
    differences: Blocks | None = None
    names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        differences, self.differences = self.differences, None
        super().__post_init__()
        self.names = [name for name, _ in self.model.named_parameters()]
        self.differences = differences
        if differences is not None and self.masters is self.weights:
            self.masters = [nn.Parameter(weight.detach().clone()) for weight in self.weights]
            self.optimizer = self.make_optimizer(self.masters)

    def _cast(self) -> None:
        """Update weights from the main weights, which keep the quantization error."""
        weights, masters = ([each.data for each in every] for every in (self.weights, self.masters))
        if self.differences is None:
            super()._cast()
            return
        lacking = [master - weight.float() for master, weight in zip(masters, weights, strict=True)]
        found = dict(zip(self.names, lacking, strict=True))
        for flat in self.flats:
            flat.through(self.differences, found)
        old = [weight.clone() for weight in weights]
        super()._cast()
        for name, weight, before in zip(self.names, weights, old, strict=True):
            if any(name in flat.places for flat in self.flats):
                weight.copy_(found[name] + before.float())

    def micro_batch(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        exact = [weight.data for weight in self.weights]
        if self.codes[0] is not None:
            held = dict(zip(self.names, exact, strict=True))
            for flat in self.flats:
                flat.through(self.codes[0], held)
            for weight, name in zip(self.weights, self.names, strict=True):
                weight.data = held[name].to(weight.dtype)
        loss, grads = super().micro_batch(batch)
        for weight, data in zip(self.weights, exact, strict=True):
            weight.data = data
        return loss, grads if self.adds_first else self.sent(grads)

    def sent(self, grads: list[Tensor]) -> list[Tensor]:
        return grads if self.codes[1] is None else self.rounded(self.codes[1], grads)

    def rounded(self, codec: Blocks, grads: list[Tensor]) -> list[Tensor]:
        """Return these gradients with the matrices quantized."""
        held = dict(zip(self.names, grads, strict=True))
        for flat in self.flats:
            flat.through(codec, held)
        return [held[name] for name in self.names]

    def gradients(
        self, batches: Sequence[Sequence[Batch]]
    ) -> tuple[list[list[Tensor]], list[Tensor]]:
        if not self.adds_first:
            return super().gradients(batches)
        losses, summands = [], []
        for of_rank in batches:
            runs = [self.micro_batch(batch) for batch in of_rank]
            losses.append([loss for loss, _ in runs])
            totals = [grad.to(self.grad_dtype, copy=True) for grad in runs[0][1]]
            for _, grads in runs[1:]:
                for total, grad in zip(totals, grads, strict=True):
                    total.add_(grad)
            summands.append(self.sent(totals))
        return losses, [
            self._mean(list(each)).to(self.grad_dtype) for each in zip(*summands, strict=True)
        ]


def formula(engine: Any, run: Run, codes: str) -> float:
    """Return the bytes that a rank sends in one step without a window.

    The formula is f P times bytes per element; quantized elements add a scale per block. Offloaded
    weights used at the end of forward and the start of backward are loaded once. These are the
    weights of the last block and of the root unit.
    """
    weights, gradients = CODES[codes]
    at_turn = () if run.tier == "none" else ("blocks.2.", "tokens.", "places.", "norm.", "head.")
    ranks, total = dist.get_world_size(), 0.0
    for group in engine.runtime.groups:
        own = group.plan.weight.dtype.itemsize
        kept = group.plan.grad.dtype.itemsize if run.stage < 2 else own
        is_coded = len(group.layout.slots[0].shape) > 1
        gathered = weights.bits / 8 + 4 / weights.block if weights is not None and is_coded else own
        reduced = (
            gradients.bits / 8 + 4 / gradients.block if gradients is not None and is_coded else kept
        )
        times = run.accumulation if run.stage > 1 else 1
        loads = 1 if group.layout.slots[0].name.startswith(at_turn) else 2  # loads per micro-batch
        whole = {0: kept, 1: gathered, 2: gathered, 3: loads * times * gathered}[run.stage]
        total += group.layout.padded_numel / ranks * (ranks - 1) * (times * reduced + whole)
    return total


AXES = {
    "stage": (0, 1, 2, 3),
    "codes": tuple(CODES),
    "dtype": ("fp32", "bf16"),
    "accumulation": (1, 2),
    "ranks": (2, 3, 4),
    "window": (0, ALL),
    "bucket": (4096, ALL),
    "transport": ("fastest", "gloo"),
    "tier": ("none", "cpu"),
}


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize(*cases(AXES, fits=lambda case: case[:2] != (3, "int4 both")))
def test_training_has_the_bits_of_one_process_that_rounds_the_same_tensors(
    stage: int,
    codes: str,
    dtype: str,
    accumulation: int,
    ranks: int,
    window: int,
    bucket: int,
    transport: str,
    tier: str,
) -> None:
    run = Run(
        stage,
        dtype,
        accumulation,
        window,
        0.3,
        "adamw",
        transport=transport,
        tier=tier,
        bucket=bucket,
    )
    engine = start(run, codes)
    weights, gradients = CODES[codes] if stage > 0 else (None, CODES[codes][1])
    flats = flats_of(engine) if weights or gradients else []
    reference = Rounding(
        seeded(),
        ranks,
        accumulation,
        stage < 2,
        DTYPES[dtype],
        OPTIMIZERS["adamw"],
        0.3,
        flats=flats,
        codes=(weights if stage == 3 else None, gradients),
        differences=weights if stage in (1, 2) else None,
    )
    meter = engine.runtime.comm.meter
    for step in range(STEPS):
        meter.reset()
        with SendCounter() as counter:
            losses = train_step(engine, run, step)
        if step and transport == "gloo":
            assert counter.sent_bytes == meter.total_bytes()
        if step:
            volume = engine.runtime.plan.volume()
            assert meter.total_bytes() == volume.state_bytes + volume.rows
            if not window:
                assert volume.state_bytes == formula(engine, run, codes)
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
    masters = dict(zip(reference.values(), reference.masters, strict=True))
    assert_same_bits(masters_of(engine), masters, "masters")
    report = engine.memory_report()
    assert report.measured_total <= report.predicted_total
    if (
        stage < 3
        # Stage 3 allocates buffers for summands and messages of offloaded shards later than
        # scheduled
    ):
        assert report.measured_total == report.predicted_total


@pytest.mark.ranks(3)
@pytest.mark.parametrize("codes", ["int4 gradients", "int8 both, small blocks"])
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_stages_and_transports_agree(
    codes: str,
) -> None:
    def train(stage: int, transport: str) -> tuple[list[float], dict[str, Tensor], int]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(40, 50), nn.Tanh(), nn.Linear(50, 30))
        fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
        engine = start(
            Run(stage, transport=transport, optimizer="adamw"), codes, model, fp16=fp16, bf16={}
        )
        losses = []
        for step in range(4):
            x = torch.linspace(-1, 1, 80).view(2, 40) * (1 + step + dist.get_rank())
            loss = engine(x).float().square().mean()
            losses.append(loss.item())
            engine.backward(loss * (float("inf") if step == 1 and dist.get_rank() == 2 else 1.0))
            engine.step()
        return losses, masters_of(engine), engine.skipped_steps

    stages = (0, 1, 2, 3) if codes == "int4 gradients" else (2,)
    (losses, masters, skipped), *others = [
        train(stage, way) for stage in stages for way in ("fastest", "gloo")
    ]
    assert skipped == 1 and all(map(torch.isfinite, map(torch.tensor, losses)))
    for found, values, count in others:
        assert (found, count) == (losses, 1)
        assert_same_bits(values, masters, "masters")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transport", ["fastest", "gloo"])
def test_weights_read_outside_a_forward_are_exact_and_frozen_ones_are_computed_with_as_codes(
    transport: str,
) -> None:
    model, plain = seeded(), seeded()
    for each in (model, plain):
        each.blocks[1].requires_grad_(False)
    exact = {name: value.clone() for name, value in plain.state_dict().items()}
    run = Run(3, transport=transport)
    engine = start(run, "int8 weights", model)
    held = dict(exact)
    for flat in flats_of(engine):
        flat.through(Blocks(8, 256), held)
    plain.load_state_dict(held)
    batch = batch_of(0, 0, dist.get_rank())
    loss = engine(batch.tokens, batch.targets)
    assert torch.equal(loss, plain(batch.tokens, batch.targets))
    assert not torch.equal(held["head.weight"], exact["head.weight"])
    assert_same_bits(
        dict(engine.module.state_dict()), exact, "a state dict between forward and backward"
    )
    engine.backward(loss)
    masters = masters_of(engine)
    frozen = engine.module.blocks[1].up.weight
    with deepseek_zero.zero.GatheredParameters(
        [frozen, engine.module.head.weight], modifier_rank=0
    ):
        assert torch.equal(frozen, exact["blocks.1.up.weight"])
        if dist.get_rank() == 0:
            frozen.data[0, 0] = exact["blocks.1.up.weight"][0, 0] = 5.0
    exact["blocks.1.up.weight"][0, 0] = 5.0
    assert_same_bits(masters_of(engine), masters, "masters behind a change of a frozen weight")
    assert_same_bits(dict(engine.module.state_dict()), exact, "weights behind that change")


@pytest.mark.ranks(4)
def test_a_second_copy_holds_decoded_weights_and_changes_no_bit() -> None:
    run = Run(3, "bf16", 2, optimizer="adamw", transport="gloo")
    plain = start(run, "both")
    engine = start(run, "both", hpz=2)
    for step in range(3):
        assert all(map(torch.equal, train_step(engine, run, step), train_step(plain, run, step)))
    assert_same_bits(masters_of(engine), masters_of(plain), "masters")
    engine.runtime.comm.meter.reset()
    train_step(engine, run, 3)
    volume, meter = engine.runtime.plan.volume(), engine.runtime.comm.meter
    assert meter.total_bytes() == volume.state_bytes + volume.rows
    assert meter.sent_bytes["inner_gather"] == volume.inner_gathers > 0


@pytest.mark.ranks(2)
def test_small_units_are_sent_uncoded_and_explain_reports_the_savings_of_codes() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "zero_quantized_weights": True,
            "zero_quantized_gradients": True,
        },
    }
    engine = deepseek_zero.initialize(model=seeded(), config=config)[0]
    assert not any(group.planned.is_coded for group in engine.runtime.groups), (
        "every unit is below min_numel"
    )
    assert "quantized messages" not in engine.explain()
    engine = deepseek_zero.initialize(model=nn.LayerNorm(5), config=config)[0]
    assert not any(group.planned.is_coded for group in engine.runtime.groups)
    config["zero_optimization"]["compression"] = {"min_numel": 0}  # type: ignore[index]
    engine = deepseek_zero.initialize(model=seeded(Gpt, width=30), config=config)[0]
    assert "sent as int8/256" in engine.explain() and "sent as int4/128" in engine.explain()
    plan = engine.runtime.plan
    saved = plan.uncoded().volume().state_bytes / plan.volume().state_bytes
    assert saved > 2 and f"({saved:.2f} x less)" in engine.explain()
    assert (
        deepseek_zero.plan(seeded(Gpt, width=30), config, ranks=2, rank=0).volume() == plan.volume()
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_weight_updated_by_differences_is_saved_and_resumes_bit_for_bit(
    dtype: str, tmp_path: Path
) -> None:
    run = Run(2, dtype, optimizer="adamw")
    engine = start(run, "int4 both")
    for step in range(2):
        train_step(engine, run, step)
    engine.save_checkpoint(tmp_path, tag="two")
    kept = dict(engine.module.state_dict())
    casts = {name: master.to(kept[name].dtype) for name, master in masters_of(engine).items()}
    assert not torch.equal(casts["head.weight"], kept["head.weight"]), (
        "codes have left out something"
    )
    expected = [train_step(engine, run, step) for step in (2, 3)]
    masters = masters_of(engine)

    other = start(run, "int4 both", seeded(seed=8))
    other.load_checkpoint(tmp_path, tag="two")
    assert_same_bits(dict(other.module.state_dict()), kept, "weights")
    for step, losses in zip((2, 3), expected, strict=True):
        assert all(map(torch.equal, train_step(other, run, step), losses))
    assert_same_bits(masters_of(other), masters, "masters")

    # Without quantized weights, the saved copy is not used
    exact = start(Run(3, dtype, optimizer="adamw"), "int4 gradients")
    exact.load_checkpoint(tmp_path, tag="two")
    assert (
        torch.equal(exact.module.state_dict()["head.weight"], casts["head.weight"])
        or dtype == "bf16"
    )
    exact.save_checkpoint(tmp_path, tag="exact")
    other.load_checkpoint(tmp_path, tag="exact")
    assert_same_bits(
        dict(other.module.state_dict()), dict(exact.module.state_dict()), "weights of a plain run"
    )


@pytest.mark.ranks(2)
def test_writes_into_weights_updated_by_differences_take_effect_immediately() -> None:
    run = Run(1, "bf16", optimizer="adamw")
    engine = start(run, "int4 both")
    train_step(engine, run, 0)
    weight = engine.module.head.weight
    kept = {name: value.clone() for name, value in engine.module.state_dict().items()}
    masters = masters_of(engine)
    with deepseek_zero.zero.GatheredParameters([weight], modifier_rank=0):
        if dist.get_rank() == 0:
            weight.data[0, 0] = 3.0
    kept["head.weight"][0, 0] = masters["head.weight"][0, 0] = 3.0
    assert_same_bits(dict(engine.module.state_dict()), kept, "weights")
    assert_same_bits(masters_of(engine), masters, "masters")
    deepseek_zero.utils.safe_set_full_fp32_param(
        weight, torch.full_like(weight, 0.1, dtype=torch.float32)
    )
    assert torch.equal(weight, torch.full_like(weight, 0.1))


def test_values_that_codes_cannot_represent_are_refused() -> None:
    with pytest.raises(UsageError, match=r"bits is 4 at stage 3"):
        start(Run(3), "int4 both")
    with pytest.raises(UsageError, match=r"inside_bits is 8, but gradients are not quantized"):
        compression_of(
            resolve(
                load({"zero_optimization": {"compression": {"gradients": {"inside_bits": 8}}}}),
                Facts(),
            )
        )
    open_bits = {"auto": True, "gradients": {"error_feedback": "bf16"}}
    with pytest.raises(
        UsageError, match=r"cannot choose the bits of gradients with error feedback"
    ):
        compression_of(resolve(load({"zero_optimization": {"compression": open_bits}}), Facts()))
    with pytest.raises(UsageError, match=r"bf16.master is none"):
        start(Run(1, "bf16", master="none"), "int8 weights")


@dataclass
class RoundingHosts(Rounding):
    """A reference whose hosts reduce exactly, or through `inside`, and exchange quantized sums."""

    inside: Blocks | None = None

    def sent(self, grads: list[Tensor]) -> list[Tensor]:
        return grads if self.inside is None else self.rounded(self.inside, grads)

    def gradients(
        self, batches: Sequence[Sequence[Batch]]
    ) -> tuple[list[list[Tensor]], list[Tensor]]:
        runs = [self.micro_batch(of_rank[0]) for of_rank in batches]  # one micro-batch each
        summands = [self.sent(grads) if self.adds_first else grads for _, grads in runs]
        hosts = [
            summands[start : start + self.ranks_per_host]
            for start in range(0, self.ranks, self.ranks_per_host)
        ]
        sums = []
        for host in hosts:
            summed = [self._sum(list(grads)) for grads in zip(*host, strict=True)]
            sums.append(Rounding.sent(self, summed))
        totals = [
            self._sum(list(grads)).div_(float(self.ranks)) for grads in zip(*sums, strict=True)
        ]
        return [[loss] for loss, _ in runs], [total.to(self.grad_dtype) for total in totals]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("stage", "dtype", "transport", "bucket", "inside"),
    [
        (0, "bf16", "gloo", ALL, None),
        (1, "fp32", "fastest", 4096, None),
        (2, "bf16", "gloo", 4096, Blocks(8, 256)),
        (3, "bf16", "fastest", ALL, None),
        (1, "bf16", "fastest", 4096, Blocks(8, 256)),
    ],
)
def test_sums_by_host_are_coded_between_hosts_and_exact_inside_unless_configured(
    stage: int, dtype: str, transport: str, bucket: int, inside: Blocks | None
) -> None:
    run = Run(
        stage, dtype, 1, 0, 0.3, "adamw", transport=transport, bucket=bucket, ranks_per_host=2
    )
    engine = start(run, "int4 gradients", inside_bits=16 if inside is None else inside.bits)
    reference = RoundingHosts(
        seeded(),
        4,
        1,
        stage < 2,
        DTYPES[dtype],
        OPTIMIZERS["adamw"],
        0.3,
        ranks_per_host=2,
        flats=flats_of(engine),
        codes=(None, Blocks(4, 128)),
        inside=inside,
    )
    for step in range(STEPS):
        engine.runtime.comm.meter.reset()
        losses = train_step(engine, run, step)
        expected, _ = reference.step(
            [[batch_of(step, 0, rank)] for rank in range(4)], engine.get_global_grad_norm()
        )
        assert all(map(torch.equal, losses, expected[dist.get_rank()])), (
            f"losses differ in step {step}"
        )
        assert_same_bits(
            dict(engine.module.state_dict()), reference.values(), f"weights after step {step}"
        )
    engine.runtime.comm.meter.reset()
    train_step(engine, run, STEPS)
    volume, meter = engine.runtime.plan.volume(), engine.runtime.comm.meter
    assert meter.total_bytes() == volume.state_bytes + volume.rows
    near = 0.0
    for group in engine.runtime.groups:
        own = (group.plan.grad if stage < 2 else group.plan.weight).dtype.itemsize
        is_coded = inside is not None and group.planned.key.is_coded
        near += group.layout.padded_numel * (1 + 4 / 256 if is_coded else own)
    assert meter.sent_bytes["near_reduce_scatter"] == near / 2, (
        "of two ranks each sends half of all"
    )
    report = engine.memory_report()
    assert report.measured_total <= report.predicted_total


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_coded_frozen_weights_are_saved_decoded_and_load_to_the_same_codes(
    dtype: str, tmp_path: Path
) -> None:
    def start_frozen(seed: int, *, codes: bool) -> Any:
        model, config = seeded(seed=seed), Run(3, dtype).config()
        model.blocks[1].requires_grad_(False)
        config["zero_optimization"]["zero_quantized_nontrainable_weights"] = codes
        config["zero_optimization"]["compression"] = {"min_numel": 0}
        optimizer = OPTIMIZERS["sgd"]([each for each in model.parameters() if each.requires_grad])
        return deepseek_zero.initialize(model=model, optimizer=optimizer, config=config)[0]

    def codes_of(engine: Any) -> list[Tensor]:
        groups = [
            group for group in engine.runtime.groups if group.plan.weight.stored_as is not None
        ]
        return [group.weight.memory.clone() for group in groups]

    run, one = Run(3, dtype), start_frozen(7, codes=True)
    train_step(one, run, 0)
    one.save_checkpoint(tmp_path, tag="one")
    expected = train_step(one, run, 1)
    report = one.memory_report()
    assert report.measured_total <= report.predicted_total

    other = start_frozen(8, codes=True)
    assert not any(map(torch.equal, codes_of(one), codes_of(other)))
    other.load_checkpoint(tmp_path, tag="one")
    assert codes_of(other) and all(map(torch.equal, codes_of(one), codes_of(other)))
    assert all(map(torch.equal, train_step(other, run, 1), expected))
    plain = start_frozen(9, codes=False)  # loads the dequantized values as numbers
    plain.load_checkpoint(tmp_path, tag="one")
    assert all(map(torch.equal, train_step(plain, run, 1), expected))
    other.export(tmp_path / "whole.safetensors")
    exported = load_file(tmp_path / "whole.safetensors")
    held = plain.module.state_dict()
    assert torch.equal(exported["blocks.1.up.weight"], held["blocks.1.up.weight"])
    exact = seeded(seed=7).blocks[1].up.weight
    difference = exported["blocks.1.up.weight"].float() - exact
    assert 0 < difference.abs().max() <= exact.abs().max() / 127
