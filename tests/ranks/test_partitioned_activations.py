"""Each tensor-parallel rank keeps a shard of partitioned activations, without changing a bit."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepseek_zero
from deepseek_zero import checkpointing
from deepseek_zero.activations import recompute
from deepseek_zero.activations.partition import Gathering
from deepseek_zero.base.errors import UsageError
from tests.unit.parallel.tiny import batch, tiny

pytest.importorskip("transformers")
ROWS, LENGTH, WIDTH, LAYERS = 3, 32, 32, 2


def given(seed: int) -> dict[str, torch.Tensor]:
    return {name: value.repeat(1, 4)[:, :LENGTH] for name, value in batch(seed).items()}


def engine_of(section: dict[str, Any], stage: int, layers: int = LAYERS, **mesh: int) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "activation_checkpointing": {"policy": "full", **section},
    }
    model = tiny("llama", num_hidden_layers=layers)
    return deepseek_zero.initialize(model=model, config=config, mesh=mesh)[0]


def train(engine: Any, steps: int = 3) -> list[torch.Tensor]:
    found = []
    for step in range(steps):
        loss = engine(**given(10 * step + engine.mesh.data_index)).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.detach())
    return found + [value.clone() for value in engine.module.state_dict().values()]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("place", ["none", "cpu", "nvme"])
def test_shares_have_the_stated_size_and_change_no_bit(place: str) -> None:
    where = {"device": place} | ({"nvme_path": tempfile.gettempdir()} if place == "nvme" else {})
    plain = engine_of({}, 1, tp=2)
    expected, unshared = (
        train(plain),
        plain.runtime.comm.along["tp"].meter.sent_bytes.get("activations", 0),
    )
    plain.destroy()
    engine = engine_of({"partition_activations": True, **where}, 1, tp=2)
    assert all(map(torch.equal, train(engine), expected))
    parking = engine.parts.recompute.parking
    share = -(-ROWS * LENGTH * WIDTH // 2) * 4
    assert parking.peak_bytes == LAYERS * share and parking.used_bytes == 0
    assert unshared == 0
    assert engine.runtime.comm.along["tp"].meter.sent_bytes["activations"] == 3 * LAYERS * share
    engine.destroy()


@pytest.mark.ranks(2)
def test_all_gathers_except_the_first_overlap_with_recomputation() -> None:
    """Check the order in which gathers begin, layers compute and gathers end, without a clock."""
    many = 6
    engine, events = (
        engine_of({"partition_activations": True}, 1, many, tp=2),
        list[tuple[str, Any]](),
    )

    class Noted(Gathering):
        def __init__(self, *args: Any) -> None:
            events.append(("begins", self))
            super().__init__(*args)

        def wait(self) -> torch.Tensor:
            events.append(("is waited for", self))
            return super().wait()

    for layer in engine.module.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args: events.append(("computes", module))
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepseek_zero.activations.partition.Gathering", Noted)
        train(engine, 1)
    computes = [place for place, (what, _) in enumerate(events) if what == "computes"]
    gathers = [each for what, each in events if what == "begins"]
    spans = [
        (events.index(("begins", each)), events.index(("is waited for", each))) for each in gathers
    ]
    hidden = [any(first < place < last for place in computes) for first, last in spans]
    assert len(computes) == 2 * many and hidden == [False] + [True] * (many - 1)
    assert sum(hidden) / many >= 0.8
    engine.destroy()


@pytest.mark.ranks(2)
def test_a_program_can_disable_sharding_and_enable_it_again() -> None:
    engine = engine_of({"partition_activations": True}, 1, tp=2)
    meter = engine.runtime.comm.along["tp"].meter
    sent = []
    for asked in (True, False, True):
        checkpointing.partition_activations_in_checkpoint(asked)
        meter.reset()
        train(engine, 1)
        sent.append(meter.sent_bytes.get("activations", 0))
    checkpointing.configure(partition_activations=False)
    checkpointing.configure(deepspeed_config={"activation_checkpointing": {}}, profile=False)
    checkpointing.partition_activations_in_checkpoint(True)
    meter.reset()
    train(engine, 1)
    sent.append(meter.sent_bytes.get("activations", 0))
    assert sent[0] > 0 == sent[1] and sent[0] == sent[2] == sent[3]
    recompute.release(recompute.current())
    engine.destroy()


@pytest.mark.ranks(4)
def test_ranks_with_other_batches_share_nothing() -> None:
    plain = engine_of({}, 3, tp=2)
    expected = train(plain)
    plain.destroy()
    engine = engine_of({"partition_activations": True, "cpu_checkpointing": True}, 3, tp=2)
    assert all(map(torch.equal, train(engine), expected))
    engine.destroy()


@pytest.mark.ranks(2)
def test_inputs_that_differ_are_an_error_and_without_tensor_parallel_ranks_nothing_is_cut() -> None:
    engine = engine_of({"partition_activations": True}, 0, tp=2)
    x = torch.full((64, 64), float(dist.get_rank()), requires_grad=True) * 1
    with pytest.raises(UsageError, match="inputs of a checkpoint differ over tp"):
        checkpointing.checkpoint(torch.tanh, x)
    engine.destroy()
    engine = engine_of({"partition_activations": True}, 0)
    train(engine, 1)
    assert engine.parts.recompute.partition is None
    engine.destroy()
