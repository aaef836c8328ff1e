"""Vertical order: each unit runs all micro-batches of a step on one load of its weights.

Results have the bits of an unsharded model with the same micro-batches and are close to those of
whole batches. Tests with offload have "offload" in their names, so that `-k offload` selects them.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import deepseek_zero
from deepseek_zero.base.errors import ConfigError, NotBuiltError, PeerError, UsageError
from tests.models import LENGTH, VOCABULARY, WIDTH, Block, Gpt, batch_of, seeded
from tests.pairwise import cases
from tests.reference import OPTIMIZERS, Reference
from tests.training import ALL, DTYPES, offload

STEPS, SAMPLES = 3, 40  # a quarter of the samples is an input large enough to be offloaded
RATE = 0.2  # dropout rate


class Layer(Block):
    """A block whose inputs and outputs are tensors, batches in containers, and None."""

    def forward(
        self, x: Tensor, table: Tensor, *, more: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor], None]:  # type: ignore[override]
        assert more["nothing"] is None
        x = F.dropout(super().forward(x + table), RATE) * more["scale"]
        return x, {"mean": x.mean(dim=1)}, None


class Net(Gpt):
    """A model whose random numbers in forward depend only on the batch.

    run: Calls a block.
    """

    run: Callable[..., Any] = staticmethod(lambda block, x, table, more: block(x, table, more=more))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        assert targets is not None
        torch.manual_seed(int(tokens.sum()))
        x, table = self.tokens(tokens), self.places.weight[: tokens.shape[1]] * 1.0
        scale = torch.linspace(0.5, 1.5, len(x), dtype=x.dtype)[:, None, None]
        means = []
        for block in self.blocks:
            x, found, _ = self.run(block, x, table, {"scale": scale, "nothing": None})
            means.append(found["mean"].float().square().mean())
        loss = F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())
        return loss + 0.1 * torch.stack(means).sum()


def cut(micro_batches: int) -> Callable[..., Any]:
    """Return a function that runs a block on micro-batches, as vertical order does, in a plain
    model.
    """

    def run(block: nn.Module, x: Tensor, table: Tensor, more: dict[str, Any]) -> Any:
        parts = zip(x.chunk(micro_batches), more["scale"].chunk(micro_batches), strict=True)
        found = [block(part, table, more={**more, "scale": scale}) for part, scale in parts]
        return (
            torch.cat([each[0] for each in found]),
            {"mean": torch.cat([each[1]["mean"] for each in found])},
            None,
        )

    return run


def engine_of(
    model: nn.Module, vertical: int, tier: str = "none", window: int = 0, **top: Any
) -> Any:
    """Start an engine at stage 3 that offloads only weights unless `top` has `states`."""
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": window,
        "vertical_micro_batches": vertical,
        **offload(tier, states=top.pop("states", False)),
    }
    optimizer = OPTIMIZERS[top.pop("optimizer", "adamw")](list(model.parameters()))
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "steps_per_print": None,
        "zero_optimization": zero,
        **top,
    }
    return deepseek_zero.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(engine: Any, step: int, accumulation: int = 1) -> list[Tensor]:
    losses = []
    for micro in range(accumulation):
        batch = batch_of(step, micro, dist.get_rank(), SAMPLES)
        loss = engine(batch.tokens, batch.targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return losses


AXES = {
    "micro_batches": (2, 4, 8),
    "tier": ("none", "cpu", "nvme"),
    "ranks": (1, 2, 3),
    "dtype": ("fp32", "bf16"),
    "window": (0, ALL),
    "accumulation": (1, 2),
    "states": (False, True),
    "parked": ("none", "nvme"),
    "transport": ("fastest", "gloo"),
}


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize(*cases(AXES))
def test_offloaded_or_not_it_trains_to_the_bits_of_the_same_cuts_without_sharding(
    micro_batches: int,
    tier: str,
    ranks: int,
    dtype: str,
    window: int,
    accumulation: int,
    states: bool,
    parked: str,
    transport: str,
) -> None:
    top: dict[str, Any] = {
        "gradient_accumulation_steps": accumulation,
        "bf16": {"enabled": dtype == "bf16"},
    }
    parking = {"device": parked, "nvme_path": tempfile.gettempdir()}
    top |= {"transport": transport, "activation_checkpointing": parking}
    engine = engine_of(seeded(Net), micro_batches, tier, window, states=states, **top)
    plain = seeded(Net)
    plain.run = cut(micro_batches)
    reference = Reference(plain, ranks, accumulation, False, DTYPES[dtype], OPTIMIZERS["adamw"])
    for step in range(STEPS):
        losses = train(engine, step, accumulation)
        everyone = [
            [batch_of(step, micro, rank, SAMPLES) for micro in range(accumulation)]
            for rank in range(ranks)
        ]
        expected, _ = reference.step(everyone)
        assert all(map(torch.equal, losses, expected[dist.get_rank()])), (
            f"losses differ in step {step}"
        )
        found = engine.module.state_dict()
        different = [
            name
            for name, value in reference.values().items()
            if not torch.equal(found[name], value)
        ]
        assert not different, f"step {step}"
    if parked == "nvme" and micro_batches == 2:
        assert engine.parts.recompute.parking._arrived == STEPS * accumulation * 3 * micro_batches
    engine.destroy()


@pytest.mark.ranks(2)
def test_it_comes_close_to_whole_batches_and_to_accumulation() -> None:
    def run(vertical: int, accumulation: int) -> tuple[list[float], dict[str, Tensor]]:
        engine, losses = (
            engine_of(
                seeded(Gpt), vertical, optimizer="sgd", gradient_accumulation_steps=accumulation
            ),
            [],
        )
        for step in range(STEPS):
            batch = batch_of(step, 0, dist.get_rank(), SAMPLES)
            found = []
            for tokens, targets in zip(
                batch.tokens.chunk(accumulation), batch.targets.chunk(accumulation), strict=True
            ):
                loss = engine(tokens, targets)
                engine.backward(loss)
                engine.step()
                found.append(loss.detach())
            losses.append(float(torch.stack(found).mean()))
        return losses, engine.module.state_dict()

    losses, state = run(4, 1)
    for other, weights in (run(1, 1), run(1, 4)):
        assert losses == pytest.approx(other, abs=1e-5)
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "top", [{"torch_autocast": {"enabled": True}}, {"fp16": {"enabled": True}}], ids=str
)
def test_under_autocast_and_loss_scaling_it_has_the_bits_of_an_engine_whose_model_cuts_by_itself(
    top: dict[str, Any],
) -> None:
    def run(vertical: int) -> list[Tensor]:
        model = seeded(Net)
        model.run = Net.run if vertical > 1 else cut(4)
        engine = engine_of(model, vertical, **top)
        losses = [loss for step in range(STEPS) for loss in train(engine, step)]
        return losses + list(engine.module.state_dict().values())

    assert all(map(torch.equal, run(4), run(1)))


# -- transfers


def loads_of(engine: Any, accumulation: int = 1) -> dict[str, int]:
    """Return how often each unit's weights are read from the disk between two updates."""
    train(engine, 0, accumulation)
    for unit in engine.runtime.units:
        for group in unit.sharded:
            for chunk in group.weight.storage.chunks:
                chunk.wait()  # wait for the writes of the update
    with engine.timeline() as seen:
        for micro in range(accumulation):
            batch = batch_of(1, micro, dist.get_rank(), SAMPLES)
            engine.backward(engine(batch.tokens, batch.targets))
            if micro + 1 < accumulation:
                engine.step()
    assert all(event.is_read for event in seen.transfers)
    return {
        unit.name: sum(
            event.what == f"the weights of {group.members[0].name}" for event in seen.transfers
        )
        for unit in engine.runtime.units
        for group in unit.sharded
    }


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize("ranks", [1, 2])
def test_offloaded_weights_are_loaded_as_often_whatever_the_micro_batches(ranks: int) -> None:
    """Each unit is loaded twice, units in use between forward and backward once."""
    once = {"root": 1, "blocks.0": 2, "blocks.1": 2, "blocks.2": 1}
    for vertical in (1, 2, 4):
        assert loads_of(engine_of(seeded(Gpt), vertical, "nvme")) == once
    accumulating = loads_of(engine_of(seeded(Gpt), 1, "nvme", gradient_accumulation_steps=4), 4)
    assert accumulating == {name: 4 * count for name, count in once.items()}


@pytest.mark.ranks(2)
def test_one_sum_per_step_sends_a_quarter_of_the_bytes_of_four_accumulation_steps() -> None:
    def sent(vertical: int, accumulation: int) -> dict[str, int]:
        engine = engine_of(
            seeded(Gpt), vertical, transport="gloo", gradient_accumulation_steps=accumulation
        )
        train(engine, 0, accumulation)
        engine.runtime.comm.meter.reset()
        train(engine, 1, accumulation)
        return {lane: engine.runtime.comm.meter.sent_bytes[lane] for lane in ("gather", "reduce")}

    assert sent(4, 1) == sent(1, 1) == {lane: count // 4 for lane, count in sent(1, 4).items()}


# -- micro-batches


@pytest.mark.ranks(1)
def test_a_unit_gets_micro_batches_in_training_and_the_batch_in_evaluation() -> None:
    model = seeded(Gpt)
    seen: list[int] = []
    for block in model.blocks:
        block.norm_1.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    engine = engine_of(model, 4)
    train(engine, 0)
    assert seen == [SAMPLES // 4] * 4 * 3 * 2, "forward and recomputation of three blocks"
    seen.clear()
    with torch.no_grad():
        assert engine(torch.zeros(3, LENGTH, dtype=torch.long)).shape == (3, LENGTH, VOCABULARY)
    assert seen == [3] * 3
    engine.destroy()
    assert "forward" not in vars(model.blocks[0])


class Watched(nn.Module):
    """A block that records the peak bytes of its live activations."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(
            ALIVE.watch(torch.sin(ALIVE.watch(torch.exp(ALIVE.watch(self.up(x))))))
        )


class Alive:
    """Current and peak bytes of watched storages."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def watch(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, storage.nbytes())
        return tensor

    def _gone(self, nbytes: int) -> None:
        self.now -= nbytes


ALIVE = Alive()


@pytest.mark.ranks(1)
def test_inside_units_the_activations_of_one_micro_batch_are_alive() -> None:
    def most(vertical: int) -> int:
        engine = engine_of(nn.Sequential(*(Watched() for _ in range(4))), vertical)
        for _ in range(2):
            ALIVE.most = 0
            engine.backward(engine(torch.randn(16, WIDTH)).square().mean())
            engine.step()
        assert ALIVE.now == 0
        return ALIVE.most

    activation = 16 * 64 * 4
    assert most(1) == 4 * 2 * activation, "two that backward needs, of four blocks"
    assert most(4) == 2 * activation // 4


# -- errors


class Whole(nn.Module):
    """Blocks whose inputs or outputs cannot be split into micro-batches.

    how: The reason.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(Odd(how) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "other batch":
            x = x.flatten(0, 1)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Odd(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner, self.calls = how, nn.Sequential(nn.Linear(4, 4)), 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        x = self.inner(x)
        if self.how == "mean":
            return x.mean()
        return (x,) * self.calls if self.how == "another number" else x


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("how", "samples", "says"),
    [
        ("", 6, "was given 6 samples, which do not make 4 micro-batches"),
        ("other batch", 8, r"unit 'blocks.0' got no tensor of 8 samples; .* \[\(24,\)\]"),
        (
            "mean",
            8,
            r"unit 'blocks.0' returned a tensor of shape \(\) for a micro-batch of 2 samples",
        ),
        ("another number", 8, r"unit 'blocks.0' returned \[1, 2, 3, 4\] tensors"),
    ],
)
def test_values_that_cannot_be_cut_or_joined_are_named(how: str, samples: int, says: str) -> None:
    engine = engine_of(Whole(how), 4)
    with pytest.raises(UsageError, match=says):
        engine(torch.randn(samples, 3, 4))


@pytest.mark.ranks(2)
def test_a_batch_that_one_rank_cannot_cut_is_an_error_on_every_rank() -> None:
    engine = engine_of(seeded(Gpt), 4)
    train(engine, 0)
    samples = SAMPLES if dist.get_rank() == 0 else SAMPLES - 1
    batch = batch_of(1, 0, dist.get_rank(), samples)
    with pytest.raises(
        PeerError if dist.get_rank() == 0 else UsageError, match="39 samples, which do not make 4"
    ):
        engine.backward(engine(batch.tokens, batch.targets))


@pytest.mark.ranks(1)
def test_units_that_contain_each_other_and_models_without_units_are_refused() -> None:
    with pytest.raises(UsageError, match=r"unit 'blocks\.0\.up' is inside unit 'blocks\.0'"):
        engine_of(seeded(Gpt), 2, units=["Block", "blocks.0.up"])
    with pytest.raises(UsageError, match="has no units that could process micro-batches"):
        engine_of(nn.Linear(4, 4), 2)


@pytest.mark.parametrize(
    ("stage", "samples", "says"),
    [
        (
            2,
            8,
            "vertical_micro_batches = 4.* needs stage 3: at stage 2 every rank holds all weights",
        ),
        (3, 6, "vertical_micro_batches = 4.* does not divide train_micro_batch_size_per_gpu = 6"),
    ],
)
def test_a_configuration_without_an_effect_of_it_is_refused(
    stage: int, samples: int, says: str
) -> None:
    zero = {"stage": stage, "vertical_micro_batches": 4}
    with pytest.raises(ConfigError, match=says):
        deepseek_zero.initialize(
            model=nn.Linear(2, 2),
            config={"train_micro_batch_size_per_gpu": samples, "zero_optimization": zero},
        )


@pytest.mark.ranks(1)
def test_it_is_refused_with_torch_compile() -> None:
    with pytest.raises(NotBuiltError, match="beside vertical_micro_batches is not built"):
        engine_of(seeded(Gpt), 2).compile()
